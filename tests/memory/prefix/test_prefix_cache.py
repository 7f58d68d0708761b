"""PagedKVCache with a prefix cache: what is found, kept and reported, case by case."""

import numpy as np
import pytest

from pagedkv import OutOfBlocksError, SequenceTable

from ..manager import fails_after, refused, state
from .prompts import TEXT, P, make, started
from .router import Router


def test_nothing_is_found_before_the_commit():
    cache = make()
    seq = cache.add(TEXT).seq
    assert cache.find(TEXT) == cache.add(TEXT).num_cached == 0
    cache.commit(seq)
    assert cache.find(TEXT) == cache.add(TEXT).num_cached == 8
    cache.check()


def test_tokens_that_differ_or_come_elsewhere_are_not_found():
    cache = make()
    started(cache, TEXT)
    for tokens, found in (
        (TEXT[:5], 4),
        (TEXT[4:], 0),
        ([*TEXT[:7], 1, *TEXT[8:]], 7),
        ([*TEXT[:5], 1, *TEXT[6:]], 4),
        ([1, *TEXT[1:]], 0),
        (TEXT[:3], 0),
    ):
        assert cache.find(tokens) == found
    assert cache.find(np.array(TEXT)) == cache.find(tuple(TEXT)) == 8
    assert cache.find(TEXT, "a") == cache.find(TEXT, b"") == 0


def test_a_hit_that_ends_inside_a_block_is_a_copy_of_it():
    cache = make()
    first = started(cache, TEXT)
    for layer in (*cache.k_caches, *cache.v_caches):
        layer[:3] = np.arange(3 * P * 8).reshape(3, P, 1, 8)
    seq, num_cached = cache.add([*TEXT[:7], 1, 2])
    assert num_cached == 7
    assert cache.batch([first, seq]).block_tables.tolist() == [[0, 1, 2], [0, 3, 4]]
    for layer in (*cache.k_caches, *cache.v_caches):
        assert (layer[3] == layer[1]).all()
    cache.commit(seq)
    assert (cache.find([*TEXT[:8], 0]), cache.find([*TEXT[:7], 1, 0])) == (8, 8)
    assert cache.stats().hit_tokens == 7
    cache.check()


def test_part_of_a_block_is_found():
    """At least half of a block, behind a full one, and never the last token; of several blocks the last one counts."""
    cache = make(num_blocks=32)
    started(cache, TEXT)
    assert [cache.find([*TEXT[:4], *rest]) for rest in (TEXT[4:6], TEXT[4:7], [104, 0, 0])] == [4, 6, 4]
    assert cache.find([*TEXT[:3], 0, 0]) == 0
    started(cache, [*TEXT[:6], 1, 2])
    assert cache.find([*TEXT[:7], 0, 0]) == 6, "the last block begins as the one before it, but not as long"
    started(cache, [*TEXT[:4], 9, 9, 9, 9])
    assert cache.find([*TEXT[:7], 0, 0]) == 4
    assert cache.find([*TEXT[:8], 0]) == 8, "full blocks are all found"
    cache.reset()
    assert cache.find([*TEXT[:4], 9, 9, 9, 0]) == 0


def test_a_block_that_the_copy_would_evict_is_not_copied():
    cache = make(num_blocks=5)
    cache.free(started(cache, TEXT[:8]))
    part = [*TEXT[:7], *range(10)]
    assert (cache.find(part[:16]), cache.find(part)) == (7, 4), "3 blocks are blank"
    assert cache.add(part).num_cached == 4
    cache.check()
    cache = make(num_blocks=6)
    keeper = started(cache, TEXT[:8])
    cache.free(started(cache, [0, *TEXT[:7]]))
    assert cache.add(part).num_cached == 7, "one that is in use is never evicted"
    cache.check()
    cache.free(keeper)


def test_a_reused_block_is_not_found_in_part():
    cache = make()
    seq = started(cache, TEXT[:8])
    cache.truncate(seq, 3)
    cache.append(seq, 1, [7])
    cache.commit(seq)
    assert cache.find([*TEXT[:3], 7, *TEXT[4:8]]) == 4


