"""K and V arrays of any framework, and copies on a device of the tables that a step reads."""
