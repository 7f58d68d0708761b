"""What a RedisStore does where the server is late, gone, or shared; what it keeps is tested with the other stores."""

import socket
import time

import pytest

from pagedkv.stores.redis import RedisStore

from . import redis_server
from .caches import blocks_of, make_cache, text
from .test_prefixes import NUM_TOKENS, loaded, prefixes_of, stored

redis = pytest.importorskip("redis", reason="redis-py is not installed: the extra redis brings it")


@pytest.fixture(params=redis_server.NAMES)
def url(request, server_of):
    return server_of(request.param).url


def block(i):
    return [bytes([i]) * 16], [bytes([i]) * 10]


def test_stores_share_blocks_and_their_bound(url):
    one, other = (RedisStore(url, 30, prefix="shared", timeout=10) for _ in range(2))
    foreign = RedisStore(url, 30, prefix="foreign", timeout=10)
    for i, store in enumerate((one, other, one, other, foreign)):
        store.put(*block(i))
    assert [one.get(block(i)[0])[0] is not None for i in range(5)] == [False, True, True, True, False]
    assert foreign.get(block(4)[0])[0] == block(4)[1][0]


def test_prefixes_find_each_other_over_a_server(url):
    size = blocks_of(make_cache()).wire.block_bytes
    store = RedisStore(url, 100 * size, prefix="prefixes", timeout=10)
    stored(store)
    assert loaded(make_cache(block_size=4), store)[0] == NUM_TOKENS // 8 * 8


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
