"""Layers with windows: a store gives back what the next query sees, and nothing that was not written is ever found."""

import functools
import math
import threading
import time
from hashlib import shake_128
from itertools import accumulate, islice

import numpy as np
import pytest

from pagedkv.arrays import host_view
from pagedkv.layouts import as_tokens
from pagedkv.memory.prefix.digests import root_digest
from pagedkv.stores import HostStore, SavedSequences
from pagedkv.stores.blocks import CacheBlocks

from .caches import DIM, HEADS, LAYERS, W, evict, fill, make_cache, text
from .test_prefixes import FaultyStore, damage, make_store, prefixes_of

WINDOWS = [2 * W, None, 2 * W]
NUM_TOKENS = 10 * W + 3
FULL = 10 * W
SEVERAL = {"num_kv_heads": [HEADS, 1, HEADS], "head_dim": [8, DIM, 8]}


def windowed(num_blocks=200, block_size=4, windows=WINDOWS, **options):
    """A cache whose blocks hold anything but what a test writes."""
    cache = make_cache(num_blocks, block_size, windows=windows, **options)
    fill(cache)
    return cache


def shape_of(cache, layer):
    """Hkv and D."""
    return cache.groups[cache.layer_groups.group_of[layer]].shape or (HEADS, DIM)


@functools.lru_cache(2**14)
def kv_after(path):
    """K and V of a token in all layers, (num_layers, 2, num_kv_heads, head_dim), by the digest of all up to it."""
    shape = LAYERS, 2, HEADS, DIM
    return np.frombuffer(shake_128(path).digest(2 * math.prod(shape)), np.uint16).astype(np.float32).reshape(shape)


def kv_of(tokens, salt=None):
    """K and V of a text, (num_layers, 2, num_tokens, num_kv_heads, head_dim), each of all tokens up to its own."""
    paths = accumulate(tokens, lambda path, token: shake_128(path + b"%d " % token).digest(16), initial=b"%r" % salt)
    rows = [kv_after(path) for path in islice(paths, 1, None)]
    return np.array(rows, np.float32).reshape(-1, LAYERS, 2, HEADS, DIM).transpose(1, 2, 0, 3, 4)


def write(cache, tokens, salt, slots):
    """Write the last tokens of a text, which have these slots."""
    for layer, kv in enumerate(kv_of(tokens, salt)[:, :, len(tokens) - slots.shape[-1] :]):
        heads, dim = shape_of(cache, layer)
        cache.write(layer, *kv[:, :, :heads, :dim], slots)


def computed(cache, tokens, salt=None, chunk=None):
    """A sequence of these tokens whose K and V are written, and found by others."""
    seq, length = cache.add_found(tokens, salt)
    while length < len(tokens):
        stop = min(len(tokens), length + (chunk or len(tokens)))
        slots = cache.append(seq, stop - length, tokens=tokens[length:stop])
        write(cache, tokens[:stop], salt, slots)
        cache.commit(seq)
        length = stop
    return seq


def assert_written(cache, tokens, slots, salt=None):
    """The tokens with slots, (num_groups, num_tokens), have the K and V of the text."""
    expected = kv_of(tokens, salt)
    for layer, group in enumerate(cache.layer_groups.group_of):
        [there] = (slots[group] >= 0).nonzero()
        ids, offsets = np.divmod(slots[group, there], cache.block_size)
        heads, dim = shape_of(cache, layer)
        stored, layout = cache._layer_caches.kv_format, cache._options[layer]["layout"]
        for i in range(2):
            kv = expected[layer, i, there, :heads, :dim]
            wanted = stored.quantise(kv) if stored.scale == "row" else (kv,)
            for x, rows in zip(cache._layer_caches.layers[layer][i::2], wanted, strict=True):
                np.testing.assert_array_equal(as_tokens(layout, host_view(x))[ids, offsets].reshape(rows.shape), rows)