def test_a_reused_block_is_not_found_behind_its_old_parent():
    cache = make(num_blocks=3)
    cache.free(started(cache, TEXT[:8]))
    other = [*range(8)]
    started(cache, other)  # evicts the second block of the text
    assert cache.find(TEXT[:8]) == 4
    for tokens in (other[:3], other[4:7]):
        assert cache.find([*TEXT[:4], *tokens, 0]) == 4


def test_a_part_of_a_block_that_was_evicted_is_not_found():
    cache = make(num_blocks=2)
    cache.free(started(cache, TEXT[:8]))
    cache.add(3)
    assert cache.find([*TEXT[:7], 0]) == 4


def test_of_a_prompt_that_is_all_there_one_token_is_left():
    cache = make()
    seq = started(cache, TEXT[:8])
    cache.k_caches[0][:2] = np.arange(2 * P * 8).reshape(2, P, 1, 8)
    again, num_cached = cache.add(TEXT[:8])
    assert num_cached == 7
    assert cache.batch([seq, again]).block_tables.tolist() == [[0, 1], [0, 2]], "somebody has block 1"
    assert (cache.k_caches[0][2] == cache.k_caches[0][1]).all()
    cache.commit(again)
    assert cache.batch(again).block_tables.tolist() == [[0, 1]]
    cache.free([seq, again])
    again, num_cached = cache.add(TEXT[:8])
    assert (num_cached, cache.num_free) == (7, 14)
    assert cache.find([*TEXT[:8], 1]) == 8, "others find it meanwhile"
    cache.commit(again)
    assert cache.batch(again).block_tables.tolist() == [[0, 1]]
    cache.check()


@pytest.mark.parametrize("ids", [TEXT[6:8], [1, 2]])
def test_descendants_are_found_after_other_sequences_shared_the_block(ids):
    """A prompt that ends with the block; one that goes back into it as its only owner, to go on as before or not."""
    router = Router()
    cache = make(events=router)
    cache.free(started(cache, [*TEXT, 0]))
    cache.free(started(cache, TEXT[:4]))
    seq = started(cache, [*TEXT[:8], 1])
    cache.truncate(seq, 6)
    cache.append(seq, 2, ids)
    router.agrees_with(cache)
    cache.commit(seq)
    cache.free(seq)
    assert (cache.find([*TEXT, 0, 1]), cache.find([*TEXT[:6], *ids, 9])) == (12, 8)
    assert cache.stats().cached == 3 + (ids == [1, 2])
    router.agrees_with(cache)


def test_descendants_become_unfindable_when_a_copy_has_no_room():
    router = Router()
    cache = make(num_blocks=6, events=router)
    cache.free(started(cache, [*TEXT, *range(5)]))
    seq = started(cache, TEXT[:9])
    cache.truncate(seq, 6)
    others = [started(cache, [token] * P) for token in (7, 8)]
    assert (cache.num_free, cache.stats().cached) == (2, 2)
    cache.append([seq, *others], 1, [1, 7, 8])
    assert (cache.num_free, cache.find([*TEXT, 0, 1])) == (0, 4)
    router.agrees_with(cache)
    cache.check()


def test_a_block_that_another_fork_has_stored_is_lost_with_the_one_before_it():
    """Else it could not be found, nor could others with its tokens, as long as a sequence has it."""
    router = Router()
    cache = make(num_blocks=5, events=router)
    first, seq = cache.add(TEXT[:4]).seq, cache.add(TEXT[:8]).seq
    cache.commit(first)
    fork = cache.fork(seq)
    cache.commit(fork)  # takes the block of the first sequence, and stores the next one behind that
    cache.free([first, *fork])
    others = started(cache, [7] * 12)  # which evict the first block
    router.agrees_with(cache)
    cache.check()
    cache.free(others)
    cache.free(started(cache, [*TEXT[:8], 1]))
    assert cache.find([*TEXT[:8], 1]) == 8
    cache.check()


