"""What can be counted about the CUDA kernels without a GPU."""
