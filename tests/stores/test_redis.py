"""What a RedisStore does where the server is late, gone, shared, or loses keys; test_stores.py has what it keeps."""

import random
import socket
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.stores.redis import RedisStore

from ..project.pages import ROOT, blocks
from ..support.strategies import long
from . import redis_server
from .caches import blocks_of, make_cache, text
from .test_prefixes import NUM_TOKENS, loaded, prefixes_of, stored

redis = pytest.importorskip("redis", reason="redis-py is not installed: the extra redis brings it")


@pytest.fixture(params=redis_server.NAMES)
def server(request, server_of):
    return server_of(request.param)


def block(i):
    return [bytes([i]) * 16], [bytes([i]) * 10]


def test_stores_share_blocks_and_their_bound(server):
    one, other = (RedisStore(server.url, 30, prefix="shared", timeout=10) for _ in range(2))
    foreign = RedisStore(server.url, 30, prefix="foreign", timeout=10)
    for i, store in enumerate((one, other, one, other, foreign)):
        store.put(*block(i))
    assert [one.get(block(i)[0])[0] is not None for i in range(5)] == [False, True, True, True, False]
    assert foreign.get(block(4)[0])[0] == block(4)[1][0]


def test_an_empty_value_is_no_block_and_costs_no_other(server):
    store = RedisStore(server.url, 30, prefix="empty", timeout=10)
    store.put(*block(1))
    keys = block(0)[0] + block(1)[0]
    store._client.set(store._prefix + keys[0], b"")
    assert (store.has(keys), store.get(keys)[0], bytes(store.get(keys)[1])) == ([False, True], None, block(1)[1][0])


def test_prefixes_find_each_other_over_a_server(server):
    size = blocks_of(make_cache()).wire.block_bytes
    store = RedisStore(server.url, 100 * size, prefix="prefixes", timeout=10)
    stored(store)
    assert loaded(make_cache(block_size=4), store)[0] == NUM_TOKENS // 8 * 8


def test_the_example_of_the_docs(server, capsys):
    page, address = ROOT / "docs" / "howto" / "stores.md", "redis://localhost:6379/0"
    define, [example] = blocks(page, "python")[0], blocks(page, "py")
    assert example.count(address) == 1
    exec(f"{define}tokens = list(range(300))\n{example.replace(address, server.url)}", {})
    assert capsys.readouterr().out == "300\n44\n"


def test_a_server_that_does_not_answer_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", 2**20, timeout=0.05)
        begin = time.monotonic()
        for call in (lambda: store.get(block(1)[0]), lambda: store.put(*block(1)), lambda: store.remove(block(1)[0])):
            with pytest.raises(redis.RedisError):
                call()
        with prefixes_of(make_cache(), store) as prefixes:
            assert prefixes.load(text(NUM_TOKENS)) == 0
            assert isinstance(prefixes.patient.last_error, redis.RedisError)
        assert time.monotonic() - begin < 5
    with pytest.raises(redis.ConnectionError):
        store.get(block(1)[0])


SIZE, NUM_BLOCKS = 1000, 10
CAPACITY = NUM_BLOCKS * SIZE
NUMBERS = range(30)


def key(i):
    return bytes([i]) * 16


