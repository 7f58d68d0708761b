"""Sequences that are saved under a name, and come back whole, short, or not at all."""

from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from pagedkv.memory.prefix.digests import root_digest
from pagedkv.stores import HostStore, SavedSequences

from ..support.interrupts import interrupts_at_every_instant
from .caches import W, blocks_of, committed, contents, make_cache, text
from .test_prefixes import SIZE, FaultyStore, fail, make_store, prefixes_of, release

NUM_TOKENS = 6 * W + 5
LONG = 100 * W  # too many ids for one block


def saved_in(cache, store):
    return SavedSequences(prefixes_of(cache, store))


def saved(store, name="a chat", tokens=None, salt=None):
    """Save a sequence; returns its K and V."""
    cache, tokens = make_cache(120), text(NUM_TOKENS) if tokens is None else tokens
    seq = committed(cache, tokens, salt)
    assert saved_in(cache, store).save(seq, name)
    return contents(cache, cache.slots(seq, 0, len(tokens)))


@pytest.mark.parametrize("num_tokens", [1, W, NUM_TOKENS, LONG])
def test_a_sequence_comes_back(num_tokens):
    tokens = text(num_tokens)
    before = saved(store := make_store(), tokens=tokens, salt="a")
    cache = make_cache(240, 4, layout="HND")
    seq, num_cached, ids = saved_in(cache, store).restore("a chat", "a")
    assert num_cached == cache.seq_lens(seq)[0] == num_tokens
    np.testing.assert_array_equal(ids, tokens)
    np.testing.assert_array_equal(contents(cache, cache.slots(seq, 0, num_tokens), "HND"), before)
    cache.append(seq, tokens=[7])
    cache.check()


@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_an_interrupt_at_any_instant_leaves_no_sequence_that_nobody_knows(num_lost):
    """Of a sequence that comes back whole, in part, and not at all."""
    saved(store := make_store(), tokens=text(2 * W))
    wire = blocks_of(make_cache())
    for digest in wire.wire.digests(text(2 * W), root_digest(None))[2 - num_lost :]:
        store.remove([name.key for name in wire.names(digest)])
    for interrupt in interrupts_at_every_instant(("memory/guard", "pagedkv/commit", "stores/saved", "stores/prefixes")):
        cache, restored = make_cache(), []
        with suppress(KeyboardInterrupt), interrupt:
            restored.append(saved_in(cache, store).restore("a chat"))
        assert cache.num_seqs == len(restored), interrupt.came_at
        assert not restored or restored[0].num_cached == (2 - num_lost) * W
        cache.check()


def test_names_and_salts_are_told_apart():
    store, other = make_store(), text(NUM_TOKENS, 1)
    saved(store, salt="a")
    saved(store, name="another chat", tokens=other, salt="a")
    restore = saved_in(make_cache(), store).restore
    np.testing.assert_array_equal(restore("another chat", "a").tokens, other)
    for name, salt in (("a chat", None), ("a chat", "b"), ("no chat", "a")):
        with pytest.raises(KeyError, match=f"no sequence is saved as '{name}' with this salt: give the salt, "):
            restore(name, salt)


def test_a_name_is_of_the_sequence_saved_last():
    store, other = make_store(), text(W, 1)
    saved(store)
    saved(store, tokens=other)
    saves = saved_in(make_cache(), store)
    np.testing.assert_array_equal(saves.restore("a chat").tokens, other)
    saves.delete("a chat")
    saves._prefixes.flush()
    with pytest.raises(KeyError):
        saves.restore("a chat")


def test_what_is_lost_is_missing_at_the_end():
    before = saved(store := make_store())
    [*keys] = store._slots._used
    store.remove(keys[8:12])
    cache = make_cache()
    seq, num_cached, tokens = saved_in(cache, store).restore("a chat")
    assert num_cached % W == 0
    assert num_cached < NUM_TOKENS == len(tokens)
    np.testing.assert_array_equal(contents(cache, cache.slots(seq, 0, num_cached)), before[:, :, :num_cached])


def test_what_the_store_has_evicted_is_saved_again():
    cache, store = make_cache(), HostStore(8 * 4 * SIZE, SIZE)
    seq, saves = committed(cache, text(NUM_TOKENS)), saved_in(cache, store)
    assert saves.save(seq, "a chat")
    saved(store, "another chat", text(NUM_TOKENS, 1))
    assert saves.save(seq, "a chat")
    assert saved_in(make_cache(), store).restore("a chat").num_cached == NUM_TOKENS


@pytest.mark.parametrize("max_pending_bytes", [2**28, 4 * SIZE])
@pytest.mark.parametrize(("num_slots", "is_saved"), [(7 * 4, False), (7 * 4 + 1, True)])
def test_a_store_without_room_for_all_of_it_has_not_saved_it(num_slots, is_saved, max_pending_bytes):
    cache = make_cache()
    seq = committed(cache, text(NUM_TOKENS))
    prefixes = prefixes_of(cache, HostStore(num_slots * SIZE, SIZE), max_pending_bytes=max_pending_bytes)
    assert SavedSequences(prefixes).save(seq, "a chat") is is_saved


def of_another_text(parts):
    """The parts of a long text, the second one of a text that had the name before."""
    return lambda keys, found: [parts.get(key, block) for key, block in zip(keys, found, strict=True)]


def test_damaged_texts_are_not_restored():
    tokens = text(LONG)
    saved(store := make_store(), tokens=tokens)
    saves = saved_in(make_cache(120), store)
    key_of = partial(saves._key, "a chat", bytes(16))
    first, second = saves._parts.keys(key_of, LONG)
    parts = dict(zip((first, second), map(bytes, store.get([first, second])), strict=True))
    stale = saves._parts.cut(key_of, text(LONG, 1))[1][1]
    faults = [
        {first: parts[first][:-1]},
        {first: parts[second]},
        {second: stale},
        {second: b""},
        {second: None},
        {first: 7},
        {first: release(parts[first])},
    ]
    for fault in ({}, *faults):
        faulty = saved_in(make_cache(120), FaultyStore(store, of_another_text(fault)))
        if fault:
            with pytest.raises(KeyError):
                faulty.restore("a chat")
        else:
            np.testing.assert_array_equal(faulty.restore("a chat").tokens, tokens)


def test_a_store_that_fails_saves_nothing():
    cache = make_cache()
    seq = committed(cache, text(NUM_TOKENS))
    assert not saved_in(cache, FaultyStore(make_store(), fail)).save(seq, "a chat")
    with pytest.raises(KeyError):
        saved_in(cache, FaultyStore(make_store(), fail)).restore("a chat")


def test_refusals():
    cache = make_cache()
    saves = saved_in(cache, make_store())
    seq = committed(cache, text(W))
    cache.append(seq, 2)
    with pytest.raises(ValueError, match=f"got {seq} with {W + 2} tokens, {W} of them known: pass their ids to add"):
        saves.save(seq, "a chat")
    with pytest.raises(ValueError, match=r"seq must have tokens whose ids are all known, got .* with 0 tokens"):
        saves.save(cache.add([]).seq, "a chat")
    cache.free(seq)
    with pytest.raises(KeyError):
        saves.save(seq, "a chat")


def test_a_name_is_a_text():
    cache = make_cache(120)
    seq, named = committed(cache, text(W)), saved_in(cache, make_store())
    for call in (lambda: named.save(seq, 5), lambda: named.restore(5), lambda: named.delete(5)):
        with pytest.raises(TypeError, match="name must be a str, got int"):
            call()
