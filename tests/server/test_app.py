"""The server: the same texts as one at a time, clear limits, and no lost blocks whatever clients do."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from unittest import mock

import numpy as np
import pytest

import pagedkv

from .serving import EXAMPLES, TOKENIZER, aborted, ask, begin, complete, held, serving, wait_until

from sampling import Sampling  # isort: skip

from serve import SmallDecoder, parse, small  # isort: skip
from tokenizer import END  # isort: skip

POOL = {"num_blocks": 512, "block_size": 16, "prefix_cache": True}
PROMPT = TOKENIZER.encode((EXAMPLES / "engine.py").read_bytes())


@pytest.fixture(scope="module")
def shared():
    with serving() as shared:
        yield shared


def requests(count, length, max_tokens):
    """Prompts that begin alike and end in their own tokens, with their own draws."""
    return [
        {"prompt": [*PROMPT[:length], 1 + i % 200], "max_tokens": max_tokens, "seed": i, "temperature": 0.7}
        for i in range(count)
    ]


def engine_of(pool, max_num_seqs):
    engine, *_ = small(parse(["--context", "1024"]), pool, {"max_num_seqs": max_num_seqs, "swap": None})
    return engine


def one_at_a_time(wanted):
    """The texts of an engine without a server or a prefix cache, one request at a time."""
    engine = engine_of(POOL | {"prefix_cache": False}, 1)
    texts = []
    for request in wanted:
        sampling = {"top_p": 1.0, "top_k": 0} | {name: request[name] for name in ("seed", "temperature")}
        engine.add(request["prompt"], request["max_tokens"], **sampling)
        decoder, text, reason = SmallDecoder(TOKENIZER), "", ""
        while not reason:
            for sampled in engine.step():
                text, reason = text + decoder.push(sampled.token), sampled.reason
        texts.append((text + decoder.finish(), reason))
    return texts


def logits_of(wanted, max_num_seqs):
    """A digest of the logits of each draw, sorted."""
    engine = engine_of(POOL, max_num_seqs)
    rows, choose = [], Sampling.choose

    def record(sampling, logits, *args):
        rows.append(sha256(logits).hexdigest())
        return choose(sampling, logits, *args)

    for request in wanted:
        engine.add(request["prompt"], request["max_tokens"], seed=request["seed"])
    with mock.patch.object(Sampling, "choose", record):
        while engine.scheduler.num_waiting + engine.scheduler.num_running:
            engine.step()
    return sorted(rows)


@pytest.mark.skipif(
    "openblas" not in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"],
    reason="another BLAS may sum the rows of a tile in different orders",
)
def test_logits_have_the_same_bits_in_any_batch():
    wanted = requests(5, 40, 3)
    assert logits_of(wanted, 1) == logits_of(wanted, 5)


def test_texts_are_those_of_a_run_one_at_a_time(shared):
    wanted = requests(24, 100, 6)
    with ThreadPoolExecutor(8) as clients:
        got = clients.map(lambda i: complete(shared.port, **wanted[i], stream=i % 2 == 0), range(len(wanted)))
        assert list(got) == one_at_a_time(wanted)
    assert shared.engine.cache.stats().hit_tokens >= 16 * 96


@pytest.mark.long
def test_a_thousand_requests_of_32_clients():
    """The whole of it, and the prefix cache's worth, in seconds of this process."""
    wanted = requests(1000, 512, 8)
    expected = one_at_a_time(wanted)
    seconds = {}
    for words in (["--no-prefix-cache"], []):
        count = len(wanted) if not words else 200
        with serving("--max-batch", "32", "--max-waiting", "32", *words) as server, ThreadPoolExecutor(32) as clients:
            free = server.engine.cache.num_free
            begun = time.process_time()
            got = list(clients.map(lambda request: complete(server.port, **request), wanted[:count]))
            seconds[not words] = (time.process_time() - begun) / count
            assert got == expected[:count]
            assert server.engine.cache.num_free == free
    print(f"\n{1e3 * seconds[False]:.1f} ms a request without the prefix cache, {1e3 * seconds[True]:.1f} ms with it")
    assert seconds[False] > 3 * seconds[True]


