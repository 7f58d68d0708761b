"""What both backends with compiled kernels share: where they are compiled, and where machine code is kept."""
