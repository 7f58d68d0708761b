"""Writing, gathering, copying and swapping blocks on the host, against the reference and bit by bit."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given

import pagedkv
from pagedkv import reference
from pagedkv.layouts import FORMATS
from pagedkv.testing.calls import check_write
from pagedkv.testing.problems.writes import tokens, write_specs

from ..support.bits import bits
from ..support.problems import FLOATS, Spec, as_torch, build, in_layout
from ..support.rotary_cases import tables_of

KV_DTYPES = tuple(FORMATS)
LAYOUTS = ["NHD", "HND", "vllm"]


def stored_options(problem):
    """How the caches of a problem are stored."""
    names = ("layout", "kv_dtype", "k_scale", "v_scale", "k_scales", "v_scales")
    return {name: problem.options.get(name) for name in names}


@given(write=write_specs(kv_dtypes=KV_DTYPES))
def test_a_write_changes_its_slots_and_not_one_other_bit(write):
    """Every bit of the caches: what is written, what is skipped, and everything else."""
    check_write(write)


@given(write=write_specs(kv_dtypes=KV_DTYPES), half=st.integers(1, 8), interleaved=st.booleans(), wide=st.booleans())
def test_keys_are_rotated_on_their_way(write, half, interleaved, wide):
    """The bits of apply_rotary and then write_kv; of the oracle, which rounds later, the values."""
    spec, token_dtype, count = write.cache, write.token_dtype, write.num_tokens
    problem = build(spec)
    rng = np.random.default_rng(spec.seed)
    k, v = rng.standard_normal((2, count, spec.num_kv_heads, spec.head_dim), np.float32).astype(FLOATS[token_dtype])
    cos, sin = tables_of(rng, 30, half, FLOATS["float32" if wide else token_dtype])
    positions = rng.integers(0, 30, count, np.int64 if wide else np.int32)
    slots = rng.permutation(len(problem.k_cache) * spec.block_size)[:count]
    skipped = rng.random(count) < 0.2
    slots[skipped] = -1
    options = stored_options(problem)
    caches, expected, oracle = ({name: x.copy() for name, x in problem.caches.items()} for _ in range(3))
    rotated = pagedkv.apply_rotary(k, None, cos, sin, positions, interleaved=interleaved)[0]
    pagedkv.write_kv(rotated, v, slots=slots, **options | expected)
    positions[skipped] = 99
    rotation = {"cos": cos, "sin": sin, "positions": positions, "interleaved": interleaved}
    before = [x.tobytes() for x in (k, v, cos, sin, positions)]
    pagedkv.write_kv(k, v, slots=slots, **options | caches, **rotation)
    assert [x.tobytes() for x in (k, v, cos, sin, positions)] == before
    for name, cache in caches.items():
        np.testing.assert_array_equal(bits(cache), bits(expected[name]))
    reference.write_kv(k, v, slots=slots, **options | oracle, **rotation)
    num_blocks = len(problem.k_cache)
    where = {"block_table": np.arange(num_blocks), "seq_len": num_blocks * spec.block_size}
    near, exact = (reference.gather_kv(**where, **options | x)[0][slots[~skipped]] for x in (caches, oracle))
    # A rounding to either dtype may go the other way, and where two products cancel, float32 has lost what is left.
    largest = np.abs(exact).max(axis=-1, keepdims=True, initial=0)
    steps, lost = float(ml_dtypes.finfo(FLOATS[token_dtype]).eps), 2.0**-21 * largest
    if problem.spec.has_scales:
        lost += (1 / 127 + steps) * largest
    else:
        stored = ml_dtypes.finfo(problem.spec.kv_format.element)
        steps += float(stored.eps)
        lost += float(stored.smallest_subnormal) * np.max(1.0 if options["k_scale"] is None else options["k_scale"])
    assert (np.abs(near - exact) <= steps * np.abs(exact) + lost).all()


def test_a_token_lies_where_its_layout_says():
    """Slot 13 of blocks of 8 is offset 5 of block 1; in layout vllm, K has vectors of 16 bytes along the dims."""
    k, v = np.random.default_rng(0).standard_normal((2, 1, 2, 16), np.float32)
    for layout, index in (("NHD", (1, 5)), ("HND", (1, slice(None), 5))):
        caches = np.zeros((2, 3, *((8, 2) if layout == "NHD" else (2, 8)), 16), np.float32)
        pagedkv.write_kv(k, v, *caches, np.array([13]), layout=layout)
        for cache, token in zip(caches, (k, v), strict=True):
            np.testing.assert_array_equal(cache[index], token[0])
    k_cache, v_cache = np.zeros((3, 2, 4, 8, 4), np.float32), np.zeros((3, 2, 16, 8), np.float32)
    pagedkv.write_kv(k, v, k_cache, v_cache, np.array([13]), layout="vllm")
    for head, dim in np.ndindex(2, 16):
        assert k_cache[1, head, dim // 4, 5, dim % 4] == k[0, head, dim]
        assert v_cache[1, head, dim, 5] == v[0, head, dim]


@pytest.mark.parametrize("token_dtype", FLOATS)
@pytest.mark.parametrize("kv_dtype", reference.FP8_DTYPES)
def test_fp8_rounding_of_every_16_bit_pattern(kv_dtype, token_dtype):
    """Nearest even, saturated at the largest finite value, NaN kept; for float32 also what lies between."""
    patterns = np.arange(2**16, dtype=np.uint16)
    if token_dtype == "float32":
        low = np.random.default_rng(0).choice(np.array([0, 1, 0x8000, 0xFFFF], np.uint32), 2**16)
        x = (patterns.astype(np.uint32) << 16 | low).view(np.float32)
    else:
        x = patterns.view(FLOATS[token_dtype])
    x = x.reshape(-1, 1, 8)
    k_cache, v_cache = np.zeros((2, len(x), 1, 1, 8), np.uint8)
    pagedkv.write_kv(x, x, k_cache, v_cache, np.arange(len(x)), kv_dtype=kv_dtype, v_scale=3.0)
    fp8 = reference.FP8_DTYPES[kv_dtype]
    for cache, scale in ((k_cache, 1.0), (v_cache, 3.0)):
        largest = np.float32(ml_dtypes.finfo(fp8).max)
        with np.errstate(invalid="ignore"):  # signalling NaN
            wanted = np.clip(x.astype(np.float32) / np.float32(scale), -largest, largest).astype(fp8)
        written = cache.reshape(x.shape).view(fp8)
        is_nan = np.isnan(x.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(written.astype(np.float32)), is_nan)
        np.testing.assert_array_equal(written.view(np.uint8)[~is_nan], wanted.view(np.uint8)[~is_nan])


@pytest.mark.parametrize("kv_dtype", FLOATS)
def test_float32_tokens_are_rounded_to_nearest_even(kv_dtype):
    """A cache of float32 keeps every bit, those of NaN too."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**32, 8 * 4000, dtype=np.uint32)
    halfway = np.uint32(0x1000 if kv_dtype == "float16" else 0x8000)
    codes[::2] = codes[::2] & ~(2 * halfway - np.uint32(1)) | halfway  # ties
    x = codes.view(np.float32).reshape(-1, 1, 8)
    k_cache, v_cache = np.zeros((2, len(x), 1, 1, 8), FLOATS[kv_dtype])
    pagedkv.write_kv(x, x, k_cache, v_cache, np.arange(len(x)))
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(FLOATS[kv_dtype]).astype(np.float32)
        for cache in (k_cache, v_cache):
            np.testing.assert_array_equal(cache.reshape(x.shape).astype(np.float32), wanted)
            assert kv_dtype != "float32" or cache.tobytes() == x.tobytes()


