"""``python -m pagedkv bench``: what the package does a second, and what the machine and its peers do beside it."""
