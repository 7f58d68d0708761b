"""What every store promises: the block that was put, or none; a bound; the beginnings of sequences stay longest."""

from contextlib import suppress

import numpy as np
import pytest

from pagedkv.stores import FileStore, HostStore
from pagedkv.stores.recycled import RecycledMemory
from pagedkv.stores.redis import RedisStore

from ..support.interrupts import interrupts_at_every_instant
from . import redis_server
from .nixl_agent import host_and_store

BLOCK_BYTES, NUM_BLOCKS = 100, 6
CAPACITY = NUM_BLOCKS * BLOCK_BYTES


def keys(*numbers):
    return [bytes([i]) * 16 for i in numbers]


def block(number, size=BLOCK_BYTES):
    return np.random.default_rng(number).bytes(size)


@pytest.fixture(scope="module")
def nixl_store():
    with host_and_store(CAPACITY, BLOCK_BYTES) as (_, store):
        yield store


@pytest.fixture(params=["host", "file", "nixl", *redis_server.NAMES])
def store(request, tmp_path, server_of):
    if request.param == "host":
        yield HostStore(CAPACITY, BLOCK_BYTES)
    elif request.param == "file":
        with FileStore(tmp_path / "blocks", CAPACITY, BLOCK_BYTES) as store:
            yield store
    elif request.param == "nixl":
        store = request.getfixturevalue("nixl_store")
        yield store
        store.remove(keys(*range(30)))
    else:
        store = RedisStore(server_of(request.param).url, CAPACITY, prefix=request.node.name, timeout=10)
        yield store
        store.close()


def put(store, *numbers):
    store.put(keys(*numbers), [block(i) for i in numbers])


def here(store, *numbers):
    """Which of these blocks are there; they are right."""
    found = store.get(keys(*numbers))
    assert len(found) == len(numbers)
    for number, one in zip(numbers, found, strict=True):
        assert one is None or bytes(one) == block(number)
    return [number for number, one in zip(numbers, found, strict=True) if one is not None]


def test_what_was_put_is_there_until_it_is_removed(store):
    assert store.capacity == CAPACITY
    assert here(store) == here(store, 1) == []
    put(store, 1, 2, 3)
    put(store)
    assert here(store, 3, 0, 1, 2) == [3, 1, 2]
    assert [*store.has(keys(3, 0, 1, 2))] == [True, False, True, True]
    assert [*store.has([])] == []
    store.remove(keys(2, 5))
    store.remove([])
    assert here(store, 1, 2, 3) == [1, 3]
    put(store, 2)
    assert here(store, 2) == [2]


def test_blocks_of_any_size_up_to_the_largest(store):
    sizes = [0 + 1, 17, BLOCK_BYTES]
    store.put(keys(*sizes), [np.frombuffer(block(size, size), np.uint8).data for size in sizes])
    assert [bytes(x) for x in store.get(keys(*sizes))] == [block(size, size) for size in sizes]


def test_a_key_keeps_its_block(store):
    put(store, 1)
    store.put(keys(1, 2), [block(9), block(2)])
    assert here(store, 1, 2) == [1, 2]


def test_the_least_recently_used_blocks_make_room(store):
    put(store, 1, 2, 3)
    put(store, 4, 5, 6)
    assert here(store, 2) == [2]
    store.has(keys(1))
    put(store, 7, 8)
    assert here(store, *range(9)) == [1, 2, 4, 5, 7, 8]


def test_the_beginning_of_a_long_sequence_is_kept(store):
    put(store, *range(20, 22))
    put(store, *range(1, 10))
    assert here(store, *range(1, 10)) == [1, 2, 3, 4, 5, 6]
    assert here(store, 20, 21) == []


def test_what_was_got_stays_as_it_is(store):
    put(store, 1)
    [found] = store.get(keys(1))
    put(store, *range(2, 8))
    assert here(store, 1) == []
    assert bytes(found) == block(1)


@pytest.mark.parametrize(
    ("wrong_keys", "blocks", "message"),
    [
        (keys(1, 1), [b"a", b"b"], "keys must be different, one for each of 3 blocks, got 2"),
        (keys(1), [b"a", b"b"], "keys must be different, one for each of 3 blocks, got 2"),
        ([b"short"], [b"a"], "keys must have 16 bytes, got 5"),
        (keys(1), [bytes(6 * BLOCK_BYTES + 1)], "blocks must have at most [16]00 bytes each, got 601"),
    ],
)
def test_refusals_change_nothing(store, wrong_keys, blocks, message):
    put(store, 1, 2)
    with pytest.raises(ValueError, match=message):
        store.put([*keys(3), *wrong_keys], [b"c", *blocks])
    assert here(store, 1, 2, 3) == [1, 2]


@pytest.mark.parametrize("call", [lambda store: put(store, 4, 5, 6), lambda store: store.remove(keys(1, 2))])
@pytest.mark.parametrize("kind", ["host", "file"])
def test_an_interrupt_at_any_instant_leaves_room_for_all_blocks(tmp_path, kind, call):
    for i, interrupt in enumerate(interrupts_at_every_instant((f"stores/{kind}", "stores/slots"))):
        sizes = CAPACITY, BLOCK_BYTES
        store = HostStore(*sizes) if kind == "host" else FileStore(tmp_path / str(i), *sizes)
        put(store, 0, 1, 2, 3)
        with suppress(KeyboardInterrupt), interrupt:
            call(store)
        here(store, *range(7))
        put(store, *range(10, 10 + NUM_BLOCKS))
        assert len(here(store, *range(10, 10 + NUM_BLOCKS))) == NUM_BLOCKS, interrupt.came_at
        if kind == "file":
            store.close()


def test_memory_is_used_again_when_nobody_has_it():
    memory = RecycledMemory()
    size = 2**17
    first = memory.room(size)
    part = first[10:20]
    address = np.frombuffer(first, np.uint8).ctypes.data
    del first
    second = memory.room(size)  # a part of the first piece is still somebody's
    assert abs(np.frombuffer(second, np.uint8).ctypes.data - address) >= size
    del part
    assert np.frombuffer(memory.room(size - 100), np.uint8).ctypes.data == address
    assert np.frombuffer(memory.room(10), np.uint8).ctypes.data != address  # far too large
