"""``python -m pagedkv bench``: the speed of the package, compared with the machine and with other libraries."""
