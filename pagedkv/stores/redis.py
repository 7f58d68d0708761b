"""RedisStore: wire blocks in a Redis server, which many processes and machines share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..extras import pip_install
from ..memory.arguments import as_int
from ..memory.prefix.digests import NUM_BYTES
from .recycled import RecycledMemory
from .store import Buffer, require_blocks, sizes_of

_AT_ONCE = 2**20  # bytes of one command and its answer, about
_ROOM = 2**25  # bytes for blocks that have come, at a time
_KEYS_AT_ONCE = 2**10  # keys of one call of the script, during which the server answers nobody else
_LOOKED_AT = 20  # names of the server that a call looks at, about
# The sorted set `order` is all that the store keeps beside the blocks, so that no part of it can be lost alone. A
# member is a key and the size of its block, its score the time of the last use. The member "bytes" has minus the sum of
# the sizes. A server that evicts keys by itself may drop the set, or blocks. Hence each call looks at some more names
# and counts the blocks that are not in the set; a member whose block is gone leaves when it is the oldest.
_SCRIPT = """
local order, prefix, capacity, forgets = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[5] == '1'
local clock = math.max(0, tonumber(redis.call('ZREVRANGE', order, 0, 0, 'WITHSCORES')[2] or 0))
local before = -tonumber(redis.call('ZSCORE', order, 'bytes') or 0)
local bytes, sizes = before, {}
local function use(key, size)
  clock = clock + 1
  -- This fails when the server is out of memory; blocks can be read all the same.
  if redis.pcall('ZADD', order, clock, key .. size) == 1 then bytes = bytes + size end
end
local function forget(key, size)
  if redis.call('ZREM', order, key .. size) == 1 then bytes = bytes - size end
  if redis.call('STRLEN', prefix .. key) == size then redis.call('UNLINK', prefix .. key) end
end
for i = #ARGV, 6, -1 do
  local size = redis.call('STRLEN', prefix .. ARGV[i])
  sizes[i - 5] = size
  if forgets then
    forget(ARGV[i], size)
  elseif size > 0 then
    use(ARGV[i], size)
  end
end
local seen = redis.call('SCAN', ARGV[3], 'MATCH', ARGV[4], 'COUNT', LOOKED_AT)
for _, name in ipairs(seen[2]) do
  local key, size = string.sub(name, #prefix + 1), redis.call('STRLEN', name)
  if #key == KEY_BYTES and not redis.call('ZSCORE', order, key .. size) then use(key, size) end
end
while bytes > capacity do
  local oldest = redis.call('ZRANGEBYSCORE', order, '(0', '+inf', 'LIMIT', 0, 1)[1]
  if not oldest then bytes = 0 break end
  forget(string.sub(oldest, 1, KEY_BYTES), tonumber(string.sub(oldest, KEY_BYTES + 1)))
end
if bytes ~= before then redis.call('ZADD', order, -bytes, 'bytes') end
return {seen[1], sizes}
""".replace("LOOKED_AT", str(_LOOKED_AT)).replace("KEY_BYTES", str(NUM_BYTES))


class RedisStore:
    """Keeps blocks in a Redis server, version 5 or later; no cluster.

    All stores with the same prefix share their blocks and one bound, that of whoever called last. A script on the
    server counts bytes and evicts blocks; each call also counts some blocks that a client left behind when it died. The
    server may restart, or evict keys by its `maxmemory-policy`: what is lost is computed again. Any thread may call it.

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
        self._order = f"{{{prefix}}}:order".encode()
        self._prefix = f"{{{prefix}}}:block:".encode()
        self._pattern = re.sub(rb"([][*?\\])", rb"\\\1", self._prefix) + b"*"
        self._cursor: bytes | int = 0  # where the server goes on to look for blocks that nobody has counted
        self._recycled = RecycledMemory()
        self._script: Any = self._client.register_script(_SCRIPT)

    def get(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Look up keys; see `BlockStore.get`."""
        found: list[Buffer | None] = []
        at_once, room = 1, memoryview(b"")
        while len(found) < len(keys):
            for block in self._client.mget([self._prefix + key for key in keys[len(found) : len(found) + at_once]]):
                if not block:  # `has` says that an empty one is not there
                    found.append(None)
                    continue
                # The memory of each answer serves the next one, too: new memory would take longer than the copy.
                if len(room) < len(block):
                    room = self._recycled.room(max(_ROOM, len(block)))
                room[: len(block)] = block
                found.append(room[: len(block)])
                room, at_once = room[len(block) :], max(1, _AT_ONCE // len(block))
        self._call(keys)
        return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys are there; see `BlockStore.has`."""
        return [size > 0 for size in self._call(keys)]

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> None:
        """Keep copies of blocks; see `BlockStore.put`."""
        require_blocks(keys, sizes_of(blocks), self.capacity)
        pipeline, waiting = self._client.pipeline(transaction=False), 0
        for key, block, size in zip(keys, blocks, self._call(keys), strict=True):
            if not size:
                pipeline.set(self._prefix + key, memoryview(block), nx=True)
                waiting += memoryview(block).nbytes
            if waiting >= _AT_ONCE:
                pipeline.execute()
                waiting = 0
        pipeline.execute()
        self._call(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        self._call(keys, forgets=True)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, keys: Sequence[bytes], *, forgets: bool = False) -> list[int]:
        """Use keys, or forget them; returns the bytes of their blocks, 0 where there is none."""
        sizes: list[int] = []
        # The last keys first, so that the first are the most recently used.
        for stop in range(len(keys), 0, -_KEYS_AT_ONCE):
            some = keys[max(0, stop - _KEYS_AT_ONCE) : stop]
            arguments = self._prefix, self.capacity, self._cursor, self._pattern, int(forgets)
            self._cursor, of_some = self._script([self._order], [*arguments, *some])
            sizes[:0] = of_some
        return sizes
