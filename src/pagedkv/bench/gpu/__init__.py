"""Benches on a GPU: decode_attention beside other libraries, and write_kv."""
