"""PagedKVCache: K and V of all layers follow the sequences, in every layout and framework."""

import dataclasses
import sys
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import PagedKVCache
from pagedkv.arrays import host_view
from pagedkv.errors import BackendUnavailableError, CapacityError, OutOfBlocksError
from pagedkv.memory import Batch, Stats

from .memory.manager import refused

LAYERS, BLOCKS, P, HEADS, DIM = 3, 10, 8, 2, 16
REST_OF_STATS = {field.name: 0 for field in dataclasses.fields(Stats)[3:]} | {"used_by_group": (0,)}
ARRAYS = {"numpy": np.ndarray, "torch": torch.Tensor}


def make(**options) -> PagedKVCache:
    return PagedKVCache(LAYERS, BLOCKS, P, HEADS, DIM, **{"max_seqs": 4, "max_seq_len": 40} | options)


def as_bytes(array) -> np.ndarray:
    """The array's memory as (N, bytes of a block) uint8."""
    return np.ascontiguousarray(host_view(array)).view(np.uint8).reshape(BLOCKS, -1)


def arrays_of(cache: PagedKVCache) -> list:
    return [*cache.k_caches, *cache.v_caches, *cache.k_scales, *cache.v_scales]


def fill(cache: PagedKVCache) -> list[np.ndarray]:
    """Give every byte of every layer's K and V a value of its own, as good as; returns what is stored then."""
    rng = np.random.default_rng(0)
    for array in arrays_of(cache):
        target = host_view(array)
        target[:] = rng.integers(0, 256, (*target.shape, target.itemsize), np.uint8).view(target.dtype)[..., 0]
    return [as_bytes(array).copy() for array in arrays_of(cache)]


@pytest.mark.parametrize("array_module", ARRAYS)
@pytest.mark.parametrize(
    ("layout", "k_shape", "v_shape"),
    [
        ("NHD", (BLOCKS, P, HEADS, DIM), (BLOCKS, P, HEADS, DIM)),
        ("HND", (BLOCKS, HEADS, P, DIM), (BLOCKS, HEADS, P, DIM)),
        ("vllm", (BLOCKS, HEADS, DIM // 8, P, 8), (BLOCKS, HEADS, DIM, P)),
    ],
)
def test_caches_are_views_of_one_allocation_each(array_module, layout, k_shape, v_shape):
    cache = make(dtype="float16", layout=layout, array_module=array_module)
    assert len(cache.k_caches) == len(cache.v_caches) == LAYERS
    for caches, shape in ((cache.k_caches, k_shape), (cache.v_caches, v_shape)):
        size = 2 * int(np.prod(shape))
        addresses = [array.data_ptr() if array_module == "torch" else array.ctypes.data for array in caches]
        assert addresses == [addresses[0] + layer * size for layer in range(LAYERS)]
        for array in caches:
            assert type(array) is ARRAYS[array_module]
            assert array.shape == shape
            assert not as_bytes(array).any()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "numpy_dtype", "torch_dtype"),
    [
        ("float32", None, np.float32, torch.float32),
        (np.float16, None, np.float16, torch.float16),
        ("bfloat16", None, ml_dtypes.bfloat16, torch.bfloat16),
        (torch.bfloat16, None, ml_dtypes.bfloat16, torch.bfloat16),
        ("float32", "fp8_e4m3", np.uint8, torch.uint8),
        (np.dtype(np.float16), "fp8_e5m2", np.uint8, torch.uint8),
        ("bfloat16", "int8", np.int8, torch.int8),
    ],
)
def test_caches_have_the_dtype_asked_for(dtype, kv_dtype, numpy_dtype, torch_dtype):
    assert make(dtype=dtype, kv_dtype=kv_dtype).k_caches[0].dtype == numpy_dtype
    assert make(dtype=dtype, kv_dtype=kv_dtype, array_module=torch).v_caches[-1].dtype == torch_dtype


