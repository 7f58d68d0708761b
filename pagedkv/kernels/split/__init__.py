"""Kernel split: flash-decoding for NHD and HND in one launch."""
