"""The command line of the server: Ctrl-C, and errors in one line."""

import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from pagedkv.__main__ import main
from pagedkv.cpu import threads
from pagedkv.server.serve import build, names
from pagedkv.server.visits import Visits

from .serving import EXAMPLES, ask, begin, built, complete, wait_until

import serve  # isort: skip

PATH = os.pathsep.join([str(EXAMPLES), *sys.path])


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_from_the_command_line_until_ctrl_c():
    command = [sys.executable, "-W", "error", str(EXAMPLES / "serve.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/v1 ", process.stdout.readline())[1])
        assert complete(port, "def main(", max_tokens=2)[1] == "length"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_a_second_ctrl_c_ends_it_in_the_middle_of_a_step():
    code = """
import threading
import serve
serve.SmallEngine.step = lambda engine: print("a step", flush=True) or threading.Event().wait()
serve.serve(serve.parse(), serve.small)
"""
    command = [sys.executable, "-W", "error", "-c", code, "--port", "0"]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": os.environ | {"PYTHONPATH": PATH},
    }
    with subprocess.Popen(command, **pipes) as process:
        try:
            port = int(re.match(r"http://127\.0\.0\.1:(\d+)/v1 ", process.stdout.readline())[1])
            with begin(port, prompt="x", stream=True):
                assert process.stdout.readline() == "a step\n"
                process.send_signal(signal.SIGINT)
                wait_until(lambda: ask(port, None, "/health", "GET")[0] == 503)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        ([], ["localhost", "127.0.0.1:8000", "[::1]:8000"], ["192.0.2.1", "a.example"]),
        (
            ["--host", "192.0.2.1", "--allowed-host", "a.example"],
            ["192.0.2.1", "A.example:80", "localhost"],
            ["b.example"],
        ),
        (["--allowed-host", "*"], ["b.example"], []),
    ],
)
def test_the_names_by_which_it_may_be_asked(words, own, others):
    args = serve.parse(words)
    visits = Visits(None, names(args))
    assert all(map(visits._is_named, own))
    assert not any(
        map(visits._is_named, [*others, "", "localhost.a.example", "x@localhost"] if "*" not in words else others)
    )


@pytest.mark.parametrize(("memory", "num_blocks"), [("1MiB", 25), ("500000", 12)])
def test_a_pool_of_so_much_memory(memory, num_blocks):
    assert built("--memory", memory).worker.engine.cache.stats().free == num_blocks


def test_host_memory_for_requests_that_give_their_blocks_back():
    engine = built("--swap", "1MiB").worker.engine
    assert engine.scheduler._swapping._swap.cache is engine.cache
    with pytest.raises(SystemExit, match=r"^store must be a number and a unit"):
        built("--swap", "1 apple")


@pytest.mark.parametrize("memory", ["0", "2 apples", "1.5", "nan"])
def test_an_amount_of_memory_that_cannot_be(memory):
    with pytest.raises(SystemExit, match=r"^memory must be "):
        built("--memory", memory)


@pytest.mark.parametrize(
    "command", [lambda words: serve.serve(serve.parse(words), None), lambda words: main(["serve", "x", *words])]
)
def test_an_address_that_cannot_be_had_is_reported(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"port {port} of 127\.0\.0\.1 cannot be had \(.*\): try --port 0"):
            command(["--port", str(port)])
    with pytest.raises(SystemExit, match=r"--host no host is no address of this machine \(.*\): try 127\.0\.0\.1"):
        command(["--host", "no host"])


def test_sizes_that_cannot_be(capsys):
    for words, message in [
        (["--num-blocks", str(2**31)], "--num-blocks: "),
        (["--kv-events-config", "zmq"], "--kv-events-config: must be a JSON object, got zmq"),
        (["--kv-events-config", '{"publisher": "nats"}'], 'publisher must be "zmq" or "null", got nats'),
        (
            ["--kv-events-config", '{"topics": "kv", "enable_kv_cache_events": false}'],
            "--kv-events-config: must have no other keys than buffer_steps, data_parallel_rank, "
            "enable_kv_cache_events, endpoint, hwm, max_queue_size, publisher, replay_endpoint, topic, got topics",
        ),
    ]:
        with pytest.raises(SystemExit, match=r"^2$"):
            serve.parse(words)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^--context must be at least the 16 tokens of a block, got 15$"):
        built("--context", "15", "--block-size", "16")


def test_a_wrong_number_of_threads_is_reported(monkeypatch):
    monkeypatch.setattr(threads._state, "count", None)
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "abc")
    with pytest.raises(SystemExit, match=r"^PAGEDKV_NUM_THREADS must be an integer in 1\.\.1024, got 'abc'$"):
        built()


def test_a_pool_that_has_no_room_is_reported():
    with pytest.raises(
        SystemExit, match=r"^Unable to allocate .*: change --num-blocks, --memory, --block-size or --context$"
    ):
        build(serve.parse([]), lambda *_: np.empty(2**62, np.int8))


def test_weights_that_cannot_be_read_are_reported(tmp_path):
    path = tmp_path / "weights.npz"
    for content, message in [
        (None, "is not there: train.py makes it"),
        (b"", "is no weights file of train.py: "),
        (b"PK\x03\x04", "is no weights file of train.py: "),
    ]:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SystemExit, match=rf"^{re.escape(str(path))} {message}"):
            built("--weights", str(path))


def test_a_block_is_no_longer_than_the_context_of_the_model():
    with pytest.raises(SystemExit, match=r"^a block of 4096 tokens is longer than the context of \d+: change one$"):
        built("--block-size", "4096")


def test_a_model_of_transformers_needs_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "pagedkv.server.hugging_face", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"models need torch and transformers: pip install .*\[transformers\]"):
        built("somebody/something")


@pytest.mark.parametrize("name", ["./nosuch", "no/such/folder"])
def test_a_model_that_is_neither_a_folder_nor_a_name(name):
    with pytest.raises(SystemExit, match=rf"^MODEL must be a folder, or a name such as .*, got {re.escape(name)}$"):
        built(name)


def test_a_request_to_a_hub_is_announced(monkeypatch, capsys):
    def offline(name, **options):
        raise OSError(capsys.readouterr().err)

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", offline)
    with pytest.raises(
        SystemExit, match=r"^there is no folder nosuch: asking huggingface\.co for a model of this name"
    ):
        built("nosuch")
