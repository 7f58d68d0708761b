"""Launches of merge_states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...arrays import Array
from ...calls import MergeCall
from ...kernels.merge_states import MAX_STATES, NUM_THREADS, MergeConfig, make_merge_states
from ...layouts import VECTOR_BYTES
from ..device import LARGEST_GRID_Y, Device
from .plan import compile_for


class _StateAddresses(NamedTuple):
    """The addresses of an output and its LSE; strides of rows and heads of the output, and of rows of the LSE."""

    out: int
    lse: int
    strides: tuple[int, int, int]
    kind: str


def merge_states(device: Device, call: MergeCall, out: Array, lse: Array) -> None:
    """Fill out and lse with attention over the keys of all states.

    Up to 8 states take one launch. Each further launch takes the result so far, in float32, and up to 7 more.

    Parameters
    ----------
    device : Device
        Where all arrays are.
    call : MergeCall
        A call with at least one row.
    out : (rows, num_heads, head_dim) array, C-contiguous
        It has the dtype of the states.
    lse : (rows, num_heads) float32 array, C-contiguous
    """
    num_rows, num_heads, head_dim = out.shape
    kind = out.dtype.name
    states = [
        _StateAddresses(
            device.address(f"outs[{i}]", state),
            device.address(f"lses[{i}]", state_lse),
            (state.strides[0], state.strides[1], state_lse.strides[0]),
            kind,
        )
        for i, (state, state_lse) in enumerate(zip(call.outs, call.lses, strict=True))
    ]
    result = _StateAddresses(device.address("out", out), device.address("lse", lse), (0, 0, 0), kind)
    elements = _elements(out.itemsize, head_dim, [*states, result])
    sizes = num_rows * num_heads * head_dim * 4, num_rows * num_heads * 4
    turn = 0
    while states:
        now, states = states[:MAX_STATES], states[MAX_STATES:]
        target = result
        if states:
            strides = num_heads * head_dim * 4, head_dim * 4, num_heads * 4
            # Two workspaces in turn: a launch reads the one of the launch before while it writes the other.
            names = f"merge_out_{turn % 2}", f"merge_lse_{turn % 2}"
            target = _StateAddresses(
                device.scratch(names[0], sizes[0]), device.scratch(names[1], sizes[1]), strides, "float32"
            )
            states = [target, *states]
        config = MergeConfig(now[0].kind, kind, target.kind, len(now), head_dim, elements)
        filled = now + now[-1:] * (MAX_STATES - len(now))
        arguments = (
            *(state.out for state in filled),
            *(state.lse for state in filled),
            target.out,
            target.lse,
            num_rows,
            num_heads,
            *(stride for state in filled for stride in state.strides),
        )
        grid = -(-num_rows * (head_dim // elements) // NUM_THREADS), min(num_heads, LARGEST_GRID_Y), 1
        device.launch(compile_for(device, make_merge_states, config), grid, arguments)
        turn += 1


def _elements(itemsize: int, head_dim: int, states: Sequence[_StateAddresses]) -> int:
    """The most elements of a vector for which every address of every state is aligned."""
    bits = VECTOR_BYTES | head_dim * itemsize
    for state in states:
        bits |= state.out | state.strides[0] | state.strides[1]
    return (bits & -bits) // itemsize
