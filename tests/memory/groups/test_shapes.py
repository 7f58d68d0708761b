"""A cache whose layers have several shapes gives the bits of a cache for each, over one pool of blocks."""

import sys

import numpy as np
import pytest

from pagedkv import PagedKVCache, kv_bytes

from ...support.bits import bits
from ...support.strategies import each_of
from ..device_module import DeviceModule

# Hkv and D of layers with a window and without: of other heads and dims, of other heads alone, and with room left over.
SHAPES = {"Gemma 4": ((4, 16), (1, 32)), "heads": ((2, 64), (1, 64)), "padded": ((3, 24), (2, 8))}
WINDOWS = (9, None, 9, 9, None)
NUM_HEADS = 12


def of_layers(window_and_full):
    """Hkv and D of each layer."""
    return [window_and_full[window is None] for window in WINDOWS]


def one_cache(shapes, **options):
    """A cache for all layers, and the place of each in it."""
    heads, dims = zip(*shapes, strict=True)
    cache = PagedKVCache(len(shapes), 200, num_kv_heads=heads, head_dim=dims, windows=WINDOWS, **options)
    return [(cache, layer) for layer in range(len(shapes))]


def a_cache_each(shapes, **options):
    """The same with a cache for each shape."""
    places = {}
    for heads, dim in dict.fromkeys(shapes):
        layers = [layer for layer, shape in enumerate(shapes) if shape == (heads, dim)]
        of_layers = {name: [x[i] for i in layers] if isinstance(x, list) else x for name, x in options.items()}
        of_layers |= {"num_kv_heads": heads, "head_dim": dim, "windows": [WINDOWS[layer] for layer in layers]}
        cache = PagedKVCache(len(layers), 400, **of_layers)
        places |= {layer: (cache, place) for place, layer in enumerate(layers)}
    return [places[layer] for layer in range(len(shapes))]


