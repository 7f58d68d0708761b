"""Prefill of a few query rows over a long context: keys are split over warps and thread blocks."""