def assert_found_is_written(cache, tokens, salt=None):
    """All blocks that prompts with this beginning can find have its K and V; returns how many of its tokens are."""
    chains, size = cache._rows.chains, cache.block_size
    columns = chains.cache.columns(chains.cache.find(np.asarray(tokens, np.int32), root_digest(salt)))
    slots = np.where(columns[:, :, None] < 0, -1, columns[:, :, None] * size + np.arange(size))
    assert_written(cache, tokens, slots.reshape(len(columns), -1), salt)
    cache.check()
    return cache.find([*tokens, 1], salt)


def assert_seen(cache, seq, tokens, salt=None):
    """A sequence has the K and V of a text, as far as the next query sees them."""
    slots = np.atleast_2d(cache.slots(seq, 0, len(tokens)))
    assert_written(cache, tokens, slots, salt)
    for group, (window, *_) in enumerate(cache.groups):
        assert (slots[group, 0 if window is None else max(0, len(tokens) - window + 1) :] >= 0).all()


def assert_goes_on(cache, seq, tokens):
    """As `assert_seen`, and the sequence takes another token."""
    assert_seen(cache, seq, tokens)
    cache.append(seq, 1, tokens=[7])
    cache.check()


OTHERS = {
    "blocks of 2": {"block_size": 2},
    "of a wire block": {"block_size": W},
    "of three": {"block_size": 3 * W, "num_blocks": 60},
    "of 5, across wire blocks": {"block_size": 5},
    "kept tokens": {"keep": 5},
    "HND": {"layout": "HND"},
    "vllm": {"layout": "vllm", "block_size": W},
    "torch": {"array_module": "torch"},
    "a group for each layer": {"group_size": 1},
}


SHAPES = {"one shape": {}, "several": SEVERAL, "several without a window": SEVERAL | {"windows": [2 * W, None, None]}}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_another_cache_finds_what_one_has_stored(options, shapes):
    tokens, store, cache, other = text(NUM_TOKENS), make_store(), windowed(**shapes), windowed(**shapes | options)
    computed(cache, tokens)
    with prefixes_of(cache, store) as prefixes:
        assert prefixes.store(tokens) == FULL
    with prefixes_of(other, store) as prefixes:
        assert prefixes.load(tokens) == FULL // other.block_size * other.block_size
        assert prefixes.num_loaded == FULL
    assert other.stats().used == 0
    assert assert_found_is_written(other, tokens) >= FULL // other.block_size * other.block_size
    assert_goes_on(other, computed(other, tokens), tokens)


def test_a_store_has_room_for_the_blocks_of_all_shapes():
    """Two layers of 4 heads and 8 dims, and one of a head of 16."""
    shapes = SEVERAL | {"windows": None}
    largest = 128 + 2 * 2 * W * 8 * 4
    with prefixes_of(windowed(**shapes), HostStore(5 * largest, largest)):
        pass
    with pytest.raises(ValueError, match=f"^store must have a capacity of at least {5 * largest} bytes, 5 blocks of "):
        prefixes_of(windowed(**shapes), HostStore(4 * largest, largest))


def test_each_window_comes_as_far_as_the_next_query_sees():
    tokens, store = text(NUM_TOKENS), make_store()
    with prefixes_of(cache := windowed(windows=[2 * W, None, 5 * W]), store) as prefixes:
        computed(cache, tokens)
        prefixes.store(tokens)
    asked = []
    faulty = FaultyStore(store, lambda keys, found: asked.append(len(keys)) or found)
    with prefixes_of(other := windowed(windows=[2 * W, None, 5 * W]), faulty) as prefixes:
        assert prefixes.load(tokens) == FULL
    assert asked == [HEADS * 10, HEADS * 2, HEADS * 5]
    assert_found_is_written(other, tokens)


def test_what_the_pool_has_of_a_window_does_not_come():
    tokens, store = text(NUM_TOKENS), make_store()
    with prefixes_of(cache := windowed(), store) as prefixes:
        computed(cache, tokens)
        prefixes.store(tokens)
    other = windowed()
    other.free(computed(other, tokens[: 9 * W]))
    asked = []
    faulty = FaultyStore(store, lambda keys, found: asked.append(len(keys)) or found)
    with prefixes_of(other, faulty) as prefixes:
        assert prefixes.load(tokens) == FULL
    assert asked == [HEADS, HEADS]
    assert_found_is_written(other, tokens)


