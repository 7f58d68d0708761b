"""``python -m pagedkv info``: what is installed, which uses of pagedkv work, and what to install for the others."""
