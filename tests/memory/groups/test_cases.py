"""Which blocks groups hold, release and find, with the numbers that a search key by key gives.

Blocks have 4 tokens, groups are [a window of 6, full] unless a test says otherwise.
"""

import numpy as np
import pytest

from pagedkv.memory import LRU

from ..manager import last_block_first
from .tables import Chosen, Listener, P, assert_sound, columns, evict, make, shortest, tables

TEXT = [*range(100)]
OTHERS = [*range(1000, 1100)]


def started(cache, tokens):
    """Add a prompt whose K and V are then written."""
    seq = cache.add(tokens).seq
    cache.commit(seq)
    return seq


def test_a_prompt_has_a_block_of_each_group_for_each_column():
    cache = make(6, None)
    seq = cache.add(10).seq
    assert columns(cache, seq) == [[0, 1, 2], [0, 1, 2]]
    assert cache.stats().used == 6
    assert_sound(cache, [seq])


def test_a_window_holds_three_blocks_however_long_a_sequence_grows():
    cache, held = make(6, None), {}
    seq = cache.add(0).seq
    for length in range(1, 41):
        cache.append(seq)
        held[length] = [*map(len, columns(cache, seq))]
        assert cache.stats().used == sum(held[length])
        assert_sound(cache, [seq])
    assert [held[length] for length in (4, 8, 9, 12, 13, 17, 40)] == [
        *([1, 1], [2, 2], [3, 3], [3, 3], [3, 4], [3, 5], [3, 10])
    ]


