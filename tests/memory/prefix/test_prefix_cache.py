"""PagedKVCache with a prefix cache: what is found, what is kept, what is told, one case at a time."""

import hashlib

import numpy as np
import pytest

from pagedkv import OutOfBlocksError, PagedKVCache
from pagedkv.memory import LRU, AllBlocksCleared, BlockRemoved, BlockStored

from ..manager import fails_after, refused, state

P = 4
TEXT = list(range(100, 111))  # two full blocks, and three tokens


def make(num_blocks=16, **options) -> PagedKVCache:
    return PagedKVCache(1, num_blocks, P, 1, 8, **{"max_seqs": 8} | options)


def started(cache, tokens, salt=None):
    seq = cache.add(tokens, salt).seq
    cache.commit(seq)
    return seq


def digests(tokens, head=bytes(16)):
    """The digests of the full blocks, worked out once more."""
    found = []
    for i in range(0, len(tokens) // P * P, P):
        head = hashlib.blake2b(head + np.array(tokens[i : i + P], "<i4").tobytes(), digest_size=16).digest()
        found.append(head)
    return found


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
        ([*TEXT[:7], 1, *TEXT[8:]], 4),
        ([1, *TEXT[1:]], 0),
        (TEXT[:3], 0),
    ):
        assert cache.find(tokens) == found
    assert cache.find(np.array(TEXT)) == cache.find(tuple(TEXT)) == 8
    assert cache.find(TEXT, "a") == cache.find(TEXT, b"") == 0


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
    assert (num_cached, cache.batch(again).block_tables.tolist()) == (7, [[0, 1]]), "nobody had it"
    assert cache.find([*TEXT[:8], 1]) == 4
    cache.commit(again)
    assert cache.find([*TEXT[:8], 1]) == 8
    cache.check()


def test_blocks_that_were_computed_at_the_same_time_become_one():
    cache = make()
    seqs = [cache.add(TEXT).seq for _ in range(3)]
    assert cache.num_free == 7
    cache.commit(seqs[:2])
    assert cache.num_free == 9
    cache.commit(seqs)
    assert cache.num_free == 11
    assert cache.batch(seqs).block_tables.tolist() == [[0, 1, 2], [0, 1, 5], [0, 1, 8]]
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
    assert cache.add([1, *TEXT]).num_cached == 11
    cache.check()


def test_what_is_found_is_not_evicted_for_the_rest():
    cache = make(num_blocks=5)
    cache.free(started(cache, TEXT[:8]))
    cache.free(started(cache, [0, *TEXT[:7]]))
    assert cache.add([*TEXT[:8], *range(12)]).num_cached == 8
    assert cache.num_free == 0
    cache.check()


def test_a_copy_is_found_by_the_tokens_that_it_was_copied_with():
    cache = make()
    seq = cache.add(TEXT[:6]).seq
    [fork] = cache.fork(seq)
    cache.append([seq, fork], 2, [1, 2, 3, 4])
    cache.commit([seq, fork])
    assert [cache.find(TEXT[:6] + rest) for rest in ([1, 2, 0], [3, 4, 0], [5, 6, 0])] == [8, 8, 4]


def test_tokens_that_are_not_told_end_what_is_found():
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
    assert cache.append(other, tokens=[0]).tolist() == [P + 2], "as its only owner"
    assert cache.find(TEXT) == 4
    cache.check()


def test_after_a_reset_sequences_go_on_but_are_not_found():
    cache = make()
    seq = started(cache, TEXT)
    cache.free(started(cache, [1, *TEXT]))
    cache.pin("text", TEXT)
    cache.reset()
    cache.append(seq, 5, TEXT[:5])
    cache.commit(seq)
    assert (cache.find(TEXT), cache.stats().cached, cache.num_free) == (0, 0, 12)
    assert cache.pin("text", TEXT) == 0
    started(cache, TEXT)
    assert cache.find(TEXT) == 8
    cache.check()


