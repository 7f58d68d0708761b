"""The state of a launch: memory, the registers of a batch, and what is recorded about accesses."""
