"""From the elements of a cache to float32, and the order in which dims lie then."""
