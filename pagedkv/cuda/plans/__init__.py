"""What a call launches on a device."""