def test_chats_stops_and_usage(shared):
    text, _ = complete(shared.port, "def main(", temperature=0, max_tokens=30)
    stop = text[10:13]
    for stream in (False, True):
        cut = complete(shared.port, "def main(", temperature=0, max_tokens=30, stop=stop, stream=stream)
        assert cut == (text[: text.index(stop)], "stop")
    chat = {"messages": [{"role": "user", "content": "class Queue"}], "max_tokens": 5, "temperature": 0}
    status, _, body = ask(shared.port, chat, "/v1/chat/completions")
    answer = json.loads(body)
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 5
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    events = re.findall(rb"data: (.*)\n\n", ask(shared.port, chat, "/v1/chat/completions")[2])
    *chunks, last = map(json.loads, events[:-1])
    assert last["usage"] == answer["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(one["delta"].get("content", "") for one in choices) == answer["choices"][0]["message"]["content"]
    assert [one["delta"].get("role") for one in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["delta"] == {}
    assert all(chunk["usage"] is None for chunk in chunks)


def test_several_prompts_get_a_choice_each(shared):
    prompts = ["def main(", [*PROMPT[:20]], "class"]
    alone = [complete(shared.port, prompt, temperature=0, max_tokens=5) for prompt in prompts]
    asked = {"prompt": prompts, "temperature": 0, "max_tokens": 5}
    answer = json.loads(ask(shared.port, asked)[2])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == alone
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens"] == sum(
        len(TOKENIZER.encode(x)) if isinstance(x, str) else 20 for x in prompts
    )
    usage = {"include_usage": True, "continuous_usage_stats": True}
    events = re.findall(rb"data: (.*)\n\n", ask(shared.port, asked | {"stream": True, "stream_options": usage})[2])
    *chunks, last = map(json.loads, events[:-1])
    texts, reasons = [""] * 3, [[] for _ in prompts]
    for [choice] in (chunk["choices"] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
    assert [(text, reason[-1]) for text, reason in zip(texts, reasons, strict=True)] == alone
    assert not any(any(reason[:-1]) for reason in reasons)
    assert last["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert counted[0] > 0


def test_a_prompt_gets_n_choices_each_with_its_seed(shared):
    asked = {"prompt": ["def main(", "class"], "temperature": 2.0, "max_tokens": 5, "n": 2}
    answer = json.loads(ask(shared.port, asked | {"seed": 7})[2])
    alone = [
        complete(shared.port, **asked | {"prompt": x, "seed": s, "n": 1})[0] for x in asked["prompt"] for s in (7, 8)
    ]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [*enumerate(alone)]
    tokens = sum(len(TOKENIZER.encode(x)) for x in asked["prompt"])
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (tokens, 20)
    assert len({choice["text"] for choice in json.loads(ask(shared.port, asked)[2])["choices"]}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_goes_before_the_text(shared, stream):
    text, _ = complete(shared.port, "é(", temperature=0, max_tokens=5)
    options = {"temperature": 0, "stream": stream, "echo": True}
    assert complete(shared.port, "é(", max_tokens=5, stop="é", **options) == ("é(" + text, "length")
    assert complete(shared.port, TOKENIZER.encode("é("), max_tokens=0, **options) == ("é(", "length")
    # A prompt that ends within a character.
    for stop in (None, "\ufffd"):
        prompt = list("é".encode()[:1])
        assert complete(shared.port, prompt, max_tokens=0, stop=stop, **options) == ("\ufffd", "length")


def test_a_client_that_leaves_ends_all_its_texts(shared, monkeypatch):
    before, ended, abort = aborted(shared), [], shared.engine.abort
    monkeypatch.setattr(shared.engine, "abort", lambda request: ended.append(request) or abort(request))
    with held(shared, after=2) as is_held:
        connection = begin(shared.port, prompt=["x", "y", "z"], max_tokens=100, ignore_eos=True)
        assert is_held()
        connection.close()
        wait_until(lambda: aborted(shared) == before + 1)
    wait_until(lambda: not shared.engine.scheduler.num_running)
    assert len({*ended}) == 3


def test_texts_and_tokens_are_converted(shared):
    def asked(path, **fields):
        status, _, body = ask(shared.port, fields, path)
        return json.loads(body) if status == 200 else (status, json.loads(body)["error"]["message"])

    tokens = TOKENIZER.encode("def é")
    of_tokens = {"count": len(tokens), "max_model_len": 1024, "tokens": tokens, "token_strs": None}
    assert asked("/tokenize", prompt="def é", model="any") == of_tokens
    assert asked("/detokenize", tokens=tokens) == {"prompt": "def é"}
    chat = asked("/tokenize", messages=[{"role": "user", "content": "def"}])
    assert asked("/detokenize", tokens=chat["tokens"]) == {"prompt": "\n\n\n# user: def\n"}
    for path, fields, words in [
        ("/tokenize", {}, "prompt is missing"),
        ("/tokenize", {"prompt": ["x"]}, 'prompt must be a text, got ["x"]'),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs is not supported by this server"),
        ("/tokenize", {"prompt": "\ud800"}, "the prompt cannot be encoded"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [1024]}, "tokens must be whole numbers from 0 to 1023"),
        ("/detokenize", {"tokens": [True]}, "tokens must be whole numbers from 0 to 1023"),
        ("/detokenize", {"tokens": "x"}, "tokens must be a list of tokens"),
    ]:
        status, message = asked(path, **fields)
        assert status == 400
        assert message.startswith(words)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"prompt": "x"', 400, "the body must be JSON"),
        (b"[" * 100_000, 400, "the body must be JSON"),
        (b"\xff", 400, "the body must be JSON"),
        ([], 400, "the body must be a JSON object, got list"),
        ({"prompt": "x" * 10_000_000}, 413, "the body must be of at most 1000000 bytes"),
        ({"prompt": ""}, 400, "prompt must be a text of at least one character"),
        ({"prompt": ["a", ""]}, 400, "prompt must be a text of at least one character, its tokens, or a list"),
        ({"prompt": ["a", [5, 1024]]}, 400, "prompt must have tokens from 0 to 1023"),
        ({"prompt": ["a", 5]}, 400, "prompt must be a text"),
        ({"prompt": []}, 400, "prompt must be a text"),
        ({"prompt": ["x"] * 137}, 400, "a request may ask for 136 texts on this server, got 137"),
        ({"prompt": [5, 1024]}, 400, "prompt must have tokens from 0 to 1023"),
        ({"prompt": "\ud800"}, 400, "the prompt cannot be encoded"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be a whole number from 1 to"),
        ({"prompt": "x", "temperature": float("nan")}, 400, "temperature must be a number from 0 to 2, got NaN"),
        ({"prompt": ["x"] * 69, "n": 2}, 400, "a request may ask for 136 texts on this server, got 138"),
        ({"prompt": "x", "logprobs": 1, "echo": True}, 400, "logprobs is not supported by the small model: leave it"),
        ({"prompt": "x", "logit_bias": {"3": 1}}, 400, "logit_bias is not supported by the small model: leave it out"),
        ({"prompt": "x", "stop": [1]}, 400, "stop must be a text"),
    ],
)
def test_what_is_wrong_is_said(shared, body, status, words):
    got, _, text = ask(shared.port, body)
    assert got == status
    assert words in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"max_tokens": 1025}, "you requested 1026 tokens (1 in the prompt, 1025 in the completion)"),
        ({"prompt": [5] * 1025}, "you requested 1041 tokens (1025 in the prompt, 16 in the completion)"),
        ({"prompt": " " * 900_000}, "your prompt has 900000 bytes, and 33792 are the most"),
    ],
)
def test_what_the_context_has_no_room_for_is_refused_as_openai_does(shared, fields, asked, stream):
    """Clients such as LangChain and LiteLLM know it by its code, or by the first words."""
    status, _, body = ask(shared.port, {"prompt": "x", "stream": stream} | fields)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith(f"This model's maximum context length is 1024 tokens. However, {asked}. Please")