def attended(places, shapes, dtype, *, backend="auto", num_heads=lambda _: NUM_HEADS, lens=(3, 40), num_steps=3):
    """What all layers return for chunks of prompts and for steps."""
    rng, results = np.random.default_rng(0), []
    caches = {id(cache): cache for cache, _ in places}
    seqs = {name: [cache.add(0).seq for _ in lens] for name, cache in caches.items()}
    for n in ([length // 2 for length in lens], [length - length // 2 for length in lens], *[[1, 1]] * num_steps):
        slots = {name: cache.append(seqs[name], n) for name, cache in caches.items()}
        batches = {name: cache.batch(seqs[name], 1 if n == [1, 1] else n) for name, cache in caches.items()}
        for (cache, layer), (heads, dim) in zip(places, shapes, strict=True):
            k, v = rng.standard_normal((2, sum(n), heads, dim)).astype(dtype)
            q = rng.standard_normal((sum(n), num_heads(heads), dim)).astype(dtype)
            cache.write(layer, k, v, slots[id(cache)])
            results.append(cache.attend(layer, q, batches[id(cache)], backend=backend))
        for name, cache in caches.items():
            cache.commit(seqs[name])
    return results


def assert_same(shapes, dtype="float32", how=None, **options):
    own, expected = (
        attended(make(shapes, dtype=dtype, **options), shapes, dtype, **how or {}) for make in (one_cache, a_cache_each)
    )
    for x, y in zip(own, expected, strict=True):
        assert not np.isnan(x).any()
        np.testing.assert_array_equal(bits(x), bits(y))


@each_of("shapes", SHAPES)
@pytest.mark.parametrize("layout", ["NHD", "HND", "vllm"])
def test_one_cache_has_the_bits_of_a_cache_for_each_shape(shapes, layout):
    assert_same(of_layers(shapes), layout=layout, block_size=8)


def test_layers_have_scales_for_their_own_heads():
    """Blocks of one token in 8 bits, whose parts would begin at any byte."""
    shapes = of_layers(SHAPES["padded"])
    k_scale = [np.linspace(0.5, 2, heads, dtype=np.float32) for heads, _ in shapes]
    assert_same(shapes, kv_dtype="fp8_e4m3", block_size=1, k_scale=k_scale)
    with pytest.raises(ValueError, match=r"^k_scale must have shape \(num_kv_heads,\) = \(2,\), got \(3,\)$"):
        one_cache(shapes, block_size=1, kv_dtype="fp8_e4m3", k_scale=k_scale[:1] * 5)


@pytest.mark.usefixtures("without_lines")
def test_kernels_of_a_gpu_read_them():
    how = {"backend": "emulator", "num_heads": lambda heads: 4 * heads, "lens": (3, 20), "num_steps": 1}
    assert_same(of_layers(SHAPES["heads"]), "float16", how, block_size=16)


@pytest.mark.parametrize("array_module", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("kv_dtype", "block_size", "shapes"),
    [
        (None, 4, SHAPES["Gemma 4"]),
        (None, 4, SHAPES["padded"]),
        ("fp8_e5m2", 1, SHAPES["padded"]),
        ("int8", 5, SHAPES["padded"]),
    ],
)
def test_all_groups_share_the_bytes_of_a_block(array_module, kv_dtype, block_size, shapes):
    shapes = of_layers(shapes)
    options = {"dtype": "bfloat16", "kv_dtype": kv_dtype, "block_size": block_size}
    (cache, _), *_ = one_cache(shapes, array_module=array_module, **options)
    num_bytes = cache.stats().num_bytes // 200
    first = min(views[0].__array_interface__["data"][0] for views in cache._layer_caches.views)
    for group in cache.groups:
        end = first
        for view in (view for layer in group.layers for view in cache._layer_caches.views[layer]):
            start = view.__array_interface__["data"][0]
            assert start % 16 == 0
            assert end <= start < end + 16
            assert view.strides[0] == num_bytes
            end = start + view[0].nbytes
        assert end <= first + num_bytes
    heads, dims = zip(*shapes, strict=True)
    sizes = {"num_layers": len(shapes), "num_kv_heads": heads, "head_dim": dims, "windows": WINDOWS}
    seq = cache.add(0).seq
    for _ in range(30):
        cache.append([seq])
        cache.commit([seq])
    cache.append([seq])
    assert kv_bytes(31, **sizes, **options) == cache.stats().used_bytes


@pytest.mark.parametrize("array_module", ["numpy", "torch", "cupy"])
def test_a_copy_of_a_block_is_one_of_all_its_layers(monkeypatch, array_module):
    monkeypatch.setitem(sys.modules, "cupy", DeviceModule())
    (cache, _), *_ = one_cache(of_layers(SHAPES["Gemma 4"]), block_size=4, array_module=array_module)
    seq = cache.add(2).seq
    [fork] = cache.fork(seq)
    slots = np.asarray(cache.slots(seq, 0, 1))[:, 0].tolist()
    for layer, group in enumerate(cache.layer_groups.group_of):
        cache.k_caches[layer][slots[group] // 4], cache.v_caches[layer][slots[group] // 4] = layer + 1, -layer - 1
    cache.append([fork])
    copies = np.asarray(cache.slots(fork, 0, 1))[:, 0].tolist()
    for layer, group in enumerate(cache.layer_groups.group_of):
        assert copies[group] != slots[group]
        for caches, number in ((cache.k_caches, layer + 1), (cache.v_caches, -layer - 1)):
            assert (caches[layer][copies[group] // 4] == number).all()


def test_repr_and_groups_say_the_shapes():
    (cache, _), *_ = one_cache(of_layers(SHAPES["Gemma 4"]), block_size=4)
    assert [group.shape for group in cache.groups] == [(4, 16), (1, 32), (4, 16), (4, 16)]
    assert "3 layers of (200, 4, 4, 16) and 2 layers of (200, 4, 1, 32) float32" in repr(cache)
    assert "3 of window 9 and 1 layer of (4, 16), 1 without a window and 2 layers of (1, 32)" in repr(cache)
    alike = PagedKVCache(2, 8, 4, num_kv_heads=[1, 1], head_dim=(8, 8))
    assert repr(alike) == repr(PagedKVCache(2, 8, 4, num_kv_heads=1, head_dim=8))
    assert alike.k_caches[0].flags.c_contiguous


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_kv_heads": [1]}, ValueError, "num_kv_heads must be one for all layers, or a list of 2, got 1"),
        ({"num_kv_heads": [1, 0]}, ValueError, "num_kv_heads must be at least 1, got 0"),
        ({"num_kv_heads": [1, 2.0]}, TypeError, "num_kv_heads must be an int, got float"),
        ({"num_kv_heads": np.ones(2, int)}, TypeError, "num_kv_heads must be an int, or a list .*, got ndarray: .*"),
        ({"head_dim": [8, 12]}, ValueError, "head_dim must be a multiple of 8 from 8 to 512, got 12"),
        ({"head_dim": (8,) * 3}, ValueError, "head_dim must be one for all layers, or a list of 2, got 3"),
        (
            {"head_dim": (8, 16), "same_as": {1: 0}},
            ValueError,
            r"same_as must name a layer of the same shape for layer 1, which has \(1, 16\), but 0 has \(1, 8\)",
        ),
        (
            {"head_dim": (8, 16), "group_size": 2},
            ValueError,
            "group_size must be at most 1, the layers of the largest shape that fit, got 2",
        ),
    ],
)
def test_refusals(arguments, error, message):
    sizes = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8} | arguments
    with pytest.raises(error, match=f"^{message}$"):
        PagedKVCache(**sizes, num_blocks=8, block_size=4)
    with pytest.raises(error, match=f"^{message}$"):
        kv_bytes(9, **sizes)
