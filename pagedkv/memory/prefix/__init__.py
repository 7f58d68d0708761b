"""Finding full blocks by their tokens: digests, the index, eviction and events."""
