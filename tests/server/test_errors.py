"""The server when something fails: waiting clients get an error, and the server goes on or ends."""

import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from .serving import TOKENIZER, aborted, ask, begin, complete, held, serving, wait_until

from serve import SmallDecoder, SmallText  # isort: skip


@pytest.fixture(scope="module")
def shared():
    with serving() as shared:
        yield shared


@pytest.fixture(autouse=True)
def no_traceback(caplog):
    """uvicorn logs what the application raises."""
    with caplog.at_level(logging.ERROR, logger="uvicorn.error"):
        yield
    assert not [record.getMessage() for record in caplog.records]


def failing(*args, **options):
    raise KeyError("odd")


def test_an_engine_that_cannot_take_a_request_says_so_and_takes_the_next(shared, monkeypatch):
    monkeypatch.setattr(shared.engine, "add", failing)
    status, _, body = ask(shared.port, {"prompt": "x"})
    assert (status, json.loads(body)["error"]["message"]) == (500, "the engine cannot take it: KeyError: 'odd'")
    monkeypatch.undo()
    assert complete(shared.port, "x", max_tokens=1)[1] == "length"


def test_a_field_whose_name_utf_8_has_no_bytes_for_is_refused_by_it(shared):
    status, _, body = ask(shared.port, {"prompt": "x", "\ud800": 1})
    assert (status, json.loads(body)["error"]["param"]) == (400, "\ud800")


def test_tokens_that_cannot_be_drawn_fail_the_step_alone(shared, monkeypatch):
    monkeypatch.setattr("serve.Sampling.choose", failing)
    assert ask(shared.port, {"prompt": "x"})[0] == 500
    monkeypatch.undo()
    assert complete(shared.port, "x", max_tokens=1)[1] == "length"


def test_an_update_that_fails_fails_the_step_alone(shared, monkeypatch):
    monkeypatch.setattr(shared.engine.scheduler, "update", failing)
    assert ask(shared.port, {"prompt": "x"})[0] == 500
    monkeypatch.undo()
    assert complete(shared.port, "x", max_tokens=1)[1] == "length"


def poison(shared, monkeypatch, marked):
    """Make the logits NaN of each row whose token a function marks."""
    forward = shared.engine.model.forward

    def poisoned(tokens, attend, indices, *args):
        logits = forward(tokens, attend, indices, *args)
        logits[[marked(token) for token in tokens[indices].tolist()]] = np.nan
        return logits

    monkeypatch.setattr(shared.engine.model, "forward", poisoned)


def test_a_request_whose_logits_are_not_finite_fails_alone(shared, monkeypatch):
    prompt = [7, 8, 9] * 20
    expected = complete(shared.port, [*prompt, 5], temperature=0, max_tokens=5)
    poison(shared, monkeypatch, lambda token: token == 1000)
    bad = [11, 12, 13] * 20 + [1000]
    with ThreadPoolExecutor(3) as clients, held(shared) as is_held:
        first = clients.submit(complete, shared.port, [*prompt, 5], temperature=0, max_tokens=5)
        assert is_held()
        others = [clients.submit(ask, shared.port, {"prompt": bad, "stream": stream}) for stream in (False, True)]
        wait_until(lambda: shared.server.worker._inbox.qsize() == 2)
    for status, _, body in (other.result() for other in others):
        assert (status, "logits are not finite" in json.loads(body)["error"]["message"]) == (500, True)
    assert first.result() == expected
    monkeypatch.undo()
    status, _, body = ask(shared.port, {"prompt": bad, "max_tokens": 1})
    # Nothing that was computed with it is found by others.
    assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_text_that_fails_ends_the_others_of_its_request(shared, monkeypatch):
    ended, abort = [], shared.engine.abort
    monkeypatch.setattr(shared.engine, "abort", lambda request: ended.append(request) or abort(request))
    poison(shared, monkeypatch, lambda token: token == 1000)
    asked = {"prompt": [[7, 8], [7, 1000], [9]], "max_tokens": 900, "ignore_eos": True}
    status, _, body = ask(shared.port, asked)
    assert (status, "logits are not finite" in json.loads(body)["error"]["message"]) == (500, True)
    wait_until(lambda: not shared.engine.scheduler.num_running)
    assert len({*ended}) == 2


def test_a_text_that_goes_wrong_in_the_middle_ends_with_an_error_event(shared, monkeypatch):
    text, _ = complete(shared.port, "def main(", temperature=0, max_tokens=6)
    last = TOKENIZER.encode(text)[3]
    poison(shared, monkeypatch, lambda token: token == last)
    status, _, body = ask(shared.port, {"prompt": "def main(", "temperature": 0, "max_tokens": 6, "stream": True})
    *chunks, error = map(json.loads, re.findall(rb"data: (.*)\n\n", body))
    assert status == 200
    assert all("choices" in chunk for chunk in chunks)
    assert "logits are not finite" in error["error"]["message"]