@pytest.mark.parametrize("array_module", ARRAYS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "vllm"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("float16", "fp8_e4m3"), ("float16", "int8")]
)
@pytest.mark.parametrize("at_hand", [2**17, 4096])
def test_append_copies_the_shared_block_in_every_layer(monkeypatch, array_module, layout, dtype, kv_dtype, at_hand):
    """All layers at a time, or with float32 two."""
    monkeypatch.setattr("pagedkv.memory.device.layer_caches._AT_HAND", at_hand)
    cache = make(dtype=dtype, kv_dtype=kv_dtype, layout=layout, array_module=array_module)
    expected = fill(cache)
    seq = cache.add(P + 3).seq
    seqs = [seq, *cache.fork(seq, 2)]
    slots = cache.append(seqs, [1, 2, 1])
    assert isinstance(slots, ARRAYS[array_module])
    assert slots.tolist() == [2 * P + 3, 3 * P + 3, 3 * P + 4, P + 3]
    for array in expected:
        array[[2, 3]] = array[1]
    for array, content in zip(arrays_of(cache), expected, strict=True):
        assert (as_bytes(array) == content).all()
    cache.check()


@pytest.mark.parametrize("array_module", ARRAYS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "vllm"])
def test_rows_of_int8_have_scales_beside_them(array_module, layout):
    """In memory a head's are side by side, whatever the layout; layers that read another's have its scales."""
    cache = make(kv_dtype="int8", dtype="bfloat16", layout=layout, array_module=array_module, same_as={1: 0})
    shape = (BLOCKS, P, HEADS) if layout == "NHD" else (BLOCKS, HEADS, P)
    for scales in (cache.k_scales, cache.v_scales):
        assert {(type(x), tuple(x.shape)) for x in scales} == {(ARRAYS[array_module], shape)}
        views = [*map(host_view, scales)]
        assert views[0].dtype == np.float32
        assert sorted(views[0].strides, reverse=True) == [4 * P * HEADS, 4 * P, 4]
        assert views[0].strides[1 if layout == "NHD" else 2] == 4
        assert np.may_share_memory(views[0], views[1])
    assert make(kv_dtype="fp8_e4m3").k_scales == make().v_scales == ()
    k, v = np.random.default_rng(0).standard_normal((2, P + 4, HEADS, DIM), np.float32)
    seqs = [cache.add(n).seq for n in (P + 1, 3)]
    slots = np.concatenate([np.asarray(cache.slots(seq, 0, n)) for seq, n in zip(seqs, (P + 1, 3), strict=True)])
    send = torch.from_numpy if array_module == "torch" else np.asarray
    cache.write(0, send(k), send(v), send(slots))
    stored = {"layout": layout, "kv_dtype": "int8", "k_scales": cache.k_scales[1], "v_scales": cache.v_scales[1]}
    gathered = pagedkv.gather_kv(
        cache.k_caches[1], cache.v_caches[1], cache.batch(seqs).block_tables[0], P + 1, **stored
    )
    for x, y in zip((k, v), gathered, strict=True):
        largest = np.abs(x[: P + 1]).max(axis=-1, keepdims=True)
        assert (np.abs(x[: P + 1] - np.asarray(y)) <= largest / 253).all()


