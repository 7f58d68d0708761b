"""assert_matches_reference: right functions pass, wrong ones do not, and the message says what to do."""

import ast
import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv import reference
from pagedkv.testing import Spec, assert_matches_reference, matching, search

from .attention import numpy_decode, torch_prefill

FEW = {"max_examples": 12, "head_dims": (64, 8)}


def in_dtypes_of_an_operation(operation):
    """An operation of the reference, which computes in float64, with out in q's dtype and lse in float32."""

    @functools.wraps(operation)
    def call(q, *arguments, return_lse=False, **options):
        out, lse = operation(q, *arguments, return_lse=True, **options)
        out, lse = out.astype(q.dtype), lse.astype(np.float32)
        return (out, lse) if return_lse else out

    return call


decode, prefill = map(in_dtypes_of_an_operation, (reference.decode_attention, reference.prefill_attention))


def test_right_functions_pass():
    assert assert_matches_reference(numpy_decode, **FEW) >= 10
    assert assert_matches_reference(decode, **FEW) >= 10
    assert assert_matches_reference(torch_prefill, arrays="torch", dtypes=("float32", "bfloat16"), **FEW) >= 10


@pytest.mark.long
def test_every_option_of_the_signature_is_drawn():
    seen = {}

    def noting(q, k_cache, v_cache, block_tables, seq_lens, query_starts, **options):
        for name, value in options.items():
            seen.setdefault(name, set()).add(str(value))
        return prefill(q, k_cache, v_cache, block_tables, seq_lens, query_starts, **options)

    names = ("query_starts", "scale", "softcap", "alibi_slopes", "window", "sinks", "causal", "kv_dtype", "layout")
    assert_matches_reference(noting, options=names, max_examples=66, head_dims=(16,))
    assert seen.keys() == {*names[1:]}
    assert all(len(values) > 1 for values in seen.values())


def test_a_partial_has_the_remaining_parameters():
    assert_matches_reference(functools.partial(decode, layout="NHD"), layouts=["NHD"], **FEW)
    with pytest.raises(AssertionError, match=r"^wrong_head fails problem"):
        assert_matches_reference(functools.partial(wrong_head), **FEW)


def wrong_head(q, k_cache, v_cache, block_tables, seq_lens):
    group = q.shape[1] // k_cache.shape[2]
    order = np.arange(q.shape[1]).reshape(-1, group).T.ravel()
    out = np.empty_like(q)
    out[:, order] = numpy_decode(q[:, order], k_cache, v_cache, block_tables, seq_lens)
    return out if group > 1 else -out


def reads_the_whole_table(q, k_cache, v_cache, block_tables, seq_lens):
    k_cache[block_tables]
    return numpy_decode(q, k_cache, v_cache, block_tables, seq_lens)


def multiplies_by_zero(q, k_cache, v_cache, block_tables, seq_lens):
    nothing = 0 * v_cache[block_tables[:, 0], -1].sum() if len(q) and seq_lens.all() else 0
    return numpy_decode(q, k_cache, v_cache, block_tables, seq_lens) + nothing


def writes_to_q(q, k_cache, v_cache, block_tables, seq_lens):
    out = numpy_decode(q, k_cache, v_cache, block_tables, seq_lens)
    q *= 2
    return out


def forgets_a_dimension(q, k_cache, v_cache, block_tables, seq_lens):
    return numpy_decode(q, k_cache, v_cache, block_tables, seq_lens)[:, :, 0]


def in_float64(*arguments):
    return numpy_decode(*arguments).astype(np.float64)


def lse_in_float64(*arguments, return_lse):
    out, lse = decode(*arguments, return_lse=True)
    return out, lse.astype(np.float64)


def lse_for_each_dim(*arguments, return_lse):
    out, lse = decode(*arguments, return_lse=True)
    return out, np.broadcast_to(lse[..., None], out.shape)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (wrong_head, r"out is off at \d+ of \d+ places .* expected"),
        (reads_the_whole_table, "IndexError: index"),
        (multiplies_by_zero, "nan, expected"),
        (writes_to_q, "an argument was written to"),
        (forgets_a_dimension, "out must have shape"),
        (in_float64, "out must have dtype float32, that of q, got float64"),
        (lse_in_float64, "lse must have dtype float32 or that of q, got float64"),
        (lse_for_each_dim, r"lse must have shape \(\d+, \d+\), \(rows, heads\), got"),
    ],
)
def test_wrong_functions_do_not(wrong, says):
    with pytest.raises(AssertionError, match=says) as caught:
        assert_matches_reference(wrong)
    assert f"{wrong.__name__} fails problem" in str(caught.value)
    [again] = re.findall(r"^try it again with spec=(Spec\(.*\))$", str(caught.value), re.MULTILINE)
    [call] = ast.parse(again).body
    spec = Spec(**{part.arg: ast.literal_eval(part.value) for part in call.value.keywords})
    assert max(spec.seq_lens) <= 2, "the smallest one"
    with pytest.raises((AssertionError, IndexError)):
        assert_matches_reference(wrong, spec=spec)
    assert assert_matches_reference(numpy_decode, spec=spec) == 1


