"""Scales, softcap, ALiBi, sinks and the dtypes of caches: every option where it is hard."""

import numpy as np

from pagedkv import reference

from ..support.problems import assert_close, expect
from .drawn import FEW_ROW_KERNELS, MORE_PREFILLS, PAGED, SPLITS
from .kernels import (
    CORES_INT8,
    CPU,
    FEW_ROWS,
    LONG,
    PREFILL_CORES,
    PREFILL_FP8,
    PREFILL_INT8,
    QUICK,
    SLOW,
    SPLIT_FP8,
    SPLIT_INT8,
    V1,
    V2,
    decode_kernel,
    each_kernel,
)

OPTIONS = {"alibi": True, "sinks": True, "softcap": 2.0, "scale": 0.3}


@each_kernel(V1, V2, *CPU)
def test_each_option_alone_and_all_of_them(kernel, open_device):
    """To the other kernels on a device, softcap and slopes are another compile: see the drawn problems."""
    for options in ({}, *({name: value} for name, value in OPTIONS.items()), OPTIONS):
        problem = kernel.build(num_kv_heads=3, **options)
        assert_close(problem, *kernel.attend(problem, open_device))


@each_kernel(*QUICK, long=(*SLOW, *LONG))
def test_scales_that_are_not_positive_or_make_scores_of_hundreds(kernel, open_device):
    fields = {} if kernel in CPU or kernel is FEW_ROWS else {"seq_lens": (70, 5), "query_lens": (9, 5)}
    if not kernel.is_prefill:
        fields["query_lens"] = None
    for scale in (-0.2, 0.0, *((1.5, -1.5) if kernel in CPU else ())):
        problem = kernel.build(**fields, scale=scale, sinks=scale > 1, num_kv_heads=1)
        out, lse = kernel.attend(problem, open_device)
        assert_close(problem, out, lse)
        if scale == 0 and not kernel.is_prefill:  # the mean of the values
            with np.errstate(divide="ignore"):
                expected = np.log(problem.seq_lens)[:, None] * np.ones_like(lse)
            np.testing.assert_allclose(lse, expected, rtol=1e-6)


@each_kernel(*QUICK, long=(*SLOW, *LONG))
def test_sinks_are_far_above_and_below_all_logits(kernel, open_device):
    fields = {} if kernel is FEW_ROWS else {"seq_lens": (20,), "query_lens": (20,) if kernel.is_prefill else None}
    problem = kernel.build(**fields, sinks=True)
    heads = np.arange(problem.spec.num_heads)
    problem.options["sinks"] = np.array([-1e30, 300.0, -300.0, 0.5], np.float32)[heads % 4]
    assert_close(problem, *kernel.attend(problem, open_device))


@each_kernel(*(kernel for kernel in (*CPU, *PAGED, SPLIT_FP8, PREFILL_FP8) if kernel.spec.is_fp8))
def test_scales_of_fp8(kernel, open_device):
    for kv_scales in ("scalar", "per head"):
        problem = kernel.build(kv_scales=kv_scales, num_kv_heads=3)
        assert_close(problem, *kernel.attend(problem, open_device))


def spread(problem, name, least, most):
    """Multiply the scales of a problem's rows, in order, by powers of ten between `least` and `most`."""
    scales = problem.options[name]
    factors = 10 ** np.linspace(least, most, scales.shape[0] * scales.shape[1]).astype(np.float32)
    scales[...] = scales * np.random.default_rng(3).permutation(factors).reshape(*scales.shape[:2], 1)


FEW_INT8 = next(kernel for kernel in FEW_ROW_KERNELS if kernel.spec.has_scales)
INT8 = (*(kernel for kernel in (*PAGED, *SPLITS) if kernel.spec.has_scales), SPLIT_INT8, CORES_INT8, PREFILL_INT8)


@each_kernel(*INT8, long=(FEW_INT8,))
def test_scales_of_rows_from_a_ten_thousandth_to_ten_thousand(kernel, open_device):
    """A weight times the scale of a value keeps its bits, and none is too large for float16.

    The bound is the largest output of a head, and half of the smallest float16.
    """
    lengths = {"seq_lens": (2, 90, 300), "query_lens": (2, 20, 9) if kernel.is_prefill else None}
    lengths = {} if kernel is FEW_INT8 else lengths
    operation = reference.prefill_attention if kernel.is_prefill else reference.decode_attention
    for least, most in ((-4, 4), (-4, -4), (4, 4), (-6, -6)):
        problem = kernel.build(**lengths, num_kv_heads=1, poison="zero")
        spread(problem, "v_scales", least, most)
        out, _ = kernel.attend(problem, open_device)
        expected = operation(*problem.args, **problem.options)[: len(out)]
        bound = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[problem.spec.q_dtype]
        error = np.abs(out.astype(np.float32) - expected)
        assert (error <= bound * np.abs(expected).max(axis=-1, keepdims=True) + 2.0**-25).all()


FLOAT16 = MORE_PREFILLS["int8 as float16"]
CPU_INT8 = tuple(kernel for kernel in CPU if kernel.spec.has_scales)


