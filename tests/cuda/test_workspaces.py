"""Workspaces that are reserved: no call of at most the sizes that were named allocates any."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv.layouts import KvFormat

from ..support.device_fakes import ELSEWHERE, InterfaceArray
from .conftest import recorded
from .driver_fakes import Code, Recorder

NUM_KV_HEADS, BLOCK_SIZE = 2, 16
LAYOUTS = ("NHD", "HND", "vllm")
KINDS = (("float32", None), ("float16", None), ("float16", "fp8_e4m3"), ("float32", "fp8_e5m2"))
_addresses = itertools.count(ELSEWHERE, 1 << 42)


def zeros(dtype, *shape, stream=None):
    """A device array whose memory nobody has."""
    address = next(_addresses)
    return InterfaceArray(np.broadcast_to(np.zeros((), dtype), shape), stream, strides=None, data=(address, False))


def caches_of(layout, head_dim, dtype, kv_dtype, stream=None):
    parts = KvFormat.of(dtype, kv_dtype).parts(layout, 4, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
    k_cache, v_cache = (zeros(stored, *shape, stream=stream) for shape, stored in parts)
    return {"k_cache": k_cache, "v_cache": v_cache, "layout": layout, "kv_dtype": kv_dtype}


def allocations(recorder):
    return [call for call in recorder.calls if call[0] in ("alloc", "free")]


def run(caches, dtype, num_heads, head_dim, num_seqs, max_blocks, num_tokens=0, **options):
    """A decode call, and a prefill call if there are rows for one."""
    tables, lens = zeros(np.int32, num_seqs, max_blocks), zeros(np.int32, num_seqs)
    arrays = caches | {"block_tables": tables, "seq_lens": lens}
    q = zeros(dtype, num_seqs, num_heads, head_dim)
    pagedkv.decode_attention(q, **arrays, **options, out=zeros(dtype, *q.shape))
    if num_tokens:
        q = zeros(dtype, num_tokens, num_heads, head_dim)
        starts = zeros(np.int32, num_seqs + 1)
        pagedkv.prefill_attention(q, **arrays, query_starts=starts, **options, out=zeros(dtype, *q.shape))


def sizes(most):
    """Up to `most`; often `most` itself, or near a power of two."""
    power = 1 << (most.bit_length() - 1)
    near = {most, max(most - 1, 1), power, min(power + 1, most)}
    return st.sampled_from(sorted(near)) | st.integers(1, most)


@given(st.data())
def test_calls_within_what_was_reserved_allocate_nothing(data):
    draw = data.draw
    capability = draw(st.sampled_from([(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]))
    layout, (dtype, kv_dtype) = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(KINDS))
    head_dim, group_size = draw(st.sampled_from([64, 128, 256, 512])), draw(st.sampled_from([1, 8, 12, 24, 64]))
    num_seqs, max_blocks, num_tokens = draw(st.integers(1, 64)), draw(st.integers(1, 1 << 13)), draw(st.integers(0, 99))
    caches, num_heads = caches_of(layout, head_dim, dtype, kv_dtype), NUM_KV_HEADS * group_size
    most_tokens, checked = max_blocks * BLOCK_SIZE, draw(st.booleans())
    with recorded(Recorder(capability)) as recorder:
        most = {"num_heads": num_heads, "num_seqs": num_seqs, "max_seq_len": most_tokens, "num_tokens": num_tokens}
        most |= {"dtype": dtype, "check": checked}
        reserved = pagedkv.reserve_workspaces(**caches, **most)
        assert reserved == pagedkv.workspace_bytes()
        before = allocations(recorder)
        for _ in range(3):
            options = {"softcap": draw(st.sampled_from([None, 5.0])), "check": checked and draw(st.booleans())}
            options["window"] = draw(st.none() | st.integers(1, most_tokens))
            if draw(st.booleans()):  # a table of any width, with a bound
                width, bound = draw(st.integers(1, 1 << 14)), draw(sizes(most_tokens))
                options["max_seq_len"] = bound
            else:
                width = draw(sizes(max_blocks))
            tokens = draw(sizes(num_tokens)) if num_tokens else 0
            run(caches, dtype, num_heads, head_dim, draw(sizes(num_seqs)), width, tokens, **options)
        assert allocations(recorder) == before
        assert pagedkv.reserve_workspaces(**caches, **most) == 0


@pytest.mark.parametrize(
    ("layout", "dtype", "kv_dtype", "group_size", "largest", "other"),
    [
        # The largest batch is v1's, which has no workspaces; vLLM's rule gives a small one to v2.
        ("vllm", "float16", None, 8, (256, {}), (4, {})),
        ("vllm", "float16", None, 8, (256, {}), (256, {"kernel": "v2"})),
    ],
    ids=["fewer rows", "kernel"],
)
def test_other_kernels_than_that_of_the_largest_call_have_theirs(
    cuda, layout, dtype, kv_dtype, group_size, largest, other
):
    caches, num_heads, bound = caches_of(layout, 256, dtype, kv_dtype), NUM_KV_HEADS * group_size, 4096
    sizes = {"num_heads": num_heads, "num_seqs": 256, "max_seq_len": bound}
    pagedkv.reserve_workspaces(**caches, **sizes, dtype=dtype)
    before = allocations(cuda)
    for num_seqs, options in (largest, other):
        run(caches, dtype, num_heads, 256, num_seqs, bound // BLOCK_SIZE, **options)
    assert allocations(cuda) == before


@pytest.mark.parametrize("num_tokens", [0, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_more_is_reserved_than_the_largest_calls_need(cuda, layout, num_tokens):
    caches, bound = caches_of(layout, 128, "float16", None), 8192
    run(caches, "float16", 8, 128, 4, bound // BLOCK_SIZE, num_tokens, kernel="auto", check=True)
    needed = pagedkv.workspace_bytes()
    pagedkv.raise_if_failed()
    released = pagedkv.release_workspaces()
    reserved = pagedkv.reserve_workspaces(
        **caches, num_heads=8, num_seqs=4, max_seq_len=bound, num_tokens=num_tokens, check=True
    )
    assert reserved == released < needed  # the report stays


def test_a_bound_is_rounded_up_as_that_of_a_call_is(cuda):
    """Of a call whose tables are wider."""
    caches, bound = caches_of("NHD", 128, "float16", None), 5000
    pagedkv.reserve_workspaces(**caches, num_heads=8, num_seqs=4, max_seq_len=bound)
    before = allocations(cuda)
    run(caches, "float16", 8, 128, 4, 1024, max_seq_len=bound)
    assert allocations(cuda) == before


def test_a_window_of_all_calls_takes_less(cuda):
    caches = caches_of("NHD", 128, "float16", None)
    sizes = {"num_heads": 8, "num_seqs": 4, "max_seq_len": 1 << 17, "num_tokens": 8}
    assert (
        0
        < 4 * pagedkv.reserve_workspaces(**caches, **sizes, window=1024)
        < pagedkv.reserve_workspaces(**caches, **sizes)
    )


def test_what_is_reserved_in_a_capture_is_for_the_graphs_of_the_stream(cuda, torch):
    at_host = np.zeros((4, 16, 2, 64), np.float16)
    k_cache, v_cache = torch.Tensor(at_host), torch.Tensor(at_host)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reserved = pagedkv.reserve_workspaces(k_cache, v_cache, 4, num_seqs=2, max_seq_len=4096)
    assert graph.nodes == []
    assert reserved == pagedkv.workspace_bytes() > 0
    assert pagedkv.release_workspaces() == 0, "graphs keep theirs"


@pytest.mark.parametrize("captured", [False, True])
def test_each_workspace_is_allocated_once(cuda, captured):
    """Those that both operations have, too: graphs would keep the first ones for good."""
    caches = caches_of("NHD", 256, "float32", "fp8_e4m3", stream=5)
    if captured:
        cuda.begin_capture(5)
    sizes = {"num_heads": NUM_KV_HEADS * 16, "num_seqs": 256, "max_seq_len": 4096, "num_tokens": 8}
    pagedkv.reserve_workspaces(**caches, **sizes, dtype="float16", check=True)
    assert [name for name, *_ in allocations(cuda)] == ["alloc"] * 7


def test_what_is_reserved_after_less_is_as_much_as_at_once(cuda):
    caches, sizes = caches_of("NHD", 128, "float16", None), {"num_heads": 8, "max_seq_len": 8192, "num_tokens": 8}
    pagedkv.reserve_workspaces(**caches, **sizes, num_seqs=64)
    pagedkv.reserve_workspaces(**caches, **sizes, num_seqs=65)
    grown = pagedkv.workspace_bytes()
    pagedkv.release_workspaces()
    assert pagedkv.reserve_workspaces(**caches, **sizes, num_seqs=65) == grown


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("room", [1, 3])
def test_where_there_is_room_for_some_none_grows(cuda, monkeypatch, before, room, captured):
    caches, sizes = caches_of("NHD", 128, "float16", None, stream=5), {"num_heads": 8, "max_seq_len": 8192}
    if captured:
        cuda.begin_capture(5)
    if before:
        pagedkv.reserve_workspaces(**caches, **sizes, num_seqs=before)
    held, allocate, left = dict(cuda.memory), cuda.cuMemAlloc, iter(range(room))

    def alloc(nbytes):
        return allocate(nbytes) if next(left, None) is not None else (Code(2), 0)

    alloc.__name__ = "cuMemAlloc"
    monkeypatch.setattr(cuda, "cuMemAlloc", alloc)
    with pytest.raises(MemoryError, match="make room"):
        pagedkv.reserve_workspaces(**caches, **sizes, num_seqs=4, num_tokens=8)
    assert {address: x for address, x in cuda.memory.items() if x[1] != "freed"} == held
    assert pagedkv.workspace_bytes() == sum(nbytes for nbytes, _ in held.values())


def test_where_there_is_no_room_it_says_so(cuda):
    caches = caches_of("NHD", 128, "float16", None)
    cuda.fail["alloc"] = 2
    with pytest.raises(MemoryError, match=r"workspace split_sums needs .* bytes .* make room"):
        pagedkv.reserve_workspaces(**caches, num_heads=8, num_seqs=4, max_seq_len=8192)
    assert pagedkv.workspace_bytes() == 0


@pytest.mark.parametrize(
    ("layout", "num_seqs", "num_tokens", "message"),
    [
        ("NHD", 2**30, 0, r"num_seqs \* num_kv_heads, times .* must be below 2\*\*31 on a device, got 2147483648$"),
        ("vllm", 2**28, 0, r"num_seqs \* num_heads must be below 2\*\*31 on a device, got 2147483648$"),
        ("HND", 1, 2**29, r"num_tokens \* num_heads / num_kv_heads must be below .*, got 2147483648 and "),
        ("vllm", 1, 2**29, r"num_tokens \* num_heads / num_kv_heads must be below .*, got 2147483648 and "),
    ],
)
def test_calls_that_no_grid_has_room_for_are_refused_before(cuda, layout, num_seqs, num_tokens, message):
    """With the words of the call, and nothing grows."""
    caches, sizes = caches_of(layout, 64, "float16", None), {"num_heads": 8, "num_seqs": num_seqs}
    with pytest.raises(ValueError, match=message) as of_call:
        run(caches, "float16", 8, 64, num_seqs, 1, num_tokens)
    before = allocations(cuda)
    with pytest.raises(ValueError, match=message) as of_reservation:
        pagedkv.reserve_workspaces(**caches, **sizes, max_seq_len=16, num_tokens=num_tokens)
    assert str(of_reservation.value) == str(of_call.value)
    assert allocations(cuda) == before


HOST = {"k_cache": np.zeros((4, 16, 2, 64), np.float16), "v_cache": np.zeros((4, 16, 2, 64), np.float16)}


def test_on_the_host_there_is_nothing_to_reserve():
    assert pagedkv.reserve_workspaces(**HOST, num_heads=4, num_seqs=2, max_seq_len=4096, num_tokens=3) == 0


def test_caches_on_the_host_may_lie_as_the_cpu_takes_them(cuda):
    """Kernels on a GPU move rows of 16 bytes, from addresses that are multiples of 16."""
    rows = np.zeros((4, 16, 2, 66), np.float16)
    assert pagedkv.reserve_workspaces(rows[..., 2:], rows[..., :64], 4, num_seqs=2, max_seq_len=4096) == 0
    with pytest.raises(ValueError, match="k_cache must have rows at multiples of 16 bytes"):
        pagedkv.reserve_workspaces(*(InterfaceArray(rows[..., :64]) for _ in range(2)), 4, num_seqs=2, max_seq_len=4096)


def test_a_bound_may_be_any(cuda):
    """As in the calls: lengths are int32."""
    sizes = caches_of("NHD", 128, "float16", None) | {"num_heads": 8, "num_seqs": 4, "num_tokens": 8}
    assert pagedkv.reserve_workspaces(**sizes, max_seq_len=2**31 - 1) > 0
    assert pagedkv.reserve_workspaces(**sizes, max_seq_len=10**30) == 0


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_heads": 3}, ValueError, "num_heads must be a positive multiple of num_kv_heads, got 3"),
        ({"num_heads": 4.0}, TypeError, "num_heads must be an int, got float"),
        ({"num_seqs": 0}, ValueError, "num_seqs must be at least 1, got 0"),
        ({"max_seq_len": -1}, ValueError, "max_seq_len must be at least 1, got -1"),
        ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0, got -1"),
        ({"num_heads": 2**40}, ValueError, r"num_heads must be below 2\*\*31, got 1099511627776"),
        ({"num_seqs": 2**100}, ValueError, r"num_seqs must be below 2\*\*31, got 12676"),
        ({"num_tokens": 2**31}, ValueError, r"num_tokens must be below 2\*\*31, got 2147483648"),
        ({"num_heads": 2**30, "num_seqs": 2**30}, ValueError, "q must be an array that NumPy can describe"),
        ({"dtype": "int8"}, TypeError, "dtype must be float32, float16 or bfloat16, got 'int8'"),
        ({"dtype": "bfloat16"}, TypeError, "k_cache must have dtype bfloat16, that of q"),
        ({"kv_dtype": "fp8_e4m3"}, TypeError, "k_cache must have dtype uint8 for kv_dtype 'fp8_e4m3'"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"layout": "HNDX"}, ValueError, 'layout must be "NHD", "HND" or "vllm"'),
        ({"v_cache": np.zeros((4, 16, 2, 32), np.float16)}, ValueError, "v_cache must have shape"),
        ({"v_cache": np.zeros((4, 16, 2, 128), np.float16)[..., ::2]}, ValueError, "v_cache must be contiguous along"),
    ],
)
def test_what_no_call_could_have_is_refused(changed, error, message):
    with pytest.raises(error, match=message):
        pagedkv.reserve_workspaces(**({**HOST, "num_heads": 4, "num_seqs": 2, "max_seq_len": 4096} | changed))


def test_fp8_caches_do_not_say_the_dtype_of_q():
    caches = {name: cache.view(np.uint8) for name, cache in HOST.items()}
    with pytest.raises(TypeError, match="dtype must be that of q for caches in 8 bits, got None"):
        pagedkv.reserve_workspaces(**caches, num_heads=4, num_seqs=2, max_seq_len=4096, kv_dtype="fp8_e5m2")
