"""Validation of the arguments of every operation: metadata first, values last. It writes to nothing."""
