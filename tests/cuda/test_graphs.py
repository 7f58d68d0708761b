"""Calls captured in CUDA graphs by the recipes of torch and CuPy, on a driver that refuses what a capture forbids."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import pagedkv
from pagedkv import backends

from .driver_fakes import GLOBAL, RELAXED, THREAD_LOCAL

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 64, 16, 2, 4, 64


def decode_of(kind, num_seqs=2, max_blocks=256):
    """A decode call that needs workspaces, on device arrays of a kind; `arguments` are its arrays."""
    cache, q = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), (num_seqs, NUM_HEADS, HEAD_DIM)
    at_host = [np.zeros(shape, np.float16) for shape in (q, cache, cache)]
    at_host += [np.zeros(shape, np.int32) for shape in ((num_seqs, max_blocks), (num_seqs,))]
    at_host += [np.zeros(q, np.float16)]
    *arrays, out = map(kind, at_host)
    return SimpleNamespace(
        call=lambda *given: pagedkv.decode_attention(*(given or arrays), out=out, check=True),
        arguments=arrays,
        at_host=at_host,  # whose addresses the arrays have: nobody else may get them
    )


def prefill_of(kind, num_tokens):
    """A prefill call of a sequence, as `decode_of`; its table has room for keys that are split."""
    cache, q = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), (num_tokens, NUM_HEADS, HEAD_DIM)
    at_host = [np.zeros(shape, np.float16) for shape in (q, cache, cache)]
    at_host += [np.zeros(shape, np.int32) for shape in ((1, 256), (1,), (2,))]
    at_host += [np.zeros(q, np.float16)]
    *arrays, out = map(kind, at_host)
    return SimpleNamespace(
        call=lambda: pagedkv.prefill_attention(*arrays, out=out, check=True), arguments=arrays, at_host=at_host
    )


def launched(cuda):
    """The workspaces of what has been launched, without a capture."""
    return {x for call in cuda.calls if call[0] == "launch" for x in cuda.workspaces_of(call[-1])}


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("warmups", [0, 3])
def test_torch_captures_on_a_stream_that_no_call_has_seen(cuda, torch, warmups, mode):
    decode = decode_of(torch.Tensor)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(warmups):
            decode.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(2):  # the second call is a known one
            decode.call()
    assert len(graph.nodes) == 2 * 2, "a check, and the kernel"
    assert len(graph.workspaces) == 5, "sums, states, counters, the report and lengths that were looked at"
    assert not graph.workspaces & launched(cuda)
    graph.replay()


def test_torch_makes_graphed_callables(cuda, torch):
    decode = decode_of(torch.Tensor)
    graph = torch.cuda.make_graphed_callables(decode.call, decode.arguments)
    assert len(graph.nodes) == 2
    assert not graph.workspaces & launched(cuda)
    graph.replay()


# A check, the kernels that split the keys of few rows and merge; that of many rows, where there may be some.
@pytest.mark.parametrize(("num_tokens", "num_kernels"), [(8, 3), (64, 4)])
@pytest.mark.parametrize("warmups", [0, 3])
def test_torch_captures_prefill(cuda, torch, warmups, num_tokens, num_kernels):
    prefill = prefill_of(torch.Tensor, num_tokens)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(warmups):
            prefill.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            prefill.call()
    assert len(graph.nodes) == 2 * num_kernels
    assert len(graph.workspaces) == 4, "sums, states, the report and lengths that were looked at"
    assert not graph.workspaces & launched(cuda)
    graph.replay()


@pytest.mark.parametrize("mode", [GLOBAL, RELAXED])
@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize(
    ("of", "num_kernels"),
    [(decode_of, 2), (partial(prefill_of, num_tokens=8), 3), (partial(prefill_of, num_tokens=64), 4)],
    ids=["decode", "few_rows", "many_rows"],
)
def test_cupy_captures_on_the_stream_of_calls(cuda, cupy, of, num_kernels, non_blocking, mode):
    made = of(cupy.ndarray)
    made.call()
    with cupy.cuda.Stream(non_blocking=non_blocking) as stream:
        made.call()
        stream.begin_capture(mode)
        made.call()
        graph = stream.end_capture()
        made.call()
    assert len(graph.nodes) == num_kernels
    assert not graph.workspaces & launched(cuda), "a replay on another stream does not disturb calls"
    graph.replay()


def test_graphs_of_one_stream_share_workspaces_and_keep_those_that_were_outgrown(cuda, torch):
    graphs = []
    for num_seqs in (1, 8, 2):
        decode = decode_of(torch.Tensor, num_seqs)
        decode.call()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            decode.call()
    small, large, within = (graph.workspaces for graph in graphs)
    assert within == large != small
    held = pagedkv.workspace_bytes()
    released = pagedkv.release_workspaces()
    assert 0 < released < held
    assert pagedkv.workspace_bytes() == held - released
    for graph in graphs:
        graph.replay()


def test_a_graph_of_another_stream_has_other_workspaces(torch):
    decode, graphs = decode_of(torch.Tensor), [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph in graphs:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            decode.call()
    assert not graphs[0].workspaces & graphs[1].workspaces


def test_another_thread_may_grow_and_load_during_a_capture(cuda, torch):
    """torch captures in the mode that forbids it to all threads."""
    decode, graph, failed = decode_of(torch.Tensor), torch.cuda.CUDAGraph(), []

    def in_a_thread():
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                decode_of(torch.Tensor, num_seqs=3).call()
            except Exception as error:
                failed.append(error)
        assert cuda.context == 0

    with torch.cuda.graph(graph):
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        decode.call()
    assert not failed
    assert len(graph.nodes) == 2
    assert cuda.thread.mode == GLOBAL


def test_another_thread_that_waits_during_a_capture_gets_an_error(cuda, torch):
    decode, graph, failed = decode_of(torch.Tensor), torch.cuda.CUDAGraph(), []
    decode.call()

    def in_a_thread():
        with torch.cuda.stream(torch.cuda.Stream()):
            for call in (pagedkv.raise_if_failed, pagedkv.release_workspaces):
                with pytest.raises(RuntimeError, match="GPU 0 is being captured, by this or another thread: call this"):
                    call()
                failed.append(call)

    with torch.cuda.graph(graph):
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        decode.call()
    assert len(failed) == 2
    graph.replay()
    pagedkv.raise_if_failed()


def test_what_a_replay_has_skipped_is_raised(cuda, torch):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_of(torch.Tensor).call()
        with pytest.raises(RuntimeError, match="raise_if_failed waits for the GPU: call it after the replay"):
            pagedkv.raise_if_failed()
        with pytest.raises(RuntimeError, match="release_workspaces waits for the GPU: call it after the capture"):
            pagedkv.release_workspaces()
    graph.replay()
    cuda.content = np.array([1, 1, 3, 7, 99]).tobytes()
    pagedkv.release_workspaces()
    with pytest.raises(IndexError, match="got 99 for sequence 3, column 7"):
        pagedkv.raise_if_failed()


def test_without_a_gpu_there_are_no_workspaces(monkeypatch):
    monkeypatch.setattr(backends, "_backends", {})
    assert pagedkv.release_workspaces() == pagedkv.workspace_bytes() == 0
