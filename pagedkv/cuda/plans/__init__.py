"""Plans: what a call launches on a device."""
