"""The public operations on arrays of CuPy and torch; on torch's of the host in the emulator, so that CI runs them."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

import pagedkv

from .support.frameworks import capture, cupy_frame, sent
from .support.problems import FLOATS, Spec, assert_close, build
from .support.rotary_cases import tables_of, tokens_of
from .support.strategies import long

pytestmark = pytest.mark.usefixtures("without_lines")

SPECS = [
    Spec(seq_lens=(37, 0, 600), layout="vllm", group_size=3, sinks=True, alibi=True),
    Spec(seq_lens=(33, 530), layout="vllm", q_dtype="float16", kv_dtype="float16", window=100, softcap=5.0),
    Spec(seq_lens=(20, 513), layout="vllm", q_dtype="float16", kv_dtype="fp8_e4m3", kv_scales="per head"),
    Spec(seq_lens=(16, 530), layout="vllm", q_dtype="bfloat16", kv_dtype="bfloat16", sinks=True, group_size=3),
    Spec(seq_lens=(20,), layout="vllm", kv_dtype="fp8_e5m2", kv_scales="scalar", softcap=20.0, alibi=True),
]

SPLIT_SPECS = [
    Spec(seq_lens=(37, 0, 600), sinks=True, alibi=True),
    Spec(seq_lens=(33, 530, 5000), layout="HND", q_dtype="float16", kv_dtype="float16", window=2100, group_size=4),
    Spec(seq_lens=(20, 513), q_dtype="float16", kv_dtype="fp8_e4m3", kv_scales="per head", softcap=5.0, group_size=8),
]


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [
        *((spec, kernel) for spec in SPECS[:2] for kernel in ("auto", "v1", "v2")),
        (SPECS[2], "auto"),
        (SPECS[2], "v2"),
        (SPECS[3], "v2"),
        (SPECS[4], "v1"),
        *long([(SPECS[2], "v1"), (SPECS[3], "v1"), (SPECS[4], "v2")]),
        *((spec, kernel) for spec in SPLIT_SPECS for kernel in ("auto", "split")),
    ],
    ids=lambda x: f"{x.layout}-{x.kv_dtype}" if isinstance(x, Spec) else x,
)
def test_decode(framework, spec, kernel):
    problem = build(spec)
    args, options = [framework.send(x) for x in problem.args], sent(framework, problem.options)
    for _ in range(2):  # the second call is a known one
        out = framework.send(np.zeros(problem.q.shape, problem.q.dtype))
        result, lse = pagedkv.decode_attention(
            *args, **options, **framework.options, kernel=kernel, out=out, return_lse=True
        )
        assert result is out
        assert_close(problem, framework.fetch(out), framework.fetch(lse))


def test_decode_on_another_stream(framework):
    problem = build(SPECS[0])
    with framework.stream():
        args, options = [framework.send(x) for x in problem.args], sent(framework, problem.options)
        out, lse = pagedkv.decode_attention(*args, **options, **framework.options, kernel="v2", return_lse=True)
        assert_close(problem, framework.fetch(out), framework.fetch(lse))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("float32", "NHD"), ("bfloat16", "HND"), ("bfloat16", "vllm"), ("fp8_e4m3", "NHD"), ("fp8_e4m3", "vllm")),
        *long([("float32", "HND"), ("float32", "vllm"), ("bfloat16", "NHD"), ("fp8_e4m3", "HND")]),
    ],
)
def test_caches(framework, layout, kind):
    rng = np.random.default_rng(0)
    kv_format = pagedkv.layouts.FORMATS[kind]
    caches = [rng.integers(0, 100, shape).astype(dtype) for shape, dtype in kv_format.parts(layout, 6, 8, 2, 16)]
    k, v = rng.standard_normal((2, 5, 2, 16)).astype(np.float32)
    slots, table = np.array([3, -1, 47, 8, 0]), np.array([5, 0, 1, -1], np.int32)
    options = {"layout": layout, "kv_dtype": kind if kv_format.coded else None}
    if kv_format.scale == "call":
        options |= {"k_scale": 0.5, "v_scale": np.array([0.25, 3], np.float32)}
    pairs, there, back = np.array([[0, 2], [1, 3]]), np.array([[5, 0], [3, 5]]), np.array([[0, 4]])
    results = []
    for on in (framework, None):
        send, fetch = (on.send, on.fetch) if on else (np.array, np.asarray)
        more = {**(sent(on, options) if on else options), **(on.options if on else {})}
        own, host = [send(x) for x in caches], [np.zeros_like(x) for x in caches]
        backend = on.options if on else {}
        pagedkv.write_kv(send(k), send(v), *own, send(slots), **more)
        pagedkv.copy_blocks(own[0], own[1], send(pairs), **backend)
        pagedkv.swap_blocks(own, host, there, **backend)
        pagedkv.swap_blocks(host, own, back, **backend)
        dense = pagedkv.gather_kv(*own, send(table), 19, **more)
        results.append([*map(fetch, (*own, *dense)), *host])  # fetching waits for the copies to the host as well
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "float16", *long(["bfloat16"])])
@pytest.mark.parametrize("is_stacked", [True, False])
def test_merge(framework, dtype, is_stacked):
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((9, 4, 2, 64)).astype(FLOATS[dtype])
    lses = rng.standard_normal((9, 4, 2), np.float32)
    lses[1, 2], lses[:, 3, 0], outs[:, 3, 0] = -np.inf, -np.inf, np.nan
    given = (outs, lses) if is_stacked else (list(outs), list(lses))
    send = framework.send if is_stacked else lambda arrays: [framework.send(x) for x in arrays]
    out, lse = pagedkv.merge_states(*map(send, given), **framework.options)
    out, lse = framework.fetch(out), framework.fetch(lse)
    expected, expected_lse = pagedkv.merge_states(*given)
    rtol, atol = (1e-5, 1e-6) if dtype == "float32" else (1e-2, 1e-2)
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=rtol, atol=atol)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert (out[3, 0] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "table_dtype", "head_dim", "rotary_dim", "interleaved"),
    [
        ("float32", "float32", 24, 16, False),
        ("float16", "float32", 64, 64, False),
        ("bfloat16", "bfloat16", 64, 24, True),
        *long((dtype, "float32", 64, 32, interleaved) for dtype in FLOATS for interleaved in (False, True)),
    ],
)
def test_rotary(framework, dtype, table_dtype, head_dim, rotary_dim, interleaved):
    rng = np.random.default_rng(0)
    q, k = tokens_of(rng, 6, (4, 2), head_dim, FLOATS[dtype])
    given = (q, k, *tables_of(rng, 50, rotary_dim // 2, FLOATS[table_dtype]), rng.integers(0, 50, 6))
    results = pagedkv.apply_rotary(*map(framework.send, given), interleaved=interleaved, **framework.options)
    for x, y in zip(results, pagedkv.apply_rotary(*given, interleaved=interleaved), strict=True):
        np.testing.assert_array_equal(framework.fetch(x).astype(np.float32), y.astype(np.float32))


def in_a_thread(call):
    """What the call returns in a thread that has called nothing of CUDA yet."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


