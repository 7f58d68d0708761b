"""PagedKVCache: the pool, the sequences and the K and V of all layers as one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets import bucket
from ..layouts import cache_shapes, storage_dtype
from .arrays import Arrays
from .checks import MAX_INT32, as_int, as_ints
from .guard import Guarded, alone, consistent, exclusive
from .mirror import Mirror
from .pool import BlockPool
from .prefix.cache import PrefixCache
from .prefix.digests import Hash, blake2b_128, root_digest
from .prefix.events import Listener
from .prefix.eviction import LRU, Eviction
from .rows import Prompt
from .stats import Stats, draw
from .table import SequenceTable


class Added(NamedTuple):
    """What `PagedKVCache.add` started.

    Attributes
    ----------
    seq : int
        The handle of the sequence.
    num_cached : int
        How many of its first tokens are in the cache already.
    """

    seq: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What the attention operations need to know about a batch of sequences.

    Attributes
    ----------
    block_tables : (num_seqs, width) int32
        Entries at or past ceil(seq_len / P) are unused: -1 on the host, anything on a device.
    seq_lens : (num_seqs,) int32
    max_seq_len : int
        The longest of them, 0 if there are none; known on the host wherever the arrays are.
    """

    block_tables: Any
    seq_lens: Any
    max_seq_len: int


