"""Prefill attention by warpgroups: products of compute capability 9.0 (wgmma)."""
