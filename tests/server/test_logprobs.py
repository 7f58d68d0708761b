"""Log-probabilities in answers, without a model."""

import json
import math

import pytest

from pagedkv.server.logprobs import Scores, of_chat, of_completion, token_text

from .serving import TOKENIZER

from serve import SmallDecoder  # isort: skip

A, B, C = b"abc"
PROMPT = [(B, -1.0, [(A, -0.5)]), (C, -math.inf, [(A, -0.5)])]


def test_the_text_of_a_token_has_the_space_that_a_beginning_leaves_out():
    words = {1: "a", 2: " b", 3: "<s>"}
    assert [token_text(lambda tokens: "".join(map(words.get, tokens)).removeprefix(" "), x) for x in words] == [
        *words.values()
    ]


def made(num_top, num_prompt_top=None):
    """What is made of the prompt abc, and a c behind it."""
    of = Scores(
        lambda token: "a" if token == B else chr(token), SmallDecoder(TOKENIZER), [A, B, C], num_top, num_prompt_top
    )
    return [*of.prompt(PROMPT), of.token(C, -2.0, [(A, -0.1), (B, -0.2)])], of.of_prompt(PROMPT)


def test_a_completion_names_its_tokens_among_the_most_probable_ones():
    """Two tokens have the same text here, of which the most probable one counts."""
    assert of_completion(made(2)[0]) == {
        "tokens": ["a", "a", "c", "c"],
        "token_logprobs": [None, -1.0, -9999.0, -2.0],
        "top_logprobs": [None, {"a": -0.5}, {"a": -0.5, "c": -9999.0}, {"a": -0.1, "c": -2.0}],
        "text_offset": [0, 1, 2, 3],
    }
    assert of_completion(made(0)[0])["top_logprobs"] == [None, {"a": -1.0}, {"c": -9999.0}, {"c": -2.0}]


def test_a_chat_names_as_many_as_it_asks_for():
    *_, last = of_chat(made(1)[0])["content"]
    first = {"token": "a", "logprob": -0.1, "bytes": [A]}
    assert last == {"token": "c", "logprob": -2.0, "bytes": [C], "top_logprobs": [first]}


@pytest.mark.parametrize("num_top", [0, 1])
def test_a_prompt_has_ranks_where_they_are_known(num_top):
    _, [nothing, one, other] = made(None, num_top)
    top = {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}} if num_top else {}
    assert nothing is None
    assert one == {"98": {"logprob": -1.0, "rank": None, "decoded_token": "a"}, **top}
    assert json.loads(json.dumps(other, allow_nan=False))["99"]["logprob"] == -9999.0
