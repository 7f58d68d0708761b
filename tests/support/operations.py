"""A call of every operation of the CPU backend, in each dtype that it computes differently, on values of the test's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import pagedkv

BF16 = ml_dtypes.bfloat16
OUT = 7  # what the arrays that are written hold before the call


class Operation(NamedTuple):
    """A call, made without arguments, and the arrays that it writes."""

    call: Callable[[], Any]
    written: list[np.ndarray]

    def contents(self):
        """What is in the arrays that the call writes, as bytes."""
        return [x.tobytes() for x in self.written]

    def result(self):
        """What the call returns and what it writes, as bytes."""
        results = self.call()
        results = results if isinstance(results, tuple) else (results,)
        return [x.tobytes() for x in results if x is not None] + self.contents()


def attention(values, seq_lens, query_len=None, dtype=np.float32):
    num_seqs, num_columns = len(seq_lens), -(-max(seq_lens) // 16)
    tables = np.arange(num_seqs * num_columns, dtype=np.int32)[::-1].reshape(num_seqs, -1).copy()
    caches = [values(tables.size, 16, 2, 64).astype(dtype) for _ in range(2)]
    q = values(num_seqs * (query_len or 1), 8, 64).astype(dtype)
    out, args = np.full_like(q, OUT), (q, *caches, tables, np.array(seq_lens, np.int32))
    if query_len is None:
        return Operation(lambda: pagedkv.decode_attention(*args, out=out, return_lse=True), [out])
    starts = np.arange(num_seqs + 1, dtype=np.int32) * query_len
    return Operation(lambda: pagedkv.prefill_attention(*args, starts, out=out, return_lse=True), [out])


def write(values, dtype=np.float32, **options):
    caches = list(np.full((2, 64, 16, 2, 64), OUT, dtype))
    k, v = values(800, 2, 64), values(800, 2, 64)
    slots = np.arange(1023, 223, -1)
    return Operation(lambda: pagedkv.write_kv(k, v, *caches, slots, **options), caches)


def blocks(values, operation):
    layers = [values(16, 16, 1, 64) for _ in range(8)]
    pairs = np.stack([np.arange(8), np.arange(15, 7, -1)], axis=1)
    return Operation(lambda: operation(layers[:4], layers[4:], pairs), layers[4:])


def gather(values, **options):
    caches = values(2, 16, 16, 2, 64)
    caches = caches.view(np.uint8)[..., ::4].copy() if options else caches
    table = np.arange(15, -1, -1, dtype=np.int32)
    return Operation(lambda: pagedkv.gather_kv(*caches, table, 200, **options), [])


def merge(values, dtype=np.float32):
    outs, lses = values(16, 16, 8, 64).astype(dtype), values(16, 16, 8)
    return Operation(lambda: pagedkv.merge_states(outs, lses), [])


def rotate(values, dtype=np.float32, **options):
    q, k, angles = values(400, 8, 64).astype(dtype), values(400, 2, 64).astype(dtype), values(400, 32)
    args, out = (q, k, np.cos(angles), np.sin(angles), np.arange(400)), (np.full_like(q, OUT), np.full_like(k, OUT))
    return Operation(lambda: pagedkv.apply_rotary(*args, out=out, **options), list(out))


FP8 = {"kv_dtype": "fp8_e4m3", "k_scale": 1e-40, "v_scale": np.full(2, 3.0, np.float32)}
OPERATIONS = {
    "decode": lambda values: attention(values, (100, 37)),
    "decode on workers": lambda values: attention(values, (3000, 900)),
    "decode of float16": lambda values: attention(values, (100, 37), dtype=np.float16),
    "decode of bfloat16 on workers": lambda values: attention(values, (3000, 900), dtype=BF16),
    "prefill": lambda values: attention(values, (100, 50), query_len=40),
    "write": write,
    "write of float16": lambda values: write(values, np.float16),
    "write of bfloat16": lambda values: write(values, BF16),
    "write of fp8": lambda values: write(values, np.uint8, **FP8),
    "copy": lambda values: blocks(values, pagedkv.copy_blocks),
    "swap": lambda values: blocks(values, pagedkv.swap_blocks),
    "gather": gather,
    "gather of fp8": lambda values: gather(values, **FP8),
    "merge": merge,
    "merge of float16": lambda values: merge(values, np.float16),
    "rotate": rotate,
    "rotate float16": lambda values: rotate(values, np.float16),
}
