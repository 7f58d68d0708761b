"""What a checked call launches on a device."""
