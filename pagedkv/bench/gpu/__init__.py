"""The benches that need a GPU: decode_attention beside other libraries, and write_kv."""