def test_a_pool_with_room_for_what_windows_leave_is_enough():
    tokens, store = text(24 * W), make_store()
    windows = [W, W, W, None]
    with prefixes_of(cache := windowed(num_layers=4, windows=windows, group_size=1), store) as prefixes:
        seq, _ = cache.add(tokens)
        cache.commit(seq)
        assert prefixes.store(tokens) == 24 * W
    needed = cache.layer_groups.peak(len(tokens), W)
    for num_blocks, num_found in ((needed - 1, 0), (needed, 24 * W - 1)):
        other = windowed(num_blocks, num_layers=4, windows=windows, group_size=1)
        assert not other.can_add(tokens)
        with prefixes_of(other, store) as prefixes:
            assert prefixes.load(tokens) == num_found
        other.check()


def test_blocks_that_are_evicted_in_part_are_not_stored():
    tokens, store, cache, other = text(NUM_TOKENS), make_store(), windowed(), windowed()
    computed(cache, tokens)
    evict(cache)
    with prefixes_of(cache, store) as prefixes:
        assert prefixes.store(tokens) == FULL
    with prefixes_of(other, store) as prefixes:
        assert prefixes.load(tokens[: 9 * W + 1]) == 0
        assert prefixes.load(tokens) == FULL
    assert_found_is_written(other, tokens)


@pytest.mark.parametrize(("num_blocks", "num_tokens", "chunk"), [(11, 9, 20), (12, 13, 3)])
def test_blocks_that_other_layers_have_taken_are_not_stored(num_blocks, num_tokens, chunk):
    tokens, store = text(num_tokens, 1), make_store()
    caches = [windowed(n, windows=[None, 5, 5]) for n in (num_blocks, 200, 200)]
    for seed in (1, 2):
        caches[0].free(computed(caches[0], text(num_tokens, seed), chunk=chunk))
    assert_found_is_written(caches[0], tokens)
    computed(caches[1], tokens)
    for cache in caches[:2]:
        with prefixes_of(cache, store, block_tokens=4) as prefixes:
            prefixes.store(tokens)
    with prefixes_of(caches[2], store, block_tokens=4) as prefixes:
        assert prefixes.load(tokens) == num_tokens - 1
    assert_found_is_written(caches[2], tokens)


def lose(cache, store, tokens, lost):
    """Have the store lose wire blocks of the layers with a window, by their numbers."""
    _, window = CacheBlocks.of_each_kind(cache, "a model", block_tokens=W)
    digests = window.wire.digests(np.asarray(tokens, np.int32), root_digest(None))
    store.remove([name.key for i in lost for name in window.names(digests[i])[1:2]])


@pytest.mark.parametrize(
    ("lost", "num_found"),
    [([9], 9), ([8], 8), ([7], 10), ([8, 5], 8), ([8, 7], 7), ([8, 6, 4], 4), ([8, 6, 4, 2], 2), (range(1, 10, 2), 1)],
    ids=str,
)
def test_a_gap_ends_the_hits_that_see_it(lost, num_found):
    tokens, store, cache, other = text(NUM_TOKENS), make_store(), windowed(), windowed()
    computed(cache, tokens)
    with prefixes_of(cache, store) as prefixes:
        prefixes.store(tokens)
    lose(cache, store, tokens, lost)
    with prefixes_of(other, store) as prefixes:
        assert prefixes.load(tokens) == num_found * W == prefixes.num_loaded
    assert assert_found_is_written(other, tokens) == num_found * W
    assert other.stats().used == 0


