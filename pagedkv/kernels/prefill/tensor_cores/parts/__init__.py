"""Prefill of a few query rows over a long context, whose keys are split over warps and thread blocks."""
