"""What the user calls: each operation validates, finds its backend, and runs."""
