"""Full blocks that are found again by their tokens: digests, the index, what is evicted first, and events."""
