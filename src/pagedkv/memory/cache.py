"""PagedKVCache: the pool, the sequences and the K and V of all layers as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets import bucket
from ..commit import commit
from ..layouts import cache_shapes, storage_dtype
from .arrays import Arrays
from .checks import MAX_INT32, as_int, as_ints
from .guard import Guarded, alone, consistent, exclusive
from .mirror import Mirror
from .pool import BlockPool
from .stats import Stats, pool_map
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
        self.table = SequenceTable(self.pool, block_size, max_seqs, max_blocks)
        self._arrays = Arrays(array_module, device)
        stored = storage_dtype(dtype, kv_dtype)
        k_shape, v_shape = cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_dim, stored.itemsize)
        self.k_caches = tuple(self._arrays.zeros((num_layers, *k_shape), stored))
        self.v_caches = tuple(self._arrays.zeros((num_layers, *v_shape), stored))
        self._mirrors = self._make_mirrors() if self._arrays.on_device else None
        self._guard = self.pool._guard

    @exclusive
    def add(self, tokens: int | Sequence[int]) -> Added:
        """Start a sequence.

        Parameters
        ----------
        tokens : int, or (num_tokens,) ints
            How many tokens it begins with, or which.

        Returns
        -------
        Added
            The handle, and 0: the K and V of all its tokens are still to be written, to
            ``slots(seq, num_cached, num_tokens)``.

        Raises
        ------
        ValueError
            More than max_seq_len tokens.
        CapacityError
            max_seqs sequences are alive.
        OutOfBlocksError
            Too few blocks are free.
        """
        num_tokens: Any = tokens if isinstance(tokens, (int, np.integer)) else len(as_ints("tokens", tokens))
        seq, writes = self.table._plan_add(num_tokens)
        added = Added(seq, num_cached=0)
        commit(writes)
        return added

    @exclusive
    def append(self, seqs: Any, n: Any = 1) -> Any:
        """Add n tokens to the end of each sequence, after copying the blocks that would be written but are shared.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        n : int, or (num_seqs,) ints
            New tokens of every sequence, or of each; at least 0.

        Returns
        -------
        (num_new_tokens,) int64
            Their slots, in the order of the sequences.

        Raises
        ------
        ValueError
            A sequence would be longer than max_seq_len, or is named twice.
        OutOfBlocksError
            Too few blocks are free.
        KeyError
            A sequence that was freed or never was.
        RuntimeError
            On a device, while its current stream is being captured in a CUDA graph.
        """
        appended, writes = self.table._plan_append(seqs, n)
        if len(appended.copies):
            # Before the commit: until then the destinations are free blocks, which may hold anything.
            sources, destinations = (self._arrays.asarray(ids) for ids in appended.copies.T.copy())
            for cache in (*self.k_caches, *self.v_caches):
                cache[destinations] = cache[sources]
        slots = self._arrays.asarray(appended.slots)
        commit(writes)
        return slots

    def fork(self, seq: int, n: int = 1) -> list[int]:
        """Start n sequences that share the tokens of another: `SequenceTable.fork`."""
        return self.table.fork(seq, n)

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


def _longest(seq_lens: npt.NDArray[np.int32]) -> int:
    return int(seq_lens.max(initial=0))
