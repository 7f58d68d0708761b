"""Batch: the block tables, lengths and query rows of some sequences."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...buckets import bucket
from ...cached_property import cached_property
from ...commit import Write
from ..guard import Guarded, exclusive_read
from ..sequences import Sequences
from .arrays import Arrays
from .mirror import Mirror


@dataclass(frozen=True, eq=False)
class Batch:
    """The block tables and lengths of some sequences, and their query rows: the input of attention.

    Attributes
    ----------
    block_tables : (num_seqs, width) int32
        Entries at or past ceil(seq_len / P) are unused: -1 on the host, anything on a device. With several groups of
        layers (num_groups, num_seqs, width); those that a window has passed are -1.
    seq_lens : (num_seqs,) int32
    max_seq_len : int
        The longest of them, 0 if there are none; known on the host wherever the arrays are.
    num_tokens : int
        Query rows of all sequences together.
    query_starts : (num_seqs + 1,) int32
        Where the query rows of each sequence begin, and num_tokens at the end. Made when it is first looked up.
    positions : (num_tokens,) int64
        The position of each query row in its sequence, for `apply_rotary`. Made when it is first looked up.
    plans : dict
        Plans that the layers of a model share, and on a device later batches, too: for `PagedKVCache.attend`.
    """

    block_tables: Any
    seq_lens: Any
    max_seq_len: int
    _arrays: Arrays = field(repr=False)
    _lens: npt.NDArray[np.int32] = field(repr=False)
    _given: npt.NDArray[np.int64] | None = field(repr=False)
    _batches: Batches = field(repr=False)
    _epoch: int = field(repr=False)
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def where(self) -> list[dict[str, Any]]:
        """The tables, lengths and query_starts that attention takes, for each group; on the host as NumPy views."""
        where = {"seq_lens": self.seq_lens}
        if not self.is_decode:
            where["query_starts"] = self._batches.starts_of(self)
        views = {name: self._arrays.on_host(x) for name, x in where.items()}
        tables = self._arrays.on_host(self.block_tables)
        return [{"block_tables": table, **views} for table in (tables if tables.ndim == 3 else [tables])]

    def require_current(self) -> None:
        """Raise RuntimeError if the cache was reset since, or, on a device, another batch has overwritten this one."""
        if self._epoch != self._batches.epoch:
            raise RuntimeError(
                "batch must be made after the last reset of its cache, and on a device be its last one, whose arrays "
                "lie where those of the earlier ones were: make another one"
            )

    def require_held(self, group: int, window: int, block_size: int) -> None:
        """Raise ValueError if a query sees tokens that have been released, through a window of a group."""
        table = self.where[group]["block_tables"]
        held, num_used = table >= 0, -(-self._lens.astype(np.int64) // block_size)
        first = np.where(held.any(axis=1), held.argmax(axis=1), num_used)
        most = self._lens - np.where(first > 0, first * block_size + window - 1, 0)
        if (more := self._query_lens > most).any():
            seq = int(more.argmax())
            raise ValueError(
                f"batch must have at most {max(0, most[seq])} query tokens of sequence {seq}, got "
                f"{self._query_lens[seq]}: with a window of {window} the others see tokens that have been released. "
                "Let queries attend before `commit` and the next `append`, or make the cache with keep=n to keep n "
                "tokens more"
            )

    @cached_property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one query row, so that `decode_attention` can compute the batch."""
        return bool(self._lens.all() if self._given is None else (self._given == 1).all())

    @cached_property
    def num_tokens(self) -> int:
        return int(self._query_lens.sum())

    @cached_property
    def query_starts(self) -> Any:
        return self._arrays.asarray(self._starts)

    @cached_property
    def _starts(self) -> npt.NDArray[np.int32]:
        return np.concatenate([[0], np.cumsum(self._query_lens)]).astype(np.int32)

    @cached_property
    def positions(self) -> Any:
        ends = np.cumsum(self._query_lens)
        return self._arrays.asarray(np.arange(self._query_lens.sum()) + (self._lens - ends).repeat(self._query_lens))

    @cached_property
    def _query_lens(self) -> npt.NDArray[np.int64]:
        return (self._lens > 0).astype(np.int64) if self._given is None else self._given


class Batches(Guarded):
    """Makes the batches of a cache: from new arrays on the host, from mirrors on a device.

    Parameters
    ----------
    sequences : Sequences
    arrays : Arrays
    grows : bool
        Whether the buffers on a device start as wide as the table and move when it grows; otherwise they have room for
        the longest possible sequence.
    """

    def __init__(self, sequences: Sequences, arrays: Arrays, *, grows: bool) -> None:
        self._sequences, self._arrays, self._guard = sequences, arrays, sequences._guard
        self._mirrors = self._starts = None
        self._plans: dict[Hashable, Any] = {}
        self.epoch = 0
        if arrays.on_device:
            columns = sequences._rows.blocks.shape[1] if grows else sequences.max_blocks
            num_lines = len(sequences._rows.blocks)
            self._mirrors = Mirror(arrays, num_lines, columns), Mirror(arrays, sequences.max_seqs, 1)
            self._starts = Mirror(arrays, sequences.max_seqs + 1, 1)

    def of(self, seqs: Any, query_lens: Any) -> Batch:
        """As `PagedKVCache.batch`."""
        if self._mirrors is not None:
            return self._mirrored(*self._mirrors, seqs, query_lens)
        block_tables, longest, seq_lens, query_lens = self._sequences._batch(seqs, query_lens)
        arrays, lens = self._arrays, seq_lens.copy()  # the caller may write to its seq_lens
        tables, device_lens = arrays.asarray(block_tables), arrays.asarray(seq_lens)
        return Batch(tables, device_lens, longest, arrays, lens, query_lens, self, self.epoch)

    def starts_of(self, batch: Batch) -> Any:
        """The query_starts that attention reads: on a device a mirror, so that plans find those of each batch there."""
        return batch.query_starts if self._starts is None else self._starts.update(batch._starts[:, None])[:, 0]

    def plan_expiry(self) -> Write:
        """The write after which no batch that was made is current."""
        return vars(self), "epoch", self.epoch + 1

    @exclusive_read
    def _mirrored(self, tables: Mirror, lens: Mirror, seqs: Any, query_lens: Any) -> Batch:
        block_tables, longest, seq_lens, query_lens = self._sequences._batch(seqs, query_lens)
        self.epoch += 1  # before anything is overwritten
        room = min(-(-bucket(longest) // self._sequences.block_size), self._sequences.max_blocks)
        mirrored = tables.update(block_tables.reshape(-1, block_tables.shape[-1]), room)
        if block_tables.ndim == 3:
            mirrored = mirrored.reshape(*block_tables.shape[:2], mirrored.shape[1])
        mirrored_lens = lens.update(seq_lens[:, None])[:, 0]
        rest = self._arrays, seq_lens, query_lens, self, self.epoch, self._plans
        batch = Batch(mirrored, mirrored_lens, longest, *rest)
        if not batch.is_decode:
            batch.where  # noqa: B018 (sends query_starts, which a graph that is replayed next reads)
        return batch
