"""Requests to the server, and its conversion of tokens to text."""

import json

import pytest

from pagedkv.server.protocol import Refused, parse

from .serving import TOKENIZER

from serve import SmallDecoder  # isort: skip
from pagedkv.server.worker import Stops, Writer


def parsed(chat=False, **fields):
    fields = ({"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}) | fields
    return parse(json.dumps(fields).encode(), chat=chat, num_tokens=10)


def said(*messages):
    [prompt] = parsed(chat=True, messages=list(messages)).prompts
    return prompt.content


HONOURED = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 4},
    **{"min_tokens": 2, "stop_token_ids": [3, 4], "ignore_eos": True, "priority": -1},
}


ADJUSTING = {
    **{"presence_penalty": 0.5, "frequency_penalty": -1.0},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
}


@pytest.mark.parametrize("chat", [False, True])
def test_what_is_honoured_goes_to_the_engine(chat):
    wanted = parsed(chat, **HONOURED, cache_salt="mine", stop="y", max_tokens=7, max_completion_tokens=5)
    assert wanted.options == HONOURED | {"salt": "mine"}
    assert (wanted.stop, wanted.max_tokens) == (["y"], 5)
    assert parsed(chat).options.keys() == wanted.options.keys()
    assert parsed(chat, **ADJUSTING, logit_bias={"3": -100, "0": 0.5}).options == parsed(chat).options | ADJUSTING | {
        "logit_bias": {3: -100, 0: 0.5}
    }
    assert parsed(chat, n=3).n == 3
    assert parsed(chat, top_k=-1).options["top_k"] == 0
    assert parsed(chat, seed=-1) == parsed(chat)


@pytest.mark.parametrize(
    ("prompt", "contents"),
    [
        ("x", ["x"]),
        ([5, 6], [[5, 6]]),
        (["x", "y"], ["x", "y"]),
        ([[5], "x", [6, 7]], [[5], "x", [6, 7]]),
    ],
)
def test_a_prompt_may_be_several(prompt, contents):
    assert [one.content for one in parsed(prompt=prompt).prompts] == contents


def test_options_of_what_makes_tokens_go_to_it():
    assert [one.options for one in parsed(prompt=["x", [5]]).prompts] == [{"add_special_tokens": True}, {}]
    [prompt] = parsed(add_special_tokens=False).prompts
    assert prompt.options == {"add_special_tokens": False}
    [prompt] = parsed(chat=True, chat_template_kwargs={"enable_thinking": False}).prompts
    assert prompt.options == {"enable_thinking": False}


