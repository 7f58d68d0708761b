"""Texts of a JSON schema: valid whatever the model says, however the engine computes them."""

import json
import sys

import pytest
import torch

from pagedkv.integrations.transformers import Engine

from .byte_tokenizer import byte_tokenizer
from .models import make_model

pytest.importorskip("llguidance")
KINDS = [
    {"type": "integer", "minimum": -99, "maximum": 99},
    {"type": "string", "maxLength": 4},
    {"type": "boolean"},
    {"enum": ["red", "green", None]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
]
FIELDS = {f"{i}": KINDS[i % len(KINDS)] for i in range(30)}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
SMALL = SCHEMA | {"properties": {"a": KINDS[0], "b": KINDS[1]}, "required": ["a", "b"]}
END = 256


def nested(depth):
    """A schema of an array in an array, and so on."""
    schema = {"type": "array"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def format_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(eos_token="<end>")


@pytest.fixture(scope="module")
def model():
    return make_model("Llama", vocab_size=300, eos_token_id=END, max_position_embeddings=2048)


def texts(engine, tokenizer, count, schema, num_tokens=60, **options):
    requests = [
        engine.add("x" * (i + 1), num_tokens, response_format=format_of(schema), temperature=2.0, seed=i, **options)
        for i in range(count)
    ]
    said, reasons = {request: [] for request in requests}, {}
    for sampled in engine.run():
        said[sampled.request].append(sampled.token)
        reasons[sampled.request] = sampled.reason
    assert set(reasons.values()) == {"stop"}
    assert {tokens.pop() for tokens in said.values()} == {END}
    return [tokenizer.decode(tokens) for tokens in said.values()]


def assert_valid(text, schema):
    value = json.loads(text)
    assert [*value] == [*schema["properties"]]
    for name, of in schema["properties"].items():
        x = value[name]
        if "enum" in of:
            assert x in of["enum"]
        elif of["type"] == "array":
            assert len(x) <= 2
            assert all(type(one) is int and 0 <= one <= 9 for one in x)
        elif of["type"] == "string":
            assert isinstance(x, str)
            assert len(x) <= 4
        else:
            assert type(x) is {"integer": int, "boolean": bool}[of["type"]]
            assert -99 <= x <= 99


def test_a_random_model_fills_30_fields_in_16_requests(model, tokenizer):
    made = texts(Engine(model, tokenizer, num_blocks=1024), tokenizer, 16, SCHEMA, 1000)
    for text in made:
        assert_valid(text, SCHEMA)
    assert len(set(made)) == 16


def test_preemption_goes_on_in_the_middle_of_a_value(model, tokenizer):
    expected = texts(Engine(model, tokenizer, num_blocks=64), tokenizer, 4, SMALL)
    engine = Engine(model, tokenizer, num_blocks=16, block_size=4)
    assert texts(engine, tokenizer, 4, SMALL) == expected
    assert engine.scheduler.num_preempted > 0


def test_any_object(model, tokenizer):
    engine = Engine(model, tokenizer, num_blocks=64)
    options = {"response_format": {"type": "json_object"}, "temperature": 1.0, "seed": 1}
    text = "".join(engine.stream("x", 40, **options, logit_bias={tokenizer("}").input_ids[0]: 8.0}))
    assert isinstance(json.loads(text), dict)
    assert [*engine.tokens([1], 3, response_format={"type": "text"})] == [*engine.tokens([1], 3)]


def test_a_step_that_fails_late_goes_on_with_the_same_text(model, tokenizer, monkeypatch):
    expected = texts(Engine(model, tokenizer, num_blocks=64), tokenizer, 1, SMALL)
    engine = Engine(model, tokenizer, num_blocks=64)
    run_step, update, fails = engine._run_step, engine.scheduler.update, iter(range(10**6))

    def failing(*args):
        if next(fails) % 3 == 0:
            raise ZeroDivisionError
        return update(*args)

    def patient(*args):
        while True:
            try:
                return run_step(*args)
            except ZeroDivisionError:
                pass

    monkeypatch.setattr(engine.scheduler, "update", failing)
    monkeypatch.setattr(engine, "_run_step", patient)
    assert texts(engine, tokenizer, 1, SMALL) == expected


def test_a_processor_has_no_way_around_the_schema(model, tokenizer):
    engine = Engine(model, tokenizer, num_blocks=64)
    worst = tokenizer("}").input_ids[0]
    [text] = texts(
        engine,
        tokenizer,
        1,
        SMALL,
        logits_processor=lambda _, logits: logits.index_fill(0, torch.tensor([worst]), 30.0),
    )
    assert_valid(text, SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": "json"}, r"^response_format must be \{\"type\": \"json_object\"\}.*, got 'json'$"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "^response_format must be "),
        ({"response_format": format_of({"type": "nothing"})}, "a schema that llguidance does not take: "),
        ({"response_format": format_of(nested(400))}, "a schema that llguidance does not take: recursion limit"),
        ({"response_format": format_of(nested(5_000))}, "a schema that llguidance does not take: maximum recursion"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens and ignore_eos must be left out"),
    ],
)
def test_refusals(model, tokenizer, options, message):
    engine = Engine(model, tokenizer, num_blocks=8)
    with pytest.raises(ValueError, match=message):
        engine.add([1], 5, **options)
    assert list(engine.run()) == []


def test_what_it_needs(model, tokenizer, monkeypatch):
    options = {"response_format": {"type": "json_object"}}
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        Engine(model, num_blocks=8).add([1], 5, **options)
    with pytest.raises(ValueError, match="needs a token that ends the text: name it as eos_token_id"):
        Engine(model, tokenizer, num_blocks=8, eos_token_id=()).add([1], 5, **options)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match=r"response_format needs llguidance, .*: pip install .*\[guidance\]"):
        Engine(model, tokenizer, num_blocks=8).add([1], 5, **options)
