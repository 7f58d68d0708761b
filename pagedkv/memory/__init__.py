"""Which sequence has which blocks of a paged KV cache: a block pool, block tables, and the arrays of all layers."""

from .device.batch import Batch
from .pool import BlockPool
from .prefix.events import AllBlocksCleared, BlockRemoved, BlockStored
from .prefix.eviction import LRU, Eviction
from .prefix.prompt import Added
from .stats import Stats
from .table import Appended, SequenceTable

__all__ = [
    "LRU",
    "Added",
    "AllBlocksCleared",
    "Appended",
    "Batch",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "Eviction",
    "SequenceTable",
    "Stats",
]