# Of OpenAI's and vLLM's APIs: what asks for something that is not here.
ASKING = {
    **{"best_of": 2, "length_penalty": 2, "use_beam_search": True, "bad_words": ["x"], "allowed_token_ids": [1]},
    **{"include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    **{"truncate_prompt_tokens": 3, "return_token_ids": True, "request_id": "x"},
    **{"return_tokens_as_token_ids": True, "logits_processors": [], "kv_transfer_params": {}, "vllm_xargs": {}},
    **{"structured_outputs": {}, "guided_json": {}, "guided_regex": ""},
    **{"guided_choice": [], "guided_grammar": "", "guided_decoding_backend": "x", "guided_whitespace_pattern": ""},
    **{"service_tier": "flex", "prompt_cache_retention": "24h", "max_new_tokens": 3, "max_tokenz": 3},
    **{"continuous_usage_stats": True, "priorty": 1, "num_beams": 1, "regex": "a"},
}
ASKING_TEXT = {"suffix": "x", "prompt_embeds": "x", "top_logprobs": 3}
ASKING_CHAT = {
    **{
        "echo": True,
        "prompt_logprobs": 0,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
    },
    **{"functions": [{"name": "f"}], "function_call": {"name": "f"}, "modalities": ["audio"], "audio": {}},
    **{"prediction": {}, "web_search_options": {}, "reasoning_effort": "low", "verbosity": "low", "store": True},
    **{"add_special_tokens": True, "add_generation_prompt": False, "continue_final_message": True},
    **{"chat_template": "x", "documents": [], "mm_processor_kwargs": {}},
    **{"include_reasoning": False, "thinking_token_budget": 5, "prompt": "x", "reasoning": {}},
}


@pytest.mark.parametrize(
    ("chat", "name", "value"),
    [(chat, *field) for chat in (False, True) for field in (ASKING | (ASKING_CHAT if chat else ASKING_TEXT)).items()],
)
def test_no_field_is_without_effect_but_those_that_are_listed(chat, name, value):
    with pytest.raises(Refused, match=rf"^{name} ") as error:
        parsed(chat, **{name: value})
    assert (error.value.status, error.value.param) == (400, name)
    assert parsed(chat, **{name: None}) == parsed(chat)


@pytest.mark.parametrize("chat", [False, True])
def test_what_asks_for_nothing_is_taken(chat):
    nothing = {"model": "any", "user": "me", "metadata": {"a": "b"}, "n": 1, "presence_penalty": 0.0, "bad_words": []}
    nothing |= (
        {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "store": False, "top_logprobs": 0}
        if chat
        else {"echo": False}
    )
    nothing |= {"logit_bias": {}, "frequency_penalty": 0, "response_format": {"type": "text"}}
    assert parsed(chat, **nothing) == parsed(chat)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": True}, "n must be a whole number from 1 to"),
        ({"n": 0}, "n must be a whole number from 1 to"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be a whole number from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is for requests without stream: leave one out"),
        ({"frequency_penalty": 3}, "frequency_penalty must be a number from -2 to 2, got 3"),
        *(
            ({"logit_bias": bias}, "logit_bias must be an object of tokens from 0 to 9, in quotes, and numbers from -1")
            for bias in (5, {"10": 1}, {"x": 1}, {"-1": 1}, {"1": 101}, {"1": True}, {"1": None}, {"1": 1, "01": 1})
        ),
        ({"response_format": {"type": "x"}}, r'response_format\.type must be "text", "json_object" or "json_schema"'),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            r"response_format\.json_schema\.schema is missing",
        ),
        ({"service_tier": "flex"}, 'service_tier must be "auto" or "default" on this server, got "flex": leave it out'),
        ({"bad_words": ["x"]}, "bad_words are not supported by this server: leave them out"),
        ({"suffix": "x"}, "suffix is not supported by this server: leave it out"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1, got 1.5"),
        ({"stop_token_ids": [10]}, "stop_token_ids must be a list of up to 5 tokens from 0 to 9"),
        ({"stop_token_ids": 1}, "stop_token_ids must be a list"),
        ({"stop_token_ids": list(range(6))}, "stop_token_ids must be a list of up to 5 tokens"),
        ({"cache_salt": ""}, "cache_salt must be a text of at least one character"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"add_special_tokens": 1}, "add_special_tokens must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for requests with stream: true: leave it out"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            r"stream_options\.continuous_usage_stats is for requests with include_usage: true beside it: leave it out",
        ),
        ({"seed": -2}, "seed must be a whole number from -1 to"),
        ({"best_of": 2}, "best_of must be 1 on this server, got 2: leave it out"),
        ({"stream": True, "stream_options": {"x": 1}}, r"stream_options\.x is not supported by this server"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            r"stream_options\.include_obfuscation is not supported by this server: leave it out",
        ),
    ],
)
def test_values_that_cannot_be_are_named(fields, words):
    with pytest.raises(Refused, match=f"^{words}"):
        parsed(**fields)


@pytest.mark.parametrize(
    ("fields", "chat", "words"),
    [
        ({"promt": "x"}, False, "prompt is missing; promt is not supported by this server"),
        ({"mesages": []}, True, "messages is missing; mesages is not supported by this server"),
        ({"prompt": "x"}, True, "messages is missing"),
        ({"messages": [{"content": "x"}]}, True, r"messages\[0\]\.role is missing"),
    ],
)
def test_a_field_that_is_missing_is_named_and_what_may_be_meant_for_it(fields, chat, words):
    with pytest.raises(Refused, match=f"^{words}$"):
        parse(json.dumps(fields).encode(), chat=chat, num_tokens=10)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools are not supported by this server: leave"),
        ({"logprobs": 3}, "logprobs must be true or false, got 3"),
        ({"top_logprobs": 3}, "top_logprobs is for requests with logprobs: true beside it: leave it out"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be a whole number from 0 to 20"),
        ({"chat_template_kwargs": "x"}, 'chat_template_kwargs must be an object, got "x"'),
    ],
)
def test_values_that_a_chat_cannot_have_are_named(fields, words):
    with pytest.raises(Refused, match=f"^{words}"):
        parsed(chat=True, **fields)