class Held:
    """A method that takes a while, on whichever thread, as does a call of it that has begun."""

    def __init__(self, method):
        self._method, self.begun, self.go = method, threading.Event(), threading.Event()

    def __call__(self, *args, **options):
        self.begun.set()
        assert self.go.wait(60)
        return self._method(*args, **options)


@pytest.mark.parametrize(("owner", "name"), [("text", "encode"), ("text", "encode_chat"), ("decoder", "push")])
def test_texts_and_tokens_are_made_aside_of_the_event_loop(shared, monkeypatch, owner, name):
    owner = SmallDecoder if owner == "decoder" else type(shared.server.text)
    slow = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *args, **options: slow(*args, **options))
    chat = {"messages": [{"role": "user", "content": "x"}]} if name == "encode_chat" else {"prompt": "x"}
    path = "/v1/chat/completions" if name == "encode_chat" else "/v1/completions"
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(ask, shared.port, chat | {"max_tokens": 1}, path)
        try:
            assert slow.begun.wait(60)
            assert ask(shared.port, None, "/health", "GET")[0] == 200
        finally:
            slow.go.set()
        assert asked.result()[0] == 200


def test_a_prompt_is_not_tokenised_before_there_is_room_for_its_request(monkeypatch):
    with serving("--max-batch", "1", "--max-waiting", "0") as server:
        with held(server) as is_held:
            connection = begin(server.port, prompt="x", max_tokens=1)
            assert is_held()
            monkeypatch.setattr(server.server.text, "encode", failing)
            assert ask(server.port, {"prompt": "x"})[0] == 503
        with connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_text_that_cannot_be_decoded_fails_alone(shared, monkeypatch):
    monkeypatch.setattr(SmallDecoder, "push", failing)
    status, _, body = ask(shared.port, {"prompt": "x"})
    assert (status, json.loads(body)["error"]["message"]) == (500, "the text cannot be decoded: KeyError: 'odd'")
    monkeypatch.undo()
    assert complete(shared.port, "x", max_tokens=1)[1] == "length"


@pytest.mark.parametrize(
    ("method", "path", "host", "status", "message"),
    [
        ("GET", "/v1/embeddings", "localhost", 404, "GET /v1/embeddings: Not Found: ask /v1/completions, /v1/chat/"),
        ("GET", "/v1/models/other", "localhost", 404, "the model here is small"),
        ("GET", "/v1/completions", "localhost", 405, "GET /v1/completions: Method Not Allowed: send POST"),
        ("POST", "/health", "127.0.0.1:80", 405, "POST /health: Method Not Allowed: send "),
        ("GET", "/health", "attacker.example", 400, "this server has another name: start it with --allowed-host"),
        ("GET", "/health", "localhost:x", 400, "this server has another name"),
        ("GET", "/health", "a@localhost", 400, "this server has another name"),
    ],
)
def test_errors_are_json(shared, method, path, host, status, message):
    got, headers, body = ask(shared.port, None, path, method, Host=host)
    assert (got, headers.get_content_type()) == (status, "application/json")
    assert json.loads(body)["error"]["message"].startswith(message)


def test_an_error_of_the_server_is_json_as_well(shared, monkeypatch, caplog):
    monkeypatch.setattr("pagedkv.server.app.metrics", lambda *args: b"no text")
    monkeypatch.setattr("pagedkv.server.app.PlainTextResponse", failing)
    status, headers, body = ask(shared.port, None, "/metrics", "GET")
    assert (status, headers.get_content_type()) == (500, "application/json")
    assert json.loads(body)["error"]["message"] == "the server failed: KeyError"
    wait_until(lambda: "Exception in ASGI application" in caplog.text)
    caplog.clear()


def test_each_request_has_a_line_in_the_log_without_its_text(shared, caplog):
    with caplog.at_level(logging.INFO, logger="pagedkv.serve"):
        answer = json.loads(
            ask(shared.port, {"prompt": "import secret", "max_tokens": 3, "user": "secret", "temperature": 0})[2]
        )
        ask(shared.port, {"prompt": "secret", "secret": 1})
        ask(shared.port, None, "/health", "GET")
        ask(shared.port, None, "/no%0Asuch", "GET")
        with held(shared) as is_held:
            with begin(shared.port, prompt="secret", max_tokens=3):
                assert is_held()
            wait_until(lambda: len(caplog.messages) == 4)
    assert re.fullmatch(
        rf"id={answer['id']} client=127\.0\.0\.1:\d+ route=/v1/completions status=200 "
        rf"in={answer['usage']['prompt_tokens']} cached=0 out=3 seconds=\d+\.\d+ reason=length",
        caplog.messages[0],
    )
    assert re.search(r"id=- .* status=400 in=- cached=- out=- .* reason=-", caplog.messages[1])
    assert re.search(r"status=499 in=\d cached=0 out=0 .* reason=aborted", caplog.messages[3])
    assert "secret" not in caplog.text
    assert answer["choices"][0]["text"] not in caplog.text


