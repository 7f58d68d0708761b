"""What can be counted of the CUDA kernels without a GPU."""
