"""How far attention over rows in 8 bits is from attention over the rows that they stand for.

`mean_errors(rows, head_dim, 8, 1000)` gives the table of docs/howto/quantised-cache.md.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import pagedkv
from pagedkv.layouts import FORMATS

Array = npt.NDArray[np.float64]
HEADS = 4
# From which powers of two, times that which makes the largest number 448, the best scale of fp8 is taken.
EXPONENTS = np.arange(-10, 2.5, 0.5)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def _t3(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_t(3, shape)


def _large_channels(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    x = rng.standard_normal(shape)
    x[0, ..., :3] *= 20  # of keys, as models have
    return x


def _uneven_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[:-1]))[..., None]


ROWS = {"normal": _normal, "t3": _t3, "large channels": _large_channels, "uneven rows": _uneven_rows}


def attend(q: Array, k: Array, v: Array) -> Array:
    """Attention of q (Hq, D) to k and v (T, Hq, D), in float64."""
    logits = np.einsum("hd,thd->ht", q, k) / np.sqrt(q.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def error_of(out: Array, exact: Array) -> float:
    return float(abs(out - exact).max() / abs(exact).max())


def fp8_error(q: Array, kv: Array, exact: Array) -> float:
    """The error of e4m3 with the best scale of K, and then the best of V, for these very rows."""
    codec = FORMATS["fp8_e4m3"]

    def stored(x: Array, scale: float) -> Array:
        codes = codec.narrow((x / scale).astype(np.float32))
        return codes.view(codec.element).astype(np.float64) * scale

    scales = [np.exp2(EXPONENTS) * abs(x).max() / 448 for x in kv]
    k = min((stored(kv[0], s) for s in scales[0]), key=lambda k: error_of(attend(q, k, kv[1]), exact))
    return min(error_of(attend(q, k, stored(kv[1], s)), exact) for s in scales[1])


def int8_error(q: Array, kv: Array, exact: Array) -> float:
    k, v = kv.astype(np.float32)
    cache = pagedkv.PagedKVCache(1, -(-len(k) // 16), 16, HEADS, k.shape[2], kv_dtype="int8")
    seq, _ = cache.add(len(k))
    cache.write(0, k, v, cache.slots(seq, 0, len(k)))
    return error_of(cache.attend(0, q.astype(np.float32)[None], cache.batch([seq]))[0].astype(np.float64), exact)


def mean_errors(rows: str, head_dim: int, draws: int, num_tokens: int) -> tuple[float, float]:
    """The mean errors of int8 and of fp8."""
    errors = []
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((HEADS, head_dim)).astype(np.float32).astype(np.float64)
        kv = ROWS[rows](rng, (2, num_tokens, HEADS, head_dim)).astype(ml_dtypes.bfloat16).astype(np.float64)
        exact = attend(q, *kv)
        errors.append((int8_error(q, kv, exact), fp8_error(q, kv, exact)))
    of_int8, of_fp8 = np.mean(errors, axis=0)
    return of_int8, of_fp8


@pytest.mark.parametrize("rows", ROWS)
def test_int8_is_at_least_as_exact_as_fp8_with_the_best_scale(rows):
    of_int8, of_fp8 = mean_errors(rows, 64, 4, 300)
    assert of_int8 <= of_fp8
