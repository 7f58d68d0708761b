"""What a launch works on: memory, the registers of a batch, and what is recorded about both."""
