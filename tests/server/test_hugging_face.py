"""Models of transformers behind the server: their texts, chats, states and memory."""

import json
from unittest import mock

import pytest

from pagedkv.memory.device.arrays import Arrays

from .serving import ask, built, complete, serving

torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

from ..integrations.transformers.byte_tokenizer import byte_tokenizer  # noqa: E402
from ..integrations.transformers.models import make_model  # noqa: E402

CONTENT = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def save(folder, kind, chat_template=None):
    """Save a model and its tokenizer, and return both."""
    model, tokenizer = make_model(kind, vocab_size=256, eos_token_id=None), byte_tokenizer()
    tokenizer.chat_template = chat_template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def test_a_model_of_transformers(tmp_path):
    model, tokenizer = save(tmp_path, "Llama")
    prompt = tokenizer("def main(").input_ids
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=9)[0, len(prompt) :]
    with serving("--context", "200", model=[tmp_path]) as server:
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
