"""Decode and prefill on the CPU against the machine's read bandwidth and torch, interleaved in one run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import ml_dtypes
import numba
import numpy as np
import numpy.typing as npt

import pagedkv

from .report import Row, interleaved, median, spread

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
SHAPES = ((8, 4096), (1, 16384), (64, 512))
GROUP_SIZES = (1, 4, 8)
SUM_BYTES = 2 * 2**30
QUICK_SHAPE, QUICK_GROUP_SIZE, QUICK_SUM_BYTES = (2, 512), 4, 2**26
DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
FIRST_CALL = """
import time, numpy as np, pagedkv
k = np.zeros((4, 16, 8, 128), np.float32)
q, tables, lens = np.zeros((1, 32, 128), np.float32), np.zeros((1, 4), np.int32), np.full(1, 20, np.int32)
starts = np.array([0, 1], np.int32)
begin = time.perf_counter()
if {decode}:
    pagedkv.decode_attention(q, k, k, tables, lens)
else:
    pagedkv.prefill_attention(q, k, k, tables, lens, starts)
print(time.perf_counter() - begin)
"""


def _torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(pagedkv.get_num_threads())
    return torch


def _reader(nbytes: int) -> Callable[[], Any]:
    """A plain sum over so many bytes on all threads, to measure the machine's read bandwidth."""

    @numba.njit(nogil=True, fastmath=True)
    def total(values):
        result = np.float32(0)
        for i in range(values.size):
            result += values[i]
        return result

    threads = pagedkv.get_num_threads()
    executor = ThreadPoolExecutor(threads)
    parts = np.array_split(np.ones(nbytes // 4, np.float32), threads)
    return lambda: list(executor.map(total, parts))


def _pages(dtype: str, num_tokens: int, num_kv_heads: int) -> npt.NDArray[Any]:
    """K and V caches (2, N, P, Hkv, D) of normal values."""
    values = np.random.default_rng(0).standard_normal(2**20, np.float32).astype(DTYPES[dtype])
    pages = np.resize(values, (2, num_tokens // BLOCK_SIZE, BLOCK_SIZE, num_kv_heads, HEAD_DIM))
    return pages.view(np.uint8) if dtype.startswith("fp8") else pages


def _as_tensor(torch: ModuleType, array: npt.NDArray[Any]) -> Any:
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _torch_decode(
    torch: ModuleType, q: npt.NDArray[Any], pages: npt.NDArray[Any], tables: npt.NDArray[np.int32]
) -> dict[str, Callable[[], Any]]:
    """SDPA on dense K and V, and on pages gathered first; the G heads of a KV head are G query rows."""
    num_seqs = len(tables)
    k, v = (_as_tensor(torch, cache) for cache in pages)
    query = _as_tensor(torch, q).view(num_seqs, NUM_KV_HEADS, -1, HEAD_DIM)
    index = torch.from_numpy(tables).long()
    attention = torch.nn.functional.scaled_dot_product_attention

    def gather(cache: Any) -> Any:
        return cache[index].view(num_seqs, -1, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)

    dense_k, dense_v = gather(k).contiguous(), gather(v).contiguous()
    return {
        "sdpa": lambda: attention(query, dense_k, dense_v),
        "gather": lambda: attention(query, gather(k), gather(v)),
    }


def _decode_row(
    dtype: str,
    group_size: int,
    shape: tuple[int, int],
    read: Callable[[], Any],
    read_bytes: int,
    repeats: int,
    torch: ModuleType | None,
) -> Row:
    num_seqs, length = shape
    rng = np.random.default_rng(1)
    fp8 = dtype.startswith("fp8")
    pages = _pages(dtype, num_seqs * length, NUM_KV_HEADS)
    tables = rng.permutation(pages.shape[1]).astype(np.int32).reshape(num_seqs, -1)
    lens = np.full(num_seqs, length, np.int32)
    q = rng.standard_normal((num_seqs, NUM_KV_HEADS * group_size, HEAD_DIM))
    q = q.astype(np.float32 if fp8 else DTYPES[dtype])
    out = np.empty_like(q)
    kv_dtype = dtype if fp8 else None
    # The sum goes first, so that it and not pagedkv runs while torch's threads still spin after their turn.
    contestants: dict[str, Callable[[], Any]] = {
        "read": read,
        "pagedkv": lambda: pagedkv.decode_attention(q, pages[0], pages[1], tables, lens, kv_dtype=kv_dtype, out=out),
    }
    if torch is not None and not fp8:
        contestants |= _torch_decode(torch, q, pages, tables)
    seconds = interleaved(contestants, repeats)
    medians = {name: median(values) for name, values in seconds.items()}
    bandwidth, read_bandwidth = pages.nbytes / medians["pagedkv"] / 1e9, read_bytes / medians["read"] / 1e9
    return {
        "decode": dtype,
        "G": group_size,
        "B": num_seqs,
        "L": length,
        "ms": medians["pagedkv"] * 1e3,
        "spread": spread(seconds["pagedkv"]),
        "KV GB/s": bandwidth,
        "read GB/s": read_bandwidth,
        "share": bandwidth / read_bandwidth,
        "Mtokens/s": num_seqs * length / medians["pagedkv"] / 1e6,
        "SDPA ms": medians["sdpa"] * 1e3 if "sdpa" in medians else None,
        "gather+SDPA ms": medians["gather"] * 1e3 if "gather" in medians else None,
        "x SDPA": medians["sdpa"] / medians["pagedkv"] if "sdpa" in medians else None,
        "x gather": medians["gather"] / medians["pagedkv"] if "gather" in medians else None,
    }


def _prefill_row(repeats: int, torch: ModuleType | None, num_tokens: int = 2048, num_heads: int = 32) -> Row:
    pages = _pages("float32", num_tokens, num_heads)
    tables = np.random.default_rng(1).permutation(pages.shape[1]).astype(np.int32)[None]
    q = np.random.default_rng(2).standard_normal((num_tokens, num_heads, HEAD_DIM), np.float32)
    out = np.empty_like(q)
    lens, starts = np.full(1, num_tokens, np.int32), np.array([0, num_tokens], np.int32)
    contestants: dict[str, Callable[[], Any]] = {
        "pagedkv": lambda: pagedkv.prefill_attention(q, pages[0], pages[1], tables, lens, starts, out=out)
    }
    if torch is not None:
        attention = torch.nn.functional.scaled_dot_product_attention
        dense = [
            torch.from_numpy(np.ascontiguousarray(x.reshape(-1, num_heads, HEAD_DIM).swapaxes(0, 1)))[None]
            for x in (q, pages[0][tables[0]], pages[1][tables[0]])
        ]
        contestants["sdpa"] = lambda: attention(*dense, is_causal=True)
    medians = {name: median(values) for name, values in interleaved(contestants, repeats).items()}
    flops = 2 * num_tokens * (num_tokens + 1) * HEAD_DIM * num_heads
    return {
        "prefill": "float32",
        "heads": num_heads,
        "tokens": num_tokens,
        "ms": medians["pagedkv"] * 1e3,
        "GFLOP/s": flops / medians["pagedkv"] / 1e9,
        "SDPA ms": medians["sdpa"] * 1e3 if "sdpa" in medians else None,
        "time / SDPA": medians["pagedkv"] / medians["sdpa"] if "sdpa" in medians else None,
    }


def _growth_row(repeats: int) -> Row:
    calls: dict[str, Callable[[], Any]] = {}
    for length in (4096, 16384):
        pages = _pages("float32", length, NUM_KV_HEADS)
        tables = np.random.default_rng(1).permutation(pages.shape[1]).astype(np.int32)[None]
        q = np.zeros((1, NUM_KV_HEADS, HEAD_DIM), np.float32)
        arguments = (q, pages[0], pages[1], tables, np.full(1, length, np.int32))
        calls[str(length)] = partial(pagedkv.decode_attention, *arguments)
    medians = {name: median(values) for name, values in interleaved(calls, repeats * 3).items()}
    return {
        "growth": "float32",
        "L 4096 ms": medians["4096"] * 1e3,
        "L 16384 ms": medians["16384"] * 1e3,
        "ratio": medians["16384"] / medians["4096"],
    }


def _first_call_row(operation: str) -> Row:
    """Seconds of a process' first call, with nothing compiled, then with the kernels that it kept on disk."""
    program = FIRST_CALL.format(decode=operation == "decode")
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PAGEDKV_CACHE_DIR": directory}
        cold, cached = (
            float(
                subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
            )
            for _ in range(2)
        )
    return {"first call": operation, "cold s": cold, "from disk s": cached}


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument(
        "--quick", action="store_true", help="small decode and prefill calls in float32, in seconds once compiled"
    )


def run(
    *,
    repeats: int = 9,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    progress: Callable[[str], Any] = print,
    quick: bool = False,
) -> list[Row]:
    """Measure everything, or with `quick` see that it runs; a row's first column says what it measures."""
    torch = _torch()
    if quick:
        progress("quick")
        read = _reader(QUICK_SUM_BYTES)
        row = _decode_row("float32", QUICK_GROUP_SIZE, QUICK_SHAPE, read, QUICK_SUM_BYTES, repeats, torch)
        return [row, _prefill_row(repeats, torch, num_tokens=128, num_heads=4)]
    read = _reader(SUM_BYTES)
    rows = []
    for dtype in dtypes:
        for group_size in GROUP_SIZES:
            for shape in SHAPES:
                progress(f"decode {dtype} G={group_size} (B, L)={shape}")
                rows.append(_decode_row(dtype, group_size, shape, read, SUM_BYTES, repeats, torch))
    progress("prefill, growth, first call")
    rows.append(_prefill_row(max(3, repeats // 2), torch))
    rows.append(_growth_row(repeats))
    return rows + [_first_call_row(operation) for operation in ("decode", "prefill")]
