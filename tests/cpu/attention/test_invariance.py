"""The same bits, whatever else is in the batch, wherever blocks lie, for every block size and number of threads."""

import os
import subprocess
import sys

import numpy as np
import pytest

import pagedkv

from ...support.problems import Spec, build, run
from ...support.strategies import SPLIT

ALL = {"alibi": True, "sinks": True, "softcap": 5.0, "window": SPLIT + 150, "kv_scales": "per head"}
BASES = [
    Spec(kv_dtype="float32", head_dim=64, group_size=3),
    Spec(kv_dtype="bfloat16", q_dtype="bfloat16", head_dim=128, group_size=4, **ALL),
    Spec(kv_dtype="fp8_e4m3", q_dtype="float16", head_dim=96, group_size=5, **ALL),
]
LENGTHS = (2 * SPLIT + 100, SPLIT + 1, 40, 1, 0, SPLIT)
QUERY_LENS = (70, 1, 40, 0, 0, 33)


@pytest.fixture(params=["decode", "prefill"])
def is_prefill(request):
    return request.param == "prefill"


@pytest.fixture(params=BASES, ids=lambda spec: spec.kv_dtype)
def spec(request, is_prefill):
    return request.param.replace(seq_lens=LENGTHS, query_lens=QUERY_LENS if is_prefill else None)


def assert_same_bits(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape
        assert result.tobytes() == wanted.tobytes()


def test_placement(spec):
    expected = run(build(spec))
    for seed in range(1, 4):
        assert_same_bits(run(build(spec.replace(placement_seed=seed))), expected)


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_block_size(spec, block_size):
    assert_same_bits(run(build(spec.replace(block_size=block_size))), run(build(spec)))


@pytest.mark.parametrize("strides", ["own", "halves", "strided"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layout_and_strides(spec, layout, strides):
    assert_same_bits(run(build(spec.replace(layout=layout, strides=strides))), run(build(spec)))


def test_rest_of_the_batch(spec):
    """Alone, in the opposite order, and among many."""
    rows = np.cumsum((0, *(spec.query_lens or (1,) * len(LENGTHS))))
    out, lse = run(build(spec))
    every = range(len(LENGTHS))
    for ids in (*((i,) for i in every), tuple(reversed(every)), tuple(every) * 3):
        batch = spec.replace(
            ids=ids,
            seq_lens=tuple(LENGTHS[i] for i in ids),
            query_lens=spec.query_lens and tuple(QUERY_LENS[i] for i in ids),
        )
        order = np.concatenate([np.arange(rows[i], rows[i + 1]) for i in ids])
        assert_same_bits(run(build(batch)), (out[order], lse[order]))


def test_kv_heads_one_by_one(spec):
    """A KV head's group does not see the other KV heads."""
    spec = spec.replace(alibi=False, sinks=False, kv_scales=None)
    problem = build(spec)
    out, lse = run(problem)
    for head in range(spec.num_kv_heads):
        group = slice(head * spec.group_size, (head + 1) * spec.group_size)
        one = build(spec.replace(num_kv_heads=1))
        one.q = problem.q[:, group]
        one.k_cache, one.v_cache = problem.k_cache[:, :, head : head + 1], problem.v_cache[:, :, head : head + 1]
        one.block_tables = problem.block_tables
        assert_same_bits(run(one), (out[:, group], lse[:, group]))


@pytest.mark.usefixtures("restore_threads")
def test_threads_and_repeats(spec):
    problem = build(spec.replace(seq_lens=(4 * SPLIT + 9, *LENGTHS[1:]), num_kv_heads=4))
    pagedkv.set_num_threads(1)
    assert pagedkv.get_num_threads() == 1
    expected = run(problem)
    for num_threads in (2, 3, 4):
        pagedkv.set_num_threads(num_threads)
        assert pagedkv.get_num_threads() == num_threads
        for _ in range(10):
            assert_same_bits(run(problem), expected)


def test_out_or_not(spec):
    problem = build(spec)
    expected = run(problem)
    operation = pagedkv.decode_attention if spec.query_lens is None else pagedkv.prefill_attention
    assert_same_bits(operation(*problem.args, **problem.options, return_lse=True), expected)
    assert_same_bits([operation(*problem.args, **problem.options)], expected[:1])


def test_read_only_inputs(spec):
    problem = build(spec)
    expected = run(problem)
    for array in (*problem.args, *problem.options.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    assert_same_bits(run(problem), expected)


def test_kernels_from_disk_beside_kernels_compiled_now(tmp_path):
    """A kernel that another process compiled gives the same bits, whatever this process has compiled before."""
    script = """if True:
        import sys
        from tests.support.problems import Spec, build, run
        for kv_dtype in sys.argv[1:]:
            out, _ = run(build(Spec(seq_lens=(40,), kv_dtype=kv_dtype, head_dim=8)))
        print(out.tobytes().hex())
    """
    environment = os.environ | {
        "PAGEDKV_CACHE_DIR": str(tmp_path),
        "NUMBA_OPT": "0",  # compiled three times as fast, and every function is called by its name
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    def last_result(*kv_dtypes):
        command = [sys.executable, "-c", script, *kv_dtypes]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    compiled = last_result("float32")
    assert len(list(tmp_path.iterdir())) > 0
    assert last_result("bfloat16", "float32") == compiled


def test_chunks_at_the_same_boundaries():
    """The rows of a chunk do not see what else is prefilled in the same call."""
    for base in BASES:
        spec = base.replace(seq_lens=(300, 90), query_lens=(100, 90))
        out, lse = run(build(spec))
        alone = build(spec.replace(seq_lens=(300,), query_lens=(100,)))
        assert_same_bits(run(alone), (out[:100], lse[:100]))