FAULTS = {
    "damages a block": lambda keys, found: [*found[:5], damage(found[5]), *found[6:]],
    "loses all but the first": lambda keys, found: found[:1],
    "mixes them up": lambda keys, found: found[::-1],
    "raises": lambda keys, found: found[0] / 0,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_windows_costs_a_computation_and_no_wrong_token(fault):
    tokens, store, cache, other = text(NUM_TOKENS), make_store(), windowed(), windowed()
    computed(cache, tokens)
    with prefixes_of(cache, store) as prefixes:
        prefixes.store(tokens)
    calls = []
    faulty = FaultyStore(store, lambda keys, found: found if calls.append(1) or len(calls) == 1 else fault(keys, found))
    with prefixes_of(other, faulty) as prefixes:
        assert prefixes.load(tokens) < FULL
    assert len(calls) > 1
    assert other.num_seqs == 0
    assert_found_is_written(other, tokens)
    assert_goes_on(other, computed(other, tokens), tokens)


DAMAGES = {"damaged": damage, "cut": lambda block: bytes(block)[:-8], "zeros": lambda block: bytes(len(block))}


@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["without windows", "windows"])
@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_damaged_blocks_that_come_are_replaced(change, windows):
    tokens, store = text(NUM_TOKENS), make_store()
    with prefixes_of(cache := windowed(windows=windows), store) as prefixes:
        computed(cache, tokens)
        prefixes.store(tokens)
    keys = [*store._slots._used][::5]
    damaged = [change(block) for block in store.get(keys)]
    store.remove(keys)
    store.put(keys, damaged)
    with prefixes_of(other := windowed(windows=windows), store) as prefixes:
        assert prefixes.load(tokens) < FULL
        for _ in range(3):  # it comes to those in windows once the others are whole
            prefixes.load(tokens)
            other.free(computed(other, tokens))
            assert prefixes.store(tokens) == FULL
            assert prefixes.flush()
            other.reset()
    with prefixes_of(last := windowed(windows=windows), store) as prefixes:
        assert prefixes.load(tokens) == FULL
    assert assert_found_is_written(last, tokens) == FULL


def test_a_store_that_stalls_in_the_windows_is_not_waited_for():
    tokens, store, cache, other = text(NUM_TOKENS), make_store(), windowed(), windowed()
    computed(cache, tokens)
    with prefixes_of(cache, store) as prefixes:
        prefixes.store(tokens)
    goes_on, calls = threading.Event(), []

    def stall(keys, found):
        calls.append(keys)
        return found if len(calls) == 1 or goes_on.wait() else None

    faulty = FaultyStore(store, stall)
    prefixes = prefixes_of(other, faulty, timeout=0.2)
    begin = time.monotonic()
    assert prefixes.load(tokens) == 0
    assert time.monotonic() - begin < 5
    assert isinstance(prefixes.patient.last_error, TimeoutError)
    assert other.num_seqs == 0
    goes_on.set()
    while prefixes.load(tokens) != FULL:
        pass
    prefixes.close()
    assert_found_is_written(other, tokens)


SAVED = {
    "equal caches": ({}, {}),
    "shorter blocks": ({}, {"block_size": 2, "layout": "HND"}),
    "a group for each layer": ({}, {"group_size": 1}),
    "nothing behind the window": ({"windows": [1, None, 1]}, {"windows": [1, None, 1]}),
}


@pytest.mark.parametrize("num_tokens", [1, 3, W, 2 * W + 4, NUM_TOKENS, 9 * W + 4])
@pytest.mark.parametrize(("options", "others"), SAVED.values(), ids=SAVED)
def test_a_saved_sequence_comes_back_with_what_it_held(num_tokens, options, others):
    tokens, store, cache, other = text(num_tokens), make_store(), windowed(**options), windowed(**others)
    seq = computed(cache, tokens, chunk=3)
    evict(cache)
    assert SavedSequences(prefixes_of(cache, store)).save(seq, "a chat")
    saves = SavedSequences(prefixes_of(other, store))
    restored, num_cached, ids = saves.restore("a chat")
    np.testing.assert_array_equal(ids, tokens)
    assert num_cached == num_tokens
    assert_found_is_written(other, tokens)
    assert saves.save(restored, "the same chat")
    assert_goes_on(other, restored, tokens)


