"""The arithmetic of attention on vectors, in LLVM instructions."""
