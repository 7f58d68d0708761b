"""What examples/serve.py takes as a request, and how it makes texts of tokens."""

import json

import pytest

from .serving import TOKENIZER

from server.protocol import Refused, Stops, parse  # isort: skip
from server.small import SmallDecoder  # isort: skip


def test_messages_must_be_texts():
    wrong = (None, 1, [], [{"type": "image"}], [{"type": "text"}], ["hi"])
    for messages in (None, [], ["hi"], [{"content": "hi"}], *([{"role": "user", "content": x}] for x in wrong)):
        with pytest.raises(Refused, match=r"messages"):
            parse(json.dumps({"messages": messages}).encode(), chat=True, num_tokens=10)


def test_a_message_may_come_in_parts():
    parts = [{"type": "text", "text": "def"}, {"type": "text", "text": "main"}]
    wanted = parse(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode(), chat=True, num_tokens=10)
    assert wanted.prompt == [{"role": "user", "content": "def\nmain"}]


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


def test_a_character_comes_with_the_last_of_its_bytes():
    decoder = SmallDecoder(TOKENIZER)
    assert [decoder.push(byte) for byte in "é".encode()] == ["", "é"]
    assert [decoder.push(0xC3), decoder.finish()] == ["", "�"]