def test_a_row_of_int8_has_its_largest_number_as_127():
    """Nearest even; scales that round to 0 or are denormal, and rows that are not finite."""
    tiny = 2.0**-149
    rows = [
        (1, [127, -126.5, 125.5, 0.5, 1.5, -0.49], [127, -126, 126, 0, 2, 0]),
        (3, [381, -4.5, 4.6, 1.5, -1.4], [127, -2, 2, 0, 0]),
        (0, [0, -0.0], [0, 0]),
        (0, [63 * tiny, -tiny], [0, 0]),
        (tiny, [190 * tiny, -127 * tiny, 5 * tiny], [127, -127, 5]),
        (np.nan, [np.nan, 3, -1e30], [0, 0, 0]),
        (np.nan, [1, -np.inf], [0, 0]),
    ]
    x = np.array([numbers + [0] * (8 - len(numbers)) for _, numbers, _ in rows], np.float32)[:, None]
    codes, scales = np.ones((len(x), 1, 1, 8), np.int8), np.ones((len(x), 1, 1), np.float32)
    caches = {"k_cache": codes, "v_cache": codes.copy(), "k_scales": scales, "v_scales": scales.copy()}
    pagedkv.write_kv(x, x, slots=np.arange(len(x)), kv_dtype="int8", **caches)
    np.testing.assert_array_equal(scales.ravel(), np.array([scale for scale, _, _ in rows], np.float32))
    assert codes.reshape(len(x), 8).tolist() == [wanted + [0] * (8 - len(wanted)) for _, _, wanted in rows]
    k, v = pagedkv.gather_kv(block_table=np.arange(len(x), dtype=np.int32), seq_len=len(x), kv_dtype="int8", **caches)
    np.testing.assert_array_equal(k, v)
    np.testing.assert_array_equal(k[:, 0], codes.reshape(len(x), 8) * scales[:, 0])


