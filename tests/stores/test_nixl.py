"""A NixlHost and the stores that use its memory: what happens if one of them is late, or gone."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest

from pagedkv.stores import nixl

from .nixl_agent import StandIn, host_and_store

KEY, BLOCK = b"a key, 16 bytes.", b"a block"
HAS_NIXL = bool(find_spec("nixl_cu12") or find_spec("nixl_cu13"))

HOST = """
import sys
from pagedkv.stores.nixl import NixlHost
with NixlHost(2**22, 2**16) as host:
    print("port", host.address[1], flush=True)
    sys.stdin.read()
"""


def test_a_host_frees_what_a_store_leaves():
    with host_and_store(700, 100, host_timeout=2.0 if HAS_NIXL else 0.05) as (host, store):
        store.put([KEY], [BLOCK])
        with socket.create_connection(host.address) as late:
            late.sendall(nixl._REQUEST.pack(nixl._GET, 1) + KEY)  # and never says that it has read
            assert bytes(store.get([KEY])[0]) == BLOCK
        with socket.create_connection(host.address) as gone:
            size = (100).to_bytes(8, "little")
            gone.sendall(nixl._REQUEST.pack(nixl._PUT, 7) + b"".join(bytes([i]) * 16 for i in range(7)) + size * 7)
            time.sleep(0.01)
        store.put([bytes([i]) * 16 for i in range(10, 17)], [BLOCK] * 7)
        assert store.get([bytes([i]) * 16 for i in range(7)]) == [None] * 7
        assert None not in store.get([bytes([i]) * 16 for i in range(10, 17)])
        assert len(host._slots._free) == 0


@pytest.mark.parametrize(("what", "count"), [(nixl._GET, 2**26), (b"what", 1)], ids=["too many keys", "unknown"])
def test_a_host_does_not_do_what_no_store_asks_for(what, count):
    """It ends the connection before it makes room for the keys."""
    with host_and_store(700, 100, host_timeout=100) as (host, store):
        store.put([KEY], [BLOCK])
        with socket.create_connection(host.address, timeout=10) as other:
            other.sendall(nixl._REQUEST.pack(what, count) + KEY)
            with suppress(ConnectionResetError):
                while other.recv(2**16):
                    pass
        assert store.has([KEY]) == [True]


def test_a_store_connects_again():
    with host_and_store(700, 100) as (_, store):
        store.put([KEY], [BLOCK])
        store._connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError):
            store.get([KEY])
        assert bytes(store.get([KEY])[0]) == BLOCK


def test_a_host_that_does_not_answer_is_an_error_in_time():
    with host_and_store(700, 100, timeout=0.1) as (host, store), host._lock:
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            store.get([KEY])
        assert time.monotonic() - begin < 5
        host.close()
        with pytest.raises(ConnectionRefusedError):
            nixl.NixlStore(host.address, timeout=0.1)


def test_threads_wait_for_each_other_no_longer_than_for_the_host():
    with host_and_store(700, 100, timeout=0.1) as (host, store), ThreadPoolExecutor(100) as threads:
        for lock in (host._lock, store._lock):
            with lock:
                begin = time.monotonic()
                for call in [threads.submit(store.get, [KEY]) for _ in range(100)]:
                    assert isinstance(call.exception(timeout=10), TimeoutError)
                assert time.monotonic() - begin < 5


def test_a_host_that_has_restarted_takes_larger_blocks():
    with host_and_store(700, 100) as (host, store):
        host.close()
        with nixl.NixlHost(1400, 200, host.address):
            with pytest.raises(ValueError, match="blocks must have at most 100 bytes each, got 200"):
                store.put([KEY], [bytes(200)])
            store.put([KEY], [bytes(200)])
            assert bytes(store.get([KEY])[0]) == bytes(200)


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is installed, and cannot be told to stall")
def test_a_transfer_that_stalls_keeps_its_memory(monkeypatch):
    with host_and_store(700, 100, timeout=0.1) as (_, store):
        store.put([KEY], [BLOCK])
        monkeypatch.setattr(StandIn, "state", "PROC")
        with pytest.raises(TimeoutError, match=r"NIXL has not moved 1 blocks in 0\.1 seconds: PROC"):
            store.get([KEY])
        assert len(store._unfinished) == 1
        monkeypatch.setattr(StandIn, "state", "DONE")
        assert bytes(store.get([KEY])[0]) == BLOCK


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is installed")
def test_a_forked_process_does_not_use_the_connection():
    with host_and_store(700, 100) as (_, store):
        process, store._process = store._process, store._process + 1  # as a child sees it
        for call in (lambda: store.get([KEY]), lambda: store.has([KEY]), lambda: store.put([KEY], [BLOCK])):
            with pytest.raises(RuntimeError, match="belongs to the process that made this NixlStore: make one here"):
                call()
        store._process = process
        store.put([KEY], [BLOCK])
        assert store.has([KEY]) == [True]


def test_without_nixl_a_message_says_how_to_install_it():
    with pytest.raises(ModuleNotFoundError, match="NIXL is not installed: pip install --no-deps nixl-cu12"):
        nixl.NixlHost(700, 100)


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: pip install --no-deps nixl-cu12")
def test_processes_share_a_host():
    """Two stores of this process, over the memory of another; it ends in the middle."""
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        port = next(int(line.split()[1]) for line in process.stdout if line.startswith("port"))
        blocks = [np.full(2**16, i, np.uint8) for i in range(64)]
        keys = [bytes([i]) * 16 for i in range(64)]
        with nixl.NixlStore(("127.0.0.1", port)) as one, nixl.NixlStore(("127.0.0.1", port)) as other:
            one.put(keys, blocks)
            assert all(bytes(x) == y.tobytes() for x, y in zip(other.get(keys), blocks, strict=True))
            process.kill()
            with pytest.raises(ConnectionError):
                other.get(keys)
            with pytest.raises(ConnectionError):
                other.get(keys)
