"""Wire blocks: what a cache with other blocks reads is what was written; nothing else is taken for it."""

import hashlib

import numpy as np
import pytest

from pagedkv.commit import bits
from pagedkv.layouts import FORMATS
from pagedkv.memory.prefix.digests import root_digest
from pagedkv.stores.blocks import CacheBlocks
from pagedkv.stores.wire import HEADER_BYTES, Wire

from .caches import DIM, HEADS, LAYERS, W, blocks_of, contents, fill, make_cache, text

NO_SALT = root_digest(None)
CACHES = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "vllm": {"layout": "vllm"},
    "longer blocks": {"block_size": 32, "num_blocks": 10},
    "blocks across wire blocks": {"block_size": 5, "num_blocks": 60},
    "torch": {"array_module": "torch"},
}


def moved(source, target, num_tokens, staged=False):
    """The contents of some tokens in one cache, and in another one that read them as wire blocks."""
    tokens = text(num_tokens)
    theirs, ours = blocks_of(source), blocks_of(target)
    ours._on_device = theirs._on_device = staged
    digests = theirs.wire.digests(np.pad(tokens, (0, -num_tokens % W)), NO_SALT)
    here, there = (np.asarray(cache.slots(cache.add(num_tokens).seq, 0, num_tokens)) for cache in (source, target))
    names, blocks = theirs.read(here, digests)
    opened = ours.open(blocks, names)
    assert len(opened) == len(blocks) == HEADS * -(-num_tokens // W)
    ours.write(there[3:], 3, opened)
    return contents(source, here, source._options[0]["layout"]), contents(target, there, target._options[0]["layout"])


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(
    "stored", [{}, {"dtype": "bfloat16"}, {"kv_dtype": "fp8_e5m2", "v_scale": 3.0}, {"kv_dtype": "int8"}], ids=str
)
def test_any_cache_reads_what_another_wrote(options, stored):
    other = make_cache(**stored)
    fill(other)
    for source, target in ((other, make_cache(**stored, **options)), (make_cache(**stored, **options), other)):
        if source is not other:
            fill(source, seed=1)
        before, after = moved(source, target, 8 * W - 3)
        np.testing.assert_array_equal(after[:, :, 3:], before[:, :, 3:])
        if target is not other:
            assert not after[:, :, :3].any()


@pytest.mark.parametrize(
    "options", [{"layout": "NHD"}, {"layout": "vllm"}, {"layout": "NHD", "kv_dtype": "int8"}], ids=str
)
def test_caches_on_a_device_are_copied_by_blocks(options):
    source, target = make_cache(**options), make_cache(**options, block_size=16)
    fill(source)
    fill(target, seed=1)
    untouched = target.k_caches[0][20:].copy()
    before, after = moved(source, target, 5 * W - 3, staged=True)
    np.testing.assert_array_equal(after[:, :, 3:], before[:, :, 3:])
    np.testing.assert_array_equal(target.k_caches[0][20:], untouched)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("stored", [{}, {"kv_dtype": "int8"}], ids=str)
def test_a_block_has_zeros_where_the_cache_lacks_a_token(stored, staged):
    cache = make_cache(**stored)
    fill(cache)
    blocks = CacheBlocks(cache, "a model", block_tokens=9)
    blocks._on_device = staged
    _, [first, *_] = blocks.read(np.array([-1, -1, 5, 6]), [bytes(16)])
    for part in blocks.wire.payloads(np.frombuffer(first, np.uint8)[None]):
        has_bits = bits(part)[0].reshape(LAYERS, 2, 9, -1).any(axis=(0, 1, 3))
        assert has_bits.tolist() == [False, False, True, True] + [False] * 5
    assert not np.frombuffer(first, np.uint8)[-4:].any()  # nor behind the scales of 9 tokens


def test_layers_that_read_another_layers_keys_are_left_out():
    cache = make_cache(same_as={2: 1})
    assert blocks_of(cache).wire.parts[0].shape[0] == LAYERS - 1
    fill(cache)
    before, after = moved(cache, make_cache(same_as={2: 1}, layout="HND"), 3 * W, staged=True)
    np.testing.assert_array_equal(after[:, :, 3:], before[:, :, 3:])


def test_ranks_find_their_heads():
    whole, rank = make_cache(), make_cache(num_kv_heads=1)
    fill(whole)
    ours, theirs = blocks_of(rank, first_head=2), blocks_of(whole)
    slots = np.arange(2 * W)
    digests = theirs.wire.digests(text(2 * W), NO_SALT)
    names, blocks = theirs.read(slots, digests)
    store = {name.key: block for name, block in zip(names, blocks, strict=True)}
    wanted = [name for digest in digests for name in ours.names(digest)]
    ours.write(slots, 0, ours.open([store[name.key] for name in wanted], wanted))
    np.testing.assert_array_equal(contents(rank, slots)[..., 0, :], contents(whole, slots)[..., 2, :])


def keys_of(cache=None, model="a model", salt=None, seed=0, **options):
    blocks = blocks_of(cache or make_cache(), model, **options)
    return {
        name.key
        for digest in blocks.wire.digests(text(4 * W, seed), root_digest(salt))
        for name in blocks.names(digest)
    }


def test_keys_differ_with_all_that_k_and_v_depend_on():
    fp8 = {"kv_dtype": "fp8_e4m3"}
    sets = [
        keys_of(),
        keys_of(model="another"),
        keys_of(salt="a tenant"),
        keys_of(seed=1),
        keys_of(make_cache(num_layers=2)),
        keys_of(make_cache(head_dim=32)),
        keys_of(first_head=HEADS),
        *(keys_of(make_cache(dtype=dtype)) for dtype in ("float16", "bfloat16")),
        *(keys_of(make_cache(kv_dtype=kind)) for kind in ("fp8_e4m3", "fp8_e5m2", "int8")),
        keys_of(make_cache(**fp8, k_scale=2.0)),
        keys_of(make_cache(**fp8, v_scale=2.0)),
        keys_of(make_cache(**fp8, k_scale=np.arange(3, 3 + HEADS, dtype=np.float32))),
    ]
    assert all(len(keys) == 4 * HEADS for keys in sets)
    assert len(set.union(*sets)) == sum(map(len, sets))
    assert keys_of(make_cache(layout="HND", block_size=16)) == keys_of()
    assert keys_of(make_cache(**fp8, k_scale=1.0)) == keys_of(make_cache(**fp8))


@pytest.mark.parametrize(
    ("stored", "word", "digest"),
    [
        ({"dtype": "float32"}, 0, "a004e4be19b481c7"),
        ({"dtype": "float16"}, 1, "eedd42c502b29fc8"),
        ({"dtype": "bfloat16"}, 2, "75e5613cf0650035"),
        ({"kv_dtype": "fp8_e4m3", "k_scale": 2.0}, 3, "95e3349b8b251c51"),
        ({"kv_dtype": "fp8_e5m2"}, 4, "c71bebb749609934"),
        ({"kv_dtype": "int8"}, 5, "1f83c241344bb311"),
    ],
    ids=str,
)
def test_what_an_earlier_version_stored_stays_readable(stored, word, digest):
    blocks = blocks_of(cache := make_cache(**stored))
    fill(cache)
    _, sealed = blocks.read(np.arange(2 * W - 3), blocks.wire.digests(text(2 * W - 3), NO_SALT))
    assert bytes(sealed[0][:12]) == b"pagedkv\n\1\0" + word.to_bytes(2, "little")
    assert hashlib.blake2b(b"".join(sealed), digest_size=8).hexdigest() == digest


def test_a_key_names_all_tokens_before_it():
    wire = Wire("a model", LAYERS, DIM, FORMATS["float32"], block_tokens=W)
    tokens = text(3 * W + 1)
    digests = wire.digests(tokens, NO_SALT)
    assert wire.digests(tokens[: 2 * W], NO_SALT) == digests[:2]
    tokens[0] += 1
    assert not {*wire.digests(tokens, NO_SALT)} & {*digests}


def test_only_the_block_itself_is_opened():
    blocks = blocks_of(cache := make_cache())
    fill(cache)
    names, sealed = blocks.read(np.arange(2 * W), blocks.wire.digests(text(2 * W), NO_SALT))
    block, [name, other, *_] = bytes(sealed[0]), names
    assert blocks.wire.opened(block, name) is not None
    for wrong in (None, b"", block[:-1], block + b"\0", 7, bytes(len(block))):
        assert blocks.wire.opened(wrong, name) is None
    assert blocks.wire.opened(block, other) is None
    assert blocks.wire.opened(bytes(sealed[1]), name) is None
    for place in {*range(0, 100, 7), *range(HEADER_BYTES, len(block), 41), len(block) - 1}:
        damaged = bytearray(block)
        damaged[place] ^= 4
        assert blocks.wire.opened(damaged, name) is None, place
    payload = np.frombuffer(block, np.uint8)[HEADER_BYTES:].reshape(2 * LAYERS, -1)
    moved = block[:HEADER_BYTES] + payload[[1, 0, *range(2, 2 * LAYERS)]].tobytes()
    assert blocks.wire.opened(moved, name) is None


def test_what_is_whole_comes_before_the_first_gap():
    blocks = blocks_of(cache := make_cache())
    fill(cache)
    names, sealed = blocks.read(np.arange(4 * W), blocks.wire.digests(text(4 * W), NO_SALT))
    assert len(blocks.open(sealed, names)) == 4 * HEADS
    sealed[2 * HEADS + 1] = None
    assert len(blocks.open(sealed, names)) == 2 * HEADS
    assert len(blocks.open(sealed[: HEADS - 1], names)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model must be a str that names the model and its weights, got ''"),
        ({"first_head": -1}, "first_head must be at least 0, got -1"),
    ],
)
def test_refusals(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        blocks_of(make_cache(), **{"model": "m"} | options)