class Traffic:
    """A store, and a client of its own beside it that does what the server or somebody else may do."""

    def __init__(self, server, prefix):
        self.server, self.prefix = server, f"{{{prefix}}}:".encode()
        self.store = RedisStore(server.url, CAPACITY, prefix=prefix, timeout=10)
        self.client = redis.Redis.from_url(server.url, protocol=2)

    def put(self, *numbers):
        self.store.put([key(i) for i in numbers], [np.full(SIZE, i, np.uint8) for i in numbers])

    def here(self):
        """Which blocks the store has; they are right."""
        found = self.store.get([key(i) for i in NUMBERS])
        for i, block in enumerate(found):
            assert block is None or bytes(block) == bytes([i]) * SIZE
        return [i for i, block in enumerate(found) if block is not None]

    def names(self, of=b""):
        return sorted(name for name in self.client.scan_iter() if name.startswith(self.prefix + of))

    def leave(self, *numbers):
        """What a client leaves that dies in the middle of `put`."""
        for i in numbers:
            self.client.set(self.prefix + b"block:" + key(i), bytes([i]) * SIZE)

    def restart(self):
        self.server.kill()
        self.server.start()

    def assert_bound(self):
        """After some more calls, which count what nobody has counted, the bound holds and is of use."""
        for _ in range(self.client.dbsize() // 10 + 2):
            self.store.get([key(99)])
        assert len(self.names(b"block:")) <= NUM_BLOCKS
        self.put(*range(20, 20 + NUM_BLOCKS))
        assert self.here() == [*range(20, 20 + NUM_BLOCKS)]
        assert len(self.names(b"block:")) == NUM_BLOCKS


@pytest.fixture(params=redis_server.NAMES)
def own_server(request, tmp_path):
    """A server that a test may restart, and tell to have less memory."""
    redis_server.require_server(request.param)
    with redis_server.redis_server(request.param, tmp_path) as server:
        yield server


@pytest.fixture
def traffic(server, request):
    return Traffic(server, request.node.name)


def test_each_key_that_is_deleted_costs_blocks_at_most(traffic):
    traffic.put(*range(NUM_BLOCKS))
    names = traffic.names()
    assert len(names) > NUM_BLOCKS
    for name in names:
        traffic.put(*range(NUM_BLOCKS))
        traffic.client.delete(name)
        assert len(traffic.here()) >= NUM_BLOCKS - 1
        traffic.assert_bound()


def test_blocks_that_a_client_has_not_counted_are_counted_and_evicted(traffic):
    traffic.leave(*range(NUM_BLOCKS + 5))
    traffic.assert_bound()


def test_a_prefix_is_no_pattern(server):
    one, other = (Traffic(server, prefix) for prefix in ("a[bc]*", "ab"))
    other.put(1)
    one.leave(*range(NUM_BLOCKS + 1))
    one.assert_bound()
    assert other.here() == [1]


def test_blocks_that_have_other_sizes_now_are_counted_right(traffic):
    for size in (500, 1500):
        traffic.put(*range(NUM_BLOCKS))
        for name in traffic.names(b"block:"):
            traffic.client.set(name, bytes(size))
        traffic.store.get([key(i) for i in NUMBERS])
        traffic.store.remove([key(i) for i in NUMBERS])
        assert traffic.names(b"block:") == []
        traffic.assert_bound()


def test_a_server_that_is_full_still_reads(own_server):
    traffic = Traffic(own_server, "full")
    traffic.put(1, 2, 3)
    traffic.client.config_set("maxmemory", 1)
    assert traffic.here() == [1, 2, 3]
    with pytest.raises(redis.RedisError, match="maxmemory"):
        traffic.put(4)
    traffic.store.remove([key(1)])
    assert traffic.here() == [2, 3]
    traffic.client.config_set("maxmemory", 0)
    traffic.assert_bound()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru"])
def test_a_server_that_evicts_keys_has_right_blocks(own_server, policy):
    traffic, rng = Traffic(own_server, "evicted"), random.Random(0)
    memory = traffic.client.info("memory")["used_memory"]
    traffic.client.config_set("maxmemory-policy", policy)
    traffic.client.config_set("maxmemory", memory + 1_000_000)
    for _ in range(100):
        traffic.put(*rng.sample(NUMBERS, 4))
        traffic.here()
        for _ in range(10):
            traffic.client.set(f"another application: {rng.randrange(500)}", bytes(10 * SIZE), px=10**6)
    traffic.client.config_set("maxmemory", 0)
    traffic.assert_bound()


def histories():
    numbers = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=NUM_BLOCKS + 2, unique=True)
    what = ["put", "put", "here", "remove", "leave", "delete", "flush", "restart", "another store"]
    return st.lists(st.tuples(st.sampled_from(what), numbers), max_size=25)


@pytest.mark.parametrize("max_examples", [10, *long([300])])
def test_any_history_leaves_right_blocks_and_the_bound(own_server, max_examples):
    @given(histories())
    @settings(max_examples=max_examples)
    def run(history):
        traffic = Traffic(own_server, "history")
        traffic.client.flushall()
        for what, numbers in history:
            match what:
                case "remove":
                    traffic.store.remove([key(i) for i in numbers])
                    assert not {*traffic.here()} & {*numbers}
                case "delete":
                    traffic.client.delete(*(traffic.names() or ["none"])[:: len(numbers)])
                case "flush":
                    traffic.client.flushall()
                case "another store":
                    traffic = Traffic(own_server, "history")
                case "restart" | "here":
                    getattr(traffic, what)()
                case _:
                    getattr(traffic, what)(*numbers)
            traffic.here()
        traffic.assert_bound()

    run()
