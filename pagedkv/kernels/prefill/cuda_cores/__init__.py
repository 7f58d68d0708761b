"""Prefill attention on CUDA cores."""
