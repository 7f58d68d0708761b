"""Paged KV cache and paged attention for Python."""