class PagedKVCache(Guarded):
    """A paged KV cache of all layers of a model, with the sequences in it.

    A block id names the same block in every layer. Sequences, handles and errors are those of `SequenceTable`, and so
    is the promise that every method changes all or nothing, one at a time: a mutation in the middle of another
    thread's raises RuntimeError, a read waits for it. A cache cannot be copied or pickled: TypeError.

    Parameters
    ----------
    num_layers : int
        Layers of the model, at least 1.
    num_blocks, block_size, num_kv_heads, head_dim : int
        N, P, Hkv and D.
    dtype : dtype-like
        float32, float16 or bfloat16: a name, or a dtype of NumPy, torch or CuPy.
    layout : str
        "NHD", "HND" or "vllm".
    kv_dtype : str or None
        "fp8_e4m3" or "fp8_e5m2" to store the cache in 8 bits, as uint8, instead.
    max_seqs : int
        Sequences alive at a time.
    max_seq_len : int or None
        Tokens that one sequence can have, rounded up to whole blocks; None for as many as the pool has. The block
        tables take max_seqs * max_seq_len / P * 4 bytes.
    array_module : module or str
        Whose arrays these are: numpy, torch or cupy. With NumPy the system commits the memory as it is written.
    device : device of torch, or None
        Where torch's arrays are, "cuda" for example; None for torch's default device. CuPy's are on its current one.

    Attributes
    ----------
    pool : BlockPool
    table : SequenceTable
    k_caches, v_caches : tuple of array
        K and V of each layer, with the shapes of the layout, zero at first: views of one allocation each.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.
    ModuleNotFoundError
        `array_module` is not installed; the message names the extra that brings it.

    Examples
    --------
    >>> cache = PagedKVCache(num_layers=2, num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8)
    >>> cache.k_caches[0].shape
    (8, 4, 1, 8)
    >>> seq, num_cached = cache.add(6)
    >>> cache.slots(seq, num_cached, 6)
    array([0, 1, 2, 3, 4, 5])
    >>> cache.append([seq])
    array([6])
    >>> cache.batch([seq])
    Batch(block_tables=array([[0, 1]], dtype=int32), seq_lens=array([7], dtype=int32), max_seq_len=7)
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = "float32",
        layout: str = "NHD",
        *,
        kv_dtype: str | None = None,
        max_seqs: int = 256,
        max_seq_len: int | None = None,
        array_module: ModuleType | str = "numpy",
        device: Any = None,
        prefix_cache: bool = True,
        eviction: Callable[[int], Eviction] = LRU,
        hash_of: Hash = blake2b_128,
        events: Listener | None = None,
    ) -> None:
        num_layers = as_int("num_layers", num_layers, minimum=1)
        num_kv_heads = as_int("num_kv_heads", num_kv_heads)
        head_dim = as_int("head_dim", head_dim)
        self.pool = BlockPool(num_blocks)
        block_size = as_int("block_size", block_size, minimum=1, maximum=MAX_INT32)
        if max_seq_len is None:
            max_blocks = min(self.pool.num_blocks, MAX_INT32 // block_size)
        else:
            max_blocks = -(-as_int("max_seq_len", max_seq_len, minimum=1) // block_size)
        self._arrays = Arrays(array_module, device)
        found = (
            PrefixCache(
                self.pool.num_blocks,
                block_size,
                eviction=eviction,
                hash_of=hash_of,
                listener=events,
                medium="GPU" if self._arrays.on_device else "CPU",
            )
            if prefix_cache
            else None
        )
        self.table = SequenceTable(self.pool, block_size, max_seqs, max_blocks, prefix_cache=found)
        stored = storage_dtype(dtype, kv_dtype)
        k_shape, v_shape = cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_dim, stored.itemsize)
        self.k_caches = tuple(self._arrays.zeros((num_layers, *k_shape), stored))
        self.v_caches = tuple(self._arrays.zeros((num_layers, *v_shape), stored))
        self._mirrors = self._make_mirrors() if self._arrays.on_device else None
        self._pins: dict[str, int] = {}
        self._guard = self.pool._guard

    @exclusive
    def add(self, tokens: int | Sequence[int], salt: str | bytes | None = None) -> Added:
        """Start a sequence, sharing the blocks that hold its first tokens already.

        Parameters
        ----------
        tokens : int, or (num_tokens,) ints
            How many tokens it begins with, or which: ids from 0 to 2**31 - 1.
        salt : str, bytes or None
            Only blocks of sequences with the same salt are shared. Whatever else K and V depend on, such as an adapter
            or an image, belongs into it.

        Returns
        -------
        Added
            The handle, and how many of the tokens are in the cache. The K and V of the others are still to be written,
            to ``slots(seq, num_cached, num_tokens)``: those of the last one in any case, since its output is needed.

        Raises
        ------
        TypeError
            `salt` is neither a str nor bytes nor None.
        ValueError
            More than max_seq_len tokens, or an id that is out of range.
        CapacityError
            max_seqs sequences are alive.
        OutOfBlocksError
            Too few blocks are free.
        """
        seq, num_cached, copies, writes = self.table._rows.plan_add(self._prompt(tokens, salt))
        added = Added(seq, num_cached)
        self._copy(copies)
        self.pool._commit(writes)
        return added

    @exclusive
    def append(self, seqs: Any, n: Any = 1, tokens: Any = None) -> Any:
        """Add n tokens to the end of each sequence, after copying the blocks that would be written but are shared.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        n : int, or (num_seqs,) ints
            New tokens of every sequence, or of each; at least 0.
        tokens : (num_new_tokens,) ints, or None
            Which tokens, in the order of the sequences. Without them, and after them, blocks of these sequences will
            not be found by other ones.

        Returns
        -------
        (num_new_tokens,) int64
            Their slots, in the order of the sequences.

        Raises
        ------
        ValueError
            A sequence would be longer than max_seq_len, or is named twice; not as many tokens, or an id out of range.
        OutOfBlocksError
            Too few blocks are free.
        KeyError
            A sequence that was freed or never was.
        RuntimeError
            On a device, while its current stream is being captured in a CUDA graph.
        """
        new_slots, copies, writes = self.table._rows.plan_append(seqs, n, None if tokens is None else _ids(tokens))
        self._copy(copies)
        slots = self._arrays.asarray(new_slots)
        self.pool._commit(writes)
        return slots

    @exclusive
    def commit(self, seqs: Any) -> None:
        """Say that the K and V of everything that was added and appended so far have been written, in all layers.

        From now on sequences that are added find the full blocks of these, as far as their tokens are known. Where
        another sequence has committed a block with the same tokens before, that one is shared, and the own one is free.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.

        Raises
        ------
        ValueError
            A sequence is named twice.
        KeyError
            A sequence that was freed or never was.
        """
        self.pool._commit(self.table._rows.plan_commit(seqs))

    @consistent
    def find(self, tokens: Sequence[int], salt: str | bytes | None = None) -> int:
        """How many of the first tokens `add` would find in the cache; nothing is taken.

        Parameters
        ----------
        tokens, salt
            As in `add`.
        """
        return self.table._rows.num_cached(self._prompt(tokens, salt))

    @consistent
    def can_add(self, tokens: int | Sequence[int], salt: str | bytes | None = None, *, reserve: int = 0) -> bool:
        """Whether `add` has room for a sequence.

        Parameters
        ----------
        tokens, salt
            As in `add`; blocks that are found and in use already need no room.
        reserve : int
            Blocks that must stay free besides: one for each running sequence, say, so that all can go on decoding.
        """
        return self.table._rows.can_add(self._prompt(tokens, salt), as_int("reserve", reserve))

    @exclusive
    def pin(self, name: str, tokens: Sequence[int], salt: str | bytes | None = None) -> int:
        """Keep the full blocks that tokens begin with, as far as they can be found now, until `unpin` or `reset`.

        A pin counts as a sequence: it takes one of max_seqs, and its blocks are in use.

        Parameters
        ----------
        name : str
            A new name.
        tokens, salt
            As in `add`.

        Returns
        -------
        int
            How many tokens are kept.

        Raises
        ------
        ValueError
            There is a pin of this name.
        CapacityError
            max_seqs sequences are alive.
        """
        if name in self._pins:
            raise ValueError(f"name must be a new one, got {name!r}, which is pinned: unpin it first")
        seq, length, writes = self.table._rows.plan_hold(self._prompt(tokens, salt))
        self.pool._commit([*writes, (vars(self), "_pins", self._pins | {name: seq})])
        return length

    @exclusive
    def unpin(self, name: str) -> None:
        """Let go of what `pin` keeps; it can be found until its blocks are needed.

        Raises
        ------
        KeyError
            No pin has this name.
        """
        if name not in self._pins:
            raise KeyError(f"no pin is called {name!r}")
        left = {other: seq for other, seq in self._pins.items() if other != name}
        self.pool._commit([*self.table._rows.plan_free(self._pins[name]), (vars(self), "_pins", left)])

    @exclusive
    def reset(self) -> None:
        """Forget what can be found, the pins too: after a change of the model's weights, say.

        Sequences go on, but no block that they have now will ever be found.
        """
        pins: dict[str, int] = {}
        self.pool._commit([*self.table._rows.plan_reset([*self._pins.values()]), (vars(self), "_pins", pins)])

    def fork(self, seqs: Any, n: int = 1) -> list[int]:
        """Start n sequences that share the tokens of each of some: `SequenceTable.fork`."""
        return self.table.fork(seqs, n)

    def reorder(self, seqs: Any, parents: Any) -> None:
        """Let each sequence go on with the tokens of another: `SequenceTable.reorder`."""
        self.table.reorder(seqs, parents)

    def truncate(self, seqs: Any, length: Any) -> None:
        """Shorten sequences to their first `length` tokens: `SequenceTable.truncate`."""
        self.table.truncate(seqs, length)

    def free(self, seqs: Any) -> None:
        """End sequences and release their blocks: `SequenceTable.free`."""
        self.table.free(seqs)

    def slots(self, seq: int, start: int, stop: int) -> Any:
        """Slots of the tokens start..stop-1 of a sequence, (stop - start,) int64: `SequenceTable.slots`."""
        return self._arrays.asarray(self.table.slots(seq, start, stop))

    def batch(self, seqs: Any) -> Batch:
        """The block tables and lengths of sequences.

        On the host they are new arrays. On a device they are views of buffers that stay in place; only rows that have
        changed are copied there, and the next call overwrites them in stream order. Their tables have room for the
        batch's longest length, rounded up to a power of two of at least 256 tokens, so that their shape changes as
        seldom as the plan of an attention call. Tables and lengths are of the same instant: another thread's call is
        waited for.

        Raises
        ------
        KeyError
            A sequence that was freed or never was.
        RuntimeError
            On a device, in the middle of another call of the same thread; something has to be sent there while the
            device's current stream is being captured in a CUDA graph.
        """
        if self._mirrors is not None:
            return self._mirrored_batch(seqs)
        block_tables, seq_lens = self.table._batch(seqs)
        return Batch(self._arrays.asarray(block_tables), self._arrays.asarray(seq_lens), _longest(seq_lens))

    def _prompt(self, tokens: int | Sequence[int], salt: str | bytes | None) -> Prompt:
        root = root_digest(salt)
        if isinstance(tokens, (int, np.integer)):
            return Prompt(as_int("num_tokens", tokens), None, root)
        ids = _ids(tokens)
        return Prompt(len(ids), ids, root)

    def _copy(self, copies: npt.NDArray[np.int64]) -> None:
        """Copy blocks in all layers, before the commit: until then the destinations are free blocks."""
        if len(copies):
            sources, destinations = (self._arrays.asarray(ids) for ids in copies.T.copy())
            for cache in (*self.k_caches, *self.v_caches):
                cache[destinations] = cache[sources]

    def _make_mirrors(self) -> tuple[Mirror, Mirror]:
        rows = self.table.max_seqs
        return Mirror(self._arrays, rows, self.table.max_blocks), Mirror(self._arrays, rows, 1)

    @alone
    def _mirrored_batch(self, seqs: Any) -> Batch:
        assert self._mirrors is not None
        tables, lens = self._mirrors
        block_tables, seq_lens = self.table._batch(seqs)
        longest = _longest(seq_lens)
        room = min(-(-bucket(longest) // self.table.block_size), self.table.max_blocks)
        return Batch(tables.update(block_tables, room), lens.update(seq_lens[:, None])[:, 0], longest)

    @consistent
    def stats(self) -> Stats:
        """How full the pool is, at one instant: another thread's call is waited for."""
        return Stats.of(self.table)

    def check(self) -> None:
        """Raise AssertionError unless every invariant of the pool and the table holds."""
        self.table.check()

    @consistent
    def plot(self, width: int = 64) -> str:
        """A map of the pool in characters, `width` to a line: which sequence has which block, and which are shared."""
        return pool_map(self.table).to_text(as_int("width", width, minimum=1))

    @consistent
    def _repr_html_(self) -> str:
        return f"{self.stats().to_html()}{pool_map(self.table).to_html()}"


def _ids(tokens: Any) -> npt.NDArray[np.int32]:
    """Token ids as a new array."""
    ids = as_ints("tokens", tokens)
    if len(ids) and (ids.min() < 0 or ids.max() > MAX_INT32):
        wrong = ids[(ids < 0) | (ids > MAX_INT32)][0]
        raise ValueError(f"tokens must be ids in 0..2**31 - 1, got {wrong}")
    return ids.astype(np.int32)


def _longest(seq_lens: npt.NDArray[np.int32]) -> int:
    return int(seq_lens.max(initial=0))
