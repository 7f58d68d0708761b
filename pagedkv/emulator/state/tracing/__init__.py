"""What one warp did in a launch, and how it is recorded."""
