"""Writing, gathering, copying and swapping blocks, against loops over single tokens."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given

import pagedkv
from pagedkv.layouts import FP8_DTYPES, LAYOUTS, cache_shapes

from ..support.problems import FLOATS

KINDS = [*FLOATS, *FP8_DTYPES]


def kv_options(kind):
    return {"kv_dtype": kind} if kind in FP8_DTYPES else {}


def element(kind):
    return FLOATS.get(kind, np.dtype(np.uint8))


def token(cache, layout, slot, block_size, *, is_k):
    """The elements (Hkv, D) of one slot, gathered element by element of the layout's definition."""
    block, offset = divmod(slot, block_size)
    if layout == "NHD":
        return cache[block, offset]
    if layout == "HND" or not is_k:
        return cache[block, :, offset] if layout == "HND" else cache[block, :, :, offset]
    x = cache.shape[-1]
    return np.stack([cache[block, :, d // x, offset, d % x] for d in range(x * cache.shape[2])], axis=-1)


def caches(rng, layout, kind, num_blocks, block_size, heads, head_dim, combined=False):
    """Caches of random bits, so that whatever moves is noticed."""
    dtype = element(kind)
    shapes = cache_shapes(layout, num_blocks, block_size, heads, head_dim, dtype.itemsize)
    result = []
    for shape in shapes:
        raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        result.append(raw.view(dtype)[..., 0])
    if not combined:
        return [np.ascontiguousarray(x) for x in result]
    both = np.empty((num_blocks, 2, result[0][0].size if num_blocks else 1), dtype)
    views = [both[:, i].reshape(shape) for i, shape in enumerate(shapes)]
    for view, x in zip(views, result, strict=True):
        view.view(np.uint8)[...] = np.ascontiguousarray(x).view(np.uint8)
    return views


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


def stored(x, kind, scale):
    """What the cache keeps of x (Hkv, D), by ml_dtypes' own rounding."""
    if kind in FLOATS:
        with np.errstate(over="ignore"):
            return x.astype(FLOATS[kind])
    largest = float(ml_dtypes.finfo(FP8_DTYPES[kind]).max)
    scaled = x.astype(np.float32) / np.broadcast_to(np.asarray(scale, np.float32), len(x))[:, None]
    return np.clip(scaled, -largest, largest).astype(FP8_DTYPES[kind]).view(np.uint8)


@st.composite
def problems(draw):
    layout, kind = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(KINDS))
    block_size = draw(st.sampled_from([8, 16, 32] if layout == "vllm" else [1, 3, 8, 16]))
    heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([16, 64] if layout == "vllm" else [8, 24, 64]))
    num_blocks = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    k_cache, v_cache = caches(rng, layout, kind, num_blocks, block_size, heads, head_dim, draw(st.booleans()))
    num_tokens = draw(st.integers(0, num_blocks * block_size))
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    slots[rng.random(num_tokens) < draw(st.sampled_from([0, 0, 0.3]))] = draw(st.sampled_from([-1, -(2**63)]))
    given_dtypes = list(FLOATS) if kind in FP8_DTYPES else [kind, "float32"]
    k = (rng.standard_normal((num_tokens, heads, head_dim)) * 3).astype(FLOATS[draw(st.sampled_from(given_dtypes))])
    v = (rng.standard_normal((num_tokens, heads, head_dim)) * 3).astype(FLOATS[draw(st.sampled_from(given_dtypes))])
    options = {"layout": layout, **kv_options(kind)}
    if kind in FP8_DTYPES and draw(st.booleans()):
        options |= {"k_scale": draw(st.sampled_from([0.5, 3])), "v_scale": rng.random(heads, np.float32) + 0.1}
    return kind, block_size, (k, v, k_cache, v_cache, slots), options


@given(problems())
def test_write_kv(problem):
    kind, block_size, (k, v, k_cache, v_cache, slots), options = problem
    expected = k_cache.copy(), v_cache.copy()
    for row, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            for x, cache, scale in ((k, expected[0], "k_scale"), (v, expected[1], "v_scale")):
                code = stored(x[row], kind, options.get(scale, 1.0))
                if options["layout"] == "NHD":
                    cache[block, offset] = code
                elif options["layout"] == "HND":
                    cache[block, :, offset] = code
                elif x is v:
                    cache[block, :, :, offset] = code
                else:
                    cache[block, :, :, offset] = code.reshape(len(code), -1, cache.shape[-1])
    assert pagedkv.write_kv(k, v, k_cache, v_cache, slots, **options) is None
    np.testing.assert_array_equal(bits(k_cache), bits(expected[0]))
    np.testing.assert_array_equal(bits(v_cache), bits(expected[1]))


@given(problems(), st.data())
def test_gather_kv(problem, data):
    kind, block_size, (_, _, k_cache, v_cache, _), options = problem
    num_blocks = len(k_cache)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    table = rng.integers(0, num_blocks, 5).astype(np.int32)
    seq_len = data.draw(st.integers(0, 5 * block_size))
    table[-(-seq_len // block_size) :] = data.draw(st.sampled_from([-1, 2**31 - 1]))
    k, v = pagedkv.gather_kv(k_cache, v_cache, table, seq_len, **options)
    for x, cache, scale in ((k, k_cache, "k_scale"), (v, v_cache, "v_scale")):
        assert x.flags.c_contiguous
        for position in range(seq_len):
            slot = int(table[position // block_size]) * block_size + position % block_size
            code = np.ascontiguousarray(token(cache, options["layout"], slot, block_size, is_k=x is k))
            if kind in FP8_DTYPES:
                factor = np.broadcast_to(np.asarray(options.get(scale, 1.0), np.float32), len(code))[:, None]
                np.testing.assert_array_equal(x[position], code.view(FP8_DTYPES[kind]).astype(np.float32) * factor)
            else:
                np.testing.assert_array_equal(bits(x[position]), bits(code))
    assert k.dtype == v.dtype == FLOATS.get(kind, np.dtype(np.float32))
    assert len(k) == len(v) == seq_len


def write_one(values, kind, dtype, scale=None):
    """The codes of single values, through a cache with one slot for every 8 of them."""
    x = np.zeros(-(-len(values) // 8) * 8, dtype)
    x[: len(values)] = values
    x = x.reshape(-1, 1, 8)
    k_cache, v_cache = np.zeros((2, len(x), 1, 1, 8), element(kind))
    options = {} if scale is None else {"k_scale": scale, "v_scale": scale}
    pagedkv.write_kv(x, x, k_cache, v_cache, np.arange(len(x)), **kv_options(kind), **options)
    np.testing.assert_array_equal(bits(k_cache), bits(v_cache))
    return k_cache.reshape(-1)[: len(values)]


@pytest.mark.parametrize("kind", FP8_DTYPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp8_of_every_16_bit_value(kind, dtype):
    values = np.arange(2**16, dtype=np.uint16).view(FLOATS[dtype])
    largest = float(ml_dtypes.finfo(FP8_DTYPES[kind]).max)
    with np.errstate(invalid="ignore"):
        expected = np.clip(values.astype(np.float32), -largest, largest).astype(FP8_DTYPES[kind])
    codes = write_one(values, kind, FLOATS[dtype])
    np.testing.assert_array_equal(codes.view(FP8_DTYPES[kind]).astype(np.float32), expected.astype(np.float32))
    assert np.isnan(values.astype(np.float32)).sum() == np.isnan(codes.view(FP8_DTYPES[kind]).astype(np.float32)).sum()


@pytest.mark.parametrize("kind", FP8_DTYPES)
def test_fp8_rounds_to_nearest_even_and_saturates(kind):
    dtype = FP8_DTYPES[kind]
    finite = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.unique(finite[np.isfinite(finite)])
    middles = (finite[1:] + finite[:-1]) / 2
    below, above = np.nextafter(middles, np.float32(-np.inf)), np.nextafter(middles, np.float32(np.inf))
    for values, expected in ((below, finite[:-1]), (above, finite[1:])):
        np.testing.assert_array_equal(write_one(values, kind, np.float32).view(dtype).astype(np.float32), expected)
    codes = write_one(middles, kind, np.float32)
    assert not (codes & 1).any()
    nearest = codes.view(dtype).astype(np.float32)
    assert ((nearest == finite[:-1]) | (nearest == finite[1:])).all()
    top = finite[-1]
    wide = np.array([top, 1.01 * top, 1e30, np.inf, -1e30, -np.inf], np.float32)
    saturated = write_one(wide, kind, np.float32).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(saturated, [top, top, top, top, -top, -top])
    assert np.isnan(write_one([np.nan, -np.nan], kind, np.float32).view(dtype).astype(np.float32)).all()
    zeros = write_one([0.0, -0.0, 1e-30, -1e-30], kind, np.float32)
    assert zeros.tolist() == [0, 0x80, 0, 0x80]


def test_fp8_divides_by_the_scale_in_float32():
    values = np.linspace(-500, 500, 4001, dtype=np.float32)
    for scale in (3, 0.1, 1e-40):
        with np.errstate(over="ignore"):
            scaled = np.clip(values / np.float32(scale), -448, 448)
        expected = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(write_one(values, "fp8_e4m3", np.float32, scale), expected)


@pytest.mark.parametrize("kind", FLOATS)
def test_special_floats_are_kept(kind):
    values = [np.inf, -np.inf, np.nan, 1e-40, -0.0, 3e38]
    with np.errstate(over="ignore"):
        expected = np.array(values, np.float32).astype(FLOATS[kind])
    kept = write_one(values, kind, np.float32)
    np.testing.assert_array_equal(kept.astype(np.float32), expected.astype(np.float32))
    payload = np.array([0x7F812345], np.uint32).view(np.float32)
    assert write_one(payload, "float32", np.float32).view(np.uint32) == 0x7F812345


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_round_trip(dtype, layout):
    shapes = cache_shapes(layout, 4, 8, 2, 16, dtype.itemsize)
    k_cache, v_cache = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    k, v = torch.randn(2, 11, 2, 16).to(dtype)
    table = torch.tensor([2, 0], dtype=torch.int32)
    slots = torch.cat([torch.arange(16, 24), torch.arange(3)])
    pagedkv.write_kv(k, v, k_cache, v_cache, slots, layout=layout)
    back = pagedkv.gather_kv(k_cache, v_cache, table, 11, layout=layout)
    assert [x.dtype for x in back] == [dtype, dtype]
    assert torch.equal(back[0], k)
    assert torch.equal(back[1], v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("combined", [False, True])
def test_copy_blocks(kind, layout, combined):
    rng = np.random.default_rng(5)
    layers = [caches(rng, layout, kind, 6, 8, 2, 16, combined) for _ in range(3)]
    k_caches, v_caches = zip(*layers, strict=True)
    before = [[bits(x).copy() for x in xs] for xs in (k_caches, v_caches)]
    pairs = np.array([[4, 1], [4, 0], [2, 5]])
    assert pagedkv.copy_blocks(list(k_caches), v_caches, pairs) is None
    for xs, olds in zip((k_caches, v_caches), before, strict=True):
        for x, old in zip(xs, olds, strict=True):
            np.testing.assert_array_equal(bits(x), old[[4, 4, 2, 3, 4, 2]])
    k_cache, v_cache = layers[0]
    pagedkv.copy_blocks(k_cache, v_cache, np.array([[3, 0]]))
    np.testing.assert_array_equal(bits(k_cache), before[0][0][[3, 4, 2, 3, 4, 2]])
    np.testing.assert_array_equal(bits(v_cache), before[1][0][[3, 4, 2, 3, 4, 2]])


def test_no_pairs():
    cache = np.arange(4 * 8 * 8, dtype=np.float32).reshape(4, 8, 1, 8)
    before = cache.copy()
    pagedkv.copy_blocks(cache, cache.copy(), np.zeros((0, 2), np.int64))
    pagedkv.swap_blocks(cache, cache.copy(), np.zeros((0, 2), np.int64))
    np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize("nesting", ["array", "pair", "list", "list of pairs"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_e4m3"])
def test_swap_blocks(kind, nesting):
    rng = np.random.default_rng(6)
    sources = [caches(rng, "HND", kind, 6, 8, 2, 16) for _ in range(2)]
    destinations = [caches(rng, "HND", kind, 4, 8, 2, 16, combined=True) for _ in range(2)]
    nest = {
        "array": lambda x: x[0][0],
        "pair": lambda x: tuple(x[0]),
        "list": lambda x: [x[0][0], x[1][0]],
        "list of pairs": lambda x: [tuple(pair) for pair in x],
    }[nesting]
    moved = {"array": [(0, 0)], "pair": [(0, 0), (0, 1)], "list": [(0, 0), (1, 0)]}
    old = [[bits(x).copy() for x in pair] for pair in destinations]
    originals = [[bits(x).copy() for x in pair] for pair in sources]
    assert pagedkv.swap_blocks(nest(sources), nest(destinations), np.array([[5, 0], [0, 3], [5, 2]])) is None
    for layer in range(2):
        for side in range(2):
            expected = old[layer][side]
            if (layer, side) in moved.get(nesting, [(0, 0), (0, 1), (1, 0), (1, 1)]):
                expected[[0, 3, 2]] = originals[layer][side][[5, 0, 5]]
            np.testing.assert_array_equal(bits(destinations[layer][side]), expected)
            np.testing.assert_array_equal(bits(sources[layer][side]), originals[layer][side])


def test_swap_blocks_in_one_pool_and_between_halves():
    both = np.arange(4 * 2 * 8 * 8, dtype=np.float32).reshape(4, 2, 8, 1, 8)
    before = both.copy()
    pagedkv.swap_blocks(both[:, 0], both[:, 0], np.array([[0, 3]]))
    pagedkv.swap_blocks(both[:, 0], both[:, 1], np.array([[1, 1]]))
    before[3, 0] = before[0, 0]
    before[1, 1] = before[1, 0]
    np.testing.assert_array_equal(both, before)


def test_swap_blocks_torch():
    source, destination = torch.randn(4, 8, 2, 16).bfloat16(), torch.zeros(2, 8, 2, 16).bfloat16()
    pagedkv.swap_blocks(source, destination, torch.tensor([[3, 1]]))
    assert torch.equal(destination[1], source[3])
    assert (destination[0] == 0).all()


def test_offsets_beyond_32_bits():
    """A cache of more than 2**31 elements, of which the system gives only the pages that are touched."""
    num_blocks = 2**31 // (16 * 8 * 64) + 5
    k_cache = np.zeros((num_blocks, 16, 8, 64), np.uint8)
    v_cache = np.zeros((num_blocks, 16, 8, 64), np.uint8)
    x = np.ones((1, 8, 64), np.float32)
    slot = np.array([(num_blocks - 1) * 16 + 3])
    options = {"kv_dtype": "fp8_e4m3"}
    pagedkv.write_kv(x, 2 * x, k_cache, v_cache, slot, **options)
    pagedkv.copy_blocks(k_cache, v_cache, np.array([[num_blocks - 1, num_blocks - 2]]))
    k, v = pagedkv.gather_kv(k_cache, v_cache, np.array([num_blocks - 2], np.int32), 4, **options)
    assert (k[3] == 1).all()
    assert (v[3] == 2).all()
    assert not k[:3].any()


def test_swap_blocks_refuses_a_destination_that_another_copy_uses():
    a, b = np.zeros((2, 4, 16, 1, 8), np.float32)
    pairs = np.array([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"destination\[0\] must not overlap source\[1\]"):
        pagedkv.swap_blocks([a, b], [b, a], pairs)
    with pytest.raises(ValueError, match=r"destination\[0\] must not overlap destination\[1\]"):
        pagedkv.swap_blocks([a, a.copy()], [b, b], pairs)
    assert not a.any()
    assert not b.any()
