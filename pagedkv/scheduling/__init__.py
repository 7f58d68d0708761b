"""What a server computes next: requests that wait, run, give their blocks back and finish, over a PagedKVCache."""

from .scheduler import Scheduler
from .step import Finished, Step

__all__ = ["Finished", "Scheduler", "Step"]