def test_equal_blocks_computed_in_one_step_become_one():
    cache = make()
    seqs = [cache.add(TEXT).seq for _ in range(3)]
    assert cache.num_free == 7
    cache.commit(seqs[:2])
    assert cache.num_free == 9
    cache.commit(seqs)
    assert cache.num_free == 11
    assert cache.batch(seqs).block_tables.tolist() == [[0, 1, 2], [0, 1, 5], [0, 1, 8]]
    cache.check()


def test_a_block_shared_by_more_forks_than_the_index_has_slots():
    cache = make(num_blocks=1, max_seqs=64)
    seqs = [cache.add(TEXT[:P]).seq]
    seqs += cache.fork(seqs, 40)
    cache.commit(seqs)
    assert cache.find(TEXT) == P
    cache.check()


def test_the_tail_is_evicted_first_and_the_oldest_before_it():
    cache = make(num_blocks=8)
    for number in range(2):
        cache.free(started(cache, [number, *TEXT]))
    assert (cache.num_free, cache.stats().cached) == (8, 6)
    cache.add(P * 3)
    assert [cache.find([number, *TEXT, 1]) for number in range(2)] == [8, 12]
    cache.add(P * 2)
    assert [cache.find([number, *TEXT, 1]) for number in range(2)] == [0, 12]
    with refused(cache, OutOfBlocksError, r"^1 blocks asked for, 0 of 8 are free$"):
        cache.add([1, *TEXT, 1])  # what it finds is not evicted for its last token
    assert cache.add([1, *TEXT]).num_cached == 8, "its last block may be evicted for the copy"
    cache.check()


def test_found_blocks_are_not_evicted_for_the_rest_of_a_prompt():
    cache = make(num_blocks=5)
    cache.free(started(cache, TEXT[:8]))
    cache.free(started(cache, [0, *TEXT[:7]]))
    assert cache.add([*TEXT[:8], *range(12)]).num_cached == 8
    assert cache.num_free == 0
    cache.check()


def test_a_copied_block_is_found_by_its_tokens():
    cache = make()
    seq = cache.add(TEXT[:6]).seq
    [fork] = cache.fork(seq)
    cache.append([seq, fork], 2, [1, 2, 3, 4])
    cache.commit([seq, fork])
    assert [cache.find(TEXT[:6] + rest) for rest in ([1, 2, 0], [3, 4, 0], [5, 6, 0])] == [8, 8, 6]


def test_another_table_over_the_pool_takes_blocks_that_can_be_found():
    cache = make(num_blocks=4)
    cache.free(started(cache, TEXT))
    drafts = SequenceTable(cache.pool, P, 2, 4)
    seq = drafts.add(3 * P)
    assert len({*drafts.block_tables(seq)[0].tolist()}) == 3
    assert cache.find(TEXT) == 4
    drafts.free(seq)
    cache.check()


def test_unknown_tokens_end_what_can_be_found():
    cache = make()
    seq = cache.add(TEXT[:6]).seq
    cache.append(seq)
    cache.append(seq, 5, TEXT[:5])
    cache.commit(seq)
    assert cache.stats().cached == 0
    assert cache.find([*TEXT[:6], 0, *TEXT[:5]]) == 4
    cache.truncate(seq, 6)
    cache.append(seq, 2, TEXT[6:8])
    cache.commit(seq)
    assert cache.find(TEXT) == 8


def test_a_block_that_can_be_found_is_not_written():
    cache = make()
    seq = started(cache, TEXT)
    other = cache.add(TEXT).seq
    cache.truncate(seq, 6)
    assert cache.append(seq, tokens=[0]).tolist() == [2 * P + 2], "in a copy"
    assert cache.find(TEXT) == 8
    cache.truncate(other, 6)
    taken = cache.pool.allocate(cache.num_free)
    assert cache.append(other, tokens=[0]).tolist() == [P + 2], "as its only owner, where no block is free for a copy"
    assert cache.find(TEXT) == 4
    cache.pool.release(taken)
    cache.truncate(other, 3)
    assert cache.append(other, tokens=[0]).tolist() != [3]
    assert cache.find(TEXT) == 4


