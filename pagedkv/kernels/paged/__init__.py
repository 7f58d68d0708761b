"""vLLM's paged attention, v1 and v2, for layout vllm."""
