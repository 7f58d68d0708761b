"""After any exception the caches, the outputs and every other argument are byte for byte what they were."""

import numpy as np
import pytest

import pagedkv

from ..support.problems import Spec, build
from ..support.strategies import SPLIT


def everything(x):
    """All arrays in nested arguments, whole buffers included."""
    if isinstance(x, np.ndarray):
        return [x if x.base is None or not isinstance(x.base, np.ndarray) else x.base]
    if isinstance(x, dict):
        x = list(x.values())
    return [array for y in x for array in everything(y)] if isinstance(x, (list, tuple)) else []


def assert_unchanged_by(operation, error, args, options):
    arrays = everything([args, options])
    before = [x.tobytes() for x in arrays]
    with pytest.raises(error) as info:
        operation(*args, **options)
    assert type(info.value) is error
    assert [x.tobytes() for x in arrays] == before


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


ATTENTION_FAULTS = {
    # Values in host arrays: the last sequence is the wrong one, when the first could have been done.
    "block id past the pool": (IndexError, lambda a: a | {"block_tables": changed(a["block_tables"], (2, 0), 10**6)}),
    "negative block id": (IndexError, lambda a: a | {"block_tables": changed(a["block_tables"], (2, 0), -1)}),
    "negative length": (ValueError, lambda a: a | {"seq_lens": changed(a["seq_lens"], 2, -1)}),
    "length past the table": (ValueError, lambda a: a | {"seq_lens": changed(a["seq_lens"], 2, 10**6)}),
    "not an array": (TypeError, lambda a: a | {"q": [1.0]}),
    "lengths of int64": (TypeError, lambda a: a | {"seq_lens": a["seq_lens"].astype(np.int64)}),
    "caches of different dtypes": (TypeError, lambda a: a | {"v_cache": a["v_cache"].astype(np.float16)}),
    "shape of q": (ValueError, lambda a: a | {"q": a["q"][0]}),
    "head_dim": (ValueError, lambda a: a | {"q": a["q"][..., :8]}),
    "layout": (ValueError, lambda a: a | {"layout": "NDH"}),
    "scale": (ValueError, lambda a: a | {"scale": np.nan}),
    "window": (ValueError, lambda a: a | {"window": 0}),
    "softcap": (ValueError, lambda a: a | {"softcap": -1.0}),
    "scale of a cache that is not fp8": (ValueError, lambda a: a | {"k_scale": 1.0}),
    "slopes": (ValueError, lambda a: a | {"alibi_slopes": np.ones(3, np.float32)}),
    "sinks": (TypeError, lambda a: a | {"sinks": np.ones(4, np.float64)}),
    "out of another shape": (ValueError, lambda a: a | {"out": a["out"][:1]}),
    "out of another dtype": (TypeError, lambda a: a | {"out": a["out"].astype(np.float16)}),
    "out that is read-only": (ValueError, lambda a: a | {"out": read_only(a["out"])}),
    "out that is an input": (ValueError, lambda a: a | {"q": a["out"]}),
    "out that repeats": (
        ValueError,
        lambda a: a | {"out": np.lib.stride_tricks.as_strided(a["out"], strides=(0, 0, 4))},
    ),
    "score_mod": (TypeError, lambda a: a | {"score_mod": 3}),
    "backend of the other side": (ValueError, lambda a: a | {"backend": "cuda"}),
    "kernel of another layout": (ValueError, lambda a: a | {"kernel": "v1"}),
}
PREFILL_FAULTS = {
    "starts that do not begin at 0": (ValueError, lambda a: a | {"query_starts": changed(a["query_starts"], 0, 1)}),
    "starts that decrease": (ValueError, lambda a: a | {"query_starts": changed(a["query_starts"], 2, 1)}),
    "starts past q": (ValueError, lambda a: a | {"query_starts": changed(a["query_starts"], 3, 99)}),
    "more queries than tokens": (ValueError, lambda a: a | {"seq_lens": changed(a["seq_lens"], 2, 1)}),
    "starts of int64": (TypeError, lambda a: a | {"query_starts": a["query_starts"].astype(np.int64)}),
}


def attention_arguments(query_lens):
    """Arguments by name, with an `out` that holds numbers."""
    problem = build(Spec(seq_lens=(SPLIT + 3, 20, 7), query_lens=query_lens))
    problem.out_buffer[...] = 1.5
    names = ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "query_starts")
    options = {name: value for name, value in problem.options.items() if value is not None}
    return dict(zip(names, problem.args, strict=False)) | options | {"out": problem.out}


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
@pytest.mark.parametrize("query_lens", [None, (5, 20, 2)], ids=["decode", "prefill"])
def test_attention(fault, query_lens):
    error, wrong = ATTENTION_FAULTS[fault]
    operation = pagedkv.decode_attention if query_lens is None else pagedkv.prefill_attention
    arguments = attention_arguments(query_lens)
    assert_unchanged_by(operation, error, (), wrong(arguments) | {"return_lse": True})
    operation(**arguments)  # right before the change
    assert not (arguments["out"] == 1.5).all()


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_prefill(fault):
    error, wrong = PREFILL_FAULTS[fault]
    assert_unchanged_by(pagedkv.prefill_attention, error, (), wrong(attention_arguments((5, 20, 2))))


