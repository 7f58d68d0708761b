"""Keeps K and V outside of a cache: in host memory, in a file, in Redis, in another process."""

from .file import FileStore
from .host import HostStore
from .prefixes import StoredPrefixes
from .saved import SavedSequences
from .store import BlockStore
from .swap import SwapSpace
from .wire import Wire

__all__ = ["BlockStore", "FileStore", "HostStore", "SavedSequences", "StoredPrefixes", "SwapSpace", "Wire"]
