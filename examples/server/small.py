"""The small transformer of the examples, as an engine and as a text; no torch is needed."""

import codecs
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv
from sampling import Sampling
from tokenizer import END, Tokenizer
from transformer import PagedAttention, Transformer, in_tiles, load

from .worker import Sampled


class SmallEngine:
    """`Transformer` under a `pagedkv.Scheduler`, step by step.

    Parameters
    ----------
    model : Transformer
    cache : pagedkv.PagedKVCache
    options
        Of the scheduler.
    """

    def __init__(self, model: Transformer, cache: pagedkv.PagedKVCache, **options: Any) -> None:
        self.model, self.cache = model, cache
        self.scheduler = pagedkv.Scheduler(cache, eos_token_id=END, **options)
        self._sampling: dict[int, tuple[Sampling, np.random.Generator]] = {}

    def add(self, tokens: list[int], max_tokens: int, *, seed: int | None = None, **sampling: Any) -> int:
        """Let a request wait; ValueError if it can never fit."""
        request = self.scheduler.add(tokens, max_tokens)
        self._sampling[request] = Sampling(**sampling), np.random.default_rng(seed)
        return request

    def cancel(self, request: int) -> None:
        """End a request and free its blocks."""
        del self._sampling[request]
        self.scheduler.abort(request)

    def step(self) -> list[Sampled]:
        """Compute one step; returns the tokens that came of it."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        try:
            attend = PagedAttention(self.model, self.cache, step)
            logits = self.model.forward(step.tokens, attend, step.logits_indices, in_tiles)
            requests, tokens = step.sampled.tolist(), []
            for request, row in zip(requests, logits, strict=True):
                sampling, draws = self._sampling[request]
                tokens.append(sampling.choose(row, draws.random()))
        except BaseException:
            self.scheduler.drop()
            raise
        reasons = {request: reason for request, _, reason in self.scheduler.update(step, tokens)}
        for request in reasons:
            del self._sampling[request]
        return [Sampled(request, token, reasons.get(request, "")) for request, token in zip(requests, tokens)]  # noqa: B905


class SmallText:
    """Prompts to tokens and back; none is longer than the longest tokens of a context."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = context * max(map(len, tokenizer.vocab))
        self.num_tokens = len(tokenizer)

    def encode(self, prompt: str) -> list[int]:
        data = prompt.encode()
        if len(data) > self._max_bytes:
            raise ValueError(f"a context has at most {self._max_bytes} bytes, got {len(data)}: shorten the prompt")
        return self._tokenizer.encode(data)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A model of source code has no roles: they become comments."""
        turns = "".join(f"# {message['role']}: {message['content']}\n" for message in messages)
        return self.encode(f"\n\n\n{turns}")

    def decoder(self) -> "SmallDecoder":
        return SmallDecoder(self._tokenizer)


class SmallDecoder:
    """Tokens to text as they come: a character appears with the last of its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(b"" if token == END else self._tokenizer.decode([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def small(
    weights: Path, context: int | None, num_blocks: int, block_size: int, prefix_cache: bool, **options: Any
) -> tuple[SmallEngine, SmallText]:
    """The engine and the text of a file that train.py wrote; ValueError if it is none, or has no context of a block."""
    model, tokenizer = load(weights, context)
    if model.context < block_size:
        raise ValueError(f"a block of {block_size} tokens is longer than the context of {model.context}: change one")
    model.context -= model.context % block_size
    cache = pagedkv.PagedKVCache(
        *(model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim),
        max_seq_len=model.context,
        prefix_cache=prefix_cache,
    )
    return SmallEngine(model, cache, **options), SmallText(tokenizer, model.context)