@pytest.mark.parametrize("array_module", ARRAYS)
def test_arrays_that_it_hands_out(array_module):
    cache = make(array_module=array_module)
    seqs = [cache.add(P + 1).seq, cache.add([5, 6, 7]).seq]
    batch = cache.batch(seqs)
    assert isinstance(batch, Batch)
    slots = cache.slots(seqs[0], P - 1, P + 1)
    for array, values, dtype in (
        (batch.block_tables, [[0, 1], [2, -1]], "int32"),
        (batch.seq_lens, [P + 1, 3], "int32"),
        (slots, [P - 1, P], "int64"),
        (cache.append(seqs), [P + 1, 2 * P + 3], "int64"),
    ):
        assert isinstance(array, ARRAYS[array_module])
        assert array.tolist() == values
        assert str(array.dtype).removeprefix("torch.") == dtype
    assert (type(batch.max_seq_len), batch.max_seq_len) == (int, P + 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.seq_lens = slots
    assert cache.batch(seqs[0]).seq_lens.tolist() == [P + 2]
    assert (cache.batch(seqs[1]).max_seq_len, cache.batch([]).max_seq_len) == (4, 0)


@pytest.mark.parametrize(
    "tokens", [4, np.int32(4), [1, 2, 3, 4], (1, 2, 3, 4), np.arange(4), np.arange(4, dtype=np.uint16), range(4)]
)
def test_add_takes_a_count_or_the_tokens(tokens):
    cache = make()
    seq, num_cached = cache.add(tokens)
    assert num_cached == 0
    assert cache.batch(seq).seq_lens.tolist() == [4]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_tokens_of_torch(dtype):
    cache = make()
    seq, _ = cache.add(torch.arange(P, dtype=getattr(torch, dtype)))
    cache.append(seq, P, torch.arange(P, dtype=getattr(torch, dtype)))
    cache.commit(seq)
    assert cache.find([*range(P), *range(P), 0]) == cache.find(torch.arange(2 * P + 1) % P) == 2 * P
    for tokens, error, message in (
        (torch.ones(1, 3, dtype=torch.int64), ValueError, r"^tokens must have shape \(n,\), got \(1, 3\)$"),
        (torch.ones(3), TypeError, r"^tokens must have an integer dtype, got float32$"),
        (torch.ones(3, dtype=torch.bool), TypeError, r"^tokens must have an integer dtype, got bool$"),
        (torch.tensor([-1]), ValueError, r"^tokens must be ids in 0..2\*\*31 - 1, got -1$"),
    ):
        with refused(cache, error, message):
            cache.add(tokens)


def test_sequences_come_and_go():
    cache = make()
    seq = cache.add(P + 3).seq
    [fork] = cache.fork(seq)
    cache.truncate([seq, fork], [P, 1])
    assert cache.batch([seq, fork]).seq_lens.tolist() == [P, 1]
    assert cache.stats().used == 1
    cache.free(seq)
    cache.free([fork])
    assert cache.stats().used == 0
    cache.check()


def test_stats_count_blocks_tokens_and_bytes():
    cache = make()
    num_bytes = sum(array.nbytes for array in (*cache.k_caches, *cache.v_caches))
    assert cache.stats() == Stats(10, used=0, free=10, **REST_OF_STATS | {"num_bytes": num_bytes})
    seq = cache.add(2 * P + 3).seq
    [fork] = cache.fork(seq)
    cache.truncate(fork, P + 1)
    cache.append(cache.add(0).seq, P)
    assert cache.stats() == Stats(
        num_blocks=10,
        used=4,
        free=6,
        shared=2,
        cached=0,
        used_by_group=(4,),
        num_tokens=2 * P + 3 + P + 1 + P,
        wasted_slots=P - 3,
        contiguous_blocks=15,
        queried_tokens=0,
        hit_tokens=0,
        preempted_tokens=0,
        preempted_hit_tokens=0,
        num_bytes=10 * 2 * LAYERS * P * HEADS * DIM * 4,
        used_bytes=4 * 2 * LAYERS * P * HEADS * DIM * 4,
    )
    cache.truncate(seq, P + 3)
    assert cache.stats().wasted_slots == P - 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.stats().used = 3


def test_plot_shows_who_holds_each_block():
    cache = make()
    seq = cache.add(2 * P).seq
    cache.fork(cache.add(P).seq)
    other = cache.add(P + 1).seq
    legend = "A-Z sequences, a-z with empty slots  + shared  . free; 1 block a character"
    assert cache.plot(width=4) == f"AA+C\nc...\n..\n{legend}"
    cache.free(seq)
    cache.append(other, P - 1)
    assert cache.plot().startswith("..+BB.....\n")


def test_the_map_for_notebooks_shows_every_sequence_and_the_numbers():
    cache = make()
    seqs = [cache.add(n).seq for n in (P, P + 1)]
    html = cache._repr_html_()
    assert "<tr><th>num_blocks</th><td>10</td></tr>" in html
    assert [f"<title>sequence {seq}</title>" in html for seq in seqs] == [True, True]
    assert 'stroke="currentColor"' not in html
    cache.fork(seqs[0])
    assert 'stroke="currentColor"' in cache._repr_html_()


def test_the_longest_sequence_is_a_whole_number_of_blocks():
    assert make(max_seq_len=33).max_blocks == 5
    assert make(max_seq_len=None).max_blocks == BLOCKS


@pytest.mark.parametrize(("name", "extra"), [("cupy", "cu13"), ("torch", "torch")])
def test_an_array_module_that_is_not_installed(monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf'^array_module {name} .*: pip install .*\[{extra}\]"'):
        make(array_module=name)


def test_cupy_without_a_gpu_is_an_error(monkeypatch):
    def empty(shape):
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    module = ModuleType("cupy")
    module.empty = empty
    monkeypatch.setitem(sys.modules, "cupy", module)
    with pytest.raises(BackendUnavailableError, match=r"CuPy finds no GPU .*cudaErrorInsufficientDriver.*nvidia-smi"):
        make(array_module="cupy")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"array_module": "jax"}, ValueError, r"^array_module must be numpy, torch or cupy, or .* one, got 'jax'$"),
        ({"array_module": 3}, ValueError, r"^array_module must be numpy, torch or cupy, or .* one, got 3$"),
        ({"layout": "nhd"}, ValueError, r"^layout must be \"NHD\", \"HND\" or \"vllm\", got 'nhd'$"),
        (
            {"dtype": "int8"},
            TypeError,
            r"^dtype must be float32, float16 or bfloat16, got 'int8': for a cache in 8 bits pass kv_dtype=",
        ),
        ({"kv_dtype": "fp8"}, ValueError, r"^kv_dtype must be"),
        ({"k_scale": 2.0}, ValueError, r"^k_scale needs an fp8 cache, got a cache of float32$"),
        ({"v_scale": [np.ones(1)]}, ValueError, r"^v_scale needs an fp8 cache, got a cache of float32$"),
        (
            {"kv_dtype": "int8", "v_scale": 2.0},
            ValueError,
            r"^v_scale needs an fp8 cache, got a cache of int8, whose rows carry their own scales$",
        ),
        ({"kv_dtype": "fp8_e4m3", "k_scale": np.nan}, ValueError, r"^k_scale must be positive and finite .*, got nan$"),
        ({"kv_dtype": "fp8_e4m3", "v_scale": ["1"]}, TypeError, r"^v_scale must be a number, got str$"),
        ({"kv_dtype": "fp8_e4m3", "k_scale": np.array(-1.0)}, ValueError, r"^k_scale must be positive and finite"),
        (
            {"kv_dtype": "fp8_e4m3", "k_scale": np.ones(2)},
            ValueError,
            r"^k_scale .* \(num_kv_heads,\) = \(1,\), got \(2,\)$",
        ),
        (
            {"kv_dtype": "fp8_e4m3", "k_scale": np.array([1])},
            TypeError,
            r"^k_scale must have a dtype of floats, got int64$",
        ),
        (
            {"kv_dtype": "fp8_e4m3", "num_kv_heads": 2, "v_scale": [np.array([1.0, np.nan])]},
            ValueError,
            r"^v_scale must be positive and finite, got nan for KV head 1$",
        ),
        (
            {"kv_dtype": "fp8_e4m3", "num_kv_heads": 2, "v_scale": np.array([1.0, 1e39])},
            ValueError,
            r"^v_scale must be positive and finite, got inf for KV head 1$",
        ),
        (
            {"dtype": "float8_e4m3fn"},
            TypeError,
            r"got 'float8_e4m3fn': for a cache in 8 bits pass kv_dtype=\"fp8_e4m3\"",
        ),
        ({"num_layers": 0}, ValueError, r"^num_layers must be at least 1, got 0$"),
        ({"num_blocks": 0}, ValueError, r"^num_blocks must be at least 1, got 0$"),
        ({"block_size": 0}, ValueError, r"^block_size must be at least 1, got 0$"),
        ({"block_size": 2**33}, ValueError, r"^block_size must be at most 2147483647, got 8589934592$"),
        ({"block_size": 2**29}, ValueError, r"^block_size must be at most 536870911 with a prefix cache, got"),
        ({"num_kv_heads": 0}, ValueError, r"^num_kv_heads must be at least 1, got 0$"),
        ({"head_dim": 12}, ValueError, r"^head_dim must be a multiple of 8 from 8 to 512, got 12$"),
        ({"head_dim": 16.0}, TypeError, r"^head_dim must be an int, got float$"),
        ({"max_seqs": 0}, ValueError, r"^max_seqs must be at least 1, got 0$"),
        ({"max_seq_len": 0}, ValueError, r"^max_seq_len must be at least 1, got 0$"),
        ({"max_seq_len": 40.0}, TypeError, r"^max_seq_len must be an int, got float$"),
    ],
)
def test_caches_that_cannot_be(options, error, message):
    sizes = {"num_layers": 1, "num_blocks": 4, "block_size": 8, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(error, match=message):
        PagedKVCache(**sizes | options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, s: c.add(41), ValueError, r"^num_tokens must be at most max_blocks \* block_size = 40, got 41$"),
        (lambda c, s: c.add(True), TypeError, r"^num_tokens must be an int, got bool$"),
        (lambda c, s: c.add(2.0), TypeError, r"^tokens must be a list, a tuple or an array of ints, got float$"),
        (lambda c, s: c.add("text"), TypeError, r"^tokens must be ids, got a text: give what a tokenizer makes of it$"),
        (
            lambda c, s: c.append(s, "2"),
            TypeError,
            r"^n must be an int, or a list or array with one for each .*, got str$",
        ),
        (lambda c, s: c.add([1.0]), TypeError, r"^tokens must have an integer dtype, got float64$"),
        (lambda c, s: c.add(np.array(2)), ValueError, r"^tokens must have shape \(n,\), got \(\)$"),
        (lambda c, s: c.append(True), TypeError, r"^seqs must hold ints, got a bool$"),
        (lambda c, s: c.append(s, np.array(2)), ValueError, r"^n must have shape \(num_seqs,\) = \(1,\), got \(\)$"),
        (lambda c, s: c.append(s, torch.tensor([1])), TypeError, r"array of ints, got Tensor: pass its tolist\(\)$"),
        (lambda c, s: c.attend(0, None, s), TypeError, r"^batch must be a Batch, made by batch\(seqs\), got int$"),
        (lambda c, s: c.attend(0, None, s, layout="HND"), TypeError, r"^attend\(\) takes no layout: the cache passes"),
        (lambda c, s: c.write(0, None, None, None, k_scales=0), TypeError, r"^write\(\) takes no k_scales: the cache"),
        (lambda c, s: c.fork(s, 4), CapacityError, r"^4 more sequences asked for, 3 of 4 rows are free$"),
        (lambda c, s: c.append([s, s]), ValueError, r"^seqs must name each sequence once"),
        (lambda c, s: c.append(s, 39), ValueError, r"^n must be at most 38"),
        (lambda c, s: c.truncate(s, 3), ValueError, r"^length must be at most the 2 tokens of sequence 8, got 3$"),
        (lambda c, s: c.free(s + 1), KeyError, r"freed or never added"),
        (lambda c, s: c.batch([s, 0]), KeyError, r"no sequence 0: it was freed or never added"),
        (lambda c, s: c.slots(s, 0, 3), ValueError, r"^start <= stop <= 2"),
        (lambda c, s: c.plot(width=0), ValueError, r"^width must be at least 1, got 0$"),
    ],
)
def test_refusals(call, error, message):
    cache = make()
    seq = cache.add(2).seq
    fill(cache)
    with refused(cache, error, message):
        call(cache, seq)


