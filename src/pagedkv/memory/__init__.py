"""Which sequence has which blocks of a paged KV cache: a block pool, block tables, and the arrays of all layers."""

from .cache import Added, Batch, PagedKVCache
from .pool import BlockPool
from .stats import Stats
from .table import Appended, SequenceTable

__all__ = ["Added", "Appended", "Batch", "BlockPool", "PagedKVCache", "SequenceTable", "Stats"]
