"""The command line of the server: Ctrl-C, and errors in one line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

import pagedkv
from pagedkv.__main__ import main
from pagedkv.cpu import threads
from pagedkv.server.serve import build, pool_in_words, require_key

from .serving import EXAMPLES, answered, ask, begin, built, complete, port_of, wait_until

import serve  # isort: skip

PATH = os.pathsep.join([str(EXAMPLES), *sys.path])


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_from_the_command_line_until_ctrl_c():
    command = [sys.executable, "-W", "error", str(EXAMPLES / "serve.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = port_of(process)
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
            port = port_of(process)
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
        (["--api-key", "mine"], ["b.example"], []),  # who has the key is no page of another site
    ],
)
def test_the_names_by_which_it_may_be_asked(words, own, others):
    app = built(*words).app()
    # With a key, 401 comes after the name was right.
    assert {answered(app, "/v1/models", host=name)[0] for name in own} <= {200, 401}
    strange = [*others, "", "localhost.a.example", "x@localhost"] if others else []
    assert {answered(app, "/v1/models", host=name)[0] for name in strange} <= {400}


ROUTES = ["/", "/metrics", "/status/pool", "/v1/models", "/version", "/nosuch"]
ROUTES += ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("way", ["option", "environment"])
def test_with_a_key_only_health_and_ping_answer_without_it(monkeypatch, way):
    if way == "environment":
        monkeypatch.setenv("PAGEDKV_API_KEY", "of/mine=")
    app = built(*(["--api-key", "of/mine="] if way == "option" else [])).app()
    assert [answered(app, path)[0] for path in ("/health", "/ping")] == [200, 200]
    others = ("", "of/mine=", "Bearer", "Bearer ", "Bearer of/mine", "Bearer of/mine==", "Basic of/mine=", "Bearer é")
    for wrong in others:
        answers = [answered(app, path, authorization=wrong) for path in ROUTES]
        assert {status for status, *_ in answers} == {401}
    _, headers, body = answers[-1]
    assert (headers[b"www-authenticate"], json.loads(body)["error"]["code"]) == (b"Bearer", "invalid_api_key")
    for right in ("Bearer of/mine=", "bearer of/mine=", "BEARER  of/mine="):
        assert answered(app, "/v1/models", authorization=right)[0] == 200


def test_the_key_of_the_command_line_goes_before_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("PAGEDKV_API_KEY", "other")
    assert serve.parse(["--api-key", "mine"]).api_key == "mine"
    monkeypatch.setenv("PAGEDKV_API_KEY", "")
    assert serve.parse([]).api_key is None


def test_a_key_that_no_header_can_have_is_refused(monkeypatch, capsys):
    for words, environment in [(["--api-key", ""], None), (["--api-key", "a b"], None), ([], "ä")]:
        if environment:
            monkeypatch.setenv("PAGEDKV_API_KEY", environment)
        with pytest.raises(SystemExit, match=r"^2$"):
            serve.parse(words)
        assert (
            "--api-key: must be of printable ASCII without spaces, as must PAGEDKV_API_KEY" in capsys.readouterr().err
        )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_needs_a_key(monkeypatch, host):
    for command in (lambda words: serve.serve(serve.parse(words), None), lambda words: main(["serve", "x", *words])):
        with pytest.raises(
            SystemExit, match=rf"^--host {host} is open to others: give clients a key by PAGEDKV_API_KEY"
        ):
            command(["--host", host])
    for words in (["--api-key", "mine"], ["--insecure"]):
        require_key(serve.parse(["--host", host, *words]))
    monkeypatch.setenv("PAGEDKV_API_KEY", "mine")
    require_key(serve.parse(["--host", host]))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_an_address_of_this_machine_needs_none(host):
    require_key(serve.parse(["--host", host]))


@pytest.mark.parametrize(("memory", "num_blocks"), [("1MiB", 25), ("500000", 12)])
def test_a_pool_of_so_much_memory(memory, num_blocks):
    assert built("--memory", memory).worker.engine.cache.stats().free == num_blocks


def test_a_pool_of_int8_rows():
    """Of 32 dims, in 32 + 4 of float32's 128 bytes."""
    pools = [built("--num-blocks", "64", *options).worker.engine.cache for options in ((), ("--kv-dtype", "int8"))]
    assert [cache.stats().num_bytes for cache in pools] == [64 * 16 * 5 * 2 * 2 * nbytes for nbytes in (128, 36)]


def test_it_says_at_start_what_it_computes_with(capsys):
    built("--num-blocks", "64", "--kv-dtype", "fp8_e4m3")
    said = "the small model in float32 on the CPU; context of 256 tokens; pool of 1,024 tokens in 64 blocks, 0.6 MiB\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"windows": [4, 4, None]},
            "at least 8 tokens in 8 blocks, 0.0 MiB; layers: 1 without a window, 2 of window 4",
        ),
        (
            {"states": {"x": ((1024,), "float32")}, "state_memory": "1MiB"},
            "32 tokens in 8 blocks, 0.0 MiB; 256 states of other layers, 1.0 MiB",
        ),
    ],
)
def test_it_says_which_layers_have_windows_or_states(options, said):
    assert pool_in_words(pagedkv.PagedKVCache(3, 8, 4, 1, 8, **options)) == f"pool of {said}"


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


@pytest.mark.parametrize("kind", [pagedkv.BackendUnavailableError, ImportError, OSError, ValueError])
def test_an_engine_that_cannot_be_made_is_reported(kind):
    def load(*_):
        raise kind("what is missing")

    with pytest.raises(SystemExit, match=r"^what is missing$"):
        build(serve.parse([]), load)


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