def test_an_append_without_blocks_for_the_copies_changes_no_cache():
    cache = make()
    seq = cache.add(P + 3).seq
    seqs = [seq, *cache.fork(seq)]
    cache.add(5 * P)
    cache.add(3 * P)
    fill(cache)
    with refused(cache, OutOfBlocksError, r"^1 blocks asked for, 0 of 10 are free$"):
        cache.append(seqs)


# -- what a server needs at hand
def test_what_there_is_room_for():
    cache = make(max_seqs=2)
    assert (cache.num_free, cache.block_size) == (BLOCKS, P)
    assert cache.can_add(40)
    assert not cache.can_add(41), "longer than a sequence can be"
    seq = cache.add(40).seq
    assert cache.can_add(5 * P)
    assert not cache.can_add(4 * P + 1, reserve=1)
    assert cache.can_add(4 * P, reserve=1)
    assert cache.can_add(4 * P, reserve=1)
    assert cache.seq_lens([seq, seq]).tolist() == [40, 40]
    other = cache.add(5 * P).seq
    cache.truncate(other, 0)
    assert not cache.can_add(0), "no row is free"
    with pytest.raises(ValueError, match=r"^reserve must be at least 0, got -1$"):
        cache.can_add(1, reserve=-1)


def test_found_blocks_need_room_only_if_no_sequence_holds_them():
    cache = make()
    tokens = list(range(40))
    seq = cache.add(tokens).seq
    cache.commit(seq)
    assert cache.can_add(tokens, reserve=4)
    assert not cache.can_add(tokens, reserve=5), "the last token is computed again, in a copy"
    cache.free(seq)
    assert cache.can_add(tokens, reserve=5)
    assert not cache.can_add(tokens, reserve=6)
    assert not cache.can_add(tokens, "salt", reserve=6)


