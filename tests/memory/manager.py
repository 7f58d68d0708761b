"""Helpers for tests of the memory manager: its state as bytes, and calls that must not change it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.memory import BlockPool, SequenceTable
from pagedkv.memory.chains import Chains
from pagedkv.memory.handles import Handles
from pagedkv.memory.ids import Tally
from pagedkv.memory.prefix.cache import PrefixCache
from pagedkv.memory.prefix.eviction import LRU
from pagedkv.memory.prefix.holders import Holders
from pagedkv.memory.prefix.index import HashIndex
from pagedkv.memory.prefix.outbox import Outbox
from pagedkv.memory.rows import SequenceRows
from pagedkv.memory.states import StateSlots
from pagedkv.memory.windows import Windows

Manager = BlockPool | SequenceTable | PagedKVCache


PARTS = (BlockPool, SequenceTable, SequenceRows, Handles, Chains, PrefixCache, HashIndex, LRU, Outbox, Holders, Windows)
PARTS += (StateSlots,)
NO_STATE = {"_guard", "_arrays", "_batches", "_hash_of", "_listener", "_medium", "_options", "_kinds"}
NO_STATE |= {"groups", "_groups", "layer_groups", "_same_as", "_remedy"}
NO_STATE |= {"_layer_caches", "_state_arrays"}  # what k_caches and v_caches are views of, and states
NO_STATE |= {"_known", "_last_step", "_num_changes"}  # what follows from other state, and how often that has changed


def state(owner: Any) -> dict[str, bytes]:
    """Every array that the manager remembers anything in, by name; K and V included."""
    found, seen = {}, set()

    def look(prefix, part):
        if id(part) in seen:
            return
        seen.add(id(part))
        for name, value in vars(part).items():
            if isinstance(value, np.ndarray):
                found[prefix + name] = value.tobytes()
            elif isinstance(value, PARTS):
                look(f"{prefix}{name}.", value)
            elif isinstance(value, tuple) and name not in NO_STATE:
                found[prefix + name] = b"".join(np.asarray(array).tobytes() for array in value)
            elif name == "states" and isinstance(value, dict):
                found[prefix + name] = b"".join(np.asarray(array).tobytes() for array in value.values())
            elif isinstance(value, (list, dict)) and name not in NO_STATE:
                found[prefix + name] = repr(value).encode()
            else:
                assert value is None or isinstance(value, (int, Tally)) or name in NO_STATE, f"is {name} state?"

    look("", owner)
    return found


@contextmanager
def refused(owner: Manager, error: type[Exception], match: str | None = None) -> Iterator[None]:
    """The block raises exactly this error, and the owner's state is byte-identical after it."""
    before = state(owner)
    with pytest.raises(error, match=match) as raised:
        yield
    assert raised.type is error
    assert state(owner) == before
    owner.check()


def last_block_first(pool: BlockPool) -> None:
    """Let a new pool hand out block N - 1 first, to which an index of -1 leads."""
    pool.release(pool.allocate(pool.num_blocks)[::-1])


def fails_after(calls: int, function: Callable, error: BaseException) -> Callable:
    """The function for that many calls, then the error."""
    left = calls

    def wrapped(*args, **kwargs):
        nonlocal left
        if left == 0:
            raise error
        left -= 1
        return function(*args, **kwargs)

    return wrapped
