"""Forward passes of transformers' continuous batching, which read its pages in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...operations.attention import decode_attention, prefill_attention
from ...operations.caches import write_kv
from .attention import require_layer


@dataclass(frozen=True, eq=False)
class AllocatorPages:
    """The keys and values of the layers of one of transformers' allocators, which share block tables.

    Each block has a page for the K and V of every layer. transformers numbers tokens by rows of K or V:
    ``block * 2 * num_layers * block_size + offset``.

    Attributes
    ----------
    index : int
        The allocator's index in transformers' lists of indices.
    layer_type : str
        The allocator's key in transformers' dicts of lengths.
    caches : dict
        K and V of each layer: (num_blocks, block_size, num_kv_heads, head_dim) views of the tensor of all pages.
    block_size : int
    stride : int
        Rows in a block.
    window : int or None
        The size of the ring of tokens that sliding layers have for each sequence: position p is at p % window.
    unused : int
        The row to which padding is written.
    """

    index: int
    layer_type: str
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]]
    block_size: int
    stride: int
    window: int | None
    unused: int

    @classmethod
    def of(cls, allocator: Any) -> AllocatorPages:
        """Read the pages of an allocator of transformers."""
        layers, block_size = allocator.layer_indices, allocator.tokens_per_page
        shape = (-1, len(layers), 2, block_size, allocator.num_key_value_heads, allocator.head_dim)
        pages = allocator.cache_tensor.view(shape)
        return cls(
            allocator.index,
            allocator.layer_type,
            {layer: (pages[:, i, 0], pages[:, i, 1]) for i, layer in enumerate(layers)},
            block_size,
            allocator.block_physical_stride,
            getattr(allocator, "sliding_window", None),
            allocator.write_trash_index,
        )

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Convert rows to slots; -1 for padding, all of which transformers writes to one row."""
        slots = rows // self.stride * self.block_size + rows % self.stride
        return slots.masked_fill(rows == self.unused, -1)

    def tables(self, rows: torch.Tensor) -> torch.Tensor:
        """Convert rows to blocks."""
        return (rows // self.stride).int()


class PagedPass:
    """The `ForwardPass` of transformers' continuous batching.

    Layers of one allocator share tables, which are made from the indices that transformers computes for every pass,
    without reading values from a device.

    Parameters
    ----------
    pages : list of AllocatorPages
    inputs : dict
        The inputs that transformers passes to the model.
    """

    def __init__(self, pages: list[AllocatorPages], inputs: dict[str, Any]) -> None:
        self._groups: dict[int, _InPlace | _Gathered] = {}
        for group in pages:
            of_layers = _InPlace if _keeps_what_is_seen(group, inputs) else _Gathered
            self._groups |= dict.fromkeys(group.caches, of_layers(group, inputs))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `ForwardPass`."""
        require_layer(layer, self._groups)
        return self._groups[layer].attend(layer, q, k, v, **options)


def _keeps_what_is_seen(pages: AllocatorPages, inputs: dict[str, Any]) -> bool:
    """Whether no new token overwrites one in the ring that another new token still sees.

    The length of a sequence in a sliding layer counts its new tokens and at most window - 1 before them. If it exceeds
    the window, several new tokens wrap around the ring.
    """
    return pages.window is None or inputs["max_length_k"][pages.layer_type] <= pages.window


class _InPlace:
    """Layers whose keys and values are read in the pages themselves."""

    def __init__(self, pages: AllocatorPages, inputs: dict[str, Any]) -> None:
        self.pages = pages
        self.query_starts = inputs["cu_seq_lens_q"].int()
        starts = inputs["cu_seq_lens_k"][pages.layer_type].long()
        self.seq_lens = starts.diff().int()
        self.max_seq_len = inputs["max_length_k"][pages.layer_type]
        self.is_decode = inputs["max_length_q"] == 1
        written, read = inputs["write_index"][pages.index], inputs["read_index"][pages.index]
        self.slots = pages.slots(written)
        columns = -(-self.max_seq_len // pages.block_size)
        firsts = torch.arange(columns, device=starts.device) * pages.block_size  # of the tokens of each block
        if len(read) == 0 or pages.window is None:  # the rows of a sequence, from its first token on
            rows = written if len(read) == 0 else read
            rows = rows[(starts[:-1, None] + firsts).clamp(max=len(rows) - 1)]
        else:
            rows = self._in_ring(firsts, starts, written, read, inputs["position_ids"][0])
        self.block_tables = pages.tables(rows)

    def _in_ring(
        self,
        firsts: torch.Tensor,
        starts: torch.Tensor,
        written: torch.Tensor,
        read: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The rows of the ring's tokens `firsts`: cached ones, oldest first, or ones written now."""
        query_starts = self.query_starts.long()
        cached = (self.seq_lens - query_starts.diff())[:, None]
        past = positions[query_starts[:-1].clamp(max=len(positions) - 1)][:, None]
        ages = (firsts - (past - cached)) % self.pages.window  # tokens of the sequence before this one
        rows_read = read[(starts[:-1, None] + ages).clamp(max=len(read) - 1)]
        rows_written = written[(query_starts[:-1, None] + ages - cached).clamp(min=0, max=len(written) - 1)]
        return torch.where(ages < cached, rows_read, rows_written)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        k_cache, v_cache = self.pages.caches[layer]
        write_kv(k[: len(self.slots)], v[: len(self.slots)], k_cache, v_cache, self.slots)
        if self.pages.window is not None:
            options["window"] = None  # the ring holds no token beyond it
        options["max_seq_len"] = self.max_seq_len
        tables = self.block_tables, self.seq_lens
        if self.is_decode and len(q) == len(self.seq_lens):
            return decode_attention(q, k_cache, v_cache, *tables, **options)
        return prefill_attention(q, k_cache, v_cache, *tables, self.query_starts, **options)


class _Gathered:
    """Sliding layers whose new tokens overwrite visible ones: transformers gathers all keys and values before that."""

    def __init__(self, pages: AllocatorPages, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        self.query_starts = inputs["cu_seq_lens_q"].int()
        starts = inputs["cu_seq_lens_k"][pages.layer_type].int()
        self.seq_lens = starts.diff()
        self.max_seq_len = inputs["max_length_k"][pages.layer_type]
        # Each token of the gathered copy counts as a block.
        self.block_tables = starts[:-1, None] + torch.arange(self.max_seq_len, dtype=torch.int32, device=starts.device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        states = (x.transpose(0, 1)[None] for x in (k, v))
        k, v = self.inputs["cache"].update(*states, layer, {**self.inputs})
        k_cache, v_cache = (x[0].transpose(0, 1)[:, None] for x in (k, v))
        options["max_seq_len"] = self.max_seq_len
        tables = self.block_tables, self.seq_lens, self.query_starts
        return prefill_attention(q, k_cache, v_cache, *tables, **options)
