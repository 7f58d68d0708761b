"""The same bits on the CPU for any number of threads and KV heads, in any process, and by decode as by prefill."""

import itertools
import os
import subprocess
import sys

import hypothesis.strategies as st
import llvmlite.binding
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import pagedkv

from ...attention.kernels import CPU, assert_same_bits, cpu_kernel, each_kernel
from ...support.problems import Spec, build, run
from ...support.programs import ROOT
from ...support.strategies import SPLIT, Kernel, fade, long, specs

KERNELS = [
    Kernel("float32", 64),
    Kernel("fp8_e4m3", 16),
    Kernel("int8", 16, alone=False),
    *long([Kernel("bfloat16", 32), Kernel("float32", 64, score_mod=fade)]),
]

INT8 = [kernel for kernel in CPU if kernel.spec.kv_dtype == "int8"]
ELSEWHERE = (*CPU, *(cpu_kernel(operation, kv_dtype="int8", head_dim=64) for operation in ("decode", "prefill")))


def rows_of(spec, seq, first, count, seq_len, is_decode):
    """Query rows first .. first + count of a sequence of the problem, as a call of its own, of seq_len tokens."""
    whole = build(spec)
    start = whole.query_starts[seq] + first
    arguments = (whole.q[start : start + count], whole.k_cache, whole.v_cache, whole.block_tables[seq : seq + 1])
    options = {name: value for name, value in whole.options.items() if not (is_decode and name == "causal")}
    lens = np.array([seq_len], np.int32)
    if is_decode:
        return pagedkv.decode_attention(*arguments, lens, **options, return_lse=True)
    return pagedkv.prefill_attention(*arguments, lens, np.array([0, count], np.int32), **options, return_lse=True)


@st.composite
def ways(draw, kernel):
    """A problem, the same one laid out differently, and where to cut the query tokens of each sequence into chunks."""
    spec = draw(specs(kernel, prefill=True)).replace(causal=True, alibi=draw(st.booleans()), padding_rows=0)
    # Decode has none of these.
    spec = spec.replace(window_right=None, leftpad=False, mask=None, seq_slopes=False)
    layouts = ["NHD", "HND"]
    if (spec.head_dim * build(spec).k_cache.itemsize) % 16 == 0:
        layouts.append("vllm")
    layout = draw(st.sampled_from(layouts))
    block_sizes = [8, 16, 256] if layout == "vllm" else [1, 3, 16, 256]
    other = spec.replace(
        layout=layout,
        block_size=draw(st.sampled_from(block_sizes)),
        strides=draw(st.sampled_from(["own", "halves", "strided"])),
        placement_seed=draw(st.integers(1, 9)),
    )
    cuts = [sorted({0, n, *(draw(st.integers(0, n)) for _ in range(draw(st.integers(0, 3))))}) for n in spec.query_lens]
    return spec, other, cuts, draw(st.integers(1, 3))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_way_gives_the_same_bits(kernel):
    """Whole, in chunks, in another layout, placement and block size, token by token, and by decode."""

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(ways(kernel))
    def check(drawn):
        spec, other, cuts, num_threads = drawn
        before = pagedkv.get_num_threads()
        expected = run(build(spec))
        try:
            pagedkv.set_num_threads(num_threads)
            for result, wanted in zip(run(build(other)), expected, strict=True):
                assert (result == wanted).all()
        finally:
            pagedkv.set_num_threads(before)
        starts = np.cumsum((0, *spec.query_lens))
        for seq, (length, query_len, chunks) in enumerate(zip(spec.seq_lens, spec.query_lens, cuts, strict=True)):
            calls = [(a, b - a, False) for a, b in itertools.pairwise(chunks)]
            calls += [(i, 1, is_decode) for i in {0, query_len - 1} if query_len for is_decode in (False, True)]
            for first, count, is_decode in calls:
                seen = length - query_len + first + count
                rows = slice(starts[seq] + first, starts[seq] + first + count)
                results = rows_of(spec, seq, first, count, seen, is_decode)
                for result, wanted in zip(results, expected, strict=True):
                    assert (result == wanted[rows]).all(), (seq, first, count, is_decode)

    check()