def test_a_chat_without_max_tokens_gets_what_the_pool_has_room_for(capsys):
    """Three blocks of 16 tokens, and a token that is not computed, of a context of 1024; Retry-After counts no more."""
    chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    with serving("--num-blocks", "3") as server:
        with ThreadPoolExecutor(1) as clients, held(server) as is_held:
            answer = clients.submit(ask, server.port, chat, "/v1/chat/completions")
            assert is_held()
            [place] = server.server.admission._places  # what Retry-After counts
        status, _, body = answer.result()
    assert (status, json.loads(body)["usage"]["total_tokens"], place.max_tokens) == (200, 49, 48)
    assert capsys.readouterr().err.endswith(
        "\na prompt and its text may have 48 tokens, since the pool has no room for the 1024 of the context: give more "
        "--num-blocks or --memory\n"
    )


def test_other_sites_do_not_get_in_by_a_name_of_theirs(shared):
    assert ask(shared.port, None, "/metrics", "GET", Host="attacker.example")[0] == 400


def test_what_is_drawn_and_what_ends_it_is_as_asked_for(shared, monkeypatch):
    asked = {"prompt": PROMPT[:30], "max_tokens": 12, "temperature": 0}
    whole, _ = complete(shared.port, **asked)
    first = TOKENIZER.encode(whole)[0]
    assert complete(shared.port, **asked, stop_token_ids=[first]) == ("", "stop")
    later, _ = complete(shared.port, **asked, stop_token_ids=[first], min_tokens=5)
    assert len(TOKENIZER.encode(later)) >= 5
    assert complete(shared.port, **asked, repetition_penalty=2.0)[0] != whole
    drawn = asked | {"temperature": 2.0, "seed": 1}
    assert complete(shared.port, **drawn, min_p=1.0)[0] == whole != complete(shared.port, **drawn)[0]
    status, _, body = ask(shared.port, asked | {"min_tokens": 13})
    assert (status, b"min_tokens must be at most max_tokens = 12, got 13" in body) == (400, True)
    monkeypatch.setattr(Sampling, "choose", lambda *args: END)
    assert complete(shared.port, **asked) == ("", "stop")
    assert complete(shared.port, **asked, ignore_eos=True) == ("", "length")


