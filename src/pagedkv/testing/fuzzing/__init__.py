"""`python -m pagedkv fuzz`."""
