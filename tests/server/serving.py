"""A server in this process, of the small model of the examples unless another is named, and clients of it."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from pagedkv.server.serve import OverHttp, build, publisher  # noqa: E402
from replica import parse_server  # noqa: E402
from transformer import load  # noqa: E402

TOKENIZER = load()[1]
SIZES = ["--context", "1024", "--num-blocks", "512", "--max-tokens", "128"]


def port_of(process):
    """The port that a process says it listens on."""
    return int(re.match(r"http://127\.0\.0\.1:(\d+)/v1 ", process.stdout.readline())[1])


def built(*words):
    """The server of a command line, whose first word may be a MODEL."""
    return build(*parse_server([*map(str, words)]))


@contextlib.contextmanager
def serving(*words, model=()):
    """Run a server in this process; at the end all sequences must have ended, and the pool must be whole."""
    args, load = parse_server([*map(str, model), *SIZES, "--max-batch", "8", *words])
    with publisher(args) as events, running(args, build(args, load, events)) as server:
        server.events = events
        yield server


@contextlib.contextmanager
def running(args, server):
    engine = server.worker.engine
    over_http = OverHttp(server, args.max_connections)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        thread = threading.Thread(target=over_http.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield SimpleNamespace(port=listener.getsockname()[1], server=server, engine=engine, over_http=over_http)
            wait_until(
                lambda: not engine.scheduler.num_running + engine.scheduler.num_waiting + len(server.worker._open)
            )
            assert engine.cache.stats().used == 0
            engine.cache.check()
            assert not server.worker._open
        finally:
            over_http.should_exit = True
            thread.join()


def answered(app, path, **headers):
    """Status, headers and body of the answer of an application to GET, without a server around it."""
    head = {"host": "localhost"} | headers
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "client": None, "state": {}}
    scope["headers"] = [(name.encode(), value.encode("latin-1")) for name, value in head.items() if value]
    sent = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    first, *rest = sent
    return first["status"], dict(first["headers"]), b"".join(message["body"] for message in rest)


def wait_until(condition, seconds=60, pause=0.01):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause)


def ask(port, body, path="/v1/completions", method="POST", **headers):
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def complete(port, prompt, **options):
    """The text of a completion, whole or joined from its events, and why it ended."""
    status, _, body = ask(port, {"prompt": prompt, **options})
    assert status == 200, body
    if not options.get("stream"):
        [choice] = json.loads(body)["choices"]
        return choice["text"], choice["finish_reason"]
    *events, last = re.findall(rb"data: (.*)\n\n", body)
    assert last == b"[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def begin(port, missing=0, **fields):
    """A connection on which a request was sent, or a body with so many bytes missing, and nothing read."""
    body = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body) + missing}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@contextlib.contextmanager
def held(server, after=0):
    """Hold the engine at the start of its next step but `after`; gives a function that waits until it is held."""
    engine, step, reached, go, count = server.engine, server.engine.step, threading.Event(), threading.Event(), [0]

    def stepped():
        count[0] += 1
        if count[0] > after:
            reached.set()
            assert go.wait(60)
        return step()

    engine.step = stepped
    try:
        yield lambda: reached.wait(60)
    finally:
        engine.step = step
        go.set()


def aborted(server):
    return server.server.counts["aborted"]
