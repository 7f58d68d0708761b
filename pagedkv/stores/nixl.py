"""NixlHost and NixlStore: wire blocks in the memory of another process, which NIXL moves.

A host has the memory. A store asks it over a TCP connection where blocks are or may go, has NIXL read or write them
there, and says when it is done. Until then, or until the time-out, the host gives the memory to nobody else. A store
that is late reads or writes what may be another's by then, and the checksums of the blocks tell.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from struct import Struct
from threading import Lock, Thread
from typing import Any

import numpy as np

from ..memory.prefix.digests import NUM_BYTES
from .recycled import RecycledMemory
from .slots import Slots
from .store import Buffer, require_blocks, sizes_of

_HELLO = Struct("<QQQI")  # capacity, block_bytes, address of the memory, bytes of NIXL's metadata
_REQUEST = Struct("<4sI")  # what to do, with how many keys
_GET, _HAS, _PUT, _REMOVE, _DONE = b"get ", b"has ", b"put ", b"rem ", b"done"
_NOWHERE = 2**64 - 1
_POLL = 2e-5  # seconds
_AT_ONCE, _KEYS_AT_ONCE = 2**27, 2**16  # bytes and keys of a request


class NixlHost:
    """Has memory for blocks, which a `NixlStore` of this or another process fills and reads.

    Whoever reaches its address may read and write blocks.

    Parameters
    ----------
    capacity, block_bytes : int
        As in `HostStore`.
    address : tuple of str and int
        Where it listens; port 0 for a free one.
    timeout : float
        Seconds that it keeps memory for a store that is reading or writing.

    Attributes
    ----------
    address : tuple of str and int
        With the port that it got.

    Raises
    ------
    ModuleNotFoundError
        NIXL is not installed; the message says how to.

    Examples
    --------
    Here in one process, with both of them:

    >>> from contextlib import suppress
    >>> from pagedkv.stores.nixl import NixlHost, NixlStore
    >>> with suppress(ModuleNotFoundError):  # where NIXL is not installed
    ...     with NixlHost(capacity=2**20, block_bytes=2**15) as host, NixlStore(host.address) as store:
    ...         store.put([b"a key, 16 bytes."], [b"a block"])
    """

    def __init__(
        self, capacity: int, block_bytes: int, address: tuple[str, int] = ("127.0.0.1", 0), *, timeout: float = 5.0
    ) -> None:
        self._slots = Slots(capacity, block_bytes)
        self._agent, self._timeout, self._lock = _agent(), timeout, Lock()
        self._memory = np.empty(self._slots.num_slots * self._slots.block_bytes, np.uint8)
        memory = self._memory.ctypes.data, self._memory.nbytes, 0
        self._registered = self._agent.register_memory(_joined([memory]), "DRAM")
        sizes = self._slots.capacity, self._slots.block_bytes, self._memory.ctypes.data
        metadata = self._agent.get_agent_metadata()
        self._hello = _HELLO.pack(*sizes, len(metadata)) + metadata
        self._listener = socket.create_server(address)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        Thread(target=self._accept, name="pagedkv-nixl", daemon=True).start()

    def __enter__(self) -> NixlHost:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                Thread(target=self._serve, args=(connection,), name="pagedkv-nixl", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection:
            connection.sendall(self._hello)
            while True:
                connection.settimeout(None)
                what, count = _REQUEST.unpack(_receive(connection, _REQUEST.size))
                if what not in (_GET, _HAS, _PUT, _REMOVE) or count > _KEYS_AT_ONCE:
                    return  # nothing that a store sends
                deadline = time.monotonic() + self._timeout
                packed = _receive(connection, count * NUM_BYTES, deadline)
                keys = [packed[i : i + NUM_BYTES] for i in range(0, len(packed), NUM_BYTES)]
                sizes = np.frombuffer(_receive(connection, count * 8, deadline) if what == _PUT else b"", "<u8")
                with self._lock:
                    if what == _GET:
                        self._give(connection, keys)
                    elif what == _HAS:
                        connection.sendall(bytes(place is not None for place in self._slots.find(keys)))
                    elif what == _PUT:
                        self._take(connection, keys, sizes.tolist())
                    else:
                        self._slots.remove(keys)
                connection.sendall(_DONE)

    def _give(self, connection: socket.socket, keys: list[bytes]) -> None:
        """Say where blocks are, and wait until they have been read."""
        places = [(_NOWHERE, 0) if place is None else place for place in self._slots.find(keys)]
        self._say(connection, np.array(places, "<u8").tobytes())

    def _take(self, connection: socket.socket, keys: list[bytes], sizes: list[int]) -> None:
        """Say where new blocks may go, and name them once they have been written."""
        chosen, slots, evicted = self._slots.plan(keys, sizes)
        self._slots.remove(evicted)
        places = np.full((len(keys), 2), _NOWHERE, "<u8")
        places[chosen, 0], places[chosen, 1] = slots, [sizes[i] for i in chosen]
        self._say(connection, places.tobytes())
        self._slots.put([keys[i] for i in chosen], slots, [sizes[i] for i in chosen])

    def _say(self, connection: socket.socket, places: bytes) -> None:
        """Say where blocks are, and wait until the store has moved them."""
        connection.settimeout(self._timeout)
        connection.sendall(places)
        _receive(connection, len(_DONE), time.monotonic() + self._timeout)


class NixlStore:
    """Keeps blocks in the memory of a `NixlHost`. Any thread may call it, of the process that made it.

    Parameters
    ----------
    address : tuple of str and int
        That of the host.
    timeout : float
        Seconds that a call waits for the host, and for NIXL, at most. After an error the next call connects again.

    Raises
    ------
    ModuleNotFoundError
        NIXL is not installed; the message says how to.
    OSError
        Nobody listens there, or does not answer; methods raise it, too.

    Examples
    --------
    >>> from pagedkv.stores.nixl import NixlStore
    >>> try:
    ...     store = NixlStore(("127.0.0.1", 9))  # the address of a host in another process
    ... except (ModuleNotFoundError, OSError):
    ...     store = None  # compute everything
    """

    def __init__(self, address: tuple[str, int], *, timeout: float = 5.0) -> None:
        self._address, self._timeout, self._lock, self._process = address, timeout, Lock(), os.getpid()
        self._agent, self._recycled = _agent(), RecycledMemory()
        self._connection: socket.socket | None = None
        self._unfinished: list[Any] = []  # memory that NIXL may still write to
        with self._turn():
            pass

    def __enter__(self) -> NixlStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Look up keys; see `BlockStore.get`."""
        # The last ones first, so that the first ones are the most recently used.
        parts = [self._get(keys[some]) for some in reversed(self._at_once(len(keys)))]
        return [block for part in reversed(parts) for block in part]

    def _get(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        with self._asked(_GET, keys) as (connection, deadline):
            places = self._places(connection, len(keys), deadline)
            found = self._recycled.room_for(places)
            self._move("READ", [(x, place) for x, place in zip(found, places, strict=True) if x and place], deadline)
        return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys are there; see `BlockStore.has`."""
        there: list[bool] = []
        for some in reversed(self._at_once(len(keys))):
            with self._asked(_HAS, keys[some]) as (connection, deadline):
                there[:0] = map(bool, _receive(connection, len(keys[some]), deadline))
        return there

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> None:
        """Keep copies of blocks; see `BlockStore.put`."""
        sizes = sizes_of(blocks)
        with self._turn():  # which connects again after such an error: a host that has restarted may take larger blocks
            require_blocks(keys, sizes, self.block_bytes)
        for some in reversed(self._at_once(len(keys))):
            packed = np.array(sizes[some], "<u8").tobytes()
            with self._asked(_PUT, keys[some], packed) as (connection, deadline):
                places = self._places(connection, len(keys[some]), deadline)
                moves = [(x, place) for x, place in zip(blocks[some], places, strict=True) if place]
                self._move("WRITE", moves, deadline)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        for some in self._at_once(len(keys)):
            with self._asked(_REMOVE, keys[some]):
                pass

    def _at_once(self, count: int) -> list[slice]:
        """The blocks of each request: others get their turn, and none takes as long as the time-out."""
        most = max(1, min(_AT_ONCE // self.block_bytes, _KEYS_AT_ONCE))
        return [slice(first, first + most) for first in range(0, count, most)]

    @contextmanager
    def _asked(self, what: bytes, keys: Sequence[bytes], more: bytes = b"") -> Iterator[tuple[socket.socket, float]]:
        """Send a request, let the caller move the blocks, and wait until the host knows."""
        with self._turn() as (connection, deadline):
            connection.sendall(_REQUEST.pack(what, len(keys)) + b"".join(keys) + more)
            yield connection, deadline
            connection.settimeout(_left(deadline))
            if what in (_GET, _PUT):
                connection.sendall(_DONE)
            _receive(connection, len(_DONE), deadline)

    @contextmanager
    def _turn(self) -> Iterator[tuple[socket.socket, float]]:
        """Let one thread at a time have the connection, until a deadline; what it raises ends the connection."""
        if self._process != os.getpid():  # both would read each other's answers
            raise RuntimeError(
                f"the connection to {self._address} belongs to the process that made this NixlStore: make one here"
            )
        deadline = time.monotonic() + self._timeout
        if not self._lock.acquire(timeout=self._timeout):
            raise TimeoutError(f"other threads have used this NixlStore for {self._timeout} seconds")
        try:
            yield self._connected(deadline), deadline
        except BaseException:
            self.close()
            raise
        finally:
            self._lock.release()

    def _connected(self, deadline: float) -> socket.socket:
        if self._connection is None:
            self._connection = connection = socket.create_connection(self._address, _left(deadline))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _HELLO.unpack(_receive(connection, _HELLO.size, deadline))
            self.capacity, self.block_bytes, self._base, size = hello
            self._host = self._agent.add_remote_agent(_receive(connection, size, deadline))
        self._connection.settimeout(_left(deadline))
        return self._connection

    @staticmethod
    def _places(connection: socket.socket, count: int, deadline: float) -> list[tuple[int, int] | None]:
        places = np.frombuffer(_receive(connection, count * 16, deadline), "<u8").reshape(-1, 2).tolist()
        return [None if slot == _NOWHERE else (slot, size) for slot, size in places]

    def _move(self, operation: str, moves: list[tuple[Buffer, tuple[int, int]]], deadline: float) -> None:
        """Have NIXL copy blocks from the host's memory, or to it."""
        if not moves:
            return
        agent, here = self._agent, [np.frombuffer(x, np.uint8) for x, _ in moves]
        there = [(self._base + slot * self.block_bytes, size, 0) for _, (slot, size) in moves]
        regions = [(x.ctypes.data, x.nbytes, 0) for x in here]
        registered = agent.register_memory(_joined(regions), "DRAM")
        local = agent.get_xfer_descs(regions, "DRAM")
        transfer = agent.initialize_xfer(operation, local, agent.get_xfer_descs(there, "DRAM"), self._host)
        state = agent.transfer(transfer)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_POLL)
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            self._unfinished.append((here, transfer, registered))
            raise TimeoutError(f"NIXL has not moved {len(moves)} blocks in {self._timeout} seconds: {state}")
        agent.release_xfer_handle(transfer)
        agent.deregister_memory(registered)


