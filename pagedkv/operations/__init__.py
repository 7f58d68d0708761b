"""The public operations: each validates its arguments, finds its backend, and runs."""