@pytest.mark.parametrize("last", range(1, W))
def test_a_last_token_is_told_from_how_many_tokens_of_a_block_are_missing(last):
    tokens, store, cache = [*text(4 * W), last], make_store(), windowed(windows=[3, None, 3], block_size=1)
    seq = computed(cache, tokens)
    assert SavedSequences(prefixes_of(cache, store)).save(seq, "a chat")
    other = windowed(windows=[3, None, 3], block_size=1)
    assert SavedSequences(prefixes_of(other, store)).restore("a chat").num_cached == len(tokens)
    assert_found_is_written(other, tokens)


@pytest.mark.parametrize("options", [{"block_size": 2 * W}, {"keep": 3 * W}], ids=str)
def test_a_cache_that_needs_more_than_was_saved_computes_it(options):
    tokens, store, cache, other = text(10 * W + 5), make_store(), windowed(), windowed(**options)
    seq = computed(cache, tokens, chunk=3)
    evict(cache)
    assert SavedSequences(prefixes_of(cache, store)).save(seq, "a chat")
    restored, num_cached, ids = SavedSequences(prefixes_of(other, store)).restore("a chat")
    assert (num_cached, len(ids)) == (0, len(tokens))
    other.append(restored, len(tokens), tokens=tokens)
    other.check()


@pytest.mark.parametrize(
    "windows", [[None, 2 * W, None], [None, None, None], [2 * W, None, 3 * W], [2 * W, 2 * W, None]]
)
def test_other_windows_of_the_same_model_are_told_apart(windows):
    tokens, store, cache, other = text(NUM_TOKENS), make_store(), windowed(), windowed(windows=windows)
    assert SavedSequences(prefixes_of(cache, store)).save(computed(cache, tokens), "a chat")
    with prefixes_of(other, store) as prefixes:
        assert prefixes.load(tokens) == 0
        with pytest.raises(KeyError):
            SavedSequences(prefixes).restore("a chat")
    assert other.num_seqs == 0


def test_groups_without_windows_share_with_one_group():
    tokens, store = text(NUM_TOKENS), make_store()
    cache, other = windowed(windows=None, group_size=1), windowed(windows=None)
    computed(cache, tokens)
    with prefixes_of(cache, store) as prefixes:
        assert prefixes.store(tokens) == FULL
    with prefixes_of(other, store) as prefixes:
        assert prefixes.load(tokens) == FULL
    assert assert_found_is_written(windowed(windows=None, group_size=1), tokens) == 0


def test_windows_in_all_layers_are_refused():
    with pytest.raises(
        ValueError, match=r"cache must have layers without a window, got .*Make the cache without windows"
    ):
        prefixes_of(windowed(windows=4 * W), make_store())


def staged(cache, store):
    """Prefixes of a cache whose blocks are copied to the host first, as those of a device."""
    prefixes = prefixes_of(cache, store)
    for blocks in (prefixes.blocks, *prefixes.windows):
        blocks._on_device = True
    return prefixes


def test_a_device_gets_the_blocks_of_its_own_groups():
    tokens, store = text(NUM_TOKENS), make_store()
    cache, other = (windowed(group_size=1) for _ in range(2))
    computed(cache, tokens)
    with staged(cache, store) as prefixes:
        prefixes.store(tokens)
    with staged(other, store) as prefixes:
        assert prefixes.load(tokens) == FULL
    assert_goes_on(other, computed(other, tokens), tokens)


def test_a_device_saves_sequences_that_hold_nothing_behind_a_window():
    tokens, store, cache, other = text(2 * W + 4), make_store(), *(windowed(windows=[1, None, 1]) for _ in range(2))
    seq = computed(cache, tokens)
    assert cache.slots(seq, len(tokens) - 1, len(tokens)).min() == -1
    assert SavedSequences(staged(cache, store)).save(seq, "a chat")
    restored, num_cached, _ = SavedSequences(staged(other, store)).restore("a chat")
    assert num_cached == len(tokens)
    assert_goes_on(other, restored, tokens)