def test_after_a_reset_sequences_go_on_but_are_not_found():
    cache = make()
    seq = started(cache, TEXT)
    cache.free(started(cache, [1, *TEXT]))
    cache.pin("text", TEXT)
    cache.reset()
    cache.append(seq, 5, TEXT[:5])
    cache.commit(seq)
    assert (cache.find(TEXT), cache.stats().cached, cache.num_free) == (0, 0, 12)
    with refused(cache, ValueError, r"^tokens must begin with a full block of 4 that can be found: .* got 11 tokens$"):
        cache.pin("text", TEXT)
    started(cache, TEXT)
    assert cache.find(TEXT) == 8
    cache.check()


@pytest.fixture(params=["append", "add"])
def copying(request):
    """A cache, and a call that copies; the only room for the copy is a block whose contents can be found."""
    cache = make(num_blocks=3)
    held = started(cache, TEXT[:5] if request.param == "append" else TEXT[:4])
    if request.param == "append":
        cache.fork(held)
    else:
        started(cache, [7] * 3)
    cache.free(started(cache, [1, 2, 3, 4]))
    cache.k_caches[0][:] = np.arange(3)[:, None, None, None]
    calls = {"append": lambda: cache.append(held, tokens=[1]), "add": lambda: cache.add(TEXT[:4])}
    return cache, calls[request.param]


def test_an_interrupted_copy_leaves_its_destination_unfindable(monkeypatch, copying):
    cache, call = copying
    copy = cache._layer_caches.copy

    def cut_short(copies):
        copy(copies)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache._layer_caches, "copy", cut_short)
        with pytest.raises(KeyboardInterrupt):
            call()
    cache.check()
    assert not (cache.k_caches[0][2] == 2).any()
    assert cache.find([1, 2, 3, 4, 5]) == 0
    assert cache.num_free == 1
    call()
    cache.check()


def test_a_copy_that_cannot_begin_changes_nothing(monkeypatch, copying):
    """No memory to read the first blocks: what can be found where the copy would go stays."""

    class Full(np.ndarray):
        def __getitem__(self, index):
            raise MemoryError("injected")

    cache, call = copying
    with monkeypatch.context() as patch:
        patch.setattr(cache._layer_caches, "stacks", tuple(stack.view(Full) for stack in cache._layer_caches.stacks))
        with refused(cache, MemoryError, "injected"):
            call()
    assert cache.find([1, 2, 3, 4, 5]) == 4
    call()
    assert cache.find([1, 2, 3, 4, 5]) == 0


def test_a_pin_keeps_a_prefix():
    cache = make(num_blocks=6)
    cache.free(started(cache, TEXT))
    assert cache.pin("text", TEXT) == 8
    assert cache.num_free == 4
    cache.free(cache.add(4 * P).seq)
    assert cache.find(TEXT) == 8
    with refused(cache, ValueError, r"^name must be a new one, got 'text', which is pinned: unpin it first$"):
        cache.pin("text", TEXT)
    cache.unpin("text")
    with refused(cache, KeyError, "no pin is called 'text'"):
        cache.unpin("text")
    assert cache.num_free == 6


def test_hits_are_counted():
    cache = make()
    started(cache, TEXT)
    cache.add(TEXT)
    cache.add(TEXT[:8])
    cache.add(5)
    assert (cache.stats().queried_tokens, cache.stats().hit_tokens) == (11 + 11 + 8, 0 + 8 + 7)


def test_without_a_prefix_cache():
    cache = make(prefix_cache=False)
    seq = cache.add(TEXT).seq
    before = state(cache)
    cache.commit(seq)
    assert state(cache) == before
    assert (cache.find(TEXT), cache.add(TEXT).num_cached) == (0, 0)
    with refused(
        cache, ValueError, r"^a pin keeps what can be found, and a cache with prefix_cache=False finds nothing$"
    ):
        cache.pin("text", TEXT)
    cache.append(seq, tokens=[1])
    cache.reset()
    cache.check()


