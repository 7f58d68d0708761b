"""A kernel factory and its config to PTX and machine code, without a driver."""
