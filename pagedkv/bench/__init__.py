"""``python -m pagedkv bench``: speed of the package, beside that of the machine and of other libraries."""