@pytest.mark.parametrize("scale", [0.1, 1e-40])
def test_fp8_divides_by_the_scale_in_float32(scale):
    values = np.linspace(-500, 500, 4000, dtype=np.float32).reshape(-1, 1, 8)
    k_cache, v_cache = np.zeros((2, len(values), 1, 1, 8), np.uint8)
    options = {"kv_dtype": "fp8_e4m3", "k_scale": scale, "v_scale": scale}
    pagedkv.write_kv(values, values, k_cache, v_cache, np.arange(len(values)), **options)
    with np.errstate(over="ignore"):
        codes = np.clip(values / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    for cache in (k_cache, v_cache):
        np.testing.assert_array_equal(cache.reshape(values.shape), codes)


def test_writing_the_same_slot_twice_is_a_value_error_and_writes_nothing():
    k_cache, v_cache = np.zeros((2, 4, 16, 2, 8), np.float32)
    k, v = np.ones((2, 3, 2, 8), np.float32)
    for slots in ([5, 6, 5], [5, 5, 6], [63, -1, 63]):
        with pytest.raises(ValueError, match="slots must name a slot once"):
            pagedkv.write_kv(k, v, k_cache, v_cache, np.array(slots))
    assert not k_cache.any()
    assert not v_cache.any()
    pagedkv.write_kv(k, v, k_cache, v_cache, np.array([-1, 63, -1]))
    assert k_cache.sum() == v_cache.sum() == 16


def test_a_write_of_no_tokens_changes_nothing():
    k_cache, v_cache = np.zeros((2, 4, 16, 2, 8), np.float32)
    k, v = np.ones((2, 0, 2, 8), np.float32)
    pagedkv.write_kv(k, v, k_cache, v_cache, np.zeros(0, np.int64))
    assert not k_cache.any()


@pytest.mark.parametrize("strides", ["own", "halves", "strided"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_gathered_tokens_are_those_of_the_reference(kv_dtype, layout, strides):
    kv_scales = "per head" if kv_dtype.startswith("fp8") else None
    lengths = (0, 1, 15, 16, 17, 90)
    problem = build(Spec(lengths, kv_dtype=kv_dtype, layout=layout, strides=strides, kv_scales=kv_scales))
    options = stored_options(problem)
    for table, length in zip(problem.block_tables, lengths, strict=True):
        gathered = pagedkv.gather_kv(problem.k_cache, problem.v_cache, table, length, **options)
        expected = reference.gather_kv(problem.k_cache, problem.v_cache, table, length, **options)
        for x, wanted in zip(gathered, expected, strict=True):
            assert x.dtype == FLOATS.get(kv_dtype, np.float32)
            assert x.shape == (length, 2, 64)
            np.testing.assert_array_equal(x, wanted.astype(x.dtype))
            assert not np.shares_memory(x, problem.k_cache)


def test_gather_of_fingerprints_names_block_slot_and_head():
    problem = build(Spec(seq_lens=(90,), fingerprint=True, num_kv_heads=3, layout="HND"))
    _, v = pagedkv.gather_kv(problem.k_cache, problem.v_cache, problem.block_tables[0], 90, layout="HND")
    for position, head in ((0, 0), (15, 2), (16, 1), (89, 2)):
        block = problem.block_tables[0, position // 16]
        named = [block // 16, block % 16, 0, position % 16, head, 1, 2, 3]
        np.testing.assert_array_equal(v[position, head, :8], named)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_caches_are_written_in_place_and_gathered_as_tensors(layout):
    for kv_dtype in KV_DTYPES:
        spec = Spec(seq_lens=(90,), kv_dtype=kv_dtype, layout=layout)
        problem = build(spec)
        k, v = tokens(5, spec)
        slots = np.arange(30, 35)
        caches = problem.caches
        torch_caches = {name: as_torch(x) for name, x in caches.items()}
        options = {name: problem.options.get(name) for name in ("layout", "kv_dtype")}
        pagedkv.write_kv(k, v, slots=slots, **caches, **options)
        pagedkv.write_kv(as_torch(k), as_torch(v), slots=torch.from_numpy(slots), **torch_caches, **options)
        for name, cache in caches.items():
            np.testing.assert_array_equal(
                bits(as_torch(cache).view(torch.uint8).numpy()), torch_caches[name].view(torch.uint8)
            )
        table = problem.block_tables[0]
        expected = pagedkv.gather_kv(block_table=table, seq_len=90, **caches, **options)
        gathered = pagedkv.gather_kv(block_table=as_torch(table), seq_len=90, **torch_caches, **options)
        for x, wanted in zip(gathered, expected, strict=True):
            assert torch.equal(x.nan_to_num(), as_torch(wanted).nan_to_num())


def pools(layout, num_layers=2, kv_dtype="float32", seed=0, *, halves=False):
    """The K and the V caches of several layers."""
    rng = np.random.default_rng(seed)
    layers = rng.integers(1, 2**7, (num_layers, 2, 9, 8, 2, 16)).astype(FLOATS[kv_dtype])
    pairs = [in_layout(k, v, layout) for k, v in layers]
    if halves:  # of one allocation, block by block
        return [[np.stack([np.array(x, order="C")] * 2, axis=1)[:, 0] for x in xs] for xs in zip(*pairs, strict=True)]
    return [np.array(k, order="C") for k, _ in pairs], [np.array(v, order="C") for _, v in pairs]


@pytest.mark.parametrize("kv_dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("halves", [False, True])
def test_copy_blocks_of_all_layers(layout, kv_dtype, halves):
    k_caches, v_caches = pools(layout, kv_dtype=kv_dtype, halves=halves)
    before = [x.copy() for x in (*k_caches, *v_caches)]
    pairs = np.array([[0, 5], [0, 6], [8, 1]])
    assert pagedkv.copy_blocks(k_caches, v_caches, pairs) is None
    for cache, old in zip((*k_caches, *v_caches), before, strict=True):
        wanted = old.copy()
        wanted[[5, 6, 1]] = old[[0, 0, 8]]
        np.testing.assert_array_equal(cache, wanted)
    pagedkv.copy_blocks(k_caches[0], v_caches[0], np.array([[5, 7]]))
    np.testing.assert_array_equal(k_caches[0][7], before[0][0])
    np.testing.assert_array_equal(k_caches[1][7], before[1][7])
    before = k_caches[0].copy()
    pagedkv.copy_blocks(k_caches[0], v_caches[0], np.zeros((0, 2), np.int64))
    pagedkv.swap_blocks(k_caches[1], k_caches[0], np.zeros((0, 2), np.int64))
    np.testing.assert_array_equal(k_caches[0], before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strides", ["own", "halves", "strided"])
def test_scales_move_with_their_rows(layout, strides):
    spec = Spec(kv_dtype="int8", layout=layout, strides=strides, poison="zero")
    problems = [build(spec.replace(seed=seed)) for seed in (0, 1)]
    first, second = ([*problem.caches.values()] for problem in problems)
    expected = [x.copy() for x in first]
    pagedkv.copy_blocks(**problems[0].caches, pairs=np.array([[0, 2], [1, 3]]))
    pagedkv.swap_blocks([first[::2], first[1::2]], [second[::2], second[1::2]], np.array([[2, 0], [1, 1]]))
    for cache, other, wanted in zip(first, second, expected, strict=True):
        wanted[[2, 3]] = wanted[[0, 1]]
        np.testing.assert_array_equal(cache, wanted)
        np.testing.assert_array_equal(other[:2], wanted[:2])


@pytest.mark.parametrize("block_size", [1, 31, 32, 256])
def test_small_and_large_blocks_are_copied(block_size):
    """Of 128 bytes a token: fewer than 4 KiB are stored in another way."""
    rng = np.random.default_rng(block_size)
    k_cache, v_cache = rng.normal(size=(2, 9, block_size, 2, 16)).astype(np.float32)
    before = k_cache.copy(), v_cache.copy()
    pairs = np.array([[0, 5], [0, 6], [8, 1]])
    pagedkv.copy_blocks(k_cache, v_cache, pairs)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        old[[5, 6, 1]] = old[[0, 0, 8]]
        np.testing.assert_array_equal(cache, old)


def test_copying_keeps_the_bits_of_every_nan():
    codes = np.arange(2**16, dtype=np.uint16).reshape(2, 128, 1, 256)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        k_cache, v_cache = (np.concatenate([codes, 0 * codes]).view(dtype) for _ in range(2))
        pagedkv.copy_blocks(k_cache, v_cache, np.array([[0, 3], [1, 2]]))
        np.testing.assert_array_equal(k_cache.view(np.uint16)[[3, 2]], codes)
        np.testing.assert_array_equal(v_cache.view(np.uint16)[[3, 2]], codes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swap_blocks_between_pools(layout):
    source, destination = pools(layout, seed=1), pools(layout, seed=2)
    pairs = np.array([[8, 0], [2, 8], [2, 3]])
    for arrange in (
        lambda k, v: [list(pair) for pair in zip(k, v, strict=True)],  # layers of (k, v) pairs
        lambda k, v: (k[0], v[0]),
        lambda k, v: v[1],
    ):
        expected = [x.copy() for caches in destination for x in caches]
        reached = arrange([0, 1], [2, 3])
        for i in np.ravel(reached):
            expected[i][[0, 8, 3]] = [*source[0], *source[1]][i][[8, 2, 2]]
        assert pagedkv.swap_blocks(arrange(*source), arrange(*destination), pairs) is None
        for cache, wanted in zip([*destination[0], *destination[1]], expected, strict=True):
            np.testing.assert_array_equal(cache, wanted)
        destination = pools(layout, seed=3)


def test_swap_there_and_back_is_the_identity():
    (device,), _ = pools("NHD", 1, seed=1)
    host = np.full((4, *device.shape[1:]), np.nan, np.float32)
    kept = device.copy()
    pagedkv.swap_blocks(device, host, np.array([[7, 0], [3, 2]]))
    device[[7, 3]] = np.nan
    pagedkv.swap_blocks(host, device, np.array([[0, 7], [2, 3]]))
    np.testing.assert_array_equal(device, kept)
    assert np.isnan(host[[1, 3]]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_of_more_than_2_31_elements(layout):
    """Only the last few blocks are ever touched, so that the rest takes no memory."""
    shape = {"NHD": (256, 4, 96), "HND": (4, 256, 96), "vllm": (4, 6, 256, 16)}[layout]
    num_blocks = 2**31 // (256 * 4 * 96) + 3
    k_cache = np.empty((num_blocks, *shape), np.uint8)
    v_cache = np.empty((num_blocks, *((4, 96, 256) if layout == "vllm" else shape)), np.uint8)
    k, v = np.random.default_rng(0).standard_normal((2, 7, 4, 96), np.float32)
    first = (num_blocks - 1) * 256 + 30
    options = {"layout": layout, "kv_dtype": "fp8_e5m2"}
    pagedkv.write_kv(k, v, k_cache, v_cache, np.arange(first, first + 7), **options)
    pagedkv.copy_blocks(k_cache, v_cache, np.array([[num_blocks - 1, num_blocks - 2]]))
    for block in (num_blocks - 1, num_blocks - 2):
        table = np.array([block], np.int32)
        k_back, v_back = pagedkv.gather_kv(k_cache, v_cache, table, 37, **options)
        np.testing.assert_array_equal(k_back[30:], k.astype(ml_dtypes.float8_e5m2).astype(np.float32))
        np.testing.assert_array_equal(v_back[30:], v.astype(ml_dtypes.float8_e5m2).astype(np.float32))


def test_swap_blocks_in_one_pool_and_between_halves():
    both = np.arange(4 * 2 * 8 * 8, dtype=np.float32).reshape(4, 2, 8, 1, 8)
    before = both.copy()
    pagedkv.swap_blocks(both[:, 0], both[:, 0], np.array([[0, 3]]))
    pagedkv.swap_blocks(both[:, 0], both[:, 1], np.array([[1, 1]]))
    before[3, 0] = before[0, 0]
    before[1, 1] = before[1, 0]
    np.testing.assert_array_equal(both, before)


def test_swap_blocks_refuses_a_destination_that_another_copy_uses():
    a, b = np.zeros((2, 4, 16, 1, 8), np.float32)
    pairs = np.array([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"destination\[0\] must not overlap source\[1\]"):
        pagedkv.swap_blocks([a, b], [b, a], pairs)
    with pytest.raises(ValueError, match=r"destination\[0\] must not overlap destination\[1\]"):
        pagedkv.swap_blocks([a, a.copy()], [b, b], pairs)
    assert not a.any()
    assert not b.any()
