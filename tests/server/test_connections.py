"""The server: limits on connections, and which connections are closed."""

import contextlib
import http.client
import json
import select
import socket
import subprocess
import sys
import threading
import time

import pytest

from pagedkv.server import connections
from pagedkv.server.connections import OTHER_FILES, room_for_connections

from .serving import EXAMPLES, ask, begin, held, port_of, serving, wait_until


def ask_refused(port):
    return ask(port, None, "/v1/models", "GET")[0] == 503


@pytest.mark.parametrize("beyond", [5, pytest.param(2000, marks=pytest.mark.long)])
def test_connections_beyond_the_limit_are_refused(beyond):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))  # both ends are in this process
    try:
        with serving("--max-connections", "4") as server, contextlib.ExitStack() as stack:
            idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
            for connection in idle:
                stack.enter_context(connection)
            wait_until(lambda: ask_refused(server.port))
            for connection in [begin(server.port, prompt="x") for _ in range(beyond)]:
                with connection:
                    answer = connection.recv(4096)
                    assert answer.startswith(b"HTTP/1.1 503 ")
                    assert b"\r\nRetry-After: 1\r\n" in answer  # nothing runs
                    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["type"] == "server_error"
            idle[0].close()
            wait_until(lambda: not ask_refused(server.port))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("wanted", [4, 100_000])
def test_there_are_no_more_connections_than_files(wanted):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        room = room_for_connections(wanted)
        files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == limits[1]
        assert 1 <= room <= wanted
        assert room == wanted or files == hard < 2 * wanted + OTHER_FILES
        assert files >= min(limits[0], 2 * room + OTHER_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_idle_connections_do_not_take_all_files():
    resource = pytest.importorskip("resource")
    command = [sys.executable, "-W", "error", str(EXAMPLES / "serve.py"), "--port", "0"]
    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            port = port_of(process)
            with contextlib.ExitStack() as stack:
                for _ in range(300):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                assert ask(port, None, "/metrics", "GET")[0] == 503
                wait_until(lambda: ask(port, None, "/metrics", "GET")[0] == 200, pause=0.5)  # though all are still here
        finally:
            process.terminate()
        _, errors = process.communicate(timeout=60)
    assert errors.endswith("\nat most 32 connections, for this process can have few files open: ulimit -n\n")


def test_a_limit_of_files_that_cannot_be_raised(monkeypatch):
    """macOS reports no limit, but refuses more files than its real one."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: int("not allowed"))
    assert room_for_connections(512) == (256 - OTHER_FILES) // 2


def test_connections_that_come_at_once_are_counted_one_by_one():
    with serving("--max-connections", "4") as server, contextlib.ExitStack() as stack:
        ask(server.port, None, "/v1/models", "GET")  # until it has begun
        accepted = server.over_http.server_state.connections
        wait_until(lambda: not accepted)
        held_up, go = threading.Event(), threading.Event()
        server.server.worker._loop.call_soon_threadsafe(lambda: held_up.set() or go.wait(60))
        assert held_up.wait(60)
        address = "127.0.0.1", server.port
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(24)]
        go.set()
        wait_until(lambda: len(accepted) + len(select.select(clients, [], [], 0)[0]) == len(clients))
        assert len(accepted) == 4


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connections, "SILENCE", 0.1)
    with serving() as server:
        yield server


@pytest.mark.parametrize("requests", [0, 2])
def test_a_head_that_does_not_come_whole_closes_its_connection(impatient, requests):
    client = http.client.HTTPConnection("127.0.0.1", impatient.port, timeout=20)
    with contextlib.closing(client):
        client.connect()
        connection = client.sock
        for _ in range(requests):
            client.request("GET", "/v1/models")
            assert client.getresponse().read()
        assert client.sock is connection
        connection.settimeout(0.01)
        end = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                connection.sendall(b"G")  # a byte now and then does not keep it open
                with contextlib.suppress(TimeoutError):
                    assert not connection.recv(4096)
                    return
            pytest.fail("the connection is still open")


def test_a_request_that_takes_longer_than_that_is_answered(impatient):
    with begin(impatient.port, prompt="x", max_tokens=4, stream=True) as connection:
        with held(impatient, after=1) as is_held:
            assert is_held()
            time.sleep(3 * connections.SILENCE)
        with connection.makefile("rb") as answer:
            assert b"data: [DONE]\n" in iter(answer.readline, b"")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_client_that_only_listens_gets_its_answer(impatient, stream, version):
    fields = {"prompt": "def main(", "max_tokens": 3, "temperature": 0, "stream": stream}
    impatient.over_http.config.timeout_keep_alive = 1000  # which would close it, too
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions %s\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (version, len(body))
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        with held(impatient) as is_held:
            connection.sendall(head + body)
            connection.shutdown(socket.SHUT_WR)
            assert is_held()
            time.sleep(2 * connections.PROBE)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))  # to its end: the server closes, too
    before, _, rest = answer.rpartition(b" 200 OK\r\n")
    assert (before.count(b"100") > 0) == (version == b"HTTP/1.1")
    assert b"[DONE]" in rest if stream else b'"finish_reason":"length"' in rest


def test_a_request_that_is_no_http_gets_an_error_in_json(impatient):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(b"no http\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]
