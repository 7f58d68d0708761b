"""Launches of the kernels on the contents of caches: write_kv, gather_kv, copy_blocks, swap_blocks.

Nothing here reads an array of the device, and only swap_blocks into memory that is not pinned waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import Array, Shadow
from ...calls import CopyCall, GatherCall, Rotation, SwapCall, WriteCall
from ...kernels.blocks.copy_blocks import MAX_CACHES, PIECE, CopyConfig, make_copy_blocks
from ...kernels.blocks.gather_kv import GatherConfig, make_gather_kv
from ...kernels.blocks.tokens import NUM_THREADS, RowShape, lanes_of_row, num_items, row_shape
from ...kernels.blocks.write_kv import WriteConfig, make_write_kv
from ...kernels.device.bad_entries import NUM_BYTES
from ...kernels.device.sizes import SCALED_BY_ROW
from ...layouts import VECTOR_BYTES
from ..device import FIRST_WITH_FP8, LARGEST_GRID_Y, REPORT, Device
from .plan import compile_for, scale_strides

_NO_TABLES = (0,) * 7  # arguments that a kernel without tables does not read


def write_kv(device: Device, call: WriteCall) -> None:
    """Write the tokens of a call into their slots, in one launch.

    Parameters
    ----------
    device : Device
        Where the arrays are.
    call : WriteCall
        A call with at least one token. If it is checked, the kernel skips tokens with slots at or past
        num_blocks * block_size, or at positions that the tables have no row for, and records the first one.
    """
    spec = call.spec
    config = WriteConfig(
        kind=spec.kind,
        k_kind=call.k.dtype.name,
        v_kind=call.v.dtype.name,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        is_vllm=spec.layout == "vllm",
        k_per_head=isinstance(call.k_scale, np.ndarray),
        v_per_head=isinstance(call.v_scale, np.ndarray),
        checked=call.checked,
        hardware_fp8=spec.kind.startswith("fp8") and device.capability >= FIRST_WITH_FP8,
    )
    if call.rotation is not None:
        config = _with_rotation(config, call.rotation)
    (k_scales, k_scale), (v_scales, v_scale) = _scale_arguments(device, call)
    arguments = (
        device.address("k", call.k),
        device.address("v", call.v),
        device.address("k_cache", call.k_cache),
        device.address("v_cache", call.v_cache),
        device.address("slots", call.slots),
        k_scales,
        v_scales,
        _report(device, call.checked),
        len(call.slots),
        spec.num_kv_heads,
        spec.num_blocks * spec.block_size,
        *call.k.strides[:2],
        *call.v.strides[:2],
        *_token_strides(spec.layout, call.k_cache),
        *_token_strides(spec.layout, call.v_cache),
        *scale_strides(call),
        k_scale,
        v_scale,
        *_rotation_arguments(device, call.rotation),
    )
    shape = row_shape(spec.kind, spec.head_dim, is_vllm=config.is_vllm, is_v=False)
    shape = lanes_of_row(shape) if spec.kind in SCALED_BY_ROW else shape
    grid = _token_grid(len(call.slots), spec.num_kv_heads, shape)
    device.launch(compile_for(device, make_write_kv, config), grid, arguments)


def gather_kv(device: Device, call: GatherCall, k: Array, v: Array) -> None:
    """Fill k and v with the keys and values of a sequence, in one launch.

    Parameters
    ----------
    device : Device
        Where the arrays are.
    call : GatherCall
        A call with at least one token. If it is checked, the kernel skips block ids outside 0..num_blocks-1, and
        records the first one; rows of their tokens are not written.
    k, v : (seq_len, num_kv_heads, head_dim) array, C-contiguous
        Of the `dense` dtype of the cache's format.
    """
    spec = call.spec
    config = GatherConfig(
        kind=spec.kind,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        is_vllm=spec.layout == "vllm",
        k_per_head=isinstance(call.k_scale, np.ndarray),
        v_per_head=isinstance(call.v_scale, np.ndarray),
        checked=call.checked,
        hardware_fp8=spec.kind == "fp8_e4m3" and device.capability >= FIRST_WITH_FP8,
    )
    (k_scales, k_scale), (v_scales, v_scale) = _scale_arguments(device, call)
    arguments = (
        device.address("k_cache", call.k_cache),
        device.address("v_cache", call.v_cache),
        device.address("k", k),
        device.address("v", v),
        device.address("block_table", call.block_table),
        k_scales,
        v_scales,
        _report(device, call.checked),
        call.seq_len,
        spec.num_kv_heads,
        spec.num_blocks,
        *_token_strides(spec.layout, call.k_cache),
        *_token_strides(spec.layout, call.v_cache),
        *scale_strides(call),
        k_scale,
        v_scale,
    )
    shape = row_shape(spec.kind, spec.head_dim, is_vllm=config.is_vllm, is_v=False)
    grid = _token_grid(call.seq_len, spec.num_kv_heads, shape)
    device.launch(compile_for(device, make_gather_kv, config), grid, arguments)


def copy_blocks(device: Device, call: CopyCall) -> None:
    """In every cache, copy the blocks pairs[:, 0] onto the blocks pairs[:, 1].

    Caches whose blocks are laid out alike share a launch, up to 8 of them.

    Parameters
    ----------
    device : Device
        Where all arrays are.
    call : CopyCall
        A call with at least one pair. If it is checked, the kernel skips pairs with a block that does not exist, and
        records the first one.
    """
    copies = [(cache, cache) for cache in call.caches]
    pairs = call.pairs
    _launch_copies(device, copies, device.address("pairs", pairs), len(pairs), pairs.strides[0], call.checked)


def swap_blocks(device: Device, call: SwapCall) -> None:
    """For every (source, destination) cache, copy the blocks pairs[:, 0] onto the blocks pairs[:, 1].

    From device to device it launches the kernel of `copy_blocks`; pairs on the host are copied to the device first.
    Between host and device every run of consecutive blocks is one copy on the stream or, if blocks are not contiguous,
    every contiguous part of a block; see `copies`.

    Parameters
    ----------
    device : Device
        Where the arrays are that are not on the host. On the emulator that is all of them.
    call : SwapCall
        A call with at least one pair, with pairs on the host unless all caches are on the device. From device to
        device it may be checked, as in `copy_blocks`.
    """
    copies, pairs = call.copies, call.pairs
    is_emulated = not any(isinstance(x, Shadow) for x in (pairs, *(x for both in copies for x in both)))
    within = [both for both in copies if is_emulated or all(isinstance(x, Shadow) for x in both)]
    if within:
        if is_emulated or isinstance(pairs, Shadow):
            address, stride = device.address("pairs", pairs), pairs.strides[0]
        else:
            pairs = np.ascontiguousarray(pairs)
            address, stride = device.scratch("pairs", pairs.nbytes), pairs.strides[0]
            device.copy_from_host([(address, pairs)])
        _launch_copies(device, within, address, len(pairs), stride, call.checked)
    for source, destination in copies:
        if isinstance(source, Shadow) == isinstance(destination, Shadow):
            if not isinstance(source, Shadow) and not is_emulated:
                destination[pairs[:, 1]] = source[pairs[:, 0]]
        elif isinstance(destination, Shadow):
            base = device.address("destination", destination)
            parts = _parts(source, destination, pairs)
            device.copy_from_host([(base + part.destination_offset, source[part.source]) for part in parts])
        else:
            base = device.address("source", source)
            parts = _parts(source, destination, pairs)
            device.copy_to_host([(destination[part.destination], base + part.source_offset) for part in parts])


def _token_strides(layout: str, cache: Array) -> tuple[int, int, int, int]:
    """Bytes from block to block, position to position, head to head and column to column."""
    strides = cache.strides
    if layout == "NHD":
        return strides[0], strides[1], strides[2], 0
    if layout == "HND":
        return strides[0], strides[2], strides[1], 0
    return strides[0], strides[3], strides[1], strides[2]


def _token_grid(num_tokens: int, num_kv_heads: int, shape: RowShape) -> tuple[int, int, int]:
    items = num_items(num_tokens, shape)
    return -(-items // NUM_THREADS), min(num_kv_heads, LARGEST_GRID_Y), 2


def _scale_arguments(device: Device, call: WriteCall | GatherCall) -> list[tuple[int, float]]:
    """The address and the number of both scales; the kernel reads one or the other, or the scales of rows."""
    if call.k_scales is not None and call.v_scales is not None:
        return [(device.address("k_scales", call.k_scales), 1.0), (device.address("v_scales", call.v_scales), 1.0)]
    return [
        (device.address(name, scale), 1.0) if isinstance(scale, np.ndarray) else (0, float(scale))
        for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale))
    ]


def _with_rotation(config: WriteConfig, rotation: Rotation) -> WriteConfig:
    """The config of the same kernel with tables."""
    kind, rotary_dim = rotation.cos.dtype.name, 2 * rotation.cos.shape[1]
    return replace(config, rotary_dim=rotary_dim, table_kind=kind, interleaved=rotation.interleaved)


def _rotation_arguments(device: Device, rotation: Rotation | None) -> tuple[int, ...]:
    """The last arguments of write_kv."""
    if rotation is None:
        return _NO_TABLES
    cos, sin, positions, _ = rotation
    addresses = (device.address(name, x) for name, x in (("cos", cos), ("sin", sin), ("positions", positions)))
    return *addresses, len(cos), positions.itemsize, cos.strides[0], sin.strides[0]


def _report(device: Device, checked: bool) -> int:
    return device.scratch(REPORT, NUM_BYTES) if checked else 0


class BlockLayout(NamedTuple):
    """The rows of which a block of a source and of a destination consists.

    Attributes
    ----------
    row_bytes : int
        Contiguous bytes in both.
    num_rows : int
    lengths, source_strides, destination_strides : tuple of int
        Axes over the rows, slowest first; strides in bytes.
    """

    row_bytes: int
    num_rows: int
    lengths: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]


@lru_cache(maxsize=64)
def block_layout(
    shape: tuple[int, ...], itemsize: int, source_strides: tuple[int, ...], destination_strides: tuple[int, ...]
) -> BlockLayout:
    """The BlockLayout with the fewest axes, for blocks of this shape and these strides, without the block axis."""
    row_bytes, num_rows = itemsize, 1
    axes: list[tuple[int, int, int]] = []  # fastest first
    for length, source, destination in zip(shape[::-1], source_strides[::-1], destination_strides[::-1], strict=True):
        if length == 1:
            continue
        if not axes and source == destination == row_bytes:
            row_bytes *= length
            continue
        num_rows *= length
        if axes and (source, destination) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = (axes[-1][0] * length, *axes[-1][1:])
        else:
            axes.append((length, source, destination))
    lengths, froms, tos = zip(*axes[::-1], strict=True) if axes else ((), (), ())
    return BlockLayout(row_bytes, num_rows, lengths, froms, tos)


def _launch_copies(
    device: Device,
    copies: Sequence[tuple[Array, Array]],
    pairs: int,
    num_pairs: int,
    pair_stride: int,
    checked: bool,
) -> None:
    """Copy blocks with one launch for each kind of cache and MAX_CACHES of them."""
    alike: dict[tuple[CopyConfig, tuple[int, ...], int], list[tuple[int, int]]] = {}
    for i, (source, destination) in enumerate(copies):
        layout = block_layout(source.shape[1:], source.itemsize, source.strides[1:], destination.strides[1:])
        from_address = device.address(f"source[{i}]", source)
        to_address = from_address if destination is source else device.address(f"destination[{i}]", destination)
        vector_bytes = _alignment(
            from_address, to_address, layout.row_bytes, source.strides[0], destination.strides[0],
            *layout.source_strides, *layout.destination_strides,
        )  # fmt: skip
        row_vectors, missing = layout.row_bytes // vector_bytes, 3 - len(layout.lengths)
        num_vectors = layout.num_rows * row_vectors
        if not num_vectors:
            continue
        config = CopyConfig(vector_bytes, len(layout.lengths), checked)
        scalars = (
            len(source),
            len(destination),
            num_vectors,
            row_vectors,
            *((1,) * missing + layout.lengths)[1:],
            pair_stride // 8,
            source.strides[0],
            *(0,) * missing,
            *layout.source_strides,
            destination.strides[0],
            *(0,) * missing,
            *layout.destination_strides,
        )
        alike.setdefault((config, scalars, num_vectors), []).append((from_address, to_address))
    report = _report(device, checked)
    # Compile all of them before the first launch: if one does not compile, nothing has been written.
    kernels = {config: compile_for(device, make_copy_blocks, config) for config, _, _ in alike}
    for (config, scalars, num_vectors), addresses in alike.items():
        for first in range(0, len(addresses), MAX_CACHES):
            some = addresses[first : first + MAX_CACHES]
            filled = some + some[-1:] * (MAX_CACHES - len(some))
            sources, destinations = zip(*filled, strict=True)
            grid = num_pairs, min(-(-num_vectors // PIECE), LARGEST_GRID_Y), len(some)
            device.launch(kernels[config], grid, (*sources, *destinations, pairs, report, *scalars))


def _alignment(*numbers: int) -> int:
    """The largest power of two up to 16 that divides all of the numbers."""
    bits = VECTOR_BYTES
    for number in numbers:
        bits |= number
    return bits & -bits


class _Part(NamedTuple):
    """Bytes that are contiguous in source and destination: the index in each cache, and bytes from its element 0."""

    source: tuple[slice | int, ...]
    source_offset: int
    destination: tuple[slice | int, ...]
    destination_offset: int


def _parts(source: Array, destination: Array, pairs: npt.NDArray[np.int64]) -> list[_Part]:
    """The parts to copy, as few as strides and pairs allow."""
    contiguous = source.ndim  # axes from here on are contiguous in both
    nbytes = source.itemsize
    while contiguous > 1 and (
        source.shape[contiguous - 1] == 1
        or source.strides[contiguous - 1] == destination.strides[contiguous - 1] == nbytes
    ):
        contiguous -= 1
        nbytes *= source.shape[contiguous]
    parts = []
    whole = contiguous == 1 and source.strides[0] == destination.strides[0] == nbytes
    runs = _runs(pairs) if whole else [(int(x), int(y), 1) for x, y in pairs]
    for from_block, to_block, length in runs:
        for index in np.ndindex(source.shape[1:contiguous]):
            inner = zip(index, source.strides[1:contiguous], destination.strides[1:contiguous], strict=True)
            steps = [(i * x, i * y) for i, x, y in inner]
            parts.append(
                _Part(
                    (slice(from_block, from_block + length), *index),
                    from_block * source.strides[0] + sum(x for x, _ in steps),
                    (slice(to_block, to_block + length), *index),
                    to_block * destination.strides[0] + sum(y for _, y in steps),
                )
            )
    return parts


def _runs(pairs: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(source, destination, length) of each run of pairs in which both block ids count up."""
    starts = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    bounds = np.concatenate(([0], starts, [len(pairs)]))
    return [(int(pairs[first, 0]), int(pairs[first, 1]), int(last - first)) for first, last in pairwise(bounds)]
