"""Speed of the emulator on kernel v1 and on prefill, with fewer and with more checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

import numpy as np

from ..emulator import EmulatorDevice
from ..operations.attention import decode_attention, prefill_attention
from .emulated import emulated_on
from .report import Row, median, spread

NUM_HEADS, HEAD_DIM, BLOCK_SIZE, SEQ_LEN = 8, 128, 16, 256
NUMS_SEQS = (4, 8)  # 8 sequences are 64 blocks of 128 threads
NUM_KV_HEADS, PREFILL_DIM, NUM_PROMPTS = 2, 64, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "bounds only": {"race": False, "init_check": False},
    "default": {},
    "global races": {"global_race": True},
    "statistics": {"stats": True},
    "footprint": {"footprint": True},
    "seeded schedule": {"seed": 0},
    "all of them": {"global_race": True, "stats": True, "footprint": True, "seed": 0},
}


def _problem(num_seqs: int) -> dict[str, Any]:
    """Arguments for decode_attention in float16, in v1's layout."""
    rng = np.random.default_rng(0)
    blocks = rng.permutation(num_seqs * SEQ_LEN // BLOCK_SIZE).astype(np.int32)
    k_shape = (len(blocks), NUM_HEADS, HEAD_DIM // 8, BLOCK_SIZE, 8)
    v_shape = (len(blocks), NUM_HEADS, HEAD_DIM, BLOCK_SIZE)
    q, k_cache, v_cache = (
        rng.standard_normal(shape, np.float32).astype(np.float16)
        for shape in ((num_seqs, NUM_HEADS, HEAD_DIM), k_shape, v_shape)
    )
    tables, seq_lens = blocks.reshape(num_seqs, -1), np.full(num_seqs, SEQ_LEN, np.int32)
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables, "seq_lens": seq_lens}


def _prompts() -> dict[str, Any]:
    """Arguments for prefill_attention of whole prompts in float16, which goes to tensor cores."""
    rng = np.random.default_rng(0)
    blocks = rng.permutation(NUM_PROMPTS * SEQ_LEN // BLOCK_SIZE).astype(np.int32)
    q = rng.standard_normal((NUM_PROMPTS * SEQ_LEN, NUM_HEADS, PREFILL_DIM), np.float32).astype(np.float16)
    shape = len(blocks), BLOCK_SIZE, NUM_KV_HEADS, PREFILL_DIM
    k_cache, v_cache = rng.standard_normal((2, *shape), np.float32).astype(np.float16)
    tables, seq_lens = blocks.reshape(NUM_PROMPTS, -1), np.full(NUM_PROMPTS, SEQ_LEN, np.int32)
    starts = np.arange(NUM_PROMPTS + 1, dtype=np.int32) * np.int32(SEQ_LEN)
    caches = {"k_cache": k_cache, "v_cache": v_cache, "block_tables": tables, "seq_lens": seq_lens}
    return {"q": q, **caches, "query_starts": starts}


def _calls() -> list[tuple[str, int, Callable[[], Any]]]:
    """What is timed: the kernel, the number of sequences, the call."""
    decodes = [
        ("v1", n, partial(decode_attention, **_problem(n), layout="vllm", kernel="v1", backend="emulator"))
        for n in NUMS_SEQS
    ]
    return [*decodes, ("prefill", NUM_PROMPTS, partial(prefill_attention, **_prompts(), backend="emulator"))]


def run(*, repeats: int = 9, progress: Callable[[str], Any] = print) -> list[Row]:
    """Time decode_attention with kernel="v1", and prefill_attention, on the emulator, after compilation.

    Parameters
    ----------
    repeats : int
        Calls of each kind.
    progress : callable
        Called with what is being measured.

    Returns
    -------
    list of dict
        Median milliseconds of a call, of processor time and with copies of the arrays; interquartile range over the
        median; thread instructions per second.
    """
    rows: list[Row] = []
    for kernel, num_seqs, call in _calls():
        for name, options in OPTIONS.items():
            progress(f"emulator, {kernel}, {num_seqs} sequences, {name}")
            devices: list[EmulatorDevice] = []

            def device(options: dict[str, Any] = options, devices: list[EmulatorDevice] = devices) -> EmulatorDevice:
                devices.append(EmulatorDevice(**options))
                return devices[-1]

            milliseconds = []
            with emulated_on(device):
                for _ in range(repeats + 1):  # the first call compiles and translates
                    begin = process_time()
                    call()
                    milliseconds.append(1000 * (process_time() - begin))
            instructions = sum(launch.thread_instructions for launch in devices[-1].launches)
            ms = median(milliseconds[1:])
            row = {
                "emulator": name,
                "kernel": kernel,
                "num_seqs": num_seqs,
                "ms": ms,
                "spread": spread(milliseconds[1:]),
            }
            rows.append(row | {"instructions/s": instructions / ms * 1000})
    return rows
