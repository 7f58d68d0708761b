"""Sequences that are swapped out and in: the same K and V under the same handles, or less of them."""

import numpy as np
import pytest

from pagedkv import OutOfBlocksError
from pagedkv.stores import HostStore, SwapSpace

from .caches import W, committed, contents, fill, make_cache, text
from .test_prefixes import FaultyStore, fail, make_store


def space_of(cache, store=None):
    return SwapSpace(cache, store or make_store(), block_tokens=W, timeout=5.0)


def all_of(cache, seq):
    return contents(cache, cache.slots(seq, 0, int(cache.seq_lens(seq)[0])))


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"block_size": 5}])
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
    cache.reset()
    assert cache.find(tokens, salt="a") == 0
    assert space.swap_in(seq) == [7 * W + 2]
    assert cache.find([*tokens, 1, 2], salt="a") == 5 * W
    assert cache.find([*tokens, *text(2 * W - 5, 1)], salt="a") == 5 * W
    cache.commit(seq)
    assert cache.find([*tokens, *text(2 * W - 5, 1)], salt="a") == 6 * W
    assert cache.find([*tokens, 1, 2]) == 0


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
