"""The launch of apply_rotary."""

from __future__ import annotations

from ...arrays import Array
from ...calls import RotaryCall
from ...kernels.device.bad_entries import NUM_BYTES
from ...kernels.rotary import NUM_THREADS, RotaryConfig, make_apply_rotary
from ..device import LARGEST_GRID_Y, REPORT, Device
from .plan import compile_for

HEADS = 4  # heads that a thread rotates by the cosines and sines that it loads


def apply_rotary(device: Device, call: RotaryCall, q_out: Array, k_out: Array | None) -> None:
    """Fill q_out and k_out with the rotated rows of q and k, in one launch.

    Parameters
    ----------
    device : Device
        Where all arrays are.
    call : RotaryCall
        A call with at least one token and one head. If it is checked, the kernel skips tokens at positions that the
        tables have no row for, and records the first one.
    q_out, k_out : (num_tokens, heads, head_dim) array
        q and k themselves, or arrays that overlap nothing; None if the call has no k.
    """
    q, k, cos, sin, positions = call.q, call.k, call.cos, call.sin, call.positions
    num_tokens, num_heads, head_dim = q.shape
    config = RotaryConfig(
        kind=q.dtype.name,
        table_kind=cos.dtype.name,
        head_dim=head_dim,
        rotary_dim=2 * cos.shape[1],
        interleaved=call.interleaved,
        checked=call.checked,
    )
    q_from, q_to = device.address("q", q), device.address("q_out", q_out)
    k_from = k_to = num_kv_heads = 0
    k_strides: tuple[int, ...] = (0, 0)
    k_out_strides: tuple[int, ...] = (0, 0)
    if k is not None and k_out is not None:
        k_from, k_to, num_kv_heads = device.address("k", k), device.address("k_out", k_out), k.shape[1]
        k_strides, k_out_strides = k.strides[:2], k_out.strides[:2]
    arguments = (
        q_from,
        k_from,
        device.address("cos", cos),
        device.address("sin", sin),
        device.address("positions", positions),
        q_to,
        k_to,
        device.scratch(REPORT, NUM_BYTES) if call.checked else 0,
        num_tokens,
        num_heads,
        num_heads + num_kv_heads,
        len(cos),
        positions.itemsize,
        *q.strides[:2],
        *k_strides,
        cos.strides[0],
        sin.strides[0],
        *q_out.strides[:2],
        *k_out_strides,
    )
    copies = config.num_copied > 0 and (q_from, k_from) != (q_to, k_to)
    num_items = num_tokens * max(config.num_rotated, config.num_copied if copies else 0)
    num_rows = min(-(-(num_heads + num_kv_heads) // HEADS), LARGEST_GRID_Y)
    grid = -(-num_items // NUM_THREADS), num_rows, 1 + copies
    device.launch(compile_for(device, make_apply_rotary, config), grid, arguments)
