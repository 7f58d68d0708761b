"""CacheBlocks: a cache's K and V as wire blocks, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import host_view, to_host
from ..cache import PagedKVCache
from ..commit import bits
from ..layouts import as_tokens, cache_geometry
from ..memory.arguments import as_int
from ..operations.caches import swap_blocks
from .store import Buffer
from .wire import BLOCK_TOKENS, Name, Wire

_AT_ONCE = 2**22  # bytes that are gathered at a time: they stay in a core's cache
_Layers = list[tuple[int, list[Any]]]  # the place of each layer in a payload, and its arrays by `CACHES`
_OnHost = tuple[_Layers, npt.NDArray[np.int64], npt.NDArray[np.int64]]  # and the block and the offset of each slot


class CacheBlocks:
    """Reads wire blocks from a cache, and writes them into it.

    Parameters
    ----------
    cache : PagedKVCache
    model : str
        As in `Wire`.
    first_head : int
        The number in the model of the cache's first KV head: of a rank that has heads 4 to 7, it is 4.
    block_tokens : int
        As in `Wire`.
    layers : sequence of int, or None
        All layers of one window and one shape, whose K and V the blocks have; None for all layers of a cache without
        windows.

    Attributes
    ----------
    cache : PagedKVCache
    wire : Wire
    groups : list of int
        The groups of these layers, in the cache.
    num_heads : int
        KV heads of the cache.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        model: str,
        *,
        first_head: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        layers: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"cache must be a PagedKVCache, got {type(cache).__name__}")
        if layers is None and cache.layer_groups.has_shapes:
            raise ValueError(
                f"cache must have layers of one shape, got {cache.layer_groups}: sequences of others are not swapped, "
                "but StoredPrefixes takes them"
            )
        if layers is None and (len(cache.groups) > 1 or cache.groups[0].window is not None):
            raise ValueError(
                f"cache must have one group of layers, without a window, got {cache.groups}: it releases blocks that a "
                "window has passed, and a store would have sequences with gaps. Make the cache without windows, "
                "and pass window= to attend"
            )
        self.cache, self._first_head = cache, as_int("first_head", first_head, maximum=2**16)
        self._layout, kv_format = cache._options[0]["layout"], cache._layer_caches.kv_format
        self._on_device = cache._arrays.on_device
        with_kv = sorted(layer for group in cache.groups for layer in group.layers)  # not those that read another's
        self._layers = with_kv if layers is None else sorted(layers)
        k_cache, v_cache = (caches[self._layers[0]] for caches in (cache.k_caches, cache.v_caches))
        geometry = cache_geometry(self._layout, tuple(k_cache.shape), tuple(v_cache.shape), k_cache.itemsize)
        self.num_heads, self._head_dim = geometry.num_kv_heads, geometry.head_dim
        group_of = cache.layer_groups.group_of
        self.groups = sorted({group_of[layer] for layer in self._layers})
        named = () if self._layers == with_kv else self._layers
        self.wire = Wire(model, len(self._layers), self._head_dim, kv_format, block_tokens=block_tokens, layers=named)
        self._scales = self._scales_of_heads() if kv_format.scale == "call" else [b""] * self.num_heads

    @classmethod
    def of_each_kind(cls, cache: PagedKVCache, model: str, **options: int) -> list[CacheBlocks]:
        """Those of the layers of each window and shape, layers without a window first; `options` as in `CacheBlocks`.

        Raises
        ------
        ValueError
            All layers have windows, so that the cache forgets the first tokens of a sequence.
        """
        if not cache.layer_groups.leader_is_full:
            raise ValueError(
                f"cache must have layers without a window, got {cache.groups}: when windows have passed the first "
                "tokens of a sequence in all layers, their ids are lost, and a store finds nothing without them. Make "
                "the cache without windows, and pass window= to attend"
            )
        layers: dict[tuple[Any, Any], list[int]] = {}
        for group in sorted(cache.groups, key=lambda group: group.window is not None):
            layers.setdefault((group.window, group.shape), []).extend(group.layers)
        return [cls(cache, model, layers=of_kind, **options) for of_kind in layers.values()]

    @property
    def bytes_of_all_heads(self) -> int:
        """Bytes of the wire blocks of all KV heads for the same tokens."""
        return self.num_heads * self.wire.block_bytes

    def names(self, digest: bytes) -> list[Name]:
        """The names of a wire block in the cache's KV heads."""
        return [self.wire.name(digest, self._first_head + i, scales) for i, scales in enumerate(self._scales)]

    def missing(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool]:
        """Which tokens the cache does not have in these layers, (num_tokens,) bool; `slots` as in `read`."""
        return np.asarray((np.atleast_2d(slots)[self.groups] < 0).any(axis=0))

    def read(self, slots: npt.NDArray[np.int64], digests: Sequence[bytes]) -> tuple[list[Name], list[memoryview]]:
        """Copy tokens out of the cache.

        Parameters
        ----------
        slots : (num_tokens,) int64, or (num_groups, num_tokens) with several groups
            Of tokens that follow each other; the first is the first of a wire block. The block has zeros for a negative
            one, and behind the last.
        digests : sequence of bytes
            Of the wire blocks that they are in.

        Returns
        -------
        names : list of Name
            Of each wire block and KV head.
        blocks : list of memoryview
        """
        size, num_blocks, num_heads = self.wire.block_tokens, len(digests), self.num_heads
        sealed = self.wire.empty(num_blocks * num_heads)
        payloads = self._by_head(sealed)
        slots = np.atleast_2d(slots)
        padded = np.pad(slots, ((0, 0), (0, num_blocks * size - slots.shape[1])), constant_values=-1)
        missing, at_once = self.missing(padded), max(1, _AT_ONCE // self.bytes_of_all_heads)
        for group in self.groups:
            there = np.where(missing, padded[group].max(), padded[group])
            with self._on_host(group, there, writes=False) as (layers, ids, offsets):
                for first in range(0, num_blocks, at_once):
                    some = slice(first, first + at_once)
                    of_tokens = slice(first * size, (first + at_once) * size)
                    for layer, views in layers:
                        for i, view in enumerate(views):
                            part = payloads[i // 2]
                            rows = view[ids[of_tokens], offsets[of_tokens]]
                            rows = rows.reshape(-1, size, num_heads, *part.shape[5:])
                            part[some, :, layer, i % 2] = rows.swapaxes(1, 2)
        if missing.any():
            for part in payloads:
                np.moveaxis(part, 4, 1)[missing.reshape(num_blocks, size)] = 0
        names = [name for digest in digests for name in self.names(digest)]
        self.wire.seal(sealed, names)
        return names, [block.data for block in sealed]

    def open(self, found: Sequence[Buffer | None], names: Sequence[Name]) -> list[npt.NDArray[np.uint8]]:
        """The first wire blocks that a store has whole, all KV heads of each, up to the first that it has not."""
        opened = []
        for block, name in zip(found, names, strict=False):
            if (whole := self.wire.opened(block, name)) is None:
                break
            opened.append(whole)
        return opened[: len(opened) // self.num_heads * self.num_heads]

    def write(self, slots: npt.NDArray[np.int64], skipped: int, opened: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy tokens into the cache.

        Parameters
        ----------
        slots : (num_tokens,) int64, or (num_groups, num_tokens) with several groups
            Where they go.
        skipped : int
            How many tokens the first wire blocks have before them.
        opened : sequence of array
            From `open`.
        """
        size, num_heads, slots = self.wire.block_tokens, self.num_heads, np.atleast_2d(slots)
        end = skipped + slots.shape[1]
        at_once = max(1, _AT_ONCE // self.bytes_of_all_heads)
        for group in self.groups:
            with self._on_host(group, slots[group], writes=True) as (layers, ids, offsets):
                for first in range(skipped // size, -(-end // size), at_once):
                    heads = np.stack(opened[first * num_heads : (first + at_once) * num_heads])
                    payloads = self._by_head(heads)
                    start, stop = max(first * size, skipped), min((first + len(payloads[0])) * size, end)
                    inside = slice(start - first * size, stop - first * size)
                    of_tokens = slice(start - skipped, stop - skipped)
                    for layer, views in layers:
                        for i, view in enumerate(views):
                            rows = payloads[i // 2][:, :, layer, i % 2].swapaxes(1, 2)
                            rows = rows.reshape(-1, *rows.shape[2:])[inside]
                            view[ids[of_tokens], offsets[of_tokens]] = rows.reshape(len(rows), *view.shape[2:])

    @contextmanager
    def _on_host(self, group: int, slots: npt.NDArray[np.int64], *, writes: bool) -> Iterator[_OnHost]:
        """What NumPy sees of a group's blocks.

        The blocks of a cache on a device are copied to the host first, and back if the caller `writes`.
        """
        ids, offsets = np.divmod(slots, self.cache.block_size)
        layers = [layer for layer in self._layers if self.cache.layer_groups.group_of[layer] == group]
        there = [self.cache._layer_caches.layers[layer] for layer in layers]
        if not self._on_device:
            yield self._as_layers(layers, [map(host_view, caches) for caches in there]), ids, offsets
            return
        blocks, ids = np.unique(ids, return_inverse=True)
        dtypes = [part.dtype for part in self.wire.parts for _ in "kv"]
        here = [
            [np.empty((len(blocks), *x.shape[1:]), dtype) for x, dtype in zip(caches, dtypes, strict=True)]
            for caches in there
        ]
        pairs = np.stack([blocks, np.arange(len(blocks))], axis=1)
        swap_blocks(there, here, pairs)
        yield self._as_layers(layers, here), ids, offsets
        if writes:
            swap_blocks(here, there, pairs[:, ::-1].copy())

    def _as_layers(self, layers: Iterable[int], caches: Iterable[Iterable[Any]]) -> _Layers:
        return [
            (self._layers.index(layer), [as_tokens(self._layout, bits(x)) for x in of_layer])
            for layer, of_layer in zip(layers, caches, strict=True)
        ]

    def _by_head(self, blocks: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """The bits of the parts of wire blocks, (num_blocks, num_heads, num_layers, 2, block_tokens, ...) each."""
        parts = map(bits, self.wire.payloads(blocks))
        return [part.reshape(-1, self.num_heads, *part.shape[1:]) for part in parts]

    def _scales_of_heads(self) -> list[bytes]:
        """The scales of each KV head in all layers, as bytes."""
        options = [self.cache._options[i] for i in self._layers]
        scales = np.empty((self.num_heads, len(options), 2), "<f8")
        for layer, of_layer in enumerate(options):
            for i, name in enumerate(("k_scale", "v_scale")):
                scale = to_host(of_layer[name])
                scales[:, layer, i] = 1.0 if scale is None else scale
        return [of_head.tobytes() for of_head in scales]
