"""Prefill attention on warpgroups, by the matrix products of compute capability 9.0 (wgmma)."""
