"""Device code of the CUDA backend: factories that make a kernel for one configuration, and nothing that launches it."""
