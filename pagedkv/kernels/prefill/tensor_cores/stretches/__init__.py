"""Prefill on tensor cores whose thread blocks share the keys of rows: stretches, for caches of few KV heads."""
