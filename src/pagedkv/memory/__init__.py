"""Which sequence has which blocks of a paged KV cache: a block pool, block tables, and the arrays of all layers."""

from pagedkv.memory.cache import Added, Batch, PagedKVCache
from pagedkv.memory.pool import BlockPool
from pagedkv.memory.stats import Stats
from pagedkv.memory.table import Appended, SequenceTable

__all__ = ["Added", "Appended", "Batch", "BlockPool", "PagedKVCache", "SequenceTable", "Stats"]
