"""Prefixes in a store: another cache gets the same K and V, and a store that fails costs a computation at most."""

import threading
import time
from asyncio import CancelledError
from contextlib import suppress

import numpy as np
import pytest

from pagedkv.stores import HostStore, StoredPrefixes

from ..support.interrupts import interrupts_at_every_instant
from .caches import W, blocks_of, committed, contents, make_cache, text

NUM_TOKENS = 10 * W + 3
FULL = 10 * W


def prefixes_of(cache, store, **options):
    return StoredPrefixes(cache, store, "a model", **{"block_tokens": W, "timeout": 5.0} | options)


def make_store():
    return HostStore(2**21, blocks_of(make_cache()).wire.block_bytes)


def stored(store, tokens=None, salt=None):
    """Compute a prompt in a cache and store it; returns its K and V."""
    cache, tokens = make_cache(), text(NUM_TOKENS) if tokens is None else tokens
    seq = committed(cache, tokens, salt)
    with prefixes_of(cache, store) as prefixes:
        assert prefixes.store(tokens, salt) == len(tokens) // W * W
    return contents(cache, cache.slots(seq, 0, len(tokens)))


def loaded(cache, store, tokens=None, salt=None, **options):
    """Load a prompt; returns how much of it was there, and the K and V of that."""
    tokens = text(NUM_TOKENS) if tokens is None else tokens
    with prefixes_of(cache, store, **options) as prefixes:
        num_found = prefixes.load(tokens, salt)
        assert prefixes.num_loaded <= num_found
    seq, num_cached = cache.add(tokens, salt)
    assert num_cached == num_found
    found = contents(cache, cache.slots(seq, 0, num_found))
    cache.free(seq)
    cache.check()
    return num_found, found


