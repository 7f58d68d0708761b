"""What the memory manager keeps on a device: arrays of its module, and copies of the tables that a step reads."""
