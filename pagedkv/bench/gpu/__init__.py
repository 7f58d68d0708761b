"""The benches that need a GPU: decode and prefill beside other libraries, and write_kv."""
