"""``python -m pagedkv bench cpu``: attention on the CPU, beside its read bandwidth and other libraries."""
