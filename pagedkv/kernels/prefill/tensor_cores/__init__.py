"""Prefill on tensor cores: products, copies and the softmax between them, for mma.sync, wgmma/ and parts/."""
