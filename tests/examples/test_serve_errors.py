"""examples/serve.py where something breaks: who waits is told so, and it goes on or ends."""

import json
import logging

import pytest

from .serving import TOKENIZER, ask, begin, cancelled, complete, held, serving, wait_until

from server.small import SmallText  # isort: skip


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


def test_tokens_that_cannot_be_drawn_fail_the_step_alone(shared, monkeypatch):
    monkeypatch.setattr("server.small.Sampling.choose", failing)
    assert ask(shared.port, {"prompt": "x"})[0] == 500
    monkeypatch.undo()
    assert complete(shared.port, "x", max_tokens=1)[1] == "length"


@pytest.mark.parametrize("path", ["/metrics", "/status/pool"])
def test_a_look_that_fails_is_an_answer(shared, monkeypatch, path):
    monkeypatch.setattr(shared.engine.cache, "stats", failing)
    monkeypatch.setattr(shared.engine.cache, "_repr_html_", failing)
    status, _, body = ask(shared.port, None, path, "GET")
    assert (status, json.loads(body)["error"]["message"]) == (500, "KeyError: 'odd'")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_tells_who_waits_and_ends_the_server():
    with serving() as server:
        cancel = server.engine.cancel

        def cancel_and_fail(request):
            cancel(request)
            raise KeyError("odd")

        server.engine.cancel = cancel_and_fail
        server.engine.model.forward = failing
        status, _, body = ask(server.port, {"prompt": "x"})
        assert (status, json.loads(body)["error"]["message"]) == (500, "the engine has died: KeyError: 'odd'")
        wait_until(lambda: not server.server.worker._thread.is_alive())
        assert server.over_http.has_failed
        assert server.over_http.should_exit


def test_a_look_at_a_server_that_ends_is_refused():
    with serving() as server:
        with held(server) as is_held, begin(server.port, prompt="x", max_tokens=2):
            assert is_held()
            server.over_http.should_exit = True
            wait_until(lambda: not server.server.worker._is_open)
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


def test_a_text_that_ends_at_a_stop_is_not_cancelled(shared):
    text, _ = complete(shared.port, "def main(", temperature=0, max_tokens=30)
    counts = shared.server.worker.counts
    before, stopped = cancelled(shared), counts["stop"]
    complete(shared.port, "def main(", temperature=0, max_tokens=30, stop=text[10:13])
    wait_until(lambda: counts["stop"] == stopped + 1)
    assert cancelled(shared) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": "true"}, "stream must be true or false"),
        ({"stream_options": [1]}, "stream_options must be an object"),
        ({"stream_options": {"include_usage": 1}}, "include_usage must be true or false"),
        ({"prompt": " " * 900_000}, "shorten the prompt"),
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