def test_repr_says_how_full_they_are():
    cache = make()
    cache.add(list(range(P)))
    assert repr(cache) == "PagedKVCache(3 layers of (10, 8, 2, 16) float32; 1 sequences, 9 blocks free)"
    assert repr(cache.pool) == "BlockPool(num_blocks=10; 9 free, 0 of them cached)"


def test_repr_shows_the_groups_of_a_cache_with_windows():
    groups = "; groups of layers: 1 without a window, 2 of window 6; 0 sequences, 10 blocks free)"
    assert repr(make(windows=[6, None, 6])).endswith(groups)
    assert "groups" not in repr(make(windows=None, group_size=1))


def test_out_of_blocks_says_how_many():
    cache = make()
    cache.add(40)
    cache.add(3 * P)
    with pytest.raises(OutOfBlocksError) as raised:
        cache.add(3 * P)
    assert (raised.value.requested, raised.value.free) == (3, 2)


@pytest.mark.parametrize("array_module", ARRAYS)
def test_query_rows_of_a_batch(array_module):
    cache = make(array_module=array_module)
    seqs = [cache.add(n).seq for n in (P + 1, 0, 3)]
    for query_lens, starts, positions, is_decode in (
        (None, [0, 1, 1, 2], [P, 2], False),
        ([3, 0, 3], [0, 3, 3, 6], [P - 2, P - 1, P, 0, 1, 2], False),
        (0, [0, 0, 0, 0], [], False),
    ):
        batch = cache.batch(seqs, query_lens)
        assert batch.query_starts.tolist() == starts
        assert batch.positions.tolist() == positions
        assert batch.is_decode == is_decode
        assert isinstance(batch.positions, ARRAYS[array_module])
        assert str(batch.query_starts.dtype).removeprefix("torch.") == "int32"
        assert str(batch.positions.dtype).removeprefix("torch.") == "int64"
    assert cache.batch([seqs[0], seqs[2]]).is_decode