@pytest.mark.parametrize(
    ("named", "drawn"),
    [
        ({"head_dims": (64, 128, 256), "dtypes": ("float16", "bfloat16"), "layouts": ("NHD",)}, {64, 128, 256}),
        ({"head_dims": (64, 128), "layouts": ("vllm",)}, {64, 128}),
        ({"head_dims": (8, 16), "layouts": ("NHD", "vllm")}, {8, 16}),
    ],
)
def test_each_head_size_that_is_named_is_drawn(named, drawn):
    seen = set()

    def noting(*arguments, layout, return_lse):
        seen.update([arguments[0].shape[-1]] if layout != "vllm" or named["layouts"] == ("vllm",) else [])
        return decode(*arguments, layout=layout, return_lse=True)

    assert_matches_reference(noting, options=["layout", "return_lse"], max_examples=9, **named)
    assert seen == drawn


def test_a_slow_function_meets_every_dtype_and_layout(monkeypatch):
    now, seen = 0, []
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(matching, "time", clock)
    monkeypatch.setattr(search, "time", clock)

    def slow(*arguments, layout, kv_dtype="none"):
        nonlocal now
        now += 1
        seen.append((arguments[1].dtype.name, kv_dtype, layout == "vllm"))
        return decode(*arguments, layout=layout, kv_dtype=kv_dtype if kv_dtype != "none" else None)

    assert_matches_reference(slow, max_seconds=20)
    assert len(seen) <= 20
    assert len({kind[:2] for kind in seen}) == 5
    assert {kind[2] for kind in seen} == {True, False}
    assert len(seen) > 10, "what an example took is not what the next one may not take"


def test_block_sizes_of_layout_vllm_are_those_that_are_named():
    seen = set()

    def noting(*arguments, layout):
        seen.add(arguments[1].shape[3])
        return decode(*arguments, layout=layout)

    assert_matches_reference(noting, options=["layout"], layouts=["vllm"], block_sizes=(3, 64), max_examples=5)
    assert seen == {64}


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"head_dims": ()}, "^none of head_dims"),
        ({"layouts": ["vllm"], "block_sizes": (3,)}, "^none of head_dims"),
        ({"head_dims": (65,)}, "^head_dim must be a multiple of 8"),
        ({"operation": "prefil"}, "^operation must be"),
        ({"options": ["sofcap"]}, "got sofcap$"),
        ({"max_seconds": 0}, "^max_examples and max_seconds must be above 0"),
        ({"max_examples": 0}, "^max_examples and max_seconds must be above 0"),
    ],
)
def test_a_search_that_tries_nothing_does_not_pass(named, says):
    with pytest.raises(ValueError, match=says):
        assert_matches_reference(numpy_decode, **named)


def masked_decode(q, k_cache, v_cache, block_tables, seq_lens, *, window=None):
    """The usual mask of a window: scores of -inf, and all values multiplied by their weights."""
    out = np.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for i, length in enumerate(seq_lens):
        t = np.arange(length)
        slots = block_tables[i, t // k_cache.shape[1]], t % k_cache.shape[1]
        k, v = (np.repeat(cache[slots], group, 1) for cache in (k_cache, v_cache))
        logits = np.einsum("hd,thd->ht", q[i], k) / np.sqrt(q.shape[2])
        if window is not None:
            logits[:, : max(0, length - window)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        out[i] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    return out


def test_the_message_explains_poison_left_of_the_window():
    with pytest.raises(AssertionError, match=r"got nan|: nan, expected") as caught:
        assert_matches_reference(masked_decode, max_examples=60, head_dims=(64,))
    line = str(caught.value).splitlines()[-1]
    assert re.fullmatch("window: keys and values left of it hold (nan|-inf).*finite_left_of_window=True.*", line)
    assert assert_matches_reference(masked_decode, max_examples=60, head_dims=(64,), finite_left_of_window=True) == 60


def test_a_function_without_a_signature_needs_options():
    class Kernel:
        __signature__ = "nothing"

        def __call__(self, *arguments):
            return numpy_decode(*arguments)

    with pytest.raises(TypeError, match="has no signature to read: name its options"):
        assert_matches_reference(Kernel())
    assert assert_matches_reference(Kernel(), options=[], **FEW) >= 10


def test_arrays_of_no_framework():
    with pytest.raises(ValueError, match=r'^arrays must be "numpy", "torch", "cupy" or a function, got .jax.$'):
        assert_matches_reference(numpy_decode, arrays="jax")


def test_arrays_by_a_function():
    kinds = set()

    def mine(q, *arguments):
        kinds.add(type(q))
        return numpy_decode(q, *arguments)

    class Own(np.ndarray):
        pass

    assert_matches_reference(mine, options=[], arrays=lambda x: x.view(Own), **FEW)
    assert kinds == {Own}
