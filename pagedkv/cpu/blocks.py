"""Writing, gathering and copying blocks on the CPU, in NumPy.

Caches are indexed along their block axis, which every layout has first, and are never copied. Elements move as bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import repeat
from operator import getitem

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..calls import CopyCall, GatherCall, Scale, SwapCall, WriteCall, per_head
from ..commit import Write, bits, commit
from ..layouts import KvFormat, as_tokens
from .rotary import rotated

PIECE_BYTES = 256 * 1024
MOST_BYTES = 4096  # of slots; hashing more than that takes longer than dividing them
SMALL_BLOCK = 4096  # bytes: storing fewer costs less than a separate write for each block


def write_kv(call: WriteCall) -> None:
    """Write k and v (T, Hkv, D) into the slots (T,), and skip tokens whose slot is negative."""
    k, v, slots, spec, rotation = call.k, call.v, call.slots, call.spec, call.rotation
    locate = _cached_locate if slots.nbytes <= MOST_BYTES else _locate
    kept, at = locate(slots.tobytes(), spec.block_size)
    if kept is not None:
        k, v = k[kept], v[kept]
    if rotation is not None:
        positions = rotation.positions if kept is None else rotation.positions[kept]
        k = rotated(k, rotation.cos, rotation.sin, positions, interleaved=rotation.interleaved)
    writes: list[Write] = []
    for x, scale, caches in ((k, call.k_scale, call.caches[::2]), (v, call.v_scale, call.caches[1::2])):
        for encoded, cache in zip(_encode(x, spec.format, scale), caches, strict=True):
            tokens = as_tokens(spec.layout, bits(cache))
            writes.append((tokens, at, encoded.reshape(len(x), *tokens.shape[2:])))
    commit(writes)


def moves_bits(call: WriteCall) -> bool:
    """Whether write_kv only copies elements, so that the thread's floating-point environment does not matter."""
    dtype = call.k_cache.dtype
    return call.rotation is None and call.k.dtype == dtype == call.v.dtype


def _locate(slots: bytes, block_size: int) -> tuple[Array | None, tuple[Array, Array]]:
    """Which tokens have a slot (None if all have), and the blocks and offsets of these slots."""
    of_tokens = np.frombuffer(slots, np.int64)
    kept = of_tokens >= 0
    if kept.all():
        return None, np.divmod(of_tokens, block_size)
    return kept, np.divmod(of_tokens[kept], block_size)


_cached_locate = lru_cache(maxsize=16)(_locate)  # the layers of a model write to the same slots, one after the other


def gather_kv(call: GatherCall, k: Array, v: Array) -> None:
    """Fill k and v (seq_len, Hkv, D) with the first keys and values of a sequence."""
    spec = call.spec
    size = spec.block_size
    # Few blocks at a time, so that what indexing returns is still in the processor's caches when it is copied.
    piece = size * max(1, PIECE_BYTES // (size * spec.num_kv_heads * spec.head_dim * k.itemsize))
    for caches, scale, result in ((call.caches[::2], call.k_scale, k), (call.caches[1::2], call.v_scale, v)):
        blocks, *of_rows = (as_tokens(spec.layout, bits(cache)) for cache in caches)
        of_heads = per_head(scale, spec.num_kv_heads)
        for first in range(0, call.seq_len, piece):
            some = result[first : first + piece]
            table = call.block_table[first // size : -(-(first + len(some)) // size)]
            factors = _of_tokens(of_rows[0][table], len(some)).view(np.float32) if of_rows else of_heads
            _decode(_of_tokens(blocks[table], len(some)), spec.format, factors, some)


def copy_blocks(call: CopyCall) -> None:
    """In every cache, copy the blocks pairs[:, 0] onto the blocks pairs[:, 1]."""
    _copy([(cache, cache) for cache in call.caches], call.pairs)


def swap_blocks(call: SwapCall) -> None:
    """From each source cache to its destination, copy the blocks pairs[:, 0] onto the blocks pairs[:, 1]."""
    _copy(call.copies, call.pairs)


def _copy(copies: Iterable[tuple[Array, Array]], pairs: npt.NDArray[np.int64]) -> None:
    (at, to), writes = pairs.T.tolist(), list[Write]()
    for source, destination in copies:
        if source[:1].nbytes < SMALL_BLOCK:
            writes.append((bits(destination), pairs[:, 1], bits(source)[pairs[:, 0]]))
        else:  # with an index array NumPy would copy everything twice
            blocks = map(getitem, repeat(bits(source)), at)
            writes += zip(map(getitem, repeat(bits(destination)), to), repeat(...), blocks)
    commit(writes)


def _of_tokens(blocks: Array, count: int) -> Array:
    """The first tokens (count, ...) of blocks (num_blocks, block_size, ...)."""
    return blocks.reshape(-1, *blocks.shape[2:])[:count]


def _decode(codes: Array, kv_format: KvFormat, scales: npt.NDArray[np.float32], result: Array) -> None:
    """Fill `result` (T, Hkv, D) with the values of a cache's elements; scales are (Hkv,) or (T, Hkv)."""
    if not kv_format.coded:
        result.view(codes.dtype).reshape(codes.shape)[...] = codes
        return
    wide = np.ascontiguousarray(codes).reshape(result.shape).view(kv_format.element).astype(np.float32)
    np.multiply(wide, scales[..., None], out=result)


def _encode(x: Array, kv_format: KvFormat, scale: Scale) -> tuple[Array, ...]:
    """The bits of x (T, Hkv, D) as elements of a cache, and those of the scales of rows (T, Hkv) that have them."""
    if kv_format.scale == "row":
        codes, scales = kv_format.quantise(x.astype(np.float32, copy=False))
        return bits(codes), bits(scales)
    if not kv_format.coded:
        return (bits(kv_format.narrow(x)),)
    wide = (x.astype(np.float32, copy=False) / per_head(scale, x.shape[1])[:, None]).view(np.uint32)
    # Truncate to 16 bits with a sticky last bit: rounding that to nearest even gives the same code as rounding the
    # float32, and 65,536 cases fit a table.
    low = wide & np.uint32(0xFFFF)
    low += np.uint32(0xFFFF)
    low |= wide
    low >>= np.uint32(16)
    return (np.take(_codes(kv_format), low),)


@lru_cache(maxsize=2)
def _codes(kv_format: KvFormat) -> npt.NDArray[np.uint8]:
    """The code of every float32 whose lower 16 bits are zeros, by its upper ones."""
    return kv_format.narrow((np.arange(2**16, dtype=np.uint32) << 16).view(np.float32))