def test_batches_are_equal_to_themselves_alone():
    cache = make()
    batch, other = cache.batch([]), cache.batch([])
    assert batch == batch
    assert batch != other
    assert len({batch, other}) == 2


@pytest.mark.parametrize(("query_lens", "num_rows"), [(None, 3), (None, 1), ([2, 1], 2)])
def test_query_rows_that_are_not_those_of_the_batch(query_lens, num_rows):
    cache = make()
    batch = cache.batch([cache.add(n).seq for n in (5, 3)], query_lens)
    with pytest.raises(
        ValueError, match=rf"^q must have num_tokens = {batch.num_tokens} rows, .* got {num_rows}: batch"
    ):
        cache.attend(0, np.ones((num_rows, 4, DIM), np.float32), batch)


def test_query_rows_behind_those_of_a_batch_are_padding():
    cache = make()
    batch = cache.batch([cache.add(n).seq for n in (5, 3)], [2, 1])
    q = np.ones((4, 4, DIM), np.float32)
    assert (cache.attend(0, q, batch)[:3] == cache.attend(0, q[:3], batch)).all()


def test_more_query_rows_than_tokens():
    cache = make()
    seqs = [cache.add(n).seq for n in (5, 3)]
    with refused(cache, ValueError, rf"^query_lens must be at most the 3 tokens of sequence {seqs[1]}, got 4$"):
        cache.batch(seqs, 4)


@pytest.mark.parametrize("array_module", ["numpy", "torch"])
def test_scales_as_checkpoints_have_them(array_module):
    """An array of one is a number, an array for the heads is copied; a parameter and float64 are taken, too."""
    k, v = np.random.default_rng(0).standard_normal((2, 4, HEADS, DIM), np.float32)
    heads = np.array([0.5, 2.0], np.float32)
    changing = heads.copy()

    def stored(**scales):
        cache = make(kv_dtype="fp8_e4m3", array_module=array_module, **scales)
        changing[:] = -1
        cache.write(1, k, v, cache.append(cache.add(0).seq, 4))
        changing[:] = heads
        return [np.asarray(each[1]).tolist() for each in (cache.k_caches, cache.v_caches)]

    one, each = stored(k_scale=2.0, v_scale=0.5), stored(k_scale=heads, v_scale=heads)
    assert one != each
    for form in (np.array, np.float32, torch.tensor, lambda x: torch.nn.Parameter(torch.tensor([x]))):
        assert stored(k_scale=form(2.0), v_scale=[form(0.5)] * LAYERS) == one
    for form in (
        np.float64,
        lambda x: torch.nn.Parameter(torch.tensor(x)),
        lambda x: torch.tensor(x, dtype=torch.bfloat16),
    ):
        assert stored(k_scale=form(heads), v_scale=[form(heads)] * LAYERS) == each
    assert stored(k_scale=changing, v_scale=[changing] * LAYERS) == each


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_arrays_of_every_dtype_become_tensors(dtype):
    x = np.arange(4).astype(dtype)
    tensor = make(array_module="torch").asarray(x)
    assert tensor.dtype == getattr(torch, x.dtype.name)
    x[2] = 7
    assert tensor.tolist() == [0, 1, 7, 3]