def test_a_verification_of_drafts_behind_a_long_context():
    """Many splits: rows that decode takes side by side, and prefill one after the other.

    Of rows 60 to 67 the window of the first one begins before token 512, that of the last one behind it.
    """
    spec = Spec(
        seq_lens=(3 * 512 + 77,), query_lens=(130,), num_kv_heads=2, group_size=4, head_dim=64, window=1035, sinks=True
    )
    out, lse = run(build(spec))
    for first, count in ((0, 130), (60, 8), (129, 1), (3, 40), (64, 2)):
        for is_decode in {False, count == 1}:
            results = rows_of(spec, 0, first, count, spec.seq_lens[0] - 130 + first + count, is_decode)
            for result, wanted in zip(results, (out, lse), strict=True):
                assert (result == wanted[first : first + count]).all()


@each_kernel(*(kernel for kernel in CPU if kernel.spec.layout == "NHD"))
def test_kv_heads_one_by_one(kernel, open_device):
    """A KV head's group does not see the other KV heads."""
    problem = kernel.build(strides="own")
    out, lse = run(problem)
    for head in range(kernel.spec.num_kv_heads):
        group = slice(head * kernel.spec.group_size, (head + 1) * kernel.spec.group_size)
        one = kernel.build(num_kv_heads=1)
        one.q = problem.q[:, group]
        one.k_cache, one.v_cache, *scales = (x[:, :, head : head + 1] for x in problem.caches.values())
        one.options |= dict(zip(("k_scales", "v_scales"), scales, strict=False))
        one.block_tables = problem.block_tables
        assert_same_bits(run(one), (out[:, group], lse[:, group]))


@pytest.mark.usefixtures("restore_threads")
@each_kernel(*CPU)
def test_threads_and_repeats(kernel, open_device):
    problem = kernel.build(seq_lens=(4 * SPLIT + 9, *kernel.spec.seq_lens[1:]), num_kv_heads=4)
    pagedkv.set_num_threads(1)
    assert pagedkv.get_num_threads() == 1
    expected = run(problem)
    for num_threads in (2, 3, 4):
        pagedkv.set_num_threads(num_threads)
        assert pagedkv.get_num_threads() == num_threads
        for _ in range(5):
            assert_same_bits(run(problem), expected)


def printed(script, *arguments, **variables):
    """What a process of its own prints."""
    command, environment = [sys.executable, "-c", script, *arguments], os.environ | variables
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_kernels_from_disk_beside_kernels_compiled_now(tmp_path):
    """A kernel that another process compiled gives the same bits, whatever this process has compiled before."""
    script = """if True:
        import sys
        from tests.support.problems import Spec, build, run
        for kv_dtype in sys.argv[1:]:
            out, _ = run(build(Spec(seq_lens=(40,), kv_dtype=kv_dtype, head_dim=8)))
        print(out.tobytes().hex())
    """
    # Compiled three times as fast, and every function is called by its name.
    variables = {"PAGEDKV_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0"}
    compiled = printed(script, "float32", **variables)
    assert len(list(tmp_path.iterdir())) > 0
    assert printed(script, "bfloat16", "float32", **variables) == compiled


@pytest.mark.parametrize(
    ("kernels", "processor", "needed"),
    [
        pytest.param(ELSEWHERE[2:3], "generic", None, id="generic"),
        pytest.param(INT8[:1], "haswell", "avx2", id="AVX2-int8"),
        pytest.param(ELSEWHERE, "generic", None, id="generic-all", marks=pytest.mark.long),
        pytest.param(ELSEWHERE, "haswell", "avx2", id="AVX2", marks=pytest.mark.long),
        pytest.param(ELSEWHERE, "skx", "avx512bw", id="AVX-512", marks=pytest.mark.long),
    ],
)
def test_code_for_other_processors(kernels, processor, needed):
    """Generic code has what all processors of an architecture have: on x86 no FMA, and no conversions of float16."""
    if needed and not llvmlite.binding.get_host_cpu_features().get(needed):
        pytest.skip(f"this processor has no {needed}")
    script = """if True:
        import sys
        from tests.cpu.attention.test_invariance import ELSEWHERE
        for i in map(int, sys.argv[1:]):
            print(*(x.tobytes().hex() for x in ELSEWHERE[i].attend(ELSEWHERE[i].build())))
    """
    numbers = [str(ELSEWHERE.index(kernel)) for kernel in kernels]
    elsewhere = printed(script, *numbers, NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES="")
    ours = [kernel.attend(kernel.build()) for kernel in kernels]
    assert [line.split() for line in elsewhere.splitlines()] == [[x.tobytes().hex() for x in each] for each in ours]