@pytest.mark.parametrize("query_lens", [None, (5, 20, 2)], ids=["decode", "prefill"])
def test_a_score_mod_that_does_not_compile(query_lens):
    operation = pagedkv.decode_attention if query_lens is None else pagedkv.prefill_attention
    arguments = attention_arguments(query_lens)
    arrays = everything(arguments)
    before = [x.tobytes() for x in arrays]
    with pytest.raises(Exception, match=r"score_mod|no_such_name"):
        operation(**arguments, score_mod=lambda score, q_pos, k_pos, head, seq: score.no_such_name)
    assert [x.tobytes() for x in arrays] == before


WRITE_FAULTS = {
    "slot past the pool": (IndexError, {"slots": np.array([1, 2, 10**6])}),
    "slot twice": (ValueError, {"slots": np.array([1, 2, 1])}),
    "slots of int32": (TypeError, {"slots": np.array([1, 2, 3], np.int32)}),
    "number of slots": (ValueError, {"slots": np.array([1, 2])}),
    "tokens of another dtype": (TypeError, {"k": np.zeros((3, 2, 16), np.float64)}),
    "tokens of another shape": (ValueError, {"v": np.zeros((3, 2, 8), np.float32)}),
    "read-only cache": (ValueError, {"v_cache": read_only(np.zeros((4, 16, 2, 16), np.float32))}),
    "caches of different shapes": (ValueError, {"v_cache": np.zeros((4, 8, 2, 16), np.float32)}),
    "layout": (ValueError, {"layout": "HDN"}),
    "kv_dtype of a float cache": (TypeError, {"kv_dtype": "fp8_e4m3"}),
    "unknown kv_dtype": (ValueError, {"kv_dtype": "fp8"}),
    "scale of a cache that is not fp8": (ValueError, {"v_scale": 2.0}),
    "backend of the other side": (ValueError, {"backend": "cuda"}),
}


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_write(fault):
    error, wrong = WRITE_FAULTS[fault]
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 16), np.float32)
    k_cache, v_cache = rng.standard_normal((2, 4, 16, 2, 16), np.float32)
    right = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": np.array([1, -1, 60])}
    assert_unchanged_by(pagedkv.write_kv, error, (), right | wrong)
    pagedkv.write_kv(**right)


def test_write_into_overlapping_caches():
    cache = np.ones((4, 16, 2, 16), np.float32)
    k = np.zeros((1, 2, 16), np.float32)
    assert_unchanged_by(pagedkv.write_kv, ValueError, (k, k, cache, cache, np.array([3])), {})
    assert_unchanged_by(pagedkv.write_kv, ValueError, (cache[0, :1], k, cache, cache.copy(), np.array([3])), {})


PAIR_FAULTS = {
    "block past the pool": (IndexError, [[0, 1], [2, 9]]),
    "negative block": (IndexError, [[0, 1], [-1, 2]]),
    "destination twice": (ValueError, [[0, 1], [2, 1]]),
    "destination that is a source": (ValueError, [[0, 1], [1, 2]]),
    "shape": (ValueError, [0, 1]),
    "dtype": (TypeError, [[0.0, 1.0]]),
}


@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_copy_and_swap(fault):
    error, pairs = PAIR_FAULTS[fault]
    layers = [np.random.default_rng(i).standard_normal((9, 4, 2, 8)).astype(np.float32) for i in range(4)]
    assert_unchanged_by(pagedkv.copy_blocks, error, (layers[:2], layers[2:], np.array(pairs)), {})
    assert_unchanged_by(pagedkv.swap_blocks, error, (layers[0], layers[0], np.array(pairs)), {})
    if fault != "destination that is a source":
        assert_unchanged_by(pagedkv.swap_blocks, error, (layers[:2], layers[2:], np.array(pairs)), {})


def test_a_wrong_last_layer_leaves_the_first_one_alone():
    layers = [np.random.default_rng(i).standard_normal((9, 4, 2, 8)).astype(np.float32) for i in range(4)]
    pairs = np.array([[0, 1]])
    for wrong, error in ((layers[3][:5], ValueError), (read_only(layers[3]), ValueError), ([1], TypeError)):
        assert_unchanged_by(pagedkv.copy_blocks, error, (layers[:2], [layers[2], wrong], pairs), {})
    for wrong in (layers[3].astype(np.float16), [layers[3]], None):
        with pytest.raises((TypeError, ValueError)):
            pagedkv.swap_blocks(layers[:2], [layers[2], wrong], pairs)
    assert not (layers[2][1] == layers[0][0]).any()


def test_merge_and_gather():
    outs, lses = np.ones((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
    for error, args in (
        (ValueError, (outs, lses[:1])),
        (ValueError, (outs, lses[..., :3])),
        (TypeError, (outs, lses.astype(np.float64))),
        (ValueError, ([], [])),
        (TypeError, (outs.astype(np.int32), lses)),
    ):
        assert_unchanged_by(pagedkv.merge_states, error, args, {})
    k_cache, v_cache = np.ones((2, 4, 16, 2, 8), np.float32)
    for error, table, seq_len in (
        (IndexError, np.array([0, 4], np.int32), 17),
        (ValueError, np.array([0, 1], np.int32), 33),
        (ValueError, np.array([0, 1], np.int32), -1),
        (TypeError, np.array([0, 1], np.int64), 3),
    ):
        assert_unchanged_by(pagedkv.gather_kv, error, (k_cache, v_cache, table, seq_len), {})
