"""TextDecoder: the same text as all tokens at once, a few characters late, in constant time per token."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pagedkv.integrations.transformers.text import TextDecoder

from .byte_tokenizer import byte_tokenizer

PARTS = ["a", "é", "中", "🙂", "\ufffd"]


def ids_of_bytes(tokenizer):
    """The token of each byte."""
    ids = {}
    for text in (*map(chr, range(128)), *(chr(c) for c in range(128, 2048)), "\ufffd", "\U0001f642", "\U00010000"):
        ids |= dict(zip(text.encode(), tokenizer(text).input_ids, strict=True))
    return ids


def fallback_tokenizer():
    """As of Llama 2: tokens of bytes, of which a run is a text only as a whole."""
    vocab = {"<unk>": 256, "▁a": 257, "b": 258} | {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_decoding_byte_by_byte_gives_the_same_text_at_most_three_characters_late():
    tokenizer, draw = byte_tokenizer(), random.Random(0)
    ids = ids_of_bytes(tokenizer)
    known = sorted(ids)
    for _ in range(300):
        data = b""
        for _ in range(draw.randint(1, 12)):
            part = draw.choice(PARTS).encode()
            broken = part[: draw.randint(1, 4)], bytes([draw.choice(known)]) * draw.randint(1, 9)
            data += draw.choice([part, *broken])
        tokens, decoder, text = [ids[byte] for byte in data if byte in ids], TextDecoder(tokenizer), ""
        for n, token in enumerate(tokens, 1):
            text += decoder.push(token)
            assert len(tokenizer.decode(tokens[:n])) - len(text) <= 3, data
        assert text + decoder.finish() == tokenizer.decode(tokens), data


def test_a_run_of_byte_tokens_is_decoded_as_at_once():
    tokenizer, draw = fallback_tokenizer(), random.Random(0)
    for _ in range(200):
        tokens = []
        for _ in range(draw.randint(1, 12)):
            tokens += draw.choice([[257], [258], *(list(part.encode()) for part in PARTS[1:4])])
        decoder = TextDecoder(tokenizer)
        assert "".join(map(decoder.push, tokens)) + decoder.finish() == tokenizer.decode(tokens)


@pytest.mark.parametrize("text", ["ab", "\ufffd", "中", "🙂"])
@pytest.mark.parametrize("is_broken", [False, True])
def test_decoding_a_token_takes_constant_time(text, is_broken, monkeypatch):
    tokenizer, lens = byte_tokenizer(), []
    tokens = tokenizer(text * 100).input_ids
    decoder, decode = TextDecoder(tokenizer), tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: lens.append(len(ids)) or decode(ids, **options))
    for token in tokens[:1] * 200 if is_broken else tokens:
        decoder.push(token)
    assert max(lens) <= 17
