"""Engine: a model of transformers under pagedkv's scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from ...cache import PagedKVCache
from ...errors import BackendUnavailableError
from ...memory.arguments import MAX_INT32, as_int
from ...memory.prefix.prompt import ids_of
from ...scheduling import Scheduler, Step
from .attention import NAME, CachedPass
from .models import kv_shape, require_positions, require_supported, text_config, uncompiled
from .sampling import Sampling, choose
from .text import TextDecoder
from .use import use_pagedkv

_Item = TypeVar("_Item")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate["Engine", _P], _R]


def _whole(method: _Method[_P, _R]) -> _Method[_P, _R]:
    """A method in the middle of which no request ends, though the garbage collector may close a stream at any time."""

    @wraps(method)
    def whole(self: Engine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            self._in_call = True
            return method(self, *args, **kwargs)
        finally:
            self._end_closed()

    return whole


class Sampled(NamedTuple):
    """The next token of a request.

    Attributes
    ----------
    request : int
        Its number.
    token : int
    reason : str
        Why the text ends with it: "stop" for an end token, "length" for max_tokens; empty while it goes on.
    """

    request: int
    token: int
    reason: str


class Engine:
    """Continuous batching of a model of transformers: requests come and go while others generate.

    Its requests share the blocks of what they begin with, long prompts are computed in chunks beside the tokens of
    others, and when the pool is full the last ones wait: it is a :class:`~pagedkv.Scheduler` over a
    :class:`~pagedkv.PagedKVCache`. All tokens of a step go through the model in one row without padding, and only the
    last one of each request gets logits.

    One thread at a time may call it. After an error of the model, or of a listener to the cache's events, nothing of
    its step has happened, and it can be made again, with the same draws, or its requests cancelled.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder in eval mode, on the CPU or a CUDA device. Its layers attend through pagedkv from now on.
    tokenizer : optional
        Of transformers, for prompts and streams that are text.
    memory : str, int, float or None
        What K and V may take: "2GiB", bytes, or a share, 0.9 say, of what is free on the device now.
    num_blocks : int or None
        In place of memory.
    block_size : int
        P, tokens per block.
    max_num_batched_tokens, max_num_seqs
        As for :class:`~pagedkv.Scheduler`.
    eos_token_id : int, sequence of int, or None
        The tokens that end a text; by default those of the model's generation_config.
    **options
        Others of :class:`~pagedkv.PagedKVCache`: `kv_dtype`, `max_seqs`, `prefix_cache`, `eviction`, ...

    Attributes
    ----------
    cache : PagedKVCache
    scheduler : Scheduler

    Raises
    ------
    TypeError, ValueError
        An argument is not as described, paged attention is not what the model's layers do, or the model counts
        positions itself.
    BackendUnavailableError
        There are no kernels for the model's device.

    Notes
    -----
    A text does not depend on the other requests as far as the model's own layers do not: torch's matrix products may
    round otherwise for another number of rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        memory: str | int | float | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        require_supported(model)
        require_positions(model)
        if not uncompiled(model).can_generate():
            raise ValueError(f"{type(model).__name__} has no head that gives logits: load it with AutoModelForCausalLM")
        ends = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        if not isinstance(ends, Iterable):
            ends = () if ends is None else (ends,)
        self._ends = {as_int("eos_token_id", end, minimum=None) for end in ends}
        use_pagedkv(model)
        if model.config._attn_implementation != NAME:
            raise BackendUnavailableError(f"an Engine needs kernels for {model.device}, which the warning says more of")
        num_layers, num_kv_heads, head_dim = kv_shape(model)
        where: dict[str, Any] = {"dtype": model.dtype, "array_module": torch, "device": model.device, "memory": memory}
        context = getattr(text_config(model), "max_position_embeddings", None)
        block_size = as_int("block_size", block_size, minimum=1, maximum=context or MAX_INT32)
        where["max_seq_len"] = context and context - context % block_size  # whole blocks, and no position beyond
        self.cache = PagedKVCache(num_layers, num_blocks, block_size, num_kv_heads, head_dim, **where | options)
        self.scheduler = Scheduler(self.cache, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        self._model, self._tokenizer = model, tokenizer
        self._vocab_size = len(model.get_input_embeddings().weight)
        self._samplings: dict[int, Sampling] = {}
        self._streams: dict[int, deque[Sampled]] = {}
        self._closed: list[int] = []  # requests whose streams were closed, and that have not ended yet
        self._in_call = False

    def __repr__(self) -> str:
        return f"Engine({type(self._model).__name__}, {self.scheduler!r})"

    @_whole
    def add(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        priority: int = 0,
        salt: str | bytes | None = None,
    ) -> int:
        """Let a request wait for its start.

        Parameters
        ----------
        prompt : str or (num_tokens,) ints
            A text needs the engine's tokenizer.
        max_tokens : int
            Tokens to generate, at most.
        temperature, top_k, top_p, seed
            How they are drawn: by default the most probable one is taken. With a seed the same ones are drawn again.
        priority, salt
            As for :meth:`~pagedkv.Scheduler.add`.

        Returns
        -------
        int
            The number of the request.

        Raises
        ------
        TypeError, ValueError
            An argument is not as described, or the request could never fit.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        ids: Any = ids_of(self._ids(prompt))
        # In a step it would fail, and all others with it.
        if (largest := int(ids.max(initial=0))) >= self._vocab_size:
            raise ValueError(
                f"a token of the prompt is {largest}, and {type(self._model).__name__} has {self._vocab_size}: it "
                "needs its own tokenizer"
            )
        request = self.scheduler.add(ids, max_tokens, priority=priority, salt=salt)
        self._samplings[request] = sampling
        return request

    @_whole
    def cancel(self, request: int) -> None:
        """End a request and free its blocks.

        Raises
        ------
        KeyError
            It has ended or never was.
        """
        self._end(request)

    @_whole
    def step(self) -> list[Sampled]:
        """Compute one step.

        Returns
        -------
        list of Sampled
            One for each request that got a token: those whose prompt is not done yet got none. Empty, too, when there
            is no request.

        Raises
        ------
        CapacityError
            As of :meth:`~pagedkv.Scheduler.schedule`: what else you keep in the cache is in the way.
        """
        self.scheduler.drop()  # what an interrupt has left
        step = self.scheduler.schedule()
        if step is None:
            return []
        requests = step.sampled.tolist()
        try:
            samplings = [self._samplings[request] for request in requests]
            tokens = choose(
                self._logits(step), samplings, [len(self.scheduler.tokens(request)) for request in requests]
            )
            reasons = {request: reason for request, _, reason in self.scheduler.update(step, tokens)}
        except BaseException:
            self.scheduler.drop()
            raise
        for request, token in zip(requests, tokens, strict=True):
            if token in self._ends:
                if request not in reasons:
                    self.scheduler.abort(request)
                reasons[request] = "stop"
        for request in reasons:
            del self._samplings[request]
        made = [Sampled(*pair, reasons.get(pair[0], "")) for pair in zip(requests, tokens, strict=True)]
        for sampled in made:
            if sampled.request in self._streams:
                self._streams[sampled.request].append(sampled)
        return made

    def run(self) -> Iterator[Sampled]:
        """The tokens of all requests as they come, until none is left; others may be added meanwhile."""
        while self.scheduler.num_running or self.scheduler.num_waiting:
            yield from self.step()

    def tokens(self, prompt: str | Sequence[int], max_tokens: int, **options: Any) -> Generator[int]:
        """Add a request and iterate over its tokens, without the one that ends it.

        Several can be open at a time: each step that one of them waits for is a step of all requests. Closing the
        iterator cancels the request.

        Parameters
        ----------
        prompt, max_tokens, **options
            As for `add`, which raises what it raises.
        """
        request = self.add(prompt, max_tokens, **options)
        self._streams[request] = deque()
        return _begun(self._read(request))

    def stream(self, prompt: str | Sequence[int], max_tokens: int, **options: Any) -> Generator[str]:
        """Add a request and iterate over its text, piece by piece; otherwise as `tokens`.

        Raises
        ------
        ValueError
            The engine has no tokenizer.
        """
        decoder = TextDecoder(self._require_tokenizer())
        return _begun(_text(self.tokens(prompt, max_tokens, **options), decoder))

    def _read(self, request: int) -> Generator[int]:
        stream, reason = self._streams[request], ""
        try:
            yield -1  # for `_begun`
            while not reason:
                while not stream:
                    if request not in self._samplings:
                        return  # `cancel` was called meanwhile
                    self.step()
                _, token, reason = stream.popleft()
                if reason != "stop":
                    yield token
        finally:
            self._closed.append(request)
            if not self._in_call:
                self._end_closed()

    def _end(self, request: int) -> None:
        self.scheduler.abort(request)
        del self._samplings[request]
        self._streams.pop(request, None)

    def _end_closed(self) -> None:
        try:
            self._in_call = True
            while self._closed:
                request = self._closed[-1]
                self._streams.pop(request, None)
                if request in self._samplings:
                    self._end(request)
                self._closed.remove(request)
        finally:
            self._in_call = False

    def _logits(self, step: Step) -> torch.Tensor:
        """Logits of the rows that a token is chosen from, (num_sampled, vocab_size)."""
        with torch.inference_mode():
            out = self._model(
                input_ids=step.tokens[None],
                position_ids=step.batch.positions[None],
                use_cache=False,
                logits_to_keep=step.logits_indices,
                forward_pass=CachedPass(self.cache, step.slots, step.batch),
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _ids(self, prompt: str | Sequence[int]) -> Any:
        return self._require_tokenizer()(prompt).input_ids if isinstance(prompt, str) else prompt

    def _require_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("text needs a tokenizer: Engine(model, tokenizer, ...), or give and take token ids")
        return self._tokenizer


def _begun(iterator: Generator[_Item]) -> Generator[_Item]:
    """A generator past its first item, which is for that: closing one that has not begun would end no request."""
    next(iterator)
    return iterator


def _text(tokens: Generator[int], decoder: TextDecoder) -> Generator[str]:
    with closing(tokens):
        yield ""  # for `_begun`
        for token in tokens:
            if piece := decoder.push(token):
                yield piece
        if piece := decoder.finish():
            yield piece
