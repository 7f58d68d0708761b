"""From the elements of a cache and of q to float32, the order in which dims lie then, and back into the result."""
