"""Sequences that are swapped out and in: the same K and V under the same handles, or less of them."""

import threading
import time

import numpy as np
import pytest

from pagedkv import OutOfBlocksError
from pagedkv.stores import HostStore, SwapSpace

from .caches import W, committed, contents, evict, fill, make_cache, text
from .test_prefixes import FaultyStore, fail, make_store


def space_of(cache, store=None):
    return SwapSpace(cache, store or make_store(), block_tokens=W, timeout=5.0)


def all_of(cache, seq):
    return contents(cache, cache.slots(seq, 0, int(cache.seq_lens(seq)[0])))


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"block_size": 5}, {"kv_dtype": "int8"}])
def test_sequences_come_back(options):
    cache = make_cache(**options)
    seqs = [cache.add(n).seq for n in (3 * W + 5, 0, 1, 2 * W)]
    fill(cache)
    expected = [all_of(cache, seq) for seq in seqs]
    space = space_of(cache)
    assert space.swap_out(seqs)
    assert cache.stats().used == 0
    assert cache.seq_lens(seqs).tolist() == [0] * 4
    cache.free(cache.add(30).seq)
    fill(cache, seed=1)
    assert space.swap_in(seqs[::-1]) == [2 * W, 1, 0, 3 * W + 5]
    for seq, before in zip(seqs, expected, strict=True):
        np.testing.assert_array_equal(all_of(cache, seq), before)
    cache.check()


def test_what_could_be_found_can_be_found_again():
    cache, tokens = make_cache(), text(5 * W + 3)
    seq = committed(cache, tokens, salt="a")
    cache.append(seq, 2 * W - 5, tokens=text(2 * W - 5, 1))  # not committed
    cache.append(seq, 4)  # not known
    space = space_of(cache)
    assert space.swap_out(seq)
    evict(cache)
    assert cache.find(tokens, salt="a") == 0
    assert space.swap_in(seq) == [7 * W + 2]
    assert cache.find([*tokens, 1, 2], salt="a") == 5 * W
    assert cache.find([*tokens, *text(2 * W - 5, 1)], salt="a") == 5 * W
    cache.commit(seq)
    assert cache.find([*tokens, *text(2 * W - 5, 1)], salt="a") == 6 * W
    assert cache.find([*tokens, 1, 2]) == 0


@pytest.mark.parametrize("states", [None, {"sum": ((1,), "float32")}])
def test_what_was_swapped_out_before_a_reset_is_never_found(states):
    """The weights may have changed: a sequence goes on, as those do that are in the cache, but for itself."""
    cache, tokens = make_cache(states=states), text(5 * W + 3)
    seq, _ = cache.add(tokens)
    if states:
        cache.write_states([seq], cache.read_states([seq]))
    cache.commit(seq)
    space = space_of(cache, make_store())
    copy = space.copy_out(seq)
    assert space.swap_out(seq)
    cache.reset()
    assert space.swap_in(seq) == [len(tokens)]
    other = cache.add(0).seq
    assert space.copy_in(other, copy) == len(tokens)
    cache.commit([seq, other])
    assert cache.find_blocks(tokens) == 0
    cache.check()


