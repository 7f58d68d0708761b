"""What no query sees changes no bit, and what is not finite reaches only the rows that see it."""

import numpy as np
import pytest

from .kernels import (
    ALL,
    CPU,
    CPU_DECODE,
    DECODE,
    FEW_ROWS,
    FEW_ROWS_SPLIT,
    LONG,
    LOOPS,
    PREFILLS,
    assert_same_bits,
    each_kernel,
)


@each_kernel(*ALL, long=LONG)
def test_what_is_not_used_does_not_change_a_bit(kernel, open_device):
    """Unused slots, blocks and table entries; in decode, keys and values left of the window too."""
    # Of split, slopes are another kernel.
    fields = {"num_kv_heads": 1, "sinks": True, "alibi": kernel.kernel in ("cpu", "v1", "v2")}
    fields["window"] = 50 if kernel.is_prefill and kernel is not FEW_ROWS else None if kernel is FEW_ROWS else 300
    expected = kernel.attend(kernel.build(**fields), open_device)
    for poison in ("inf", "huge", *(["zero"] if kernel in CPU else [])):
        assert_same_bits(kernel.attend(kernel.build(**fields, poison=poison), open_device), expected)


def row_of(problem, which, position, kv_head):
    """The row of a token of the first sequence in K or V; of one with a scale of its own, that scale as (1,)."""
    spec = problem.spec
    block, offset = problem.block_tables[0, position // spec.block_size], position % spec.block_size
    cache = problem.caches[f"{which}_scales"][..., None] if spec.has_scales else problem.caches[f"{which}_cache"]
    if spec.layout == "vllm" and not spec.has_scales:
        return cache[block, kv_head, :, offset]
    return cache[block, offset, kv_head] if spec.layout == "NHD" else cache[block, kv_head, offset]


NAN_IN_USE = (*CPU, *DECODE, *(kernel for kernel in PREFILLS if kernel not in LONG), FEW_ROWS)


@each_kernel(*NAN_IN_USE, long=LONG)
def test_nan_in_a_key_reaches_the_rows_that_see_it_and_no_others(kernel, open_device):
    """Those of its own KV head, at and past its position, as far as their window begins before it."""
    length, position, window = 100, 64, 30
    if kernel is FEW_ROWS:
        length, position, window = FEW_ROWS_SPLIT + 4, FEW_ROWS_SPLIT, None
    elif not kernel.is_prefill:
        length, position, window = 550, 515, None
    query_lens = (8 if kernel is FEW_ROWS else 100,) if kernel.is_prefill else None
    fields = {"seq_lens": (length,), "query_lens": query_lens, "window": window, "kv_scales": None, "strides": "own"}
    problem = kernel.build(**fields)
    out, lse = kernel.attend(problem, open_device)
    row_of(problem, "k", position, 1)[...] = 0x7F if kernel.spec.is_fp8 else np.nan
    got, got_lse = kernel.attend(problem, open_device)
    seen, first = np.zeros(lse.shape, bool), length - len(lse)
    rows = slice(max(0, position - first), None if window is None else position - first + window)
    seen[rows, kernel.spec.group_size :] = True
    assert_same_bits((got[~seen], got_lse[~seen]), (out[~seen], lse[~seen]))
    assert np.isnan(got_lse[seen]).all()
    assert np.isnan(got[seen].astype(np.float32)).all()


@each_kernel(*CPU_DECODE)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_reaches_its_element_alone(kernel, open_device, value):
    """The last value too: the step that reads it reaches past it, where it must not be multiplied by zero.

    A row of int8 is NaN as a whole.
    """
    if kernel.spec.kv_format.coded and value == np.inf:
        pytest.skip("e4m3 has no infinity, and no scale of int8 is one")
    elements = slice(None) if kernel.spec.has_scales else 5
    for length, position in ((550, 515), (515, 514)):
        problem = kernel.build(seq_lens=(length,), strides="own")
        row_of(problem, "v", position, 1)[elements] = 0x7F if kernel.spec.is_fp8 else value
        out, lse = kernel.attend(problem, open_device)
        hit = np.zeros(out.shape, bool)
        hit[0, kernel.spec.group_size :, elements] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), hit)
        np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), hit & np.isnan(value))
        assert np.isfinite(lse).all()


@each_kernel(*CPU, *LOOPS)
def test_a_query_that_is_not_finite_stays_in_its_row_and_head(kernel, open_device):
    expected = kernel.attend(kernel.build(), open_device)
    for value in (np.nan, np.inf):
        problem = kernel.build()
        problem.q[0, 1, 3] = value
        out, lse = kernel.attend(problem, open_device)
        assert np.isnan(out[0, 1].astype(np.float32)).all()
        others = np.ones(lse.shape, bool)
        others[0, 1] = False
        assert_same_bits((out[others], lse[others]), tuple(x[others] for x in expected))
