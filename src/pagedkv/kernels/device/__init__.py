"""What the kernels of every room use: intrinsics, conversions, warps, logits, bad entries, what a kernel is made of."""