def _agent() -> Any:
    """An agent of NIXL that moves memory of the host."""
    name = next((name for name in ("nixl_cu12", "nixl_cu13") if find_spec(name)), None)
    if name is None:
        raise ModuleNotFoundError(
            "NIXL is not installed: pip install --no-deps nixl-cu12 (on Linux; without --no-deps it brings torch)",
            name="nixl_cu12",
        )
    nixl = import_module(name)
    logging.getLogger("nixl").setLevel(logging.WARNING)  # else it writes to stdout that it begins
    return nixl.nixl_agent(f"pagedkv-{os.urandom(8).hex()}", nixl.nixl_agent_config(backends=["UCX"]))


def _joined(regions: list[tuple[int, int, int]]) -> list[tuple[int, int, int, str]]:
    """Regions of memory to register, those that touch as one: NIXL crashes if it lets go of one that it has twice."""
    joined: list[tuple[int, int]] = []
    for first, size, _ in sorted(regions):
        end = first + size
        if joined and first <= joined[-1][1]:
            first, before = joined.pop()
            end = max(end, before)
        joined.append((first, end))
    return [(first, end - first, 0, "") for first, end in joined]


def _left(deadline: float) -> float:
    """The seconds until then."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError("the other side has not answered in time")
    return seconds


def _receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    room = bytearray(size)
    left = memoryview(room)
    while left:
        if deadline is not None:
            connection.settimeout(_left(deadline))
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        left = left[count:]
    return bytes(room)
