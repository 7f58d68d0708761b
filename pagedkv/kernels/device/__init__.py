"""What all kernels share: intrinsics, conversions, warps, logits, bad entries, what a kernel is made of."""
