"""RedisStore: wire blocks in a Redis server, which many processes and machines share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..extras import pip_install
from ..memory.arguments import as_int
from .recycled import RecycledMemory
from .store import Buffer, require_blocks, sizes_of

_AT_ONCE = 2**20  # bytes of one command and its answer, about
_ROOM = 2**25  # bytes for blocks that have come, at a time
_ORPHANED = 60  # seconds after which the server drops a block whose writer has not come to count it
# Counts and orders blocks, whose values are there already, and evicts others. All on the server, and so in one piece.
_USE = """
local order, sizes, state = KEYS[1], KEYS[2], KEYS[3]
local prefix, capacity = ARGV[1], tonumber(ARGV[2])
local function forget(key)
  local size = redis.call('HGET', sizes, key)
  if size then
    redis.call('HINCRBY', state, 'bytes', -size)
    redis.call('HDEL', sizes, key)
    redis.call('ZREM', order, key)
  end
  redis.call('UNLINK', prefix .. key)
end
for i = #ARGV, 3, -1 do
  local key = ARGV[i]
  local size = redis.call('STRLEN', prefix .. key)
  if size == 0 then
    forget(key)
  else
    if redis.call('HSETNX', sizes, key, size) == 1 then
      redis.call('HINCRBY', state, 'bytes', size)
      redis.call('PERSIST', prefix .. key)
    end
    redis.call('ZADD', order, redis.call('HINCRBY', state, 'clock', 1), key)
  end
end
while tonumber(redis.call('HGET', state, 'bytes') or 0) > capacity do
  forget(redis.call('ZRANGE', order, 0, 0)[1])
end
"""


class RedisStore:
    """Keeps blocks in a Redis server, version 5 or later; no cluster.

    All stores with the same prefix share their blocks and one bound, that of whoever wrote last. A script on the server
    counts bytes and evicts blocks. What a client leaves behind that dies before it calls the script, goes after a
    minute. Any thread may call it.

    Parameters
    ----------
    url : str
        As redis-py takes it, such as ``redis://localhost:6379/0``, with user, password or TLS (``rediss://``).
    capacity : int
        Bytes of all blocks; the server needs about a tenth more.
    prefix : str
        What the names of this store's keys begin with.
    timeout : float
        Seconds that the server may take to accept a connection, or to send the next bytes of an answer.

    Raises
    ------
    ModuleNotFoundError
        redis-py is not installed; the message names the extra that brings it. Methods raise its RedisError.

    Examples
    --------
    >>> from contextlib import suppress
    >>> from pagedkv.stores.redis import RedisStore
    >>> with suppress(ModuleNotFoundError):  # where redis-py is not installed
    ...     store = RedisStore("redis://localhost:6379/0", capacity=2**30)  # connects when it is first used
    """

    def __init__(self, url: str, capacity: int, *, prefix: str = "pagedkv", timeout: float = 1.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: {pip_install('redis')}", name=error.name) from error
        self.capacity = as_int("capacity", capacity, minimum=1)
        once = Retry(NoBackoff(), 0)  # a retry would double the time-out; the caller has better things to do
        options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "retry": once}
        self._client = redis.Redis.from_url(url, protocol=2, **options)  # Redis 5 knows no other
        # In braces: whatever a cluster or a proxy makes of it, all keys of a store are in one place.
        self._names = [f"{{{prefix}}}:{name}".encode() for name in ("order", "sizes", "state")]
        self._prefix = f"{{{prefix}}}:block:".encode()
        self._recycled = RecycledMemory()
        self._use: Any = self._client.register_script(_USE)

    def get(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Look up keys; see `BlockStore.get`."""
        found: list[Buffer | None] = []
        at_once, room = 1, memoryview(b"")
        while len(found) < len(keys):
            for block in self._client.mget([self._prefix + key for key in keys[len(found) : len(found) + at_once]]):
                if block is None:
                    found.append(None)
                    continue
                # The memory of each answer serves the next one, too: new memory would take longer than the copy.
                if len(room) < len(block):
                    room = self._recycled.room(max(_ROOM, len(block)))
                room[: len(block)] = block
                found.append(room[: len(block)])
                room, at_once = room[len(block) :], max(1, _AT_ONCE // len(block))
        self._count(keys)
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> None:
        """Keep copies of blocks; see `BlockStore.put`."""
        require_blocks(keys, sizes_of(blocks), self.capacity)
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(self._prefix + key)
        waiting = 0
        for key, block, is_here in zip(keys, blocks, pipeline.execute(), strict=True):
            if not is_here:
                pipeline.set(self._prefix + key, memoryview(block), ex=_ORPHANED, nx=True)
                waiting += memoryview(block).nbytes
            if waiting >= _AT_ONCE:
                pipeline.execute()
                waiting = 0
        pipeline.execute()
        self._count(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        if keys:
            self._client.unlink(*(self._prefix + key for key in keys))
            self._count(keys)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _count(self, keys: Sequence[bytes]) -> None:
        self._use(self._names, [self._prefix, self.capacity, *keys])