@each_kernel(*INT8, *CPU_INT8, FLOAT16, long=(FEW_INT8,))
def test_a_value_counts_by_its_weight_times_its_scale(kernel, open_device):
    """Large scales of other values take nothing from it, whatever their weights.

    Scales lie up to 2**120 apart, and weights about as much. The bound is the weighted sum of the largest number of
    each value. Prefill as float16 loses weights below 2**-31, as over a cache of float16: its values end at 1,016.
    """
    lengths = {"seq_lens": (2, 90, 300), "query_lens": (2, 20, 9) if kernel.is_prefill else None}
    lengths = {} if kernel is FEW_INT8 else lengths
    for octaves in (10, 30, 60):
        problem = kernel.build(**lengths, num_kv_heads=1, poison="zero")
        rng, k_scales, v_scales = np.random.default_rng(octaves), *map(problem.options.get, ("k_scales", "v_scales"))
        problem.q[...] = rng.choice([-1, 1], problem.q.shape)  # exact as 16-bit integers, too
        k_scales *= 2.0 ** rng.integers(-1, 5, k_scales.shape)
        v_scales *= 2.0 ** rng.integers(-octaves, octaves, v_scales.shape)
        codes = problem.v_cache.copy()
        problem.v_cache[...] = 127
        v_scales /= 2.0 ** np.rint(np.log2(np.median(expect(problem)[0])))
        least = 1e-5 if kernel is FLOAT16 else 2.0**-25
        v_scales[...] = np.minimum(v_scales, 8 if kernel is FLOAT16 else np.inf)
        most = expect(problem)[0]
        problem.v_cache[...] = codes
        out, _ = kernel.attend(problem, open_device)
        bound = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}[problem.spec.q_dtype]
        # As far as float16 goes.
        seen, exact = (np.clip(x.astype(np.float64), -6e4, 6e4) for x in (out, expect(problem)[0]))
        assert (np.abs(seen - exact) <= bound * most + least).all()


@each_kernel(*INT8)
def test_a_scale_of_zero_makes_a_row_of_zeros(kernel, open_device):
    problem = kernel.build(
        seq_lens=(40,), query_lens=(1,) if kernel.is_prefill else None, num_kv_heads=1, poison="zero"
    )
    for name in ("k_scales", "v_scales"):
        problem.options[name][...] = 0
    out, lse = kernel.attend(problem, open_device)
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.log(40.0), rtol=1e-6)


@each_kernel(*CPU)
def test_alibi_biases_in_the_thousands(kernel, open_device):
    query_lens = (9, 3) if kernel.is_prefill else None
    problem = kernel.build(seq_lens=(3000, 1500), query_lens=query_lens, alibi=True, num_kv_heads=1, group_size=2)
    problem.options["alibi_slopes"] = np.array([1.0, 0.25], np.float32)
    assert_close(problem, *kernel.attend(problem, open_device))


FLOAT32_OVER_16_BITS = [k for k in SPLITS if k.spec.q_dtype == "float32" and k.spec.kv_dtype in ("float16", "bfloat16")]


@each_kernel(*FLOAT32_OVER_16_BITS, PREFILL_CORES)
def test_float32_queries_lose_nothing_over_16_bit_caches(kernel, open_device):
    lengths = {"seq_lens": (2, 90), "query_lens": (2, 40)} if kernel.is_prefill else {"seq_lens": (2, 3, 17, 300)}
    for scale in (None, 0.25):
        problem = kernel.build(**lengths, scale=scale)
        out, _ = kernel.attend(problem, open_device)
        assert np.abs(out - expect(problem)[0]).max() <= 1e-5


CODES = (
    decode_kernel("split", 72, 16, "float16", "fp8_e4m3", group_size=8, capability=(8, 0)),
    *(SPLIT_FP8, *(kernel for kernel in SPLITS if kernel.spec.kv_dtype == "fp8_e5m2"), PREFILL_FP8),
)
E5M2 = PREFILL_FP8.replace("e5m2", kv_dtype="fp8_e5m2")


@each_kernel(*CODES, long=(E5M2, E5M2.replace("float16", q_dtype="float16")))
def test_every_fp8_code_is_its_value(kernel, open_device):
    """As a key: the LSE of one token, of which each head sees another code. As a value: an element of the output.

    Before 8.9, arithmetic widens codes.
    """
    codes, first, heads = np.arange(256, dtype=np.uint8), 5, kernel.spec.group_size
    values = codes.view(reference.FP8_DTYPES[kernel.spec.kv_dtype]).astype(np.float32)
    finite = np.isfinite(values)
    # No head sees anything beside a code that is not finite, even where its own query is 0.
    keys = [*np.array_split(codes[finite], -(-finite.sum() // heads)), *codes[~finite, None]]
    ones = (1,) * len(keys)
    query_lens = ones if kernel.is_prefill else None
    problem = kernel.build(seq_lens=ones, query_lens=query_lens, num_kv_heads=1, scale=1.0, kv_scales=None)
    problem.q[...], problem.k_cache[...] = np.eye(heads, kernel.spec.head_dim, first), 0
    block = problem.block_tables[:, 0]
    problem.v_cache[block, 0, 0, :64] = codes.reshape(4, 64)[np.arange(len(keys)) % 4]
    for i, key in enumerate(keys):
        problem.k_cache[block[i], 0, 0, first : first + len(key)] = key
    out, lse = kernel.attend(problem, open_device)
    for i, key in enumerate(keys):
        if finite[key].all():
            np.testing.assert_allclose(lse[i, : len(key)], values[key], rtol=3e-7, atol=2e-6)
        else:
            assert not np.isfinite(lse[i]).any()
    for i in range(4):
        some = slice(64 * i, 64 * i + 64)
        expected = values[some][finite[some]].astype(out.dtype).astype(np.float32)
        np.testing.assert_allclose(out[i, 0, :64][finite[some]].astype(np.float32), expected, rtol=3e-7)