@pytest.mark.parametrize("path", ["/metrics", "/status/pool"])
def test_a_status_request_that_fails_gets_an_error(shared, monkeypatch, path):
    monkeypatch.setattr(shared.engine.cache, "stats", failing)
    monkeypatch.setattr(shared.engine.cache, "_repr_html_", failing)
    status, _, body = ask(shared.port, None, path, "GET")
    assert (status, json.loads(body)["error"]["message"]) == (500, "KeyError: 'odd'")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_tells_who_waits_and_ends_the_server():
    with serving() as server:
        abort = server.engine.abort

        def abort_and_fail(request):
            abort(request)
            raise KeyError("odd")

        server.engine.abort = abort_and_fail
        server.engine.model.forward = failing
        status, _, body = ask(server.port, {"prompt": "x"})
        assert (status, json.loads(body)["error"]["message"]) == (500, "the engine has died: KeyError: 'odd'")
        wait_until(lambda: not server.server.worker._thread.is_alive())
        assert server.over_http.has_failed
        assert server.over_http.should_exit


def test_a_status_request_to_a_server_that_ends_is_refused():
    with serving() as server:
        with held(server) as is_held, begin(server.port, prompt="x", max_tokens=2):
            assert is_held()
            server.over_http.should_exit = True
            wait_until(lambda: not server.server.worker.is_open)
            assert ask(server.port, None, "/metrics", "GET")[0] == 503
        wait_until(lambda: not server.server.worker._thread.is_alive())


def test_a_body_that_does_not_come_is_no_error(shared):
    with begin(shared.port, prompt="x") as whole:
        assert whole.recv(100).startswith(b"HTTP/1.1 200")
    with begin(shared.port, missing=50, prompt="x"):
        pass
    assert complete(shared.port, "x", max_tokens=1)[1] == "length"


def test_a_server_that_ends_waits_for_no_body():
    with serving() as server, begin(server.port, missing=50, prompt="x") as connection:
        wait_until(lambda: any(one.cycle for one in server.over_http.server_state.connections))
        server.over_http.should_exit = True
        assert connection.recv(100) == b""


def test_a_text_that_ends_at_a_stop_is_not_aborted(shared):
    text, _ = complete(shared.port, "def main(", temperature=0, max_tokens=30)
    counts = shared.server.counts
    before, stopped = aborted(shared), counts["stop"]
    complete(shared.port, "def main(", temperature=0, max_tokens=30, stop=text[10:13])
    wait_until(lambda: counts["stop"] == stopped + 1)
    assert aborted(shared) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": "true"}, "stream must be true or false"),
        ({"stream_options": [1]}, "stream_options must be an object"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage must be true or false"),
    ],
)
def test_what_is_wrong_is_said(shared, fields, words):
    status, _, body = ask(shared.port, {"prompt": "x", **fields})
    assert (status, words in json.loads(body)["error"]["message"]) == (400, True)


def test_the_api_s_own_defaults_are_taken(shared):
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": False}
    nothing = {"tools": [], "response_format": {"type": "text"}, "logit_bias": {}, "n": 1}
    for asked in (chat, chat | nothing, chat | dict.fromkeys(nothing)):
        assert ask(shared.port, asked, "/v1/chat/completions")[0] == 200


@pytest.mark.parametrize("error", [TypeError("TextEncodeInput must be"), RuntimeError("roles must alternate")])
def test_a_template_that_refuses_is_an_answer(shared, monkeypatch, error):
    def encode_chat(messages):
        raise error

    monkeypatch.setattr(shared.server.text, "encode_chat", encode_chat)
    chat = {"messages": [{"role": "alien", "content": "x"}]}
    status, _, body = ask(shared.port, chat, "/v1/chat/completions")
    assert (status, str(error) in json.loads(body)["error"]["message"]) == (400, True)


def test_a_token_that_ends_a_text_is_not_in_it(shared, monkeypatch):
    step = shared.engine.step
    monkeypatch.setattr(shared.engine, "step", lambda: [one._replace(reason="stop") for one in step()])
    assert complete(shared.port, "x", max_tokens=1) == ("", "stop")


def test_what_is_remembered_of_prompts_has_a_bound():
    text = SmallText(TOKENIZER, 1024)
    TOKENIZER._encode_piece.cache_clear()
    tokens = text.encode("a" * 5000)
    assert TOKENIZER.decode(tokens) == b"a" * 5000
    assert TOKENIZER._encode_piece.cache_info().currsize == 0