def test_a_layer_reads_another_s_keys_and_values_with_its_scales():
    cache = make(kv_dtype="fp8_e4m3", k_scale=[4.0] + [None] * (LAYERS - 1), v_scale=0.5, same_as={1: 0})
    k, v = np.random.default_rng(0).standard_normal((2, 4, HEADS, DIM), np.float32)
    seq = cache.add(0).seq
    cache.write(0, k, v, cache.append(seq, 4))
    q, batch = k[:1].repeat(2, axis=1), cache.batch(seq)
    assert (cache.attend(1, q, batch) == cache.attend(0, q, batch)).all()


@pytest.mark.parametrize(
    ("layout", "kv_dtype", "scales"), [("vllm", None, (None, None)), ("NHD", "fp8_e4m3", (0.5, [0.25, 2.0, 1.0]))]
)
def test_write_and_attend_know_how_the_cache_is_stored(layout, kv_dtype, scales):
    cache = make(layout=layout, kv_dtype=kv_dtype, k_scale=scales[0], v_scale=scales[1])
    seqs = [cache.add(n).seq for n in (P + 1, 3)]
    slots = np.concatenate([cache.slots(seq, 0, n) for seq, n in zip(seqs, (P + 1, 3), strict=True)])
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, P + 4, HEADS, DIM), np.float32)
    q = rng.standard_normal((P + 4, 4, DIM), np.float32)
    batch, ends = cache.batch(seqs, [P + 1, 3]), [P, P + 3]
    for layer in range(LAYERS):
        options = {"layout": layout, "kv_dtype": kv_dtype, "k_scale": scales[0]}
        options["v_scale"] = scales[1][layer] if scales[1] else None
        cache.write(layer, k, v, slots)
        caches = cache.k_caches[layer], cache.v_caches[layer]
        stored_k, stored_v = pagedkv.gather_kv(*caches, batch.block_tables[0], P + 1, **options)
        np.testing.assert_allclose(stored_k, k[: P + 1], rtol=0.07 if kv_dtype else 0, atol=0.02 if kv_dtype else 0)
        np.testing.assert_allclose(stored_v, v[: P + 1], rtol=0.07 if kv_dtype else 0, atol=0.02 if kv_dtype else 0)
        where = batch.block_tables, batch.seq_lens
        expected = pagedkv.prefill_attention(q, *caches, *where, batch.query_starts, **options)
        assert (cache.attend(layer, q, batch) == expected).all()
        decoded, lse = cache.attend(layer, q[ends], cache.batch(seqs), return_lse=True)
        assert (decoded == pagedkv.decode_attention(q[ends], *caches, *where, **options)).all()
        assert lse.shape == (2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.attend(3, None, None), r"^layer must be at most 2, got 3$"),
        (lambda c: c.write(-1, None, None, None), r"^layer must be at least 0, got -1$"),
        (lambda c: make(k_scale=[1.0, 1.0]), r"^k_scale must be one for all layers, or a list of 3, got 2$"),
    ],
)
def test_missing_layers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(make())


def test_a_table_that_grows_with_its_longest_sequence():
    cache = PagedKVCache(1, 100_000, 1, 1, 8, max_seqs=1000)
    rows = cache._rows
    assert rows.blocks.nbytes == 4 * 4 * 100_000, "4 entries for each block, not 1000"
    seqs = [cache.add(n).seq for n in (300, 401)]
    assert rows.blocks.shape[1] == 800
    [fork] = cache.fork(seqs[0])
    cache.append(fork, 501)
    with refused(cache, OutOfBlocksError):
        cache.append(fork, 99_199)
    with refused(cache, ValueError, rf"^n must be at most 99199, .* for sequence {fork}, got 99200$"):
        cache.append(fork, 99_200)
    assert cache.batch([*seqs, fork]).block_tables[2, 299:302].tolist() == [299, 701, 702]
    cache.check()
