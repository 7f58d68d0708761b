"""Continuous batching over a PagedKVCache: which requests wait, run, are preempted and finish."""

from .scheduler import Scheduler
from .step import Finished, Step

__all__ = ["Finished", "Scheduler", "Step"]