def test_without_a_prefix_cache_tokens_are_counted_too():
    cache = make(prefix_cache=False)
    seq = cache.add(TEXT).seq
    with refused(
        cache, ValueError, r"^tokens must have shape \(num_new_tokens,\) = \(1,\), got \(3,\): n says how many"
    ):
        cache.append(seq, 1, [1, 2, 3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, s: c.add([1, -1]), ValueError, r"^tokens must be ids in 0..2\*\*31 - 1, got -1$"),
        (lambda c, s: c.add([2**31]), ValueError, r"^tokens must be ids in 0..2\*\*31 - 1, got 2147483648$"),
        (lambda c, s: c.add(TEXT, 3), TypeError, r"^salt must be a str, bytes or None, got int$"),
        (
            lambda c, s: c.append(s, tokens=[1, 2]),
            ValueError,
            r"^tokens must have shape \(num_new_tokens,\)",
        ),
        (
            lambda c, s: c.append(s, tokens=1),
            TypeError,
            r"^tokens must be a list, a tuple or an array",
        ),
        (lambda c, s: c.append(s, tokens=[True]), TypeError, r"^tokens must have an integer dtype, got bool$"),
        (lambda c, s: c.append(s, 2, tokens=[1, True]), TypeError, r"^tokens must hold ints, got a bool$"),
        (lambda c, s: c.commit([s, s]), ValueError, r"^seqs must name each sequence once, got \d+ twice$"),
        (lambda c, s: c.commit([s, 0]), KeyError, r"no sequence 0: it was freed or never added"),
        (
            lambda c, s: c.add([TEXT, [1]]),
            ValueError,
            r"^tokens must have shape \(n,\), got a list of several lengths$",
        ),
        (lambda c, s: c.pin(["a"], TEXT), TypeError, r"^name must be a str, got list$"),
        (lambda c, s: c.unpin(["a"]), KeyError, r"no pin is called \['a'\]"),
        (lambda c, s: c.find(8), TypeError, r"^tokens must be a list, a tuple or an array of ints, got int$"),
        (lambda c, s: c.pin("a", 8), TypeError, r"^tokens must be a list, a tuple or an array of ints, got int$"),
        (lambda c, s: c.find(TEXT, 1.5), TypeError, r"^salt must be a str, bytes or None, got float$"),
    ],
)
def test_refusals(call, error, message):
    cache = make()
    seq = started(cache, TEXT)
    with refused(cache, error, message):
        call(cache, seq)


@pytest.mark.parametrize(
    ("where", "index", "value", "message"),
    [
        ("_serials", 0, 0, "cached blocks are counted wrongly|other blocks"),
        ("_serials", 0, 2, "two contents have one number|older"),
        ("_parents", 1, 7, "older than the one before it"),
        ("_parents", 1, 0, "the one before it cannot"),
        ("_index._places", 0, 1, "in another place"),
        ("_index._keys", 0, 1, "does not find a block"),
        ("_index._num_filled", 0, 1, "counts its slots wrongly"),
        ("eviction._places", 0, 0, "waits that cannot be evicted"),
    ],
)
def test_check_finds_broken_invariants(where, index, value, message):
    cache = make()
    started(cache, TEXT)
    cache.check()
    owner = cache.pool._prefix_cache
    *parts, name = where.split(".")
    for part in parts:
        owner = getattr(owner, part)
    getattr(owner, name)[index] = value
    with pytest.raises(AssertionError, match=message):
        cache.check()


def test_full_rings_and_indexes_are_rebuilt():
    cache = make(num_blocks=4)
    for number in range(60):
        seq = started(cache, [number, *TEXT[:7]])
        assert cache.find([number, *TEXT]) == 8
        cache.free(seq)
        cache.check()
    assert cache.find([58, *TEXT]) == 8
    assert cache.find([57, *TEXT]) == 0


def test_slots_that_do_not_fit_on_the_device_change_nothing(monkeypatch):
    cache = make()
    seq = started(cache, TEXT)
    monkeypatch.setattr(cache._arrays, "asarray", fails_after(0, cache._arrays.asarray, MemoryError()))
    with refused(cache, MemoryError):
        cache.append(seq)
