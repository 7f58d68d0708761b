"""Hooks of a prefix cache: eviction, hash function and event listener."""

import hashlib

import numpy as np
import pytest

from pagedkv.memory import LRU, AllBlocksCleared, BlockRemoved, BlockStored

from ..manager import fails_after, refused
from .prompts import TEXT, P, digests, make, started
from .router import Router


def test_events():
    received = []
    cache = make(num_blocks=4, events=received.append)
    seq = cache.add(TEXT[:10]).seq
    assert received == []
    cache.commit(seq)
    first, second, third = digests([*TEXT, 0])
    assert received.pop() == BlockStored([first, second], None, TEXT[:8], P, medium="CPU")
    cache.append(seq, 2, [TEXT[10], 0])
    cache.commit(seq)
    assert received.pop() == BlockStored([third], second, [*TEXT[8:], 0], P, medium="CPU")
    cache.free(seq)
    cache.add(2 * P)
    assert received.pop() == BlockRemoved([third], medium="CPU")
    cache.reset()
    assert received == [AllBlocksCleared()]


def test_events_name_the_salt_of_first_blocks():
    received = []
    cache = make(events=received.append)
    seq = cache.add(TEXT[:8], salt="tenant").seq
    plain, fork = cache.add(TEXT[:4]).seq, *cache.fork(seq)
    cache.append([fork], P, [0] * P)
    cache.commit([seq, plain, fork])
    assert [event.extra_keys for event in received] == [[("tenant",), None], None, None]
    assert received[2].parent_block_hash == received[0].block_hashes[1]
    bytes_seq, before = cache.add([5] * P, salt=b"\xff").seq, cache.add([6] * P, salt="x").seq
    [late] = cache.fork(before)
    cache.free(before)
    cache.commit([bytes_seq, late])
    assert [event.extra_keys for event in received[3:]] == [[(b"\xff",)], [("x",)]]


def test_an_exception_of_a_listener_comes_after_the_change():
    received = []

    def listener(event):
        received.append(event)
        if len(received) == 1:
            raise RuntimeError("the router is away")

    cache = make(events=listener)
    seq = cache.add(TEXT).seq
    with pytest.raises(RuntimeError, match="the router is away"):
        cache.commit(seq)
    assert cache.find(TEXT) == 8
    cache.check()
    cache.reset()
    assert received[1:] == [AllBlocksCleared()]


def full_of_cached_blocks(listener):
    """A cache whose blocks are all cached, but one in use, which has room for a token."""
    cache = make(num_blocks=4, events=listener)
    cache.free([started(cache, TEXT[:8]), started(cache, [1, *TEXT[:3]])])
    return cache, cache.add(3).seq


@pytest.mark.parametrize("tokens", [8, [0, *TEXT[:7]]])
def test_an_add_whose_listener_fails_starts_no_sequence(tokens):
    """The call evicts two blocks; the listener raises for the first of two events, and the blocks stay evicted."""
    events = []
    cache, _ = full_of_cached_blocks(lambda event: events.append(event) or (isinstance(event, BlockRemoved) and 1 / 0))
    before = cache.stats()
    with pytest.raises(ZeroDivisionError):
        cache.add(tokens)
    after = cache.stats()
    assert (after.used, after.free, after.num_tokens) == (before.used, before.free, before.num_tokens)
    assert (after.cached, cache.num_seqs) == (before.cached - 2, 1)
    assert isinstance(events[-1], BlockRemoved)
    cache.check()


@pytest.mark.parametrize("num_forks", [0, 1])
def test_an_append_whose_listener_fails_adds_no_token(num_forks):
    """With a fork the copy of the block that they share goes to a block that is evicted before anything else."""
    cache, seq = full_of_cached_blocks(lambda event: isinstance(event, BlockRemoved) and 1 / 0)
    seqs = [seq, *cache.fork(seq, num_forks)]
    with pytest.raises(ZeroDivisionError):
        cache.append(seqs, 4)
    assert cache.seq_lens(seqs).tolist() == [3] * len(seqs)
    assert cache.num_free == 3
    cache.check()
    assert len(cache.append(seqs, 1)) == len(seqs)


class MostRecent(LRU):
    """Evicts the block that came last."""

    def plan_leave(self, blocks, num_evicted):
        waiting, _ = self._waiting(int(self._first[0]), int(self._end[0]))
        evicted = waiting[~np.isin(waiting, blocks)][::-1][:num_evicted].copy()
        return evicted, super().plan_leave(np.concatenate([blocks, evicted]), 0)[1]