def test_a_sequence_that_an_interrupted_call_has_put_back_goes_out_again(monkeypatch):
    cache = make_cache()
    seq, space = committed(cache, text(W + 3)), space_of(cache)
    assert space.swap_out(seq)

    def appended(*args, append=space._append):
        append(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(space, "_append", appended)
        with pytest.raises(KeyboardInterrupt):
            space.swap_in(seq)
    assert cache.seq_lens(seq) == W + 3
    assert space.swap_out(seq)
    assert space.swap_in(seq) == [W + 3]


def test_what_sequences_share_is_stored_once():
    cache, store = make_cache(), make_store()
    seq = cache.add(4 * W + 2).seq
    seqs = [seq, *cache.fork(seq, 2)]
    fill(cache)
    before = all_of(cache, seq)
    space = space_of(cache, store)
    assert space.swap_out(seqs)
    assert len(store._slots) == 5 * 4
    assert space.swap_in(seqs[0]) == [4 * W + 2]
    space._patient.flush()  # what nobody shares is removed by now
    cache.free(seqs[1])
    assert space.swap_in(seqs[2]) == [4 * W + 2]
    for one in (seqs[0], seqs[2]):
        np.testing.assert_array_equal(all_of(cache, one), before)
    assert space.swap_out(seqs[0])
    assert space.swap_in(seqs[0]) == [4 * W + 2]
    space._patient.flush()
    assert len(store._slots) == 0


def test_what_the_store_lost_is_missing_at_the_end():
    cache = make_cache()
    seq = cache.add(6 * W).seq
    fill(cache)
    before = all_of(cache, seq)
    space = space_of(cache, HostStore(4 * 4 * make_store().block_bytes, make_store().block_bytes))
    assert space.swap_out(seq)
    [num_tokens] = space.swap_in(seq)
    assert num_tokens < 6 * W
    np.testing.assert_array_equal(all_of(cache, seq), before[:, :, :num_tokens])


def test_a_store_that_fails_takes_nothing_out():
    cache, store = make_cache(), FaultyStore(make_store(), fail)
    seq = cache.add(2 * W).seq
    fill(cache)
    before = all_of(cache, seq)
    space = space_of(cache, store)
    assert not space.swap_out(seq)
    np.testing.assert_array_equal(all_of(cache, seq), before)
    store.fault = lambda keys, found: found
    assert space.swap_out(seq)
    store.fault = fail
    assert space.swap_in(seq) == [0]


def test_a_copy_leaves_the_sequence_as_it_is_and_is_removed_with_its_object():
    cache, store = make_cache(), make_store()
    space, seq = space_of(cache, store), cache.add(3 * W + 2).seq
    fill(cache)
    before = all_of(cache, seq)
    copy = space.copy_out(seq)
    np.testing.assert_array_equal(all_of(cache, seq), before)
    for num_here in (0, 1, 2 * W, 3 * W + 1, 3 * W + 2):
        other = cache.fork(seq)[0]
        cache.truncate(other, num_here)
        assert space.copy_in(other, copy) == 3 * W + 2
        np.testing.assert_array_equal(all_of(cache, other), before)
        cache.free(other)
    assert len(store._slots) == 4 * 4
    del copy
    space._patient.flush()
    assert len(store._slots) == 0


def test_only_what_is_not_here_is_asked_for():
    cache, asked = make_cache(), []
    space = space_of(cache, FaultyStore(make_store(), lambda keys, found: asked.append(len(keys)) or found))
    seq = cache.add(4 * W).seq
    copy = space.copy_out(seq)
    asked.clear()
    assert space.copy_in(seq, copy) == 4 * W
    cache.truncate(seq, 2 * W + 1)
    assert space.copy_in(seq, copy) == 4 * W
    assert asked == [2 * 4]


def test_a_listener_that_raises_leaves_the_sequence_as_it_was():
    failing = []
    cache = make_cache(8, events=lambda event: failing and 1 / 0)
    space, seq = space_of(cache), committed(cache, text(4 * W + 1))
    copy = space.copy_out(seq)
    cache.free(seq)
    cache.free(committed(cache, text(8 * W, seed=1)))
    seq = cache.add(1).seq
    failing.append(True)
    with pytest.raises(ZeroDivisionError):
        space.copy_in(seq, copy)
    assert cache.seq_lens(seq) == [1]
    cache.check()


def test_a_store_that_stalls_is_waited_for_once():
    goes_on = threading.Event()
    store = FaultyStore(make_store(), lambda keys, found: goes_on.wait() and found)
    cache = make_cache()
    seq = cache.add(2 * W).seq
    space = SwapSpace(cache, store, block_tokens=W, timeout=0.05)
    begin = time.monotonic()
    assert not space.swap_out(seq)
    assert time.monotonic() - begin < 5
    assert not any(space.swap_out(seq) for _ in range(10))
    assert space._patient.num_failed == 1  # it has not waited again
    goes_on.set()
    while not space.swap_out(seq):
        pass
    assert space.swap_in(seq) == [2 * W]
    space._patient.flush()
    assert len(store.store._slots) == 0


def test_many_blocks_are_waited_for_together():
    """Of a store that takes its time with each call, which is less than the time-out."""
    cache = make_cache()
    seqs = [cache.add(W).seq for _ in range(20)]
    store = FaultyStore(make_store(), lambda keys, found: time.sleep(0.05) or found)
    space = SwapSpace(cache, store, block_tokens=W, timeout=0.2)
    assert not space.swap_out(seqs)


def test_host_memory_in_place_of_a_store():
    cache = make_cache()
    seq = cache.add(2 * W).seq
    space = SwapSpace(cache, "1MiB", block_tokens=W)
    assert space.swap_out(seq)
    assert space.swap_in(seq) == [2 * W]
    with pytest.raises(ValueError, match=r"store must be a number and a unit of B, KB, .*, got '1 pound'"):
        SwapSpace(cache, "1 pound")
    with pytest.raises(ValueError, match=r"store must have room for \d+ bytes, .*, got 100: give it more"):
        SwapSpace(cache, 100)
    with pytest.raises(TypeError, match=r"store\.get must be a method, as of a BlockStore"):
        SwapSpace(cache, [])


def test_a_store_without_room_for_one_wire_block_is_refused():
    with pytest.raises(ValueError, match="store must have a capacity of at least"):
        SwapSpace(make_cache(), HostStore(3200, 3200), block_tokens=W)


def test_what_is_no_cache_is_refused():
    with pytest.raises(TypeError, match="cache must be a PagedKVCache, got NoneType"):
        SwapSpace(None, "1MiB")


def test_windows_and_several_shapes_are_refused():
    with pytest.raises(ValueError, match=r"^cache must have layers of one shape, got \d without a window"):
        SwapSpace(make_cache(head_dim=[8, 16, 8]), "1MiB")
    with pytest.raises(ValueError, match="cache must have one group of layers, without a window, got "):
        SwapSpace(make_cache(windows=4 * W), "1MiB")


def test_refusals_change_nothing():
    cache = make_cache(6)
    seqs = [cache.add(2 * W).seq, cache.add(3 * W).seq]
    space = space_of(cache)
    with pytest.raises(ValueError, match=f"seqs must be sequences that are swapped out, got {seqs[0]}, which is not"):
        space.swap_in(seqs)
    assert space.swap_out(seqs[0])
    message = f"seqs must be sequences that are in the cache, got {seqs[0]}, which is swapped out"
    with pytest.raises(ValueError, match=message):
        space.swap_out(seqs[::-1])
    with pytest.raises(ValueError, match="seqs"):
        space.swap_out([seqs[1], seqs[1]])
    assert cache.seq_lens(seqs).tolist() == [0, 3 * W]
    other = cache.add(2 * W).seq
    with pytest.raises(OutOfBlocksError, match="2 blocks asked for, 1 of 6 are free"):
        space.swap_in(seqs[0])
    cache.append(seqs[0], 1)
    message = f"seqs must be as swap_out left them, got {seqs[0]}, which has got tokens since: truncate it to 0"
    with pytest.raises(ValueError, match=message):
        space.swap_in(seqs[0])
    cache.truncate(seqs[0], 0)
    cache.free(other)
    assert space.swap_in(seqs[0]) == [2 * W]
    cache.free(seqs[1])
    with pytest.raises(KeyError):
        space.swap_out(seqs[1])


def test_copies_are_of_one_sequence_and_come_from_copy_out():
    space = space_of(cache := make_cache(6))
    seqs = [cache.add(W).seq, cache.add(0).seq]
    for wrong in ([], seqs):
        message = f"seq must be the handle of one sequence, got {len(wrong)}: call copy_out for each"
        with pytest.raises(ValueError, match=message):
            space.copy_out(wrong)
    with pytest.raises(TypeError, match="copy must be what copy_out has returned, got NoneType: compute the sequence"):
        space.copy_in(seqs[1], None)
    assert cache.seq_lens(seqs).tolist() == [W, 0]
