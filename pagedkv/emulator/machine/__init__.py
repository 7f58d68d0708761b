"""What runs translated kernels: the operations that their code calls, barriers, scheduling, launches."""