@pytest.mark.parametrize("run", [lambda call: call(), in_a_thread], ids=["here", "in_another_thread"])
def test_a_bad_entry_is_raised_when_it_is_asked_for(gpu_framework, run):
    problem = build(SPECS[0])
    problem.block_tables[2, 7] = 10**6
    args, options = [gpu_framework.send(x) for x in problem.args], sent(gpu_framework, problem.options)
    pagedkv.decode_attention(*args, **options, check=True)
    with pytest.raises(IndexError, match="got 1000000 for sequence 2, column 7"):
        run(pagedkv.raise_if_failed)
    pagedkv.raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ["null", "ptds"])
def test_default_streams_in_another_thread(stream):
    cupy, problem = pytest.importorskip("cupy"), build(SPECS[0])

    def decode():
        with getattr(cupy.cuda.Stream, stream):
            args, options = [cupy.asarray(x) for x in problem.args], sent(cupy_frame(), problem.options)
            out, lse = pagedkv.decode_attention(*args, **options, kernel="v2", return_lse=True)
            return cupy.asnumpy(out), cupy.asnumpy(lse)

    assert_close(problem, *in_a_thread(decode))


def test_workspaces_are_made_anew_once_they_are_released(gpu_framework):
    problem = build(SPECS[0])
    args, options = [gpu_framework.send(x) for x in problem.args], sent(gpu_framework, problem.options)
    for _ in range(2):
        out, lse = pagedkv.decode_attention(*args, **options, kernel="v2", return_lse=True)
        assert_close(problem, gpu_framework.fetch(out), gpu_framework.fetch(lse))
        held = pagedkv.workspace_bytes()
        released = pagedkv.release_workspaces()
        assert 0 < released <= held
        assert pagedkv.workspace_bytes() == held - released


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_step_waits_for_the_device_of_torch():
    cache = pagedkv.PagedKVCache(1, 64, 4, 1, 8, array_module=torch, device="cuda", max_seqs=8, max_seq_len=64)
    seqs = [cache.add(n).seq for n in (5, 16, 30, 4)]
    arrived, expected = [], []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            cache.append(seqs)
            batch = cache.batch(seqs)
            tables = cache.block_tables(seqs)
            arrived += [batch.block_tables[:, : tables.shape[1]].clone(), batch.seq_lens.clone()]
            expected += [tables, cache.seq_lens(seqs)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, wanted in zip(arrived, expected, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), wanted)


