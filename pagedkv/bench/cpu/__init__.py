"""``python -m pagedkv bench cpu``: attention on the CPU, compared with its read bandwidth and other libraries."""