@pytest.mark.parametrize("copying", ["append", "add"])
def test_a_copy_that_is_cut_short_leaves_nothing_to_find_where_it_went(monkeypatch, copying):
    """The only room for the copy is a block whose contents can be found."""
    cache = make(num_blocks=3)
    held = started(cache, TEXT[:5] if copying == "append" else TEXT[:4])
    if copying == "append":
        cache.fork(held)
    else:
        started(cache, [7] * 3)
    cache.free(started(cache, [1, 2, 3, 4]))
    cache.k_caches[0][:] = np.arange(3)[:, None, None, None]
    calls = {"append": lambda: cache.append(held, tokens=[1]), "add": lambda: cache.add(TEXT[:4])}
    copy = cache._copy

    def cut_short(copies):
        copy(copies)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_copy", cut_short)
        with pytest.raises(KeyboardInterrupt):
            calls[copying]()
    cache.check()
    assert not (cache.k_caches[0][2] == 2).any()
    assert cache.find([1, 2, 3, 4, 5]) == 0
    assert cache.num_free == 1
    calls[copying]()
    cache.check()


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


def test_events():
    told = []
    cache = make(num_blocks=4, events=told.append)
    seq = cache.add(TEXT[:10]).seq
    assert told == []
    cache.commit(seq)
    first, second, third = digests([*TEXT, 0])
    assert told.pop() == BlockStored([first, second], None, TEXT[:8], P, medium="CPU")
    cache.append(seq, 2, [TEXT[10], 0])
    cache.commit(seq)
    assert told.pop() == BlockStored([third], second, [*TEXT[8:], 0], P, medium="CPU")
    cache.free(seq)
    cache.add(2 * P)
    assert told.pop() == BlockRemoved([third], medium="CPU")
    cache.reset()
    assert told == [AllBlocksCleared()]


def test_what_a_listener_raises_comes_after_the_change():
    told = []

    def listener(event):
        told.append(event)
        if len(told) == 1:
            raise RuntimeError("the router is away")

    cache = make(events=listener)
    seq = cache.add(TEXT).seq
    with pytest.raises(RuntimeError, match="the router is away"):
        cache.commit(seq)
    assert cache.find(TEXT) == 8
    cache.check()
    cache.reset()
    assert told[1:] == [AllBlocksCleared()]


def test_without_a_prefix_cache():
    cache = make(prefix_cache=False)
    seq = cache.add(TEXT).seq
    before = state(cache)
    cache.commit(seq)
    assert state(cache) == before
    assert (cache.find(TEXT), cache.add(TEXT).num_cached, cache.pin("text", TEXT)) == (0, 0, 0)
    cache.append(seq, tokens=[1])
    cache.reset()
    cache.check()


def test_without_a_prefix_cache_tokens_are_counted_too():
    cache = make(prefix_cache=False)
    seq = cache.add(TEXT).seq
    with refused(cache, ValueError, r"^tokens must have shape \(num_new_tokens,\) = \(1,\), got \(3,\)$"):
        cache.append(seq, 1, [1, 2, 3])


class MostRecent(LRU):
    """Evicts what came last."""

    def plan_leave(self, blocks, num_evicted):
        waiting, _ = self._waiting(int(self._first[0]), int(self._end[0]))
        evicted = waiting[~np.isin(waiting, blocks)][::-1][:num_evicted].copy()
        return evicted, super().plan_leave(np.concatenate([blocks, evicted]), 0)[1]


def test_another_order_of_eviction():
    cache = make(num_blocks=4, eviction=MostRecent)
    cache.free(started(cache, TEXT[:8]))
    cache.free(started(cache, [0, *TEXT[:7]]))
    cache.add(P)
    assert (cache.find([*TEXT[:8], 0]), cache.find([0, *TEXT[:7], 0])) == (8, 0), "its first block went"
    seq = started(cache, [0, *TEXT[:7]])
    cache.check()
    assert cache.find([0, *TEXT[:7], 0]) == 8, "the orphan made room for the block computed again"
    cache.free(seq)
    cache.check()


def test_a_listener_that_is_empty_as_a_list_is_told():
    class Log(list):
        __call__ = list.append

    log = Log()
    started(make(events=log), TEXT)
    assert len(log) == 1


