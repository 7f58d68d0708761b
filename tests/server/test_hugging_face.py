"""Models of transformers behind the server: their texts, chats, states and memory."""

import json
import re
import sys
from unittest import mock

import pytest

from pagedkv.memory.device.arrays import Arrays

from .serving import ask, built, complete, serving

torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

from ..integrations.transformers.byte_tokenizer import byte_tokenizer  # noqa: E402
from ..integrations.transformers.models import make_model  # noqa: E402

CONTENT = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def save(folder, kind, chat_template=None, eos_token_id=None):
    """Save a model and its tokenizer, and return both."""
    model, tokenizer = make_model(kind, vocab_size=256, eos_token_id=eos_token_id), byte_tokenizer(bos_token="!")
    tokenizer.chat_template = chat_template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A server of a Llama, the model, and its tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    model, tokenizer = save(folder, "Llama", eos_token_id=255)
    with serving("--context", "200", model=[folder]) as server:
        yield server, model, tokenizer


def test_a_model_of_transformers(llama):
    server, model, tokenizer = llama
    prompt = tokenizer("def main(").input_ids
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=9)[0, len(prompt) :]
    for stream in (False, True):
        said = complete(server.port, "def main(", max_tokens=9, temperature=0, stream=stream)
        assert said == (tokenizer.decode(ids), "length")
    with mock.patch.object(server.engine.scheduler, "update", side_effect=MemoryError):  # behind the last token
        assert ask(server.port, {"prompt": "def main(", "max_tokens": 1})[0] == 500
    assert complete(server.port, "def main(", max_tokens=9, temperature=0) == said
    assert json.loads(ask(server.port, {"prompt": "def"}, "/tokenize")[2])["tokens"] == tokenizer("def").input_ids
    assert json.loads(ask(server.port, {"tokens": prompt}, "/detokenize")[2]) == {"prompt": "def main("}
    chat = [{"role": "developer", "content": "hi"}]
    calls = [chat[0] | {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    for template, messages, options, expected in [
        (None, chat, {}, "the model has no chat template: ask /v1/completions"),
        (CONTENT, chat, {}, 4),
        (CONTENT.replace("content", "role"), chat, {}, 8),  # a system
        (CONTENT, calls, {}, "the model's chat template has no place for tool_calls"),
        ("<{{ messages[0]['tool_calls'][0]['function']['name'] }}>", calls, {}, 3),
        ("{{ 'thinking' if enable_thinking else '' }}", chat, {"enable_thinking": True}, 8),
        (CONTENT, chat, {"enable_thinking": True}, "no place for enable_thinking of chat_template_kwargs"),
        ("{{ tokenize }}", chat, {"tokenize": False}, "no place for tokenize of chat_template_kwargs"),
    ]:
        server.server.text._tokenizer.chat_template = template
        asked = {"messages": messages, "max_tokens": 3, "chat_template_kwargs": options}
        status, _, body = ask(server.port, asked, "/v1/chat/completions")
        if isinstance(expected, int):
            assert json.loads(body)["usage"]["prompt_tokens"] == expected
        else:
            assert (status, expected in json.loads(body)["error"]["message"]) == (400, True)
    assert isinstance(server.engine._model, transformers.LlamaForCausalLM)


def choice_of(port, path="/v1/completions", **fields):
    """The one choice of an answer, whole or joined from its events."""
    status, _, body = ask(port, {"temperature": 0, **fields}, path)
    assert status == 200, body
    if not fields.get("stream"):
        [choice] = json.loads(body)["choices"]
        return choice
    choices = [json.loads(event)["choices"][0] for event in re.findall(rb"data: (\{.*)\n\n", body)]
    scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    names = scored[0].keys() - {"refusal"}
    joined = {name: [value for one in scored for value in one[name]] for name in names}
    return {"text": "".join(choice.get("text", "") for choice in choices), "logprobs": joined}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_text_and_its_echo_are_those_of_the_model(llama, stream):
    server, model, tokenizer = llama
    said = "dé é("
    prompt = tokenizer(said).input_ids
    for asked in (said, prompt):
        made = choice_of(server.port, prompt=asked, max_tokens=4, logprobs=2, echo=True, stream=stream)
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=4)[0]
        rows = model(ids[None]).logits[0].detach().log_softmax(-1)
        scored, expected = made["logprobs"], rows[torch.arange(len(ids) - 1), ids[1:]].tolist()
        assert scored["tokens"] == [tokenizer.decode([token]) for token in ids]
        assert scored["token_logprobs"][0] is None
        assert scored["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        assert scored["text_offset"][:8] == [0, 1, 1, 2, 3, 3, 4, 5]
        assert made["text"].startswith(said)
        assert scored["top_logprobs"][0] is None
        for one, row in zip(scored["top_logprobs"][1:], rows, strict=False):
            assert max(one.values()) == pytest.approx(float(row.max()), abs=1e-4)
        alone = choice_of(server.port, prompt=asked, max_tokens=0, logprobs=2, echo=True, stream=stream)
        assert alone["text"] == said
        assert alone["logprobs"] == {name: values[: len(prompt)] for name, values in scored.items()}
        assert choice_of(server.port, prompt="!\ufffd", max_tokens=0, echo=True)["text"] == "!\ufffd"
        plain = choice_of(server.port, prompt=asked, max_tokens=4, logprobs=2, stream=stream)["logprobs"]
        assert plain["token_logprobs"] == pytest.approx(scored["token_logprobs"][len(prompt) :], abs=1e-4)


def test_offsets_count_special_tokens_that_an_echo_has(llama):
    server, *_ = llama
    made = choice_of(server.port, prompt="a!é!", max_tokens=1, logprobs=0, echo=True)
    assert made["text"].startswith("a!é!")
    assert made["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 4]


def test_a_chat_and_a_prompt_have_log_probabilities(llama):
    server, _, tokenizer = llama
    server.server.text._tokenizer.chat_template = CONTENT
    options = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    whole = choice_of(server.port, "/v1/chat/completions", **options)["logprobs"]
    streamed = choice_of(server.port, "/v1/chat/completions", **options, stream=True)["logprobs"]
    assert streamed["content"] == whole["content"]
    text = choice_of(server.port, prompt="<hé>", max_tokens=6, logprobs=2)["logprobs"]
    assert [one["token"] for one in whole["content"]] == text["tokens"]
    assert [one["logprob"] for one in whole["content"]] == pytest.approx(text["token_logprobs"], abs=1e-4)
    for one in whole["content"]:
        first, _ = one["top_logprobs"]
        assert first == {name: one[name] for name in ("token", "logprob", "bytes")}
        assert one["bytes"] == (None if "\ufffd" in one["token"] else list(one["token"].encode()))
    made = choice_of(server.port, prompt="<hé>", max_tokens=1, prompt_logprobs=2, echo=True, logprobs=1)
    nothing, *scored = made["prompt_logprobs"]
    assert nothing is None
    for token, one, expected in zip(
        tokenizer("<hé>").input_ids[1:], scored, made["logprobs"]["token_logprobs"][1:], strict=False
    ):
        assert one[str(token)]["logprob"] == expected
        assert {1, 2} <= {other["rank"] for other in one.values()}


def test_a_text_is_adjusted_as_asked(llama, monkeypatch):
    server, _, tokenizer = llama
    [token] = tokenizer("x").input_ids
    asked = {"prompt": "def", "max_tokens": 3, "logit_bias": {str(token): 100}}
    assert choice_of(server.port, **asked)["text"] == "xxx"
    cut = choice_of(server.port, **asked, stop="xx", logprobs=0)
    assert (cut["text"], cut["logprobs"]["tokens"]) == ("", ["x", "x"])
    assert choice_of(server.port, **asked, presence_penalty=2, frequency_penalty=2)["text"] == "xxx"
    assert choice_of(server.port, **asked | {"logit_bias": {str(token): 2}}, presence_penalty=2)["text"] != "xxx"
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    described = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    made = choice_of(server.port, prompt="def", max_tokens=30, response_format=described)
    assert (made["text"], made["finish_reason"]) == ('{"a":"b"}', "stop")
    described["json_schema"]["schema"] = {"type": "nothing"}
    assert b"a schema that llguidance does not take" in refused(server.port, response_format=described)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(server.engine, "_grammars", None)
    assert b"[guidance]" in refused(server.port, response_format={"type": "json_object"})


def refused(port, **fields):
    status, _, body = ask(port, {"prompt": "x", **fields})
    assert status == 400
    return body


def test_a_chat_with_a_hybrid_model_finds_its_messages_again(tmp_path):
    """The template ends a prompt with thoughts, which are in no later prompt."""
    thoughts = "[let me think of all this]"
    save(tmp_path, "Qwen3_5", CONTENT + "{% if add_generation_prompt %}" + thoughts + "{% endif %}")
    messages, cached, expected = [{"role": "user", "content": "x" * 48}], [], [0]
    with serving("--context", "300", model=[tmp_path]) as server:
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 9, "temperature": 0}
            answer = json.loads(ask(server.port, body, "/v1/chat/completions")[2])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            expected.append((answer["usage"]["prompt_tokens"] - len(thoughts)) // 16 * 16)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "y"}]
    assert cached == expected[:3]
    assert cached[2] > cached[1] == 48  # of 50 before the thoughts, and of 64 with a part of them


def test_a_hybrid_model_runs_as_many_requests_as_it_has_states(tmp_path, capsys):
    save(tmp_path, "Qwen3_5")
    with serving("--context", "32", "--num-blocks", "2", model=[tmp_path]) as server:
        assert server.server.admission._max_batch == server.engine.cache.max_seqs == 2
        assert ask(server.port, {"prompt": "x", "max_tokens": 2})[0] == 200
    assert "2 requests run at a time, for which there are states: give more --memory" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["Llama", "Qwen3_5"])
def test_by_default_a_model_gets_half_of_what_is_free_if_its_requests_can_fill_it(tmp_path, kind, monkeypatch, capsys):
    save(tmp_path, kind)
    options = ["--max-batch", "3", "--max-model-len", "64", "--dtype", "bfloat16", "--served-model-name", "mine"]
    server = built(tmp_path, *options)
    cache, stats = server.worker.engine.cache, server.worker.engine.cache.stats()
    assert (cache.max_seq_len, cache.max_seqs, server.model["id"]) == (64, 3, "mine")
    assert 3 * 64 <= stats.num_blocks * 16 <= 6 * 64  # of a hybrid model some of the memory is for states
    assert "ForCausalLM in bfloat16 on cpu; context of 64 tokens; pool of " in capsys.readouterr().err
    num_bytes = stats.num_bytes + stats.state_bytes
    monkeypatch.setattr(Arrays, "free_bytes", lambda _: num_bytes)
    half = built(tmp_path, *options).worker.engine.cache.stats()
    assert num_bytes / 4 < half.num_bytes + half.state_bytes <= num_bytes / 2