def cached(port, prompt, **options):
    """How many tokens of a prompt were in the cache, as its answer says, whole or in events."""
    answer = json.loads(ask(port, {"prompt": prompt, "max_tokens": 1, **options})[2])
    chunks = {"prompt": prompt, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}, **options}
    *_, last, _ = re.findall(rb"data: (.*)\n\n", ask(port, chunks)[2])
    return [usage["prompt_tokens_details"]["cached_tokens"] for usage in (answer["usage"], json.loads(last)["usage"])]


def test_only_equal_salts_share_what_is_cached(shared):
    prompt = [9, *PROMPT[100:147]]
    assert cached(shared.port, prompt, cache_salt="mine") == [0, 47]
    assert cached(shared.port, prompt, cache_salt="yours") == [0, 47]
    assert cached(shared.port, prompt) == [0, 47]
    assert cached(shared.port, prompt, cache_salt="mine") == [47, 47]


def test_who_has_priority_goes_first():
    with serving("--max-batch", "1") as server, ThreadPoolExecutor(3) as clients:
        order, step = [], server.engine.step
        server.engine.step = lambda: [order.append(made.request) or made for made in step()]
        with held(server) as is_held:
            asked = [clients.submit(complete, server.port, "x", max_tokens=2)]
            assert is_held()
            for priority in (0, -5):
                asked.append(clients.submit(complete, server.port, "y", max_tokens=2, priority=priority))
                wait_until(lambda: server.server.worker._inbox.qsize() == len(asked) - 1)
        assert [one.result()[1] for one in asked] == ["length"] * 3
        assert order == [0, 0, 2, 2, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_the_middle_of_its_prompt_is_aborted(shared, stream):
    before = aborted(shared)
    prompt = [7, *PROMPT[:900]]  # 8 steps, and in no cache
    with held(shared, after=2) as is_held:
        connection = begin(shared.port, prompt=prompt, max_tokens=100, stream=stream)
        assert is_held()
        assert shared.engine.cache.stats().used > 0
        connection.close()
        wait_until(lambda: aborted(shared) == before + 1)
    wait_until(lambda: shared.engine.cache.stats().used == 0)
    assert complete(shared.port, "x", max_tokens=1)[1] == "length"


def test_a_client_that_is_killed_is_aborted(shared):
    before = aborted(shared)
    code = """
import socket, sys
body = b'{"prompt": "def main(", "max_tokens": 1000, "stream": true, "temperature": 0}'
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
head = b"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: %d\\r\\n\\r\\n"
connection.sendall(head % len(body) + body)
print(len(connection.recv(100)), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-S", "-c", code, str(shared.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline()
        client.kill()
    wait_until(lambda: aborted(shared) == before + 1)
    wait_until(lambda: shared.engine.cache.stats().used == 0)


def test_requests_beyond_the_queue_are_asked_to_retry():
    with serving("--max-batch", "1", "--max-waiting", "1") as server:
        with held(server) as is_held:
            connections = [begin(server.port, prompt="x", max_tokens=2) for _ in range(2)]
            assert is_held()
            wait_until(lambda: len(server.server.admission) == 2)
            for stream in (False, True):
                status, headers, body = ask(server.port, {"prompt": "x", "stream": stream})
                assert status == 503
                assert 1 <= int(headers["Retry-After"]) <= 60
                assert "try again later" in json.loads(body)["error"]["message"]
        for connection in connections:
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_model_that_fails_answers_500_and_the_next_request_is_computed(shared, monkeypatch):
    forward = shared.engine.model.forward
    monkeypatch.setattr(shared.engine.model, "forward", lambda *args: 1 // 0)
    for stream in (False, True):
        status, _, body = ask(shared.port, {"prompt": "x", "stream": stream})
        assert status == 500
        assert "the model failed: ZeroDivisionError" in json.loads(body)["error"]["message"]
    monkeypatch.setattr(shared.engine.model, "forward", forward)
    assert complete(shared.port, "x", max_tokens=2)[1] == "length"


def test_the_server_says_what_it_does(shared):
    with held(shared) as is_held:
        connection = begin(shared.port, prompt="def main(", max_tokens=2)
        assert is_held()
    with connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    status, headers, body = ask(shared.port, None, "/metrics", "GET")
    assert (status, headers.get_content_type()) == (200, "text/plain")
    values = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    assert float(values['pagedkv_requests_total{end="length"}']) >= 1
    assert float(values["pagedkv_tokens_generated_total"]) >= 2
    assert values['pagedkv_blocks{state="free"}'] == "512"
    pool = json.loads(ask(shared.port, None, "/status/pool", "GET")[2])
    assert pool["pool"].count("<svg") == 1
    assert pool["now"].startswith("0 run, 0 wait")
    assert b'fetch("/status/pool")' in ask(shared.port, None, "/", "GET")[2]
    for path, method in (("/health", "GET"), ("/ping", "GET"), ("/ping", "POST")):
        assert json.loads(ask(shared.port, None, path, method)[2]) == {"status": "ok"}
    assert json.loads(ask(shared.port, None, "/version", "GET")[2]) == {"version": pagedkv.__version__}
    [model] = json.loads(ask(shared.port, None, "/v1/models", "GET")[2])["data"]
    assert (model["id"], type(model["created"])) == ("small", int)
    assert json.loads(ask(shared.port, None, "/v1/models/small", "GET")[2]) == model


def test_the_openai_client(shared):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{shared.port}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "small", "prompt": "def main(", "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**options)
        parts = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
        assert "".join(parts) == whole.choices[0].text
        messages = [{"role": "user", "content": "def main("}]
        chat = client.chat.completions.create(model="small", messages=messages, max_tokens=5, temperature=0)
        assert chat.choices[0].message.content
        several = client.completions.create(**options | {"prompt": ["def main(", "class"]}, n=2)
        assert [choice.text for choice in several.choices][:2] == [whole.choices[0].text] * 2
        assert len(several.choices) == 4
        with pytest.raises(openai.BadRequestError, match="tools are not supported by this server: leave them out"):
            client.chat.completions.create(
                model="small", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
            )
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024") as refused:
            client.completions.create(**options | {"max_tokens": 2000})
        assert refused.value.code == "context_length_exceeded"
        assert [model.id for model in client.models.list()] == ["small"]


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_when_the_server_ends_is_told_so(stream):
    with serving() as server:
        with begin(server.port, prompt="def main(", max_tokens=1000, temperature=0, stream=stream) as connection:
            wait_until(lambda: server.server.counts["tokens"] > 2)
            server.over_http.should_exit = True
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert (b"503 Service Unavailable" in answer) != stream
        assert b"the server is shutting down" in answer
