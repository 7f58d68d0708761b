"""The kernel of copy_blocks, and swap_blocks, on the emulator against the CPU backend."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pagedkv.arrays.shadow import make_shadow
from pagedkv.cpu.blocks import swap_blocks as swap_on_cpu
from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.plans import blocks
from pagedkv.emulator import EmulatorDevice, MemoryFault
from pagedkv.kernels.blocks.copy_blocks import CopyConfig, make_copy_blocks
from pagedkv.layouts import FORMATS, LAYOUTS

from ...support.bits import bits
from ..block_cases import (
    STRIDES,
    SparseDevice,
    assert_links,
    copying,
    every_third_for_all,
    pair_of,
    random_bits,
    swapping,
    with_gaps,
    without_device,
)

CONFIGS = [
    *(CopyConfig(vector_bytes, 0) for vector_bytes in (1, 2, 4, 8, 16)),
    *(CopyConfig(16, num_axes) for num_axes in (1, 2, 3)),
    CopyConfig(8, 2, checked=True),
    CopyConfig(16, 0, checked=True),
]


def pairs_of(num_blocks, rng, *, apart=True):
    """Some pairs in which no destination comes twice, or, apart, as a source."""
    ids = rng.permutation(num_blocks)
    count = int(rng.integers(1, max(2, num_blocks // 2)))
    sources = rng.choice(ids[count:], count) if apart else rng.integers(0, num_blocks, count)
    return np.stack([sources, ids[:count]], axis=1)


@st.composite
def pools(draw):
    """Shapes, dtype and strides of the caches of a few layers, and a seed."""
    layout = draw(st.sampled_from(LAYOUTS))
    kind = draw(st.sampled_from(["float32", "float16", "bfloat16", "fp8_e4m3"]))
    head_dim = draw(st.sampled_from([16, 48, 128])) if layout == "vllm" else draw(st.sampled_from([8, 24, 64]))
    block_size = draw(st.sampled_from([8, 16])) if layout == "vllm" else draw(st.sampled_from([1, 3, 16]))
    num_blocks, num_kv_heads = draw(st.integers(2, 9)), draw(st.integers(1, 3))
    parts = FORMATS[kind].parts(layout, num_blocks, block_size, num_kv_heads, head_dim)
    return parts, draw(st.sampled_from(STRIDES)), draw(st.integers(1, 5)), draw(st.integers(0, 2**16))


@settings(max_examples=60)
@given(pool=pools())
def test_exactly_the_named_blocks_get_the_bytes_of_others(pool, open_device):
    parts, strides, num_layers, seed = pool
    rng = np.random.default_rng(seed)
    caches = [cache for _ in range(num_layers) for cache in pair_of(parts, strides, rng)]
    pairs = pairs_of(len(caches[0]), rng)
    wide = np.full((len(pairs), 4), -1)
    wide[:, 1:3] = pairs
    expected = [cache.copy() for cache in caches]
    swap_on_cpu(swapping([(cache, cache) for cache in expected], pairs))

    with open_device(global_race=True, footprint=True, seed=seed) as device:
        blocks.copy_blocks(device, copying(caches, wide[:, 1:3]))

    for cache, wanted in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(bits(cache), bits(wanted))
    assert len(device.launches) <= 2 * -(-len(caches) // 8)
    if device.launches[0].footprint is None:  # on a GPU
        return
    ids = np.arange(len(caches[0]))
    for i, cache in enumerate(caches):
        name, (read, written) = f"source[{i}]", np.array([np.isin(ids, pairs[:, column]) for column in (0, 1)])
        axes = (-1, *(1,) * (cache.ndim - 1))
        touched = [launch.footprint for launch in device.launches if launch.footprint.written(name).any()]
        (footprint,) = touched
        footprint.expect(name, read=read.reshape(axes), written=written.reshape(axes))


@pytest.mark.parametrize(("config", "capability"), every_third_for_all(CONFIGS), ids=str)
def test_configs_link_without_spills(config, capability):
    assert_links(make_copy_blocks, config, capability)


@pytest.mark.parametrize(
    ("offset", "strides", "vector_bytes", "num_axes"),
    [
        *((offset, (64, 64, 64, 1), offset, 0) for offset in (1, 2, 4, 8, 16)),
        (16, (72, 72, 72, 1), 8, 0),
        (16, (160, 76, 76, 1), 4, 1),
        (16, (320, 136, 136, 1), 8, 1),
        (16, (320, 144, 64, 1), 16, 1),
    ],
)
def test_vectors_are_as_wide_as_addresses_and_strides_allow(offset, strides, vector_bytes, num_axes, open_device):
    """A byte view of anything can be copied: its vectors are the widest that fit."""
    rng = np.random.default_rng(0)
    shape = (6, 1 if num_axes == 0 else 2, 1, 64)
    memory = np.zeros(32 + 6 * strides[0] + 256, np.uint8)
    start = -memory.ctypes.data % 16 + offset % 16
    cache = np.lib.stride_tricks.as_strided(memory[start:], shape, strides)
    cache[...] = random_bits(rng, cache.shape, cache.dtype)
    expected = cache.copy()
    pairs = np.array([[5, 0], [2, 1]])
    swap_on_cpu(swapping([(expected, expected)], pairs))
    with open_device(global_race=True) as device:
        blocks.copy_blocks(device, copying([cache], pairs))
    np.testing.assert_array_equal(cache, expected)
    name = f"copy_blocks[vector_bytes={vector_bytes}, num_axes={num_axes}, checked=False]"
    assert [launch.kernel for launch in device.launches] == [name]


def test_a_block_has_as_few_axes_as_its_strides_allow():
    layout = blocks.block_layout((1, 4, 1, 8), 2, (999, 16, 77, 2), (1, 16, 5, 2))
    assert layout == (64, 1, (), (), ())
    layout = blocks.block_layout((3, 4, 1, 8), 2, (128, 32, 7, 2), (64, 16, 5, 2))
    assert layout == (16, 12, (12,), (32,), (16,))
    layout = blocks.block_layout((3, 4, 5, 8), 2, (2000, 160, 32, 2), (640, 160, 32, 2))
    assert layout == (16, 60, (3, 20), (2000, 32), (640, 32))
    layout = blocks.block_layout((3, 4, 5, 8), 2, (640, 160, 16, 2), (-640, 160, 32, 2))
    assert layout == (16, 60, (3, 4, 5), (640, 160, 16), (-640, 160, 32))


class Journal(EmulatorDevice):
    """An emulator that takes down what is launched and how many copies cross over; shadows are of host memory."""

    lineinfo = False

    def __init__(self):
        super().__init__(global_race=True)
        self.kernels, self.num_copies = [], 0

    def address(self, name, array):
        return super().address(name, np.asarray(array))

    def launch(self, kernel, *rest):
        self.kernels.append(kernel.name)
        super().launch(kernel, *rest)

    def copy_from_host(self, parts):
        assert all(source.flags.c_contiguous for _, source in parts)
        self.num_copies += len(parts)
        super().copy_from_host(parts)

    def copy_to_host(self, parts):
        assert all(destination.flags.c_contiguous for destination, _ in parts)
        self.num_copies += len(parts)
        super().copy_to_host(parts)


def shadow_of(array):
    return make_shadow(array.ctypes.data, array.shape, array.strides, array.dtype, not array.flags.writeable)


@settings(max_examples=60)
@given(
    pool=pools(),
    other_strides=st.sampled_from(STRIDES),
    sides=st.sampled_from(["emulator", "to device", "to host", "within, pairs on the host", "within", "mixed"]),
)
def test_swaps_write_exactly_the_named_blocks(pool, other_strides, sides):
    parts, strides, num_layers, seed = pool
    rng = np.random.default_rng(seed)
    num_blocks = parts[0].shape[0]
    others = [((num_blocks + 2, *shape[1:]), dtype) for shape, dtype in parts]
    sources, destinations = [], []
    for _ in range(num_layers):
        sources += pair_of(parts, strides, rng)
        destinations += pair_of(others, other_strides, rng)
    pairs = pairs_of(num_blocks, rng, apart=False)
    if rng.random() < 0.5:  # runs
        pairs = np.arange(2, num_blocks)[:, None] + np.array([-1, 2])
        if not len(pairs):
            return
    sources_before, expected = [x.copy() for x in sources], [x.copy() for x in destinations]
    swap_on_cpu(swapping(list(zip(sources, expected, strict=True)), pairs))

    here = {"to device": (False, True), "to host": (True, False)}.get(sides, (True, True))
    copies = [
        tuple(shadow_of(x) if on_device else x for x, on_device in zip(both, here, strict=True))
        for both in zip(sources, destinations, strict=True)
    ]
    given_pairs = shadow_of(pairs) if sides == "within" else pairs
    if sides == "emulator":
        copies = list(zip(sources, destinations, strict=True))
    if sides == "mixed":
        copies[0] = sources[0], destinations[0]
        copies[1] = copies[1][0], destinations[1]
    with Journal() as device:
        blocks.swap_blocks(device, swapping(copies, given_pairs))

    for destination, wanted in zip(destinations, expected, strict=True):
        np.testing.assert_array_equal(bits(destination), bits(wanted))
    for source, before in zip(sources, sources_before, strict=True):
        np.testing.assert_array_equal(bits(source), bits(before))


def test_consecutive_blocks_are_one_copy():
    rng = np.random.default_rng(0)
    source, destination = (random_bits(rng, (8, 4, 2, 16), np.dtype(np.float32)) for _ in range(2))
    pairs = np.array([[0, 3], [1, 4], [2, 5], [5, 0], [6, 2]])
    with Journal() as device:
        blocks.swap_blocks(device, swapping([(source, shadow_of(destination))], pairs))
    assert device.num_copies == 3
    np.testing.assert_array_equal(bits(destination[pairs[:, 1]]), bits(source[pairs[:, 0]]))
    with Journal() as device:
        blocks.swap_blocks(device, swapping([(shadow_of(source), destination)], pairs[:, ::-1]))
    assert device.num_copies == 3
    halves = np.zeros((8, 2, *source.shape[1:]), np.float32)[:, 0]
    with Journal() as device:  # blocks that are contiguous but apart
        blocks.swap_blocks(device, swapping([(source, shadow_of(halves))], pairs))
    assert device.num_copies == 5
    gaps = with_gaps(np.zeros_like(source), 1)
    with Journal() as device:  # every row
        blocks.swap_blocks(device, swapping([(source, shadow_of(gaps))], pairs))
    assert device.num_copies == 5 * 4 * 2


def small_caches(num_caches=2):
    rng = np.random.default_rng(2)
    return [random_bits(rng, (4, 8, 2, 16), np.dtype(np.float16)) for _ in range(num_caches)]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([4, 1], "source 4 in pair 1"),
        ([-1, 1], "source -1 in pair 1"),
        ([0, 4], "destination 4 in pair 1"),
        ([0, -(2**40)], f"destination {-(2**40)} in pair 1"),
    ],
)
def test_a_block_that_is_not_there_is_skipped_and_reported(bad, text):
    caches = small_caches()
    pairs = np.array([[0, 2], bad, [0, 3]])
    expected = [cache.copy() for cache in caches]
    swap_on_cpu(swapping([(cache, cache) for cache in expected], pairs[::2]))
    with Journal() as device:
        blocks.copy_blocks(device, copying(caches, pairs, checked=True))
        with pytest.raises(IndexError, match=rf"^pairs must hold block ids in 0..num_blocks-1, got {text}$"):
            raise_if_failed([device])
        raise_if_failed([device])
    np.testing.assert_array_equal(bits(np.stack(caches)), bits(np.stack(expected)))
    with pytest.raises(MemoryFault), Journal() as device:
        blocks.copy_blocks(device, copying(small_caches(), pairs))


def test_many_layers_take_few_launches(open_device):
    caches = small_caches(19)
    expected = [cache.copy() for cache in caches]
    pairs = np.array([[1, 2], [0, 3]])
    swap_on_cpu(swapping([(cache, cache) for cache in expected], pairs))
    with open_device(global_race=True) as device:
        blocks.copy_blocks(device, copying(caches, pairs))
    assert len(device.launches) == 3
    np.testing.assert_array_equal(bits(np.stack(caches)), bits(np.stack(expected)))


def test_no_pairs_launch_nothing():
    caches, none = small_caches(), np.empty((0, 2), np.int64)
    without_device().copy_blocks(copying(caches, none))
    without_device().swap_blocks(swapping([tuple(caches)], none))


def test_more_pieces_than_a_grid_has_rows(monkeypatch, open_device):
    monkeypatch.setattr(blocks, "LARGEST_GRID_Y", 2)
    rng = np.random.default_rng(0)
    cache = random_bits(rng, (3, 64, 4, 130), np.dtype(np.float32))
    expected = cache.copy()
    expected[2] = expected[0]
    with open_device(global_race=True) as device:
        blocks.copy_blocks(device, copying([cache], np.array([[0, 2]])))
    np.testing.assert_array_equal(bits(cache), bits(expected))


def test_blocks_past_2_31_elements():
    (small,) = small_caches(1)
    num_blocks = 2**31 // small[0].size + 4
    large = np.empty((num_blocks, *small.shape[1:]), np.float16)
    device = SparseDevice()
    device.address("source[0]", large)
    buffer = device.large["source[0]"]
    buffer.view()[-4:] = small
    buffer.mark(True, np.s_[-4:])
    pairs = np.array([[num_blocks - 1, 0], [num_blocks - 3, num_blocks - 2]])
    with device:
        blocks.copy_blocks(device, copying([large], pairs))
    np.testing.assert_array_equal(bits(buffer.view()[-4:]), bits(small[[0, 1, 1, 3]]))
    np.testing.assert_array_equal(bits(buffer.view()[0]), bits(small[3]))