class Chosen(LRU):
    """Evicts the blocks that it is told to."""

    chosen = np.array([0])

    def plan_leave(self, blocks, num_evicted):
        return self.chosen, super().plan_leave(blocks, num_evicted)[1]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([], r"^eviction must choose 2 blocks to evict, got 0$"),
        ([1, 1], r"^eviction must choose blocks that wait for it, each once, got 1, which is used again or chosen"),
        ([1, 0], r"^eviction must choose blocks that wait for it, each once, got 0"),
    ],
)
def test_an_eviction_that_chooses_wrongly_changes_nothing(monkeypatch, chosen, message):
    cache = make(num_blocks=4, eviction=Chosen)
    first = started(cache, TEXT[:4])
    cache.free(started(cache, TEXT[:8]))
    cache.free(started(cache, [1, 2, 3, 4, 5, 6, 7, 8]))
    monkeypatch.setattr(Chosen, "chosen", np.array(chosen, np.int64))
    cache.free(first)
    with refused(cache, ValueError, message):
        cache.add([*TEXT[:4], *range(8)])


@pytest.mark.parametrize("hash_of", [lambda data: bytes(16), lambda data: bytes([data[16] & 1]) * 16])
def test_collisions_serve_nothing_else(hash_of):
    cache = make(num_blocks=32, hash_of=hash_of)
    seqs = [started(cache, [number, *TEXT]) for number in range(4)]
    tables = cache.batch(seqs).block_tables
    assert len(np.unique(tables)) == tables.size
    for number, table in enumerate(tables):
        seq, num_cached = cache.add([number, *TEXT, 0])
        assert (cache.batch(seq).block_tables[0, : num_cached // P] == table[: num_cached // P]).all()
    assert cache.find([0, *TEXT], "salt") == 0
    cache.check()


def test_a_hash_that_fails_changes_nothing():
    hash_of = fails_after(3, lambda data: hashlib.md5(data, usedforsecurity=False).digest(), MemoryError("injected"))
    cache = make(hash_of=hash_of)
    seq = started(cache, TEXT[:8])
    with refused(cache, MemoryError, "injected"):
        cache.add([*TEXT, 1])
    cache.append(seq, 4, [1, 2, 3, 4])
    with refused(cache, MemoryError, "injected"):
        cache.commit(seq)


@pytest.mark.parametrize(
    ("digest", "error", "message"),
    [
        (bytes(32), ValueError, r"^hash_of must return 16 bytes, got 32: cut longer digests$"),
        (b"", ValueError, r"^hash_of must return 16 bytes, got 0"),
        (bytearray(16), TypeError, r"^hash_of must return bytes, 16 of them, got bytearray$"),
        (7, TypeError, r"^hash_of must return bytes, 16 of them, got int$"),
    ],
)
def test_hashes_of_another_kind(digest, error, message):
    cache = make(hash_of=lambda data: digest)
    with refused(cache, error, message):
        cache.add(TEXT)
    seq = cache.add(TEXT[:3]).seq
    cache.append(seq, tokens=[1])
    with refused(cache, error, message):
        cache.commit(seq)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eviction": LRU(4)}, r"^eviction must be a class such as LRU, or a function of num_blocks, got <"),
        ({"hash_of": "md5"}, r"^hash_of must be a function of bytes, got 'md5'$"),
        ({"events": []}, r"^events must be a function of an event, or None, got \[\]$"),
    ],
)
def test_what_cannot_be_called(options, message):
    with pytest.raises(TypeError, match=message):
        make(**options)


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
        (lambda c, s: c.append(s, tokens=[True]), TypeError, r"^tokens must have dtype int32 or int64, got bool$"),
        (lambda c, s: c.append(s, 2, tokens=[1, True]), TypeError, r"^tokens must hold ints, got a bool$"),
        (lambda c, s: c.commit([s, s]), ValueError, r"^seqs must name each sequence once, got \d+ twice$"),
        (lambda c, s: c.commit([s, 0]), KeyError, r"no sequence 0: it was freed or never added"),
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
        ("_parents", 1, 0, "a block that can be found is not"),
        ("_index._places", 0, 1, "in another place"),
        ("_index._keys", 0, 1, "does not find a block"),
        ("_index._num_filled", 0, 1, "counts its slots wrongly"),
        ("eviction._places", 0, 0, "waits that cannot be evicted"),
    ],
)
def test_check_finds(where, index, value, message):
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


def test_the_ring_and_the_index_are_made_anew_when_they_are_full():
    cache = make(num_blocks=4)
    for number in range(60):
        seq = started(cache, [number, *TEXT[:7]])
        assert cache.find([number, *TEXT]) == 8
        cache.free(seq)
        cache.check()
    assert cache.find([58, *TEXT]) == 8
    assert cache.find([57, *TEXT]) == 0