def test_another_order_of_eviction():
    router = Router()
    cache = make(num_blocks=4, eviction=MostRecent, events=router)
    cache.free(started(cache, TEXT[:8]))
    cache.free(started(cache, [0, *TEXT[:7]]))
    cache.add(P)
    assert (cache.find([*TEXT[:8], 0]), cache.find([0, *TEXT[:7], 0])) == (8, 0), "its first block went"
    assert (cache.stats().cached, cache.num_free) == (2, 3), "and with it the one behind, which nothing leads to"
    router.agrees_with(cache)
    seq = started(cache, [0, *TEXT[:7]])
    router.agrees_with(cache)
    cache.check()
    assert cache.find([0, *TEXT[:7], 0]) == 8
    cache.free(seq)
    cache.check()


class Lending(LRU):
    """Lends an array of its own, which its write changes, and writes to the one that it gets."""

    def plan_leave(self, blocks, num_evicted):
        evicted, writes = super().plan_leave(blocks.copy(), num_evicted)
        blocks.fill(0)
        return evicted, [*writes, (evicted, np.arange(num_evicted), np.zeros(num_evicted, np.int64))]


def test_arrays_of_an_eviction_are_copied():
    cache = make(num_blocks=4, eviction=Lending)
    cache.free(started(cache, [*range(4 * P)]))
    seq = cache.add(2 * P).seq
    assert len({*cache.batch(seq).block_tables[0].tolist()}) == 2
    cache.check()
    cache.reset()
    cache.check()


def test_a_falsy_listener_gets_events():
    class Log(list):
        __call__ = list.append

    log = Log()
    started(make(events=log), TEXT)
    assert len(log) == 1


class Chosen(LRU):
    """Evicts given blocks."""

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


def md5_for_three(error):
    return fails_after(3, lambda data: hashlib.md5(data, usedforsecurity=False).digest(), error)


def test_a_hash_that_fails_changes_nothing():
    cache = make(hash_of=md5_for_three(MemoryError("injected")))
    seq = started(cache, TEXT[:8])
    with refused(cache, MemoryError, "injected"):
        cache.add([*TEXT, 1])
    cache.append(seq, 4, [1, 2, 3, 4])
    with refused(cache, MemoryError, "injected"):
        cache.commit(seq)


def test_a_hash_that_ends_changes_nothing():
    """StopIteration from a hash inside map() would look like the end of the blocks."""
    cache = make(hash_of=md5_for_three(StopIteration("injected")))
    seqs = [cache.add([number] * (P + 1)).seq for number in (1, 2)]
    with refused(cache, StopIteration, "injected"):
        cache.commit(seqs)


def test_a_step_undone_by_a_listener_leaves_nothing_for_the_next():
    fails = False

    def listen(event):
        if fails:
            raise RuntimeError("not now")

    cache = make(num_blocks=4, events=listen)
    cache.free(started(cache, TEXT))
    seq = cache.add(2 * P).seq
    fails = True
    with pytest.raises(RuntimeError, match="not now"):
        cache.append(seq)  # takes a block of TEXT
    fails = False
    cache.append(seq)
    cache.check()
    assert cache.seq_lens(seq).tolist() == [2 * P + 1]


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
def test_hooks_that_cannot_be_called_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        make(**options)


def test_remaining_events_are_delivered_after_a_listener_raises():
    """Otherwise later calls without events of their own would raise for these events."""
    received = []
    cache = make(events=lambda event: received.append(event) or 1 / 0)
    seqs = [cache.add([number, *TEXT]).seq for number in (1, 2)]
    with pytest.raises(ZeroDivisionError):
        cache.commit(seqs)
    assert [event.token_ids[0] for event in received] == [1, 2]
    cache.free([*seqs, *cache.fork(seqs[0])])
    assert len(received) == 2


def test_events_left_by_an_interrupt_are_delivered_before_the_next_change():
    errors = [KeyboardInterrupt(), ZeroDivisionError()]

    def listener(event):
        if errors:
            raise errors.pop(0)

    cache = make(events=listener)
    seqs = [cache.add([number, *TEXT]).seq for number in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        cache.commit(seqs)
    before = cache.stats()
    with pytest.raises(ZeroDivisionError):
        cache.fork(seqs[0])
    assert cache.stats() == before
    assert cache.num_seqs == 2
    cache.check()
    assert len(cache.fork(seqs[0])) == 1