def test_chunks_of_a_prompt_release_what_the_next_chunk_does_not_see():
    cache, held = make(6, None), []
    seq = cache.add(0).seq
    for _ in range(4):
        cache.append(seq, 10)
        held.append(columns(cache, seq)[0])
        assert_sound(cache, [seq])
    assert held == [[0, 1, 2], [0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [5, 6, 7, 8, 9]]


def test_a_whole_prompt_stays_until_the_next_append():
    cache = make(6, None)
    seq = cache.add(40).seq
    assert cache.stats().used == 20
    cache.append(seq)
    assert (columns(cache, seq)[0], cache.stats().used) == ([8, 9, 10], 14)
    assert_sound(cache, [seq])


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_commit_releases_what_no_query_sees_any_more(prefix_cache):
    cache = make(6, None, prefix_cache=prefix_cache)
    seq = started(cache, 40)
    assert (columns(cache, seq)[0], cache.stats().used) == ([8, 9], 12)
    cache.append(seq)
    assert (columns(cache, seq)[0], cache.stats().used) == ([8, 9, 10], 14)
    assert_sound(cache, [seq])


@pytest.mark.parametrize(
    ("window", "peak", "at_end"),
    [
        (1, 1, 0),
        (2, 2, 1),
        (4, 2, 1),
        (5, 2, 1),
        *((w, 3, 2) for w in (6, 7, 8, 9)),
        *((w, 10, 10) for w in (39, 40, 41)),
    ],
)
def test_a_window_of_any_size_holds_the_blocks_that_its_keys_lie_in(window, peak, at_end):
    cache, held = make(window, None), []
    seq = cache.add(0).seq
    for _ in range(40):
        cache.append(seq)
        held.append(len(columns(cache, seq)[0]))
    cache.commit(seq)
    assert (max(held), len(columns(cache, seq)[0])) == (peak, at_end)
    assert_sound(cache, [seq])


@pytest.mark.parametrize(("keep", "first", "length"), [(0, 5, 25), (3, 5, 25), (4, 4, 21), (8, 3, 17)])
def test_a_cache_keeps_tokens_behind_a_window_for_drafts_to_be_taken_back(keep, first, length):
    cache = make(6, None, keep=keep)
    seq = started(cache, 30)
    assert columns(cache, seq) == [[*range(first, 8)], [*range(8)]]
    assert shortest(cache, seq) == length
    assert_sound(cache, [seq])


def test_the_last_append_can_be_taken_back_and_no_more_than_the_window_allows():
    cache = make(6, None)
    seq = started(cache, 20)
    cache.append(seq, 5)
    assert columns(cache, seq)[0] == [3, 4, 5, 6]
    cache.truncate(seq, 20)
    assert columns(cache, seq)[0] == [3, 4]
    assert shortest(cache, seq) == 17
    with pytest.raises(
        ValueError,
        match=r"^length must be 0 or at least 17 .*before the window has been released, got 16: .*keep=n",
    ):
        cache.truncate(seq, 16)
    assert_sound(cache, [seq])
    cache.truncate(seq, 0)
    assert cache.stats().used == 0
    cache.append(seq, 9)  # begins again at the first column
    assert columns(cache, seq) == [[0, 1, 2], [0, 1, 2]]
    assert_sound(cache, [seq])


def test_forks_copy_the_partial_block_of_each_group_and_pass_blocks_by_themselves():
    cache = make(6, None)
    a = started(cache, 21)
    [b] = cache.fork(a)

    def used_and_shared():
        assert_sound(cache, [a, b])
        return cache.stats().used, cache.stats().shared

    assert used_and_shared() == (9, 9)
    cache.append(a)
    assert used_and_shared() == (11, 7)
    cache.append(b)
    assert used_and_shared() == (11, 7)
    for _ in range(8):
        cache.append(a)
    assert used_and_shared() == (15, 5)
    assert (columns(cache, a)[0], columns(cache, b)[0]) == ([5, 6, 7], [3, 4, 5])
    cache.free(b)
    assert cache.stats().used == 11


class PlainLRU(LRU):
    """A caller's own eviction, which does not learn that a block was passed."""


@pytest.mark.parametrize(("eviction", "found"), [(LRU, 8), (PlainLRU, 0)])
def test_blocks_that_a_long_prompt_passes_do_not_flush_the_prefixes_of_others(eviction, found):
    cache = make(6, None, num_blocks=24, eviction=eviction)
    for tokens in (OTHERS[:8], TEXT[:24]):
        cache.free(started(cache, tokens))
    seq = cache.add(OTHERS[50:74]).seq
    assert (cache.find(OTHERS[:9]), cache.find(TEXT[:25])) == (found, 24)
    assert_sound(cache, [seq])


def test_a_prompt_finds_what_its_first_query_sees():
    cache = make(6, None)
    seq = started(cache, TEXT[:24])
    assert (cache.find(TEXT[:24]), cache.find(TEXT[:25])) == (23, 24)
    assert cache.find(TEXT[:23]) == 22  # a part of the last block is copied
    assert cache.find(TEXT[:16] + OTHERS[:5]) == 16
    assert_sound(cache, [seq])


def test_a_hit_takes_only_the_blocks_that_its_first_query_sees():
    cache = make(6, None)
    cache.free(started(cache, TEXT[:24]))
    seq, num_cached = cache.add(TEXT[:25])
    assert num_cached == 24
    assert columns(cache, seq) == [[4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]
    assert cache.stats().used == 10
    assert_sound(cache, [seq])


def with_text(window):
    """A cache that finds 24 tokens, which no sequence has, and the blocks of each group and column."""
    cache = make(window, None, eviction=Chosen)
    seq = cache.add(TEXT[:24]).seq
    blocks = tables(cache, [seq])[:, 0]
    cache.commit(seq)
    cache.free(seq)
    return cache, *blocks


def test_a_hit_ends_where_a_block_of_the_window_is_missing():
    cache, of_window, _ = with_text(6)
    evict(cache, of_window[[4]])
    assert cache.find(TEXT[:25]) == 16
    evict(cache, of_window[:4])
    assert cache.find(TEXT[:25]) == 0
    assert_sound(cache, [])


def test_nothing_is_found_without_the_first_full_block():
    cache, _, of_full = with_text(6)
    evict(cache, of_full[[0]])
    assert cache.find(TEXT[:25]) == 0
    assert cache.stats().cached == 0  # neither those behind it nor those of the other group
    assert_sound(cache, [])


def test_tokens_whose_digests_belong_to_others_are_not_stored_in_any_group():
    cache = make(6, None, hash_of=lambda data: bytes(16))
    seqs = [started(cache, TEXT[:8]), started(cache, OTHERS[:8])]
    assert (cache.find(TEXT[:9]), cache.find(OTHERS[:9])) == (4, 0)
    assert_sound(cache, seqs)


def test_tokens_that_are_not_stored_stay_in_their_own_blocks():
    """Behind those in the last block of the pool."""
    cache = make(None, 9, hash_of=lambda data: bytes(16))
    last_block_first(cache.pool)
    seq = cache.add(TEXT[:8]).seq
    before = tables(cache, [seq]).tolist()
    cache.commit(seq)
    assert tables(cache, [seq]).tolist() == before == [[[99, 98]], [[97, 96]]]
    assert cache.find(TEXT[:9]) == 4
    assert_sound(cache, [seq])


def test_a_block_that_a_window_passes_before_the_commit_is_found_in_no_group():
    """An earlier text had the same block in the leading group, and in this one a block that is now of another."""
    cache = make(None, 9, 5)
    seq = started(cache, OTHERS[:4])
    [lead], [of_9], [of_5] = tables(cache, [seq])[:, 0]
    cache.free(seq)
    others = np.setdiff1d(cache.pool.allocate(100), [lead, of_9, of_5])
    cache.pool.release([lead, of_5, of_9, *others])
    seq = cache.add(0).seq
    for start in (0, 4, 8):
        cache.append(seq, 4, TEXT[start : start + 4])
    assert tables(cache, [seq])[:, 0, 0].tolist() == [lead, of_5, -1]
    cache.commit(seq)
    assert cache.find(TEXT[:5]) == 0
    assert_sound(cache, [seq, cache.add(TEXT[:5]).seq])


def test_a_hit_needs_no_block_left_of_its_window():
    cache, of_window, _ = with_text(6)
    evict(cache, of_window[:4])
    assert (cache.find(TEXT[:25]), cache.find(TEXT[:24])) == (24, 23)
    assert cache.find(TEXT[:20] + OTHERS[:2]) == 0
    assert_sound(cache, [])


def test_a_hit_of_all_but_the_last_token_may_need_one_column_more():
    cache, of_window, _ = with_text(5)
    evict(cache, of_window[:5])
    assert (cache.find(TEXT[:25]), cache.find(TEXT[:24])) == (24, 0)
    assert_sound(cache, [])


def test_each_window_has_a_group_of_its_own():
    cache = make(6, 3, None)
    seq = started(cache, 33)
    assert columns(cache, seq) == [[6, 7, 8], [7, 8], [*range(9)]]
    assert cache.stats().used == 14
    assert_sound(cache, [seq])


def test_groups_of_one_window_without_a_full_one():
    cache = make(6, 6, group_size=1)
    seq = started(cache, 33)
    assert columns(cache, seq) == [[6, 7, 8], [6, 7, 8]]
    assert cache.stats().used == 6
    assert shortest(cache, seq) == 29
    assert_sound(cache, [seq])


def test_a_pin_of_a_cache_without_a_full_group_keeps_all_that_finding_it_takes():
    cache = make(6, 6)
    cache.free(started(cache, TEXT[:24]))
    assert cache.pin("text", TEXT[:24]) == 24
    cache.pool.release(cache.pool.allocate(cache.num_free))
    assert cache.find(TEXT[:25]) == 24


def test_nothing_is_found_behind_blocks_that_were_passed_before_they_were_stored():
    listener = Listener()
    cache = make(5, 5, events=listener)
    seq = started(cache, TEXT[:8])
    cache.append(seq, 4, TEXT[8:12])
    for token in TEXT[12:20]:  # the first of these passes the block that the third would be stored behind
        cache.append(seq, tokens=[token])
        cache.commit(seq)
        assert_sound(cache, [seq])
    assert cache.find(TEXT[:21]) == 8
    assert len(listener.blocks) == 2


def test_a_new_block_does_not_end_the_chain_that_led_to_a_hit():
    """The last of five blocks is the first of the chain, which a window has passed."""
    cache = make(5, num_blocks=5)
    seqs = [started(cache, TEXT[:12]), cache.add(8).seq]
    expected = cache.find(TEXT[:11])
    seq, num_cached = cache.add(TEXT[:11])
    assert num_cached == expected == 8
    assert_sound(cache, [*seqs, seq])


def within_a_block(cache, how):
    """A sequence that ends within a block of TEXT behind one that can be found, and its length."""
    seq = started(cache, TEXT[:9])
    if how == "hit":
        return cache.add(TEXT[:8])
    length = shortest(cache, seq)
    cache.truncate(seq, length)
    return seq, length


@pytest.mark.parametrize("how", ["hit", "truncate"])
def test_a_block_is_stored_behind_the_one_before_it_though_no_query_sees_that(how):
    """In one commit with a sequence that has nothing before its block."""
    cache = make(3)
    seq, length = within_a_block(cache, how)
    there, stop = int(cache.seq_lens(seq)[0]), (length // P + 1) * P
    tokens = TEXT[:there] + OTHERS[: stop - there]
    cache.append(seq, stop - there, tokens[there:])
    other = cache.add(OTHERS[20:25]).seq
    cache.commit([seq, other])
    assert cache.find([*tokens, 0]) == stop
    assert not any(cache.find([*tokens[i : i + P], 0]) for i in range(P, stop, P))
    cache.check()


@pytest.mark.parametrize("others", [0, 1])
def test_check_sees_that_the_block_before_one_to_store_is_gone(others):
    """Before it is stored behind another, and afterwards."""
    cache = make(3)
    cache.layer_groups._before[0] = 2  # what the queries see
    seq, _ = within_a_block(cache, "hit")
    with pytest.raises(AssertionError, match="has passed the block that the next one is stored behind"):
        cache.check()
    cache.commit([seq, *(cache.add(OTHERS[:5]).seq for _ in range(others))])
    with pytest.raises(AssertionError, match=["the one before it cannot", "a block that can be found is not"][others]):
        cache.check()


@pytest.mark.parametrize(("lines", "columns"), [([0, 0], [0, 1]), ([0, 1], [1, 1])], ids=["column", "group"])
def test_check_sees_a_block_of_another_column_or_group(lines, columns):
    cache = make(6, 5, None, max_seqs=1)
    started(cache, TEXT[:8])
    cache.check()
    cache._rows.blocks[lines, columns] = cache._rows.blocks[lines[::-1], columns[::-1]]
    with pytest.raises(AssertionError, match="a block that can be found is not"):
        cache.check()


def test_a_longer_prompt_shares_the_full_blocks_of_a_shorter_one():
    cache = make(6, None)
    a = started(cache, TEXT[:16])
    b, num_cached = cache.add(TEXT[:16] + OTHERS[:8])
    cache.commit(b)
    assert num_cached == 16
    assert (cache.stats().used, cache.stats().shared) == (10, 4)
    assert (columns(cache, a)[0], columns(cache, b)[0]) == ([2, 3], [4, 5])
    assert_sound(cache, [a, b])


@pytest.mark.parametrize(("chunk", "peak"), [(1, 3), (4, 4), (8, 5), (16, 7), (40, 10)])
def test_a_window_never_holds_more_than_itself_and_a_chunk(chunk, peak):
    """Wherever a chunk begins; a group without a window holds the 10 columns of 40 tokens besides."""
    held = []
    for start in range(P):
        cache = make(6, None)
        seq = cache.add(0).seq
        cache.append(seq, min(start, 40 - chunk))
        while room := 40 - int(cache.seq_lens(seq)[0]):
            cache.append(seq, min(chunk, room))
            held.append([*map(len, columns(cache, seq))])
    assert [*map(max, zip(*held, strict=True))] == [peak, 10]


@pytest.mark.parametrize(
    ("windows", "query_lens", "most"), [((6, None), [3, 4], 3), ((6, None), [3, 40], 3), ((1, None), None, 0)], ids=str
)
def test_a_query_of_released_tokens_is_refused_in_words(windows, query_lens, most):
    cache = make(*windows, num_blocks=200)
    seqs = [cache.add(8).seq, cache.add(40).seq]
    cache.commit(seqs[1])
    batch = cache.batch(seqs, query_lens)
    q = np.zeros((batch.num_tokens, 1, 8), np.float32)
    message = rf"^batch must have at most {most} query tokens of sequence 1, got .*: with a window of {windows[0]} "
    with pytest.raises(ValueError, match=message + "the others see tokens that have been released. Let queries attend"):
        cache.attend(0, q, batch)
    cache.attend(1, q, batch)
    if most:
        cache.attend(0, q[:6], cache.batch(seqs, most))


def test_a_listener_that_raises_in_commit_delays_what_windows_release():
    def listen(event):
        if fails:
            raise RuntimeError("no events, please")

    fails, cache = [True], make(6, None, events=listen)
    seq, _ = cache.add(TEXT[:40])
    with pytest.raises(RuntimeError, match="no events, please"):
        cache.commit(seq)
    assert columns(cache, seq) == [[*range(10)]] * 2
    assert cache.find(TEXT[:41]) == 40
    fails.clear()
    cache.commit(seq)
    assert columns(cache, seq) == [[8, 9], [*range(10)]]
    cache.check()
