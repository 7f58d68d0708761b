"""The small transformer of the examples behind `pagedkv serve`'s server, which serves any engine; needs no torch.

    pip install -e ".[serve]"      (starlette and uvicorn)
    python examples/serve.py
    curl -N http://127.0.0.1:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 60, "stream": true}'

An engine of your own needs what `SmallEngine` has, and its text what `SmallText` has.
"""

import argparse
import codecs
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pagedkv
from pagedkv.stores import SwapSpace

try:
    from pagedkv.server.command import add_server_options
    from pagedkv.server.protocol import too_long
    from pagedkv.server.serve import serve
except pagedkv.BackendUnavailableError as error:
    raise SystemExit(str(error)) from None

from sampling import Sampling, require_finite
from tokenizer import END, Tokenizer
from transformer import WEIGHTS, PagedAttention, Transformer, in_tiles, load


class Sampled(NamedTuple):
    """The next token of a request.

    Attributes
    ----------
    request, token : int
    reason, message : str
        Why it ended: "stop", "length", or "error" with a message; empty before that.
    num_cached : int
        How many tokens of the prompt the prefix cache had.
    """

    request: int
    token: int
    reason: str
    message: str = ""
    num_cached: int = 0


@dataclass
class Asked:
    """The options of a request: its sampling, and the tokens that end it once it has min_len tokens."""

    sampling: Sampling
    draws: np.random.Generator
    ends: list[int]
    min_len: int


class SmallEngine:
    """Runs a `Transformer` under a `pagedkv.Scheduler`.

    Parameters
    ----------
    model : Transformer
    cache : pagedkv.PagedKVCache
    options
        Options of the scheduler.
    """

    def __init__(self, model: Transformer, cache: pagedkv.PagedKVCache, **options: Any) -> None:
        self.model, self.cache = model, cache
        self.scheduler = pagedkv.Scheduler(cache, **options)
        self._asked: dict[int, Asked] = {}

    def add(
        self,
        tokens: list[int],
        max_tokens: int,
        *,
        seed: int | None = None,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        salt: str | None = None,
        snapshot_at: Sequence[int] = (),
        **sampling: Any,
    ) -> int:
        """Add a request, with options as in the Engine for transformers; ValueError for others, or if it cannot fit."""
        if lacking := [name for name in sampling if name not in Sampling.__annotations__]:
            raise ValueError(f"{lacking[0]} is not supported by the small model: leave it out")
        if min_tokens > max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {max_tokens}, got {min_tokens}")
        ends = [*stop_token_ids, *([] if ignore_eos else [END])]
        asked = Asked(Sampling(**sampling), np.random.default_rng(seed), ends, len(tokens) + min_tokens)
        request = self.scheduler.add(tokens, max_tokens, priority=priority, salt=salt, snapshot_at=snapshot_at)
        self._asked[request] = asked
        return request

    def abort(self, request: int) -> bool:
        """End a request and free its blocks; False if it had ended before."""
        self._asked.pop(request, None)
        return self.scheduler.abort(request)

    def step(self) -> list[Sampled]:
        """Run one step, and return its results."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        try:
            attend = PagedAttention(self.model, self.cache, step)
            # Check the last row of each request, even if nothing is drawn: if it is finite, so are its keys and values.
            logits = self.model.forward(step.tokens, attend, step.batch.query_starts[1:] - 1, in_tiles)
            sampled = {*step.sampled.tolist()}
            rows = zip(step.requests.tolist(), logits, strict=True)
            made = [one for request, row in rows if (one := self._draw(request, row, request in sampled))]
            for one in made:
                if one.reason == "error":
                    self.scheduler.abort(one.request)  # before the update, after which others could find its blocks
            tokens = [max(0, one.token) for one in made if one.request in sampled]
            full = {request for request, _, _ in self.scheduler.update(step, tokens)}
        except BaseException:
            self.scheduler.drop()
            raise
        for i, one in enumerate(made):
            if one.reason == "stop" and one.request not in full:
                self.scheduler.abort(one.request)
            if not one.reason and one.request in full:
                made[i] = one._replace(reason="length")
            if made[i].reason:
                del self._asked[one.request]
        return made

    def _draw(self, request: int, logits: np.ndarray, is_sampled: bool) -> Sampled | None:
        """Draw the next token of a request from the logits of its last row; None if its prompt is not done."""
        asked, num_cached = self._asked[request], self.scheduler.num_cached(request)
        try:
            require_finite(logits)
        except FloatingPointError as error:
            return Sampled(request, -1, "error", str(error), num_cached)
        if not is_sampled:
            return None
        tokens = self.scheduler.tokens(request)
        banned = asked.ends if len(tokens) < asked.min_len else []
        token = asked.sampling.choose(logits, asked.draws.random(), tokens, banned)
        return Sampled(request, token, "stop" if token in asked.ends else "", "", num_cached)


class SmallText:
    """Converts prompts to tokens and back; prompts that no context could hold are refused."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._max_bytes = context * max(map(len, tokenizer.vocab))
        self.num_tokens = len(tokenizer)

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Convert a text; there are no special tokens to add."""
        data = prompt.encode()
        if len(data) > self._max_bytes:
            raise too_long(self._context, f"your prompt has {len(data)} bytes, and {self._max_bytes} are the most")
        return self._tokenizer.encode(data)

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
        """Convert messages to comments, since a model of source code knows no roles and no tools.

        The second list is for models whose layers have states.
        """
        if options:
            raise ValueError(f"there is no chat template that could use {', '.join(options)}")
        lines = []
        for message in messages:
            who = " ".join(filter(None, [message["role"], message.get("name")]))
            calls = [
                f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", [])
            ]
            lines += [f"# {who}: {said}\n" for said in [message["content"], *calls] if said or not calls]
        return self.encode("".join(["\n\n\n", *lines])), []

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens).decode(errors="replace")

    def decoder(self) -> "SmallDecoder":
        return SmallDecoder(self._tokenizer)


class SmallDecoder:
    """Decodes tokens as they come; a character appears with the last of its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(b"" if token == END else self._tokenizer.decode([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def small(args: argparse.Namespace, pool: dict[str, Any], steps: dict[str, Any]) -> tuple[SmallEngine, SmallText, str]:
    """Load a file of train.py: its engine, its text, and what it is.

    ValueError if it is invalid or a block exceeds its context.
    """
    model, tokenizer = load(args.weights, args.context)
    if model.context < args.block_size:
        block = f"a block of {args.block_size} tokens"
        raise ValueError(f"{block} is longer than the context of {model.context}: change one")
    model.context -= model.context % args.block_size
    sizes = {"num_layers": model.num_layers, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    cache = pagedkv.PagedKVCache(**sizes, max_seq_len=model.context, **pool)
    if steps["swap"] is not None:
        steps["swap"] = SwapSpace(cache, steps["swap"])
    text = SmallText(tokenizer, model.context)
    return SmallEngine(model, cache, **steps), text, "the small model in float32 on the CPU"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve the small model over OpenAI's protocol.")
    add_server_options(parser)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="a file that train.py wrote")
    parser.set_defaults(model="small", num_blocks=1024)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(serve(parse(), small))