def test_messages_must_be_texts():
    image = {"type": "image_url", "image_url": {"url": "x"}}
    wrong = (None, 1, [], [image], [{"type": "text"}], [{"type": "text", "text": 1}], ["hi"])
    for messages in (None, [], ["hi"], [{"content": "hi"}], *([{"role": "user", "content": x}] for x in wrong)):
        with pytest.raises(Refused, match=r"^messages"):
            said(*messages or [])


def test_a_message_may_come_in_parts():
    parts = [{"type": "text", "text": "def"}, {"type": "text", "text": "main"}]
    assert said({"role": "user", "content": parts}) == [{"role": "user", "content": "def\nmain"}]


def test_a_history_has_calls_of_tools_and_their_results():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    nothing = {
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
    }  # what OpenAI's client gives back
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call], **nothing},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    asked, result, empty = said(*history)
    # Templates take arguments as objects, and would print a null.
    assert asked["tool_calls"] == [call | {"function": {"name": "f", "arguments": {"x": 1}}}]
    assert (asked["content"], result) == ("", {"role": "tool", "content": "2"})
    assert empty == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "x", "weight": 1}, r"messages\[0\]\.weight is not supported"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
            r"messages\[0\]\.tool_calls must be",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"arguments": "{}"}}]},
            r"messages\[0\]\.tool_calls must be",
        ),
        ({"role": "user", "content": "x", "tool_calls": "f"}, r"messages\[0\]\.tool_calls must be"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]},
            r"messages\[0\]\.content\[0\]\.cache is not supported by this server: leave it out",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r'messages\[0\]\.content\[0\]\.type must be "text", the one kind of part .* reads, got "image_url"',
        ),
    ],
)
def test_no_part_of_a_message_is_without_effect(message, words):
    with pytest.raises(Refused, match=f"^{words}"):
        said(message)


@pytest.mark.parametrize("name", ["messages", "n", "max_tokens", "tools"])
def test_a_value_is_refused_however_deep_it_is_nested(name):
    """A value that json.loads can read may be nested too deep for json.dumps."""
    for depth in range(850, 1000):
        nested = '{"a":' * depth + "1" + "}" * depth
        with pytest.raises(Refused) as error:
            parse(f'{{"{name}": {nested}}}'.encode(), chat=True, num_tokens=10)
        assert error.value.status == 400


def test_a_text_stops_before_the_first_of_its_stops():
    for pieces, stops, expected in [
        (["ab", "cd"], ["bc"], "a"),
        (["a", "b", "a", "b", "c"], ["abc"], "ab"),
        (["ab", "ab"], ["abc"], "abab"),
        (["x\n", "\n", "y"], ["\n\n", "z"], "x"),
        (["ab"], [], "ab"),
    ]:
        held_back = Stops(stops)
        out = "".join([held_back.push(piece) for piece in pieces] + [held_back.push("", final=True)])
        assert out == expected
        assert held_back.found == (expected != "".join(pieces))


@pytest.mark.parametrize(
    ("stops", "min_tokens", "said", "reason"),
    [
        (["a"], 2, ["a", "a", "b", ""], "stop"),
        (["ba"], 3, ["a", "a", "", ""], "stop"),  # it begins in them, and ends behind them
        (["aa", "aabb"], 2, ["", "", "", "aab", "ac"], ""),
        (["c"], 5, ["a", "a", "b", "a", "c"], ""),
    ],
)
def test_a_stop_does_not_count_in_the_first_tokens(stops, min_tokens, said, reason):
    writer = Writer(SmallDecoder(TOKENIZER), stops, min_tokens)
    *first, last = [writer.push(ord(token), "") for token in "aabac"[: len(said)]]
    assert first == [(text, "") for text in said[:-1]]
    assert last == (said[-1], reason)


def test_a_character_comes_with_the_last_of_its_bytes():
    decoder = SmallDecoder(TOKENIZER)
    assert [decoder.push(byte) for byte in "é".encode()] == ["", "é"]
    assert [decoder.push(0xC3), decoder.finish()] == ["", "�"]