@pytest.mark.parametrize("block_size", [1, W // 2, W, 5 * W])
def test_another_cache_finds_what_one_has_stored(block_size):
    expected = stored(store := make_store())
    cache = make_cache(2**10 // block_size, block_size)
    num_found, found = loaded(cache, store)
    assert num_found == FULL
    np.testing.assert_array_equal(found, expected[:, :, :FULL])
    assert cache.stats().used == 0


def test_what_the_cache_has_is_not_loaded():
    expected = stored(store := make_store())
    cache, tokens = make_cache(block_size=4), text(NUM_TOKENS)
    committed(cache, tokens[: 3 * W + 5])
    with prefixes_of(cache, store) as prefixes:
        assert prefixes.load(tokens) == FULL
        assert prefixes.num_loaded == FULL - 3 * W - 4
        assert prefixes.load(tokens) == FULL
        assert prefixes.num_loaded == FULL - 3 * W - 4
    seq, _ = cache.add(tokens)
    np.testing.assert_array_equal(contents(cache, cache.slots(seq, 4 * W, FULL)), expected[:, :, 4 * W : FULL])


def test_what_the_store_has_is_not_stored_again():
    cache, tokens, calls = make_cache(), text(NUM_TOKENS), []
    store = make_store()
    put, store.put = store.put, lambda keys, blocks: (calls.append(len(keys)), put(keys, blocks))
    committed(cache, tokens)
    with prefixes_of(cache, store) as prefixes:
        assert prefixes.store(tokens[: 4 * W]) == 4 * W
        assert prefixes.store(tokens) == FULL
        assert prefixes.store(tokens) == FULL
    assert sum(calls) == 4 * 10


@pytest.mark.parametrize("other", [{"salt": "a"}, {"tokens": text(NUM_TOKENS, 1)}, {"salt": b"\0" * 16}])
def test_other_tokens_and_salts_find_nothing(other):
    stored(store := make_store(), salt="b")
    assert loaded(make_cache(), store, **other)[0] == 0


def test_another_model_finds_nothing():
    stored(store := make_store())
    with StoredPrefixes(make_cache(), store, "another", block_tokens=W) as prefixes:
        assert prefixes.load(text(NUM_TOKENS)) == 0


def test_a_full_pool_loads_nothing():
    stored(store := make_store())
    cache = make_cache(12)
    cache.add(3 * W)
    assert loaded_or_none(cache, store) == 0
    assert cache.num_free == 9


def loaded_or_none(cache, store):
    with prefixes_of(cache, store) as prefixes:
        return prefixes.load(text(NUM_TOKENS))


def test_a_listener_that_raises_leaves_no_sequence():
    stored(store := make_store())

    def listen(event):
        raise RuntimeError("no events, please")

    cache = make_cache(events=listen)
    with prefixes_of(cache, store) as prefixes, pytest.raises(RuntimeError, match="no events, please"):
        prefixes.load(text(NUM_TOKENS))
    assert cache.num_seqs == 0


def test_an_interrupt_at_any_instant_leaves_no_sequence():
    stored(store := make_store())
    for interrupt in interrupts_at_every_instant(("memory/guard", "pagedkv/commit", "stores/prefixes")):
        cache = make_cache()
        with prefixes_of(cache, store) as prefixes, suppress(KeyboardInterrupt), interrupt:
            assert prefixes.load(text(NUM_TOKENS)) == FULL
        assert cache.num_seqs == 0, interrupt.came_at
        cache.check()


SIZE = blocks_of(make_cache()).wire.block_bytes


def damage(block):
    view = bytearray(block)
    view[-1] ^= 1
    return view


class FaultyStore:
    """Does what a real one does, and then what a fault makes of it."""

    def __init__(self, store, fault=lambda keys, found: found):
        self.store, self.fault, self.capacity = store, fault, store.capacity

    def get(self, keys):
        return self.fault(keys, self.store.get(keys))

    def has(self, keys):
        return self.store.has(keys)

    def put(self, keys, blocks):
        self.fault(keys, blocks)
        self.store.put(keys, blocks)

    def remove(self, keys):
        self.store.remove(keys)


def fail(keys, found):
    raise OSError("the network is down")


def cancel(keys, found):
    raise CancelledError


def release(block):
    view = memoryview(block)
    view.release()
    return view


AT = 4 * 3 + 1  # a block of the fourth wire block
FAULTS = {
    "raises": (fail, 0),
    "raises what is no Exception": (cancel, 0),
    "returns None": (lambda keys, found: None, 0),
    "returns no blocks": (lambda keys, found: 7, 0),
    "returns texts": (lambda keys, found: ["?"] * len(keys), 0),
    "returns too few": (lambda keys, found: found[:AT], 3 * W),
    "returns too many": (lambda keys, found: [*found, *found], FULL),
    "releases what it returns": (lambda keys, found: [release(block) for block in found], 0),
    "loses a block": (lambda keys, found: [*found[:AT], None, *found[AT + 1 :]], 3 * W),
    "damages a block": (lambda keys, found: [*found[:AT], damage(found[AT]), *found[AT + 1 :]], 3 * W),
    "cuts a block": (lambda keys, found: [*found[:AT], found[AT][:-8], *found[AT + 1 :]], 3 * W),
    "mixes blocks up": (lambda keys, found: [*found[:AT], *found[AT:][::-1]], 3 * W),
    "has one head's blocks": (lambda keys, found: found[:1] * len(keys), 0),
}


@pytest.mark.parametrize(("fault", "num_found"), FAULTS.values(), ids=FAULTS)
def test_a_fault_costs_a_computation_and_no_wrong_token(fault, num_found):
    expected = stored(store := make_store())
    num_loaded, found = loaded(make_cache(), FaultyStore(store, fault))
    assert num_loaded == num_found
    np.testing.assert_array_equal(found, expected[:, :, :num_found])


def test_a_store_that_stalls_has_nothing():
    stored(store := make_store())
    goes_on = threading.Event()
    faulty = FaultyStore(store, lambda keys, found: goes_on.wait() and found)
    cache, tokens = make_cache(), text(NUM_TOKENS)
    prefixes = prefixes_of(cache, faulty, timeout=0.05)
    begin = time.monotonic()
    assert prefixes.load(tokens) == 0
    assert time.monotonic() - begin < 5
    assert prefixes.patient.num_failed == 1
    assert prefixes.load(tokens) == 0
    assert prefixes.patient.num_failed == 1  # it has not waited again
    seq = committed(cache, text(NUM_TOKENS, 1))
    assert prefixes.store(text(NUM_TOKENS, 1)) == FULL
    cache.free(seq)
    assert not prefixes.flush()
    assert isinstance(prefixes.patient.last_error, TimeoutError)
    goes_on.set()
    while prefixes.load(tokens) != FULL:
        pass
    prefixes.close()


def test_what_does_not_fit_is_not_stored():
    cache, tokens, store = make_cache(), text(NUM_TOKENS), make_store()
    committed(cache, tokens)
    size = blocks_of(cache).bytes_of_all_heads
    with prefixes_of(cache, store, max_pending_bytes=3 * size + 1) as prefixes:
        assert prefixes.store(tokens) == 3 * W
        assert (prefixes.num_stored, prefixes.num_dropped) == (3 * W, 7 * W)
        assert prefixes.flush()
        assert prefixes.store(tokens) == 6 * W
    assert loaded(make_cache(), store)[0] == 6 * W


@pytest.mark.parametrize(("fault", "error"), [(fail, OSError("the network is down")), (cancel, CancelledError())])
def test_what_the_store_did_not_take_is_stored_again(fault, error):
    cache, tokens = make_cache(), text(NUM_TOKENS)
    committed(cache, tokens)
    faulty = FaultyStore(make_store(), fault)
    with prefixes_of(cache, faulty) as prefixes:
        prefixes.store(tokens)
        prefixes.flush()
        assert (prefixes.patient.num_failed, repr(prefixes.patient.last_error)) == (1, repr(error))
        faulty.fault = lambda keys, found: found
        assert prefixes.store(tokens) == FULL
    assert loaded(make_cache(), faulty)[0] == FULL


def test_what_the_store_has_lost_is_stored_again():
    """Nobody has asked for it in between: the cache still has it."""
    cache, tokens, store = make_cache(), text(NUM_TOKENS), make_store()
    committed(cache, tokens)
    with prefixes_of(cache, store) as prefixes:
        prefixes.store(tokens)
        prefixes.flush()
        for lost in (slice(None), slice(13, 14)):
            store.remove([*store._slots._used][lost])
            prefixes.store(tokens)
            prefixes.flush()
            assert loaded(make_cache(), store)[0] == FULL


def test_what_is_stored_again_stays_in_the_store():
    cache, hot, store = make_cache(60), text(2 * W), HostStore(5 * 4 * SIZE, SIZE)
    committed(cache, hot)
    with prefixes_of(cache, store) as prefixes:
        for seed in range(1, 4):
            prefixes.store(hot)
            committed(cache, text(2 * W, seed))
            prefixes.store(text(2 * W, seed))
            prefixes.flush()
    assert loaded(make_cache(), store, [*hot, 1])[0] == 2 * W


ANSWERS = {
    "raises": lambda keys: fail(keys, None),
    "returns None": lambda keys: None,
    "returns no list": lambda keys: 7,
    "returns too few": lambda keys: [True] * (len(keys) - 1),
    "returns too many": lambda keys: [True] * (len(keys) + 1),
}


@pytest.mark.parametrize("has", ANSWERS.values(), ids=ANSWERS)
def test_a_store_that_does_not_say_what_it_has_is_given_all(has):
    cache, tokens, store = make_cache(), text(NUM_TOKENS), make_store()
    committed(cache, tokens)
    store.has = has
    with prefixes_of(cache, store) as prefixes:
        for _ in range(2):
            assert prefixes.store(tokens) == FULL
            prefixes.flush()
        assert prefixes.num_stored == 2 * FULL
    assert loaded(make_cache(), store)[0] == FULL


def test_a_cache_without_a_prefix_cache_is_refused():
    with pytest.raises(ValueError, match="cache must have a prefix cache, got one with prefix_cache=False"):
        prefixes_of(make_cache(prefix_cache=False), make_store())


def test_what_is_no_store_is_refused():
    with pytest.raises(TypeError, match=r"store.get must be a method, as of a BlockStore, got None"):
        prefixes_of(make_cache(), 7)


class ListStore:
    """A store of a user's, which keeps blocks of any size and tells no capacity."""

    def get(self, keys):
        return [None] * len(keys)

    def has(self, keys):
        return [False] * len(keys)

    def put(self, keys, blocks): ...

    def remove(self, keys): ...


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (
            HostStore(2**21, SIZE - 1),
            f"store must take blocks of {SIZE} bytes, .* got one with block_bytes={SIZE - 1}: make it with block_bytes",
        ),
        (
            HostStore(4 * SIZE - 1, SIZE),
            rf"capacity of at least {4 * SIZE} bytes, 4 blocks of {SIZE}: .* got {4 * SIZE - 1}: give it more",
        ),
        (HostStore(6 * SIZE, 2 * SIZE), rf"at least {8 * SIZE} bytes, 4 blocks of {2 * SIZE}: .* got {6 * SIZE}"),
    ],
)
def test_a_store_without_room_for_one_wire_block_is_refused(store, message):
    with pytest.raises(ValueError, match=message):
        prefixes_of(make_cache(), store)


def test_a_store_need_not_tell_its_sizes():
    assert prefixes_of(make_cache(), ListStore()).load([1, 2]) == 0
    expected = stored(store := HostStore(4 * SIZE, SIZE), text(W))
    np.testing.assert_array_equal(loaded(make_cache(), store, text(W + 1))[1], expected)


def test_a_bound_that_lets_no_block_wait_is_refused():
    with pytest.raises(ValueError, match=rf"max_pending_bytes must be at least {4 * SIZE}, what {W} tokens take in"):
        prefixes_of(make_cache(), make_store(), max_pending_bytes=4 * SIZE - 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timeout": "2"}, TypeError, "timeout must be a number, got str"),
        ({"timeout": 0}, ValueError, "timeout must be positive and finite in float32, got 0"),
        ({"max_pending_bytes": "1GiB"}, TypeError, "max_pending_bytes must be an int, got str"),
    ],
)
def test_wrong_bounds_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        prefixes_of(make_cache(), make_store(), **options)


def test_any_time_to_wait_is_long_enough():
    expected = stored(store := make_store())
    num_found, found = loaded(make_cache(), store, timeout=1e30)
    np.testing.assert_array_equal(found, expected[:, :, :num_found])
    assert num_found == FULL


def test_wrong_tokens_change_nothing():
    with prefixes_of(make_cache(), make_store()) as prefixes:
        for call in (prefixes.load, prefixes.store):
            with pytest.raises(TypeError, match="tokens must be"):
                call("a text")
            with pytest.raises(TypeError, match="salt must be a str, bytes or None, got int"):
                call([1, 2], 3)
