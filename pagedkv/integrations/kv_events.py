"""KVEventPublisher: sends the events of a prefix cache to routers, in the messages of vLLM."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

from ..extras import pip_install
from ..memory.arguments import MAX_INT32, as_int
from ..memory.prefix.events import AllBlocksCleared, Event

try:
    import msgspec
    import zmq
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"KV events need pyzmq and msgspec: {pip_install('kv-events')} ({error})") from None

_logger = logging.getLogger("pagedkv")
_MOST_EVENTS = 1024  # in one message
_SECONDS = 0.1  # a request for a replay waits at most so long
_GATHERED = 0.002  # seconds in which events join a message: fewer messages leave the cache's thread more of the GIL
_LINGER = 1000  # milliseconds that close() gives a subscriber to take what was sent
_MOST_BYTES = 4096  # of a frame that a subscriber sends: longer ones end its connection before they take memory
_END = (-1).to_bytes(8, "big", signed=True)
# vLLM's classes leave out of a message what has its default; the other fields, such as lora_id, have none.
_OPTIONAL = {"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}


class KVEventPublisher:
    """A listener that publishes events as vLLM does, for routers that send a request where its prefix is cached.

    A thread of its own sends the events, those of 2 ms together. A message has three frames: the topic; its number, 8
    bytes, big-endian, from 0; and a batch in MessagePack, ``[time, [event, ...], data_parallel_rank]``, whose events
    are maps with vLLM's fields. A block hash is an integer of the last 64 bits of the block's digest, as vLLM sends it
    by default. A salt is text in `extra_keys`: bytes are decoded as UTF-8, with what is no UTF-8 escaped.

    A subscriber that is absent or slow loses messages, and sees it by the numbers. It sends the first number that it
    misses, 8 bytes behind an empty frame, to the socket for replays, and gets (empty frame, number, batch) for each
    message since then that is still kept, and at last the number -1 with an empty batch. A frame of over 4096 bytes
    from it ends its connection.

    Calling the publisher puts an event into a queue, and never waits or raises. If the queue is full, all that it
    contains is dropped, and subscribers are sent an `AllBlocksCleared` in its place: they then miss blocks that are
    cached, but do not believe in blocks that are gone. A process that is forked publishes nothing.

    Parameters
    ----------
    endpoint : str
        Where subscribers connect, with ``*`` for any interface or any port: ``"tcp://*:5557"``, ``"tcp://127.0.0.1:*"``
        or ``"ipc:///tmp/events"``. The default, which is vLLM's, lets every machine that reaches this one read them. As
        in vLLM, an address without ``*`` or ``::`` is that of a subscriber, to which the publisher connects:
        ``"tcp://router:5557"``.
    replay_endpoint : str or None
        Where subscribers ask for what they missed; None for nowhere.
    topic : str
        By which subscribers choose publishers. llm-d reads ``kv@<pod>@<model>`` from it.
    buffer_steps : int
        Messages kept for replays.
    hwm : int
        Messages that wait for one subscriber; it loses those beyond.
    max_queue_size : int
        Events that wait for the thread.
    data_parallel_rank : int
        The number of this replica. It is added to the ports of both endpoints.

    Attributes
    ----------
    endpoint, replay_endpoint : str
        The addresses, with the port that was found for ``*``.

    Raises
    ------
    ValueError, TypeError
        An argument is not as described here.
    OSError
        An endpoint is taken, or no address of this machine.

    References
    ----------
    .. [1] https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events/

    Examples
    --------
    >>> from pagedkv import PagedKVCache
    >>> from pagedkv.integrations.kv_events import KVEventPublisher
    >>> with KVEventPublisher("tcp://127.0.0.1:*", topic="kv@replica-0@small") as publisher:
    ...     cache = PagedKVCache(1, 64, 16, 1, 64, events=publisher)
    ...     cache.commit(cache.add(range(40)).seq)
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        data_parallel_rank: int = 0,
    ) -> None:
        self._rank = as_int("data_parallel_rank", data_parallel_rank)
        endpoint = _of_rank("endpoint", endpoint, self._rank)
        if replay_endpoint is not None:
            replay_endpoint = _of_rank("replay_endpoint", replay_endpoint, self._rank)
        buffer_steps = as_int("buffer_steps", buffer_steps, maximum=MAX_INT32 // 2 - 1)
        hwm = as_int("hwm", hwm, minimum=1, maximum=MAX_INT32)
        self._max_queue_size = as_int("max_queue_size", max_queue_size, minimum=1)
        if not isinstance(topic, str):
            raise TypeError(f"topic must be a str, got {type(topic).__name__}")
        self._topic = topic.encode()
        self._queue: SimpleQueue[Event | None] = SimpleQueue()  # None wakes the thread
        # Frames share their bytes with whatever waits for subscribers.
        self._buffer: deque[tuple[bytes, zmq.Frame]] = deque(maxlen=buffer_steps)
        self._num_malformed = 0
        self._pid, self._is_open, self.replay_endpoint = os.getpid(), True, replay_endpoint
        context = zmq.Context()
        try:
            binds = endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint
            self._sockets = [_open(context, zmq.PUB, "endpoint", endpoint, hwm, binds=binds)]
            if replay_endpoint is not None:
                hwm = 2 * (buffer_steps + 1)  # ZeroMQ may take half of it for unread, and the rest must hold a reply
                replays = _open(context, zmq.ROUTER, "replay_endpoint", replay_endpoint, hwm, binds=True)
                self._sockets.append(replays)
                self.replay_endpoint = replays.get_string(zmq.LAST_ENDPOINT)
        except BaseException:
            context.destroy(linger=0)
            raise
        self.endpoint = self._sockets[0].get_string(zmq.LAST_ENDPOINT)
        self._thread = Thread(target=self._run, args=[context], name="pagedkv-kv-events", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue an event; after `close`, and in a forked process, ignore it."""
        if not self._is_open or os.getpid() != self._pid:
            return
        if self._queue.qsize() >= self._max_queue_size:
            cleared: SimpleQueue[Event | None] = SimpleQueue()
            cleared.put(AllBlocksCleared())
            self._queue = cleared  # an interrupt comes before this or after it, and the event comes again
        self._queue.put(event)

    def close(self) -> None:
        """Send what waits, and close the sockets; a subscriber has a second to take what was sent to it."""
        if os.getpid() == self._pid:
            self._is_open = False
            self._queue.put(None)
            self._thread.join()

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- on the thread
    def _run(self, context: zmq.Context[Any]) -> None:
        numbers, queue, last = count(), self._queue, None
        try:
            while self._is_open or queue is not self._queue or not queue.empty():
                if queue is not self._queue:
                    _logger.warning("KV events came faster than they could be sent: subscribers start anew")
                    queue = self._queue
                events = []
                for event in _take(queue):
                    if event is not None and event is not last:  # an interrupt makes the cache deliver it again
                        events.append(event)
                        last = event
                if events:
                    self._send(next(numbers), events)
                for replays in self._sockets[1:]:
                    while replays.poll(0):
                        self._replay(replays)
                        if queue is not self._queue or not queue.empty():
                            break  # events come first
        except Exception:
            _logger.exception("KV events are no longer published, since this failed")
        finally:
            self._is_open = False
            context.destroy(linger=_LINGER)

    def _send(self, number: int, events: list[Event]) -> None:
        batch = msgspec.msgpack.encode((time.time(), [_as_map(event) for event in events], self._rank))
        self._sockets[0].send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        self._buffer.append((number.to_bytes(8, "big"), zmq.Frame(batch)))

    def _replay(self, replays: zmq.Socket[bytes]) -> None:
        client, *request = replays.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            self._num_malformed += 1
            if self._num_malformed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: a flood fills no log
                _logger.warning(
                    "a request for KV events must be an empty frame and a number of 8 bytes, got %d frames that begin "
                    "with %r; %d such requests so far",
                    len(request),
                    b"".join(request)[:16],
                    self._num_malformed,
                )
            return
        for number, batch in self._buffer:
            if number >= request[1]:
                replays.send_multipart((client, b"", number, batch))
        replays.send_multipart((client, b"", _END, b""))


def _open(
    context: zmq.Context[Any], kind: int, name: str, endpoint: str, hwm: int, *, binds: bool
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.ipv6 = "::" in endpoint
    socket.sndhwm, socket.maxmsgsize = hwm, _MOST_BYTES
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise OSError(
            error.errno,
            f"{name} {endpoint} cannot be had ({error.strerror}): choose another, as in tcp://*:5557; publishers on "
            "one machine take a data_parallel_rank each, which is added to the port",
        ) from None
    return socket


def _of_rank(name: str, endpoint: str, rank: int) -> str:
    """Add a rank to the port of an endpoint; ZeroMQ would take a port past the last one for another."""
    if not isinstance(endpoint, str) or not endpoint.startswith(("tcp://", "ipc://")):
        raise ValueError(f"{name} must begin with tcp:// or ipc://, got {endpoint!r}")
    address, _, port = endpoint.rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        if rank == 0 and (port == "*" or endpoint.startswith("ipc://")):
            return endpoint
        any_port = " or *" if rank == 0 else f", to which data_parallel_rank = {rank} is added"
        raise ValueError(f"{name} must end in a port{any_port}, as in tcp://*:5557, got {endpoint!r}")
    if int(port) + rank > 65535:
        raise ValueError(f"{name} must have a port of at most 65535 with data_parallel_rank = {rank}, got {endpoint!r}")
    return f"{address}:{int(port) + rank}"


def _take(queue: SimpleQueue[Event | None]) -> list[Event | None]:
    """Wait for events, a while, and take as many as one message has room for."""
    taken: list[Event | None] = []
    try:
        taken.append(queue.get(timeout=_SECONDS))
        time.sleep(_GATHERED)
        while len(taken) < _MOST_EVENTS:
            taken.append(queue.get_nowait())
    except Empty:
        pass
    return taken


def _as_map(event: Event) -> dict[str, Any]:
    """The map that vLLM encodes for an event; it leaves out optional fields that are None."""
    fields: dict[str, Any] = {"type": type(event).__name__}
    for name in event.__slots__:
        value = getattr(event, name)
        if value is not None or name not in _OPTIONAL:
            fields[name] = value
    if "block_hashes" in fields:
        fields["block_hashes"] = [_number(digest) for digest in fields["block_hashes"]]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = _number(fields["parent_block_hash"])
    if "extra_keys" in fields:
        fields["extra_keys"] = [keys and [_text(key) for key in keys] for keys in fields["extra_keys"]]
    return fields


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def _text(salt: str | bytes) -> str:
    encoded = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
    return encoded.decode("utf-8", "backslashreplace")
