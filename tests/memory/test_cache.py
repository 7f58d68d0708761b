"""PagedKVCache: K and V of all layers follow the sequences, in every layout and kind of array."""

import dataclasses
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from pagedkv.errors import CapacityError, OutOfBlocksError
from pagedkv.memory import Batch, PagedKVCache, Stats

from .manager import refused

LAYERS, BLOCKS, P, HEADS, DIM = 3, 10, 8, 2, 16
REST_OF_STATS = [field.name for field in dataclasses.fields(Stats)][3:]
ARRAYS = {"numpy": np.ndarray, "torch": torch.Tensor}


def make(**options) -> PagedKVCache:
    return PagedKVCache(LAYERS, BLOCKS, P, HEADS, DIM, **{"max_seqs": 4, "max_seq_len": 40} | options)


def as_bytes(array) -> np.ndarray:
    """The array's memory as (N, bytes of a block) uint8."""
    if isinstance(array, torch.Tensor):
        array = array.view(torch.uint8).numpy()
    return np.ascontiguousarray(array).view(np.uint8).reshape(BLOCKS, -1)


def fill(cache: PagedKVCache) -> list[np.ndarray]:
    """Give every byte of every layer's K and V a value of its own, as good as; returns what is stored then."""
    rng = np.random.default_rng(0)
    for array in (*cache.k_caches, *cache.v_caches):
        target = array.view(torch.uint8).numpy() if isinstance(array, torch.Tensor) else array.view(np.uint8)
        target[:] = rng.integers(0, 256, target.shape, np.uint8)
    return [as_bytes(array).copy() for array in (*cache.k_caches, *cache.v_caches)]


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
    ],
)
def test_dtypes(dtype, kv_dtype, numpy_dtype, torch_dtype):
    assert make(dtype=dtype, kv_dtype=kv_dtype).k_caches[0].dtype == numpy_dtype
    assert make(dtype=dtype, kv_dtype=kv_dtype, array_module=torch).v_caches[-1].dtype == torch_dtype


@pytest.mark.parametrize("array_module", ARRAYS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "vllm"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("float16", "fp8_e4m3")])
def test_append_copies_the_shared_block_in_every_layer(array_module, layout, dtype, kv_dtype):
    cache = make(dtype=dtype, kv_dtype=kv_dtype, layout=layout, array_module=array_module)
    expected = fill(cache)
    seq = cache.add(P + 3).seq
    seqs = [seq, *cache.fork(seq, 2)]
    slots = cache.append(seqs, [1, 2, 1])
    assert isinstance(slots, ARRAYS[array_module])
    assert slots.tolist() == [2 * P + 3, 3 * P + 3, 3 * P + 4, P + 3]
    for array in expected:
        array[[2, 3]] = array[1]
    for array, content in zip((*cache.k_caches, *cache.v_caches), expected, strict=True):
        assert (as_bytes(array) == content).all()
    cache.check()


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


@pytest.mark.parametrize("tokens", [4, np.int32(4), [1, 2, 3, 4], (1, 2, 3, 4), np.arange(4), range(4)])
def test_add_takes_a_count_or_the_tokens(tokens):
    cache = make()
    seq, num_cached = cache.add(tokens)
    assert num_cached == 0
    assert cache.batch(seq).seq_lens.tolist() == [4]


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


def test_stats():
    cache = make()
    assert cache.stats() == Stats(10, used=0, free=10, **dict.fromkeys(REST_OF_STATS, 0))
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
        num_tokens=2 * P + 3 + P + 1 + P,
        wasted_slots=P - 3,
        contiguous_blocks=15,
        queried_tokens=0,
        hit_tokens=0,
    )
    cache.truncate(seq, P + 3)
    assert cache.stats().wasted_slots == P - 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.stats().used = 3


def test_plot():
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
    assert make(max_seq_len=33).table.max_blocks == 5
    assert make(max_seq_len=None).table.max_blocks == BLOCKS


@pytest.mark.parametrize(("name", "extra"), [("cupy", "cu13"), ("torch", "torch")])
def test_an_array_module_that_is_not_installed(monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf'^array_module {name} .*: pip install "pagedkv\[{extra}\]"'):
        make(array_module=name)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"array_module": "jax"}, ValueError, r"^array_module must be numpy, torch or cupy, or .* one, got 'jax'$"),
        ({"array_module": 3}, ValueError, r"^array_module must be numpy, torch or cupy, or .* one, got 3$"),
        ({"layout": "nhd"}, ValueError, r"^layout must be \"NHD\", \"HND\" or \"vllm\", got 'nhd'$"),
        ({"dtype": "int8"}, TypeError, r"^dtype must be float32, float16 or bfloat16, got 'int8'$"),
        ({"kv_dtype": "fp8"}, ValueError, r"^kv_dtype must be"),
        ({"num_layers": 0}, ValueError, r"^num_layers must be at least 1, got 0$"),
        ({"num_blocks": 0}, ValueError, r"^num_blocks must be at least 1, got 0$"),
        ({"block_size": 0}, ValueError, r"^block_size must be at least 1, got 0$"),
        ({"block_size": 2**33}, ValueError, r"^block_size must be at most 2147483647, got 8589934592$"),
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
        (lambda c, s: c.add([1.0]), TypeError, r"^tokens must have dtype int32 or int64, got float64$"),
        (lambda c, s: c.add(np.array(2)), ValueError, r"^tokens must have shape \(n,\), got \(\)$"),
        (lambda c, s: c.append(True), TypeError, r"^seqs must hold ints, got a bool$"),
        (lambda c, s: c.append(s, np.array(2)), ValueError, r"^n must have shape \(num_seqs,\) = \(1,\), got \(\)$"),
        (lambda c, s: c.add("abc"), TypeError, r"^tokens must be a list, a tuple or an array of ints, got str$"),
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
