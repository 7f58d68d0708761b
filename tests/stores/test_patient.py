"""The threads that ask a store: they end with their owner, and keep neither the store nor its blocks."""

import gc
import threading
from weakref import ref

import pytest

from pagedkv.stores import SavedSequences, SwapSpace

from .caches import W, committed, make_cache, text
from .test_prefixes import FaultyStore, make_store, prefixes_of

NUM_TOKENS = 3 * W


def swapping(store):
    """A space that has had a sequence, has one, and has a copy that somebody keeps."""
    cache = make_cache()
    space, seqs = SwapSpace(cache, store, block_tokens=W), [cache.add(W).seq for _ in range(3)]
    space.swap_out(seqs[:2])
    space.swap_in(seqs[0])
    return space, space.copy_out(seqs[2])


def storing(store):
    cache = make_cache()
    prefixes, seq = prefixes_of(cache, store), committed(cache, text(NUM_TOKENS))
    prefixes.store(text(NUM_TOKENS))
    SavedSequences(prefixes).save(seq, "a chat")
    return prefixes, seq


@pytest.fixture
def threads_end():
    """Waits until the threads that began in a test have ended."""
    before = {*threading.enumerate()}

    def wait():
        began = {*threading.enumerate()} - before
        for thread in began:
            thread.join(10)
        return not any(thread.is_alive() for thread in began)

    return wait


@pytest.mark.parametrize("make", [swapping, storing])
@pytest.mark.parametrize("is_closed", [False, True])
def test_threads_end_with_their_owner_and_keep_no_store(make, is_closed, threads_end):
    store, before = make_store(), {*threading.enumerate()}  # among them some of other tests that end meanwhile
    alive = ref(store)
    gc.disable()  # which would find it later, after memory has been short
    try:
        owner, copy = make(store)
        assert len({*threading.enumerate()} - before) == 2
        del store
        if is_closed:
            owner.close()
        else:
            del owner, copy
        assert threads_end()
        assert alive() is None
    finally:
        gc.enable()


def test_what_is_closed_asks_its_store_no_more(threads_end):
    with prefixes_of(cache := make_cache(), make_store()) as prefixes:
        seq = committed(cache, text(NUM_TOKENS))
    with SwapSpace(cache, make_store(), block_tokens=W) as space:
        space.swap_out(seq)
    for call in (
        lambda: prefixes.load(text(NUM_TOKENS, 1)),
        lambda: prefixes.store([1] * W),
        lambda: space.copy_out(cache.add(W).seq),
    ):
        with pytest.raises(ValueError, match="was let go by close: make another StoredPrefixes or SwapSpace"):
            call()
    prefixes.close()
    space.close()
    assert threads_end()


def test_what_waits_is_stored_before_the_end(threads_end):
    goes_on, cache = threading.Event(), make_cache()
    store = FaultyStore(make_store(), lambda keys, found: goes_on.wait())
    committed(cache, text(NUM_TOKENS))
    prefixes = prefixes_of(cache, store, timeout=0.01)
    prefixes.store(text(NUM_TOKENS))
    prefixes.close()
    goes_on.set()
    assert threads_end()
    assert len(store.store._slots) == NUM_TOKENS // W * 4


def test_a_closed_space_leaves_no_blocks(threads_end):
    space, copy = swapping(store := make_store())
    assert len(store._slots) == 2 * 4
    space.close()
    assert threads_end()
    assert len(store._slots) == 0
    assert copy.num_tokens == W


def test_an_error_keeps_no_blocks():
    def fail(keys, blocks):
        kept.append(ref(blocks[0].obj))
        try:
            raise OSError("the network is down")
        except OSError as error:
            raise RuntimeError("nothing was sent") from error

    kept = []
    space = SwapSpace(make_cache(), FaultyStore(make_store(), fail), block_tokens=W)
    assert space.copy_out(space.cache.add(W).seq) is None
    assert repr(space._patient.last_error) == "RuntimeError('nothing was sent')"
    gc.collect()
    assert kept[0]() is None
