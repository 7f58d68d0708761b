"""What every operation requires of its arguments: metadata first, values last. Nothing is written here."""