@pytest.mark.parametrize("num_warmups", [1, 0])
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("kernel", ["v1", "v2", "split"])
def test_a_captured_call_reads_what_is_in_its_buffers(gpu_framework, kernel, is_planned, num_warmups):
    spec = SPLIT_SPECS[0] if kernel == "split" else SPECS[0]
    problem = build(spec)
    args, options = [gpu_framework.send(x) for x in problem.args], sent(gpu_framework, problem.options)
    out = gpu_framework.send(np.zeros(problem.q.shape, problem.q.dtype))
    call = partial(pagedkv.decode_attention, *args, **options, kernel=kernel, check=False)
    if is_planned:
        call = partial(pagedkv.plan_decode(*args, **options, kernel=kernel, check=False).run, *args[:3])
    replay = capture(gpu_framework, partial(call, out=out), num_warmups)
    shorter = build(spec)
    shorter.seq_lens[...] = (20, 0, 513)
    expected = pagedkv.decode_attention(*shorter.args, **shorter.options)
    args[4][...] = gpu_framework.send(shorter.seq_lens)
    replay()
    np.testing.assert_allclose(gpu_framework.fetch(out), expected, rtol=1e-4, atol=1e-5)


def ragged(seq_lens, query_lens):
    return Spec(seq_lens, query_lens, group_size=4, q_dtype="float16", kv_dtype="float16")


@pytest.mark.parametrize("num_warmups", [1, 0])
@pytest.mark.parametrize(
    ("spec", "seq_lens", "query_lens"),
    [
        (ragged((2300, 0, 40), (3, 0, 2)), (2100, 0, 7), (1, 0, 4)),  # few rows, over keys that are split
        (ragged((70, 0, 2300), (40, 0, 3)), (60, 0, 2100), (36, 0, 7)),  # many rows beside them
        (Spec((40, 0, 33), (20, 0, 3)), (33, 0, 30), (3, 0, 20)),  # on CUDA cores
    ],
    ids=["few_rows", "many_rows", "float32"],
)
def test_a_captured_prefill_reads_what_is_in_its_buffers(framework, spec, seq_lens, query_lens, num_warmups):
    problem = build(spec)
    args, options = [framework.send(x) for x in problem.args], sent(framework, problem.options)
    out = framework.send(np.zeros(problem.q.shape, problem.q.dtype))
    replay = capture(
        framework,
        lambda: pagedkv.prefill_attention(*args, **options, **framework.options, out=out, check=False),
        num_warmups,
    )
    problem.seq_lens[...] = seq_lens
    problem.query_starts[1:] = np.cumsum(query_lens)
    expected = pagedkv.prefill_attention(*problem.args, **problem.options)
    args[4][...] = framework.send(problem.seq_lens)
    args[5][...] = framework.send(problem.query_starts)
    replay()
    np.testing.assert_allclose(framework.fetch(out), expected, rtol=4e-3, atol=4e-3)
