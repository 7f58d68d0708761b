"""The drawings of explanation/emulator.md: ``python docs/scripts/draw_lanes.py`` writes them to docs/images.

A warp of v1 is traced in the emulator, on the problem of the interactive page. The tests compare the files with what
this draws: a kernel that changes changes its drawings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from record_v1 import THREAD_BLOCK, Problem

import pagedkv
from pagedkv.drawing import draw_banks, draw_bytes
from pagedkv.emulator import EmulatorDevice, Warp, WarpTrace

IMAGES = Path(__file__).parents[1] / "images"


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 128 bytes, where a GPU's allocator would put it."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 128
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@cache
def trace() -> WarpTrace:
    """Warp 0 of a thread block of v1, whose sequence has 68 tokens."""
    device = EmulatorDevice(trace=Warp(THREAD_BLOCK, 0))
    arguments = map(aligned, Problem().arguments)
    pagedkv.decode_attention(*arguments, layout="vllm", kernel="v1", backend=device)
    found = device.launches[0].trace
    assert found is not None
    return found


DRAWINGS: dict[str, Callable[[], str]] = {
    "paged/lanes-of-keys.svg": lambda: draw_bytes(trace().accesses("k_cache")[:4]),
    "paged/banks-of-q.svg": lambda: draw_banks(
        next(access for access in trace().accesses("shared_q_vecs") if access.kind == "load")
    ),
}

if __name__ == "__main__":
    for file, draw in DRAWINGS.items():
        (IMAGES / file).write_text(draw(), encoding="utf-8")
