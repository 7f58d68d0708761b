"""examples/replicas.py: what the router goes by, a replica alone, and three of them under Ray."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from secrets import token_hex

import pytest

from ..server.serving import EXAMPLES, SIZES, ask

import replicas  # isort: skip
from replica import Replica, beginning  # isort: skip

TENANTS = ("engine", "generate", "sampling", "serve", "tokenizer", "train", "transformer", "replica")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "def f("}, "def f("),
        ({"prompt": "def f(", "cache_salt": "mine"}, "mine\ndef f("),
        ({"prompt": [104, 105, 0x10FFFF]}, "hi\U0010ffff"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "x"}]}, "user\nhi\ntool\nx\n"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "user\n[{'type': 'text'}]\n"),
    ],
)
def test_equal_beginnings_of_prompts_are_equal_beginnings_of_texts(fields, text):
    assert beginning(json.dumps(fields).encode()).prompt == text


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"7", b"{", b"\xff", b"[" * 100_000, b"{}"),
        *(b'{"prompt": %s}' % prompt for prompt in (b'""', b"[]", b"null", b"[-1]", b"[1, 1e400]", b'[1, "a"]')),
        *(b'{"messages": %s}' % messages for messages in (b"[]", b"[{}]", b"7", b'[{"role": "user"}]')),
    ],
)
def test_a_request_without_a_text_has_no_beginning(body):
    """Ray's router would divide by the length of an empty text, and lose the request."""
    assert beginning(body) is None


def test_words_that_are_not_its_own_are_those_of_the_server(capsys):
    args, words = replicas.parse(["--max-replicas", "3", "--num-blocks", "64", "--cpus", "0.5"])
    assert (args.min_replicas, args.max_replicas, args.cpus) == (1, 3, 0.5)
    assert words == ["--num-blocks", "64"]
    for words, message in (
        (["--min-replicas", "3"], "--max-replicas: must be at least --min-replicas 3, got 2"),
        (["--kv-events-config", '{"enable_kv_cache_events": true}'], "--kv-events-config: Ray's router reads texts"),
        (["--num-block", "x"], "--num-blocks: 'x' is not a whole number"),
    ):
        with pytest.raises(SystemExit):
            replicas.parse(words)
        assert message in capsys.readouterr().err


def scope(path="/v1/completions", method="POST"):
    head = {"type": "http", "path": path, "method": method, "query_string": b"", "client": ("127.0.0.1", 5)}
    return head | {"headers": [(b"host", b"127.0.0.1")]}


@pytest.mark.usefixtures("restore_threads")
def test_a_replica_answers_and_aborts_what_nobody_reads():
    body = {"prompt": "def main(", "max_tokens": 900, "ignore_eos": True, "stream": True}

    async def run():
        replica = Replica.__new__(Replica)
        await replica.__init__([*SIZES], 1)  # as Ray calls it
        try:
            cache = replica._worker.engine.cache
            head, *rest = [message async for message in replica.answer(scope=scope("/health", "GET"), body=b"")]
            assert head["status"] == 200
            assert b"".join(message.get("body", b"") for message in rest) == b'{"status":"ok"}'
            async with aclosing(replica.answer(scope=scope(), body=json.dumps(body).encode())) as messages:
                assert (await anext(messages))["status"] == 200
                await anext(messages)
                assert await replica._worker.look(lambda engine: engine.cache.stats().used)
            assert not await replica._worker.look(lambda engine: engine.cache.stats().used)
            cache.check()
            await replica.check_health()
        finally:
            await replica._worker.stop()
        with pytest.raises(RuntimeError, match="the engine has died"):
            await replica.check_health()

    asyncio.run(run())


@contextmanager
def running(*words):
    """Three replicas under a Ray of their own; gives their port, and a function that replaces them."""
    command = [sys.executable, str(EXAMPLES / "replicas.py"), *SIZES]
    command += ["--min-replicas", "3", "--max-replicas", "3", "--cpus", "0.5"]
    # Ray would write a token of its own making into the home directory.
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
    environment.pop("RAY_ADDRESS", None)

    started = [*command, "--port", "0", *words]
    with subprocess.Popen(started, env=environment, stdout=subprocess.PIPE, text=True) as process:

        def said(pattern):
            return next(filter(None, (re.match(pattern, line) for line in process.stdout)))[1]

        def replace(*words):
            again = subprocess.run([*command, *words], env=environment | {"RAY_ADDRESS": address}, timeout=180)
            assert again.returncode == 0

        try:
            port, address = (said(r"http://127.0.0.1:(\d+)/v1 "), said(r"RAY_ADDRESS=(\S+) "))
            reader = threading.Thread(target=process.stdout.read)  # what replicas print must not fill the pipe
            reader.start()
            yield int(port), replace
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        reader.join()
    assert process.returncode == 0


def trace():
    """Requests of 8 tenants in a drawn order: 1,200 characters of their own, and then another line in each request."""
    beginnings = [(EXAMPLES / f"{name}.py").read_text()[:1200] for name in TENANTS]
    prompts = [f"{text}\n# {draw}" for text in beginnings for draw in range(12)]
    return random.Random(0).sample(prompts, len(prompts))


def computed(port, prompt):
    """How many tokens of a prompt a replica computed, and how many it has."""
    status, _, body = ask(port, {"prompt": prompt, "max_tokens": 4, "seed": 0})
    assert status == 200, body
    usage = json.loads(body)["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def computed_of_trace(port):
    with ThreadPoolExecutor(3) as clients:
        counts = clients.map(lambda prompt: computed(port, prompt), trace())
        return [sum(column) for column in zip(*counts, strict=True)]


@pytest.mark.long
def test_the_prefix_router_saves_tokens_and_a_restart_loses_no_request():
    pytest.importorskip("ray", reason="the extra replicas is not installed")
    with running("--router", "default") as (port, replace):
        by_default, num_tokens = computed_of_trace(port)
        stop, answered = threading.Event(), []

        def load(i):
            while not stop.is_set():  # a text that no replica knows goes to the one with the shortest texts: a new one
                answered.append(computed(port, f"{len(answered)} {i} def f():"))

        with ThreadPoolExecutor(4) as clients:
            loads = [clients.submit(load, i) for i in range(4)]
            begun = time.monotonic()
            try:
                for _ in range(2):  # from the default router to the prefix router, and from that to itself
                    replace("--router", "prefix")
            finally:
                stop.set()
            seconds = time.monotonic() - begun
            for one in loads:
                one.result()
        by_prefix, _ = computed_of_trace(port)
    print(f"\nof {num_tokens} tokens {by_default} computed by default, {by_prefix} with the prefix router")
    print(f"{len(answered)} requests during two restarts of {seconds:.0f} s, none failed")
    assert len(answered) > 20
    assert by_prefix <= 0.7 * by_default
