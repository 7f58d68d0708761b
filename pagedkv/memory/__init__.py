"""The memory manager: a block pool, block tables of sequences, and the K and V arrays of all layers."""

from .device.batch import Batch
from .groups import Group, LayerGroups
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
    "Group",
    "LayerGroups",
    "SequenceTable",
    "Stats",
]
