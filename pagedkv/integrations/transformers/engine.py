"""Engine: continuous batching of a model of transformers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from transformers import PreTrainedModel

from ...commit import commit
from ...errors import BackendUnavailableError
from ...memory.arguments import MAX_INT32, as_int
from ...memory.prefix.prompt import ids_of
from ...scheduling import Scheduler, Step
from .attention import uses_pagedkv
from .cache import make_kv_cache, make_swap_space, require_options
from .generation import Generation, is_one_prompt, options_of_choices, wait_for
from .grammar import Grammars, schema_of
from .hybrid import HybridSteps
from .models import (
    has_states,
    num_ranks,
    require_one_rotation,
    require_positions,
    require_supported,
    text_config,
    uncompiled,
)
from .options import RequestOptions
from .prompts import Prompt, end_of_messages, prompt_ids, require_tokenizer, tokenizer_of
from .request import EngineRequest
from .results import Sampled, last_logits, plan_results, rows_with_logits
from .stats import EngineStats
from .stream import Stream
from .text import TextDecoder
from .use import use_pagedkv

if TYPE_CHECKING:
    from .ranks import Ranks

_Item = TypeVar("_Item")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate["Engine", _P], _R]


def _one_at_a_time(method: _Method[_P, _R]) -> _Method[_P, _R]:
    """Guard a method: RuntimeError in the middle of another one, and recovery if an earlier one was interrupted."""

    @wraps(method)
    def call(self: Engine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._is_busy:
            raise RuntimeError(
                f"{method.__name__.strip('_')} was called in the middle of another call of this Engine, by another "
                "thread or by a callback: let one thread make all calls, and give it the requests of the others in a "
                "queue, as `pagedkv serve` does"
            )
        self._is_busy = True
        try:
            if self._is_interrupted:
                self._recover()
            return method(self, *args, **kwargs)
        finally:
            self._is_busy = False

    return call


class Engine:
    """Serves a model of transformers with continuous batching: requests come and go while others generate.

    A :class:`~pagedkv.Scheduler` over a :class:`~pagedkv.PagedKVCache` plans the steps: requests share the blocks of
    common prefixes, long prompts are computed in chunks beside the tokens of others, and when the pool is full the last
    requests wait. All tokens of a step go through the model in one row without padding, and only the last token of
    each request gets logits, unless `prompt_logprobs` asks for more. A model whose layers have states takes a pass for
    each number of tokens instead, with a row for each request.

    One thread at a time may call it. After an error of the model its step has changed nothing: repeat it, with the same
    draws, or abort requests. After an interrupt (Ctrl-C), or an error of a listener to the cache's events, the next
    call computes running requests again, except what the prefix cache finds of them.

    A model that transformers has sharded over ranks needs an Engine on each of them, with the same settings. Either all
    ranks make the same calls, or rank 0 makes them and the others `follow`. There an error or an interrupt of a step
    ends the engine.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder in eval mode, on the CPU or a CUDA device; `use_pagedkv` is applied to it.
    tokenizer : optional
        A tokenizer of transformers, for prompts and streams of text; or an object with ``tokenizer(text)``, which
        returns ids or a dict with `input_ids`, ``decode(ids, skip_special_tokens=)``, and for messages `chat_template`
        and ``apply_chat_template(messages, add_generation_prompt=, return_dict=)``.
    memory : str, int, float or None
        Memory for K, V and states, on each rank: "2GiB", bytes, or a share of the free memory of the device, such as
        0.9.
    num_blocks : int or None
        N, in place of `memory`.
    block_size : int
        P, tokens per block.
    max_num_batched_tokens, max_num_seqs
        As in :class:`~pagedkv.Scheduler`.
    eos_token_id : int, sequence of int, or None
        Tokens that end a text; by default those of the model's generation_config.
    snapshot_every : int or None
        As in :class:`~pagedkv.Scheduler`, for a model whose layers have states.
    swap : str, int, float, BlockStore or None
        Where K and V of a preempted request wait if that takes less time than computing them again, as
        :class:`~pagedkv.Scheduler` has it: host memory, "4GiB" say, or a store.
    **options
        Others of :class:`~pagedkv.PagedKVCache`: `kv_dtype`, `max_seqs`, `prefix_cache`, `eviction`, `state_memory`,
        ... The windows and states of the layers are those of the model.

    Attributes
    ----------
    cache : PagedKVCache
    scheduler : Scheduler

    Raises
    ------
    TypeError, ValueError
        An argument is not as described, paged attention cannot run the model, the model counts positions itself, or
        its rotary frequencies depend on the longest request of a step (rope_type dynamic, or longrope beyond its
        original_max_position_embeddings): `max_seq_len` keeps all below that.
    BackendUnavailableError
        There are no kernels for the model's device.

    Notes
    -----
    The prefix cache does not see a change of the model's weights: call ``cache.reset()`` then, while no request runs or
    waits.

    Attention of a request does not depend on other requests, but the model's own layers may: torch's matrix products
    may round differently for another number of rows.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from pagedkv.integrations.transformers import Engine
    >>> heads = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, intermediate_size=64, **heads)).eval()
    >>> engine = Engine(model, num_blocks=16)
    >>> len(list(engine.tokens([1, 5, 3], max_tokens=4, ignore_eos=True)))
    4
    >>> request = engine.add([1, 5, 3], max_tokens=2, ignore_eos=True)
    >>> [sampled.reason for sampled in engine.run()]
    ['', 'length']
    >>> engine.abort(engine.add([1, 5, 3], max_tokens=2))
    True
    >>> engine.step()
    []
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
        snapshot_every: int | None = None,
        swap: Any = None,
        **options: Any,
    ) -> None:
        require_options(type(self), options)
        require_tokenizer(tokenizer)
        require_supported(model)
        require_positions(model)
        if not uncompiled(model).can_generate():
            raise ValueError(f"{type(model).__name__} has no head that gives logits: load it with AutoModelForCausalLM")
        ends = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        if not isinstance(ends, Iterable):
            ends = () if ends is None else (ends,)
        self._ends = {as_int("eos_token_id", end, minimum=None) for end in ends}
        use_pagedkv(model)
        if not uses_pagedkv(uncompiled(model)):
            raise BackendUnavailableError(f"an Engine needs kernels for {model.device}, which the warning says more of")
        context = getattr(text_config(model), "max_position_embeddings", None)
        block_size = as_int("block_size", block_size, minimum=1, maximum=context or MAX_INT32)
        most = context and context - context % block_size  # whole blocks, and no position beyond
        self.cache = make_kv_cache(model, num_blocks, block_size, **{"memory": memory, "max_seq_len": most} | options)
        require_one_rotation(model, self.cache.max_seq_len, block_size)
        of_steps: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
        self._swap = make_swap_space(model, self.cache, swap)
        self.scheduler = Scheduler(self.cache, **of_steps, snapshot_every=snapshot_every, swap=self._swap)
        self._model, self._tokenizer = model, tokenizer
        self._hybrid = HybridSteps(model, self.cache) if has_states(uncompiled(model)) else None
        self._vocab_size = len(model.get_input_embeddings().weight)
        self._grammars: Grammars | None = None  # of the first request that has one
        self._requests: dict[int, EngineRequest] = {}
        self._dropped: deque[int] = deque()  # requests whose streams were closed or dropped, which the next step ends
        self._results: list[Sampled] = []  # computed, and not yet returned by `step`
        self._ranks: Ranks | None = None
        if num_ranks(model) > 1:
            from .ranks import Ranks  # it imports torch.distributed

            of_cache = {name: getattr(self.cache, name) for name in ("block_size", "max_seqs", "max_seq_len")}
            of_steps["max_num_seqs"] = max_num_seqs or 0
            self._ranks = Ranks(model.device, prefix_cache=self.cache.prefix_cache, **of_cache, **of_steps)
        self._num_finished = 0
        self._is_busy = False  # in the middle of a call
        self._is_interrupted = False  # a call began to change the scheduler, and did not end

    def __repr__(self) -> str:
        return f"Engine({type(self._model).__name__}, {self.scheduler!r})"

    def add(self, prompt: Prompt, max_tokens: int, **options: Any) -> int:
        """Add a request, which waits until there is room for it.

        Parameters
        ----------
        prompt : str, list of messages, or (num_tokens,) ints
            A text, messages for the chat template, ``[{"role": "user", "content": "Hi"}]``, or token ids: a list, an
            array, a tensor, or what a tokenizer returns. Texts and messages need the engine's tokenizer.
        max_tokens : int
            The most tokens to generate.
        **options
            Those of `RequestOptions`: temperature, stop, logprobs, ...

        Returns
        -------
        int
            The number of the request.

        Raises
        ------
        TypeError, ValueError
            An argument is not as described, or the request can never fit.
        RuntimeError
            Called in the middle of another call.
        """
        asked = RequestOptions.of(max_tokens, options)
        ids = ids_of(prompt_ids(prompt, self._tokenizer))
        if asked.snapshot_at is None:
            asked.snapshot_at = end_of_messages(prompt, self._tokenizer, ids) if self.cache.states else ()
        ends = {*(() if asked.ignore_eos else self._ends), *asked.stop_token_ids}
        request = EngineRequest(ids, asked, sorted(ends))
        request.require_tokens(self._vocab_size, type(self._model).__name__)
        self._equip(request)
        number = self._add(request)
        # From here on no interrupt can come before the caller has the number, by which it can abort the request.
        self._requests[number] = request
        self._is_interrupted = False
        return number

    def _equip(self, request: EngineRequest) -> None:
        """Give a request what its options take."""
        if request.options.stop:
            request.decoder = TextDecoder(tokenizer_of(self._tokenizer), request.options.stop)
        if (schema := schema_of(request.options.response_format)) is not None:
            if self._grammars is None:
                self._grammars = Grammars(tokenizer_of(self._tokenizer), self._vocab_size, self._ends)
            request.grammar = self._grammars.make(schema)

    @_one_at_a_time
    def _add(self, request: EngineRequest) -> int:
        self._is_interrupted = True
        asked = request.options
        try:
            number = self.scheduler.add(
                request.prompt,
                asked.max_tokens,
                priority=asked.priority,
                salt=asked.salt,
                find=asked.prompt_logprobs is None,
                snapshot_at=asked.snapshot_at,
            )
        except Exception:
            self._is_interrupted = False  # refused
            raise
        if self._ranks is not None:
            self._ranks.calls.append(("add", number, *request.told))
        return number

    @_one_at_a_time
    def abort(self, request: int) -> bool:
        """End a request and free its blocks.

        Returns
        -------
        bool
            False if the request had ended before; then nothing changes.

        Raises
        ------
        KeyError
            The request was never added.
        RuntimeError
            Called in the middle of another call.
        """
        if request not in self._requests:
            return self.scheduler.abort(request)  # which knows whether it was ever added
        self._is_interrupted = True
        self._end(request)
        if self._ranks is not None:
            self._ranks.calls.append(("abort", request))
        self._is_interrupted = False
        return True

    def step(self) -> list[Sampled]:
        """Run one step.

        Returns
        -------
        list of Sampled
            One for each request that got a token or ended with an error, in this step or in one that a stream has run
            since the last; none for those whose prompt is not done yet, and for those of streams.

        Raises
        ------
        CapacityError
            As from :meth:`~pagedkv.Scheduler.schedule`, if you keep other sequences or pins in the cache.
        RuntimeError
            Called in the middle of another call.
        """
        if not self._results:
            self._run_step()
        # From here on no interrupt can come before the caller has the tokens: it gets each of them once.
        made, self._results = self._results, []
        return made

    def run(self) -> Iterator[Sampled]:
        """Run steps and yield what `step` returns until no request is left; more may be added meanwhile."""
        while self._results or self._requests or self._is_interrupted:  # an interrupted abort may hold blocks
            if not self._results:
                self._run_step()
            while self._results:
                # Remove them one by one: after a break or an interrupt, the next step returns the others.
                first, self._results = self._results[0], self._results[1:]
                yield first

    def follow(self) -> None:
        """Compute what rank 0 computes, until it calls `close`: for the other ranks of a model that is sharded.

        Raises
        ------
        RuntimeError
            The model is not sharded, or this is rank 0; another rank has died, or does not answer in a step.
        """
        if self._ranks is None or self._ranks.rank == 0:
            raise RuntimeError("only ranks other than 0 of a sharded model follow, and this is the one that leads")
        while (told := self._ranks.wait()) is not None:
            calls, dropped = told
            for name, number, *rest in calls:
                if name == "add":
                    self._add_as_told(number, *rest)
                else:
                    self.abort(number)
            self._ranks.calls.clear()
            self._run_step(dropped)
            self._results.clear()
        self._is_interrupted = True  # closed

    def _add_as_told(self, number: int, *told: Any) -> None:
        request = EngineRequest.heard(*told)
        self._equip(request)
        added = self._add(request)
        if added != number:
            raise RuntimeError(f"request {number} of rank 0 is {added} here: follow() from the first request on")
        self._requests[number] = request
        self._is_interrupted = False

    def close(self) -> None:
        """Let the ranks that follow return, let go of `swap`, and take no more calls; others have no need of it."""
        if self._swap is not None:
            self._swap.close()
        if self._ranks is not None and not (self._is_busy or self._is_interrupted):
            self._is_interrupted = True
            self._ranks.tell()

    def tokens(self, prompt: Prompt, max_tokens: int, **options: Any) -> Stream[int]:
        """Add a request and iterate over its tokens, except one that stops it.

        Several iterators can be open at a time: a step that one of them runs is a step of all requests. Closing or
        dropping an iterator aborts its request with the next step.

        Parameters
        ----------
        prompt, max_tokens, **options
            As in `add`, whose errors it raises.

        Raises
        ------
        FloatingPointError
            From the iterator, if no token can be chosen since the model's logits are not finite.
        """
        return self._stream(prompt, max_tokens, options, lambda request: request.tokens)

    def stream(self, prompt: Prompt, max_tokens: int, **options: Any) -> Stream[str]:
        """Add a request and iterate over pieces of its text; otherwise as `tokens`.

        Raises
        ------
        ValueError
            The engine has no tokenizer.
        """
        tokenizer = tokenizer_of(self._tokenizer)

        def pieces(request: EngineRequest) -> list[str]:
            request.decoder = request.decoder or TextDecoder(tokenizer)
            return request.pieces

        return self._stream(prompt, max_tokens, options, pieces)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], max_tokens: int, *, n: int = 1, **options: Any
    ) -> Generation | list[Generation]:
        """Generate the texts of one prompt or of many, with a progress bar where stderr is a terminal.

        An error or an interrupt (Ctrl-C) aborts all of its requests with the next step. Requests of `add` and open
        streams go on beside it.

        Parameters
        ----------
        prompts : prompt, sequence of prompts, or (num_prompts, num_tokens) ints
            Each as in `add`.
        max_tokens : int
            The most tokens of each text.
        n : int
            How many texts of each prompt, which share it: text i draws with ``seed + i``, if there is a seed.
        **options
            Those of `RequestOptions`, for all prompts.

        Returns
        -------
        Generation, or list of Generation
            One if `prompts` is one prompt. A text whose logits are not finite has the finish_reason "error".

        It raises what `add` raises, and then generates nothing.

        Examples
        --------
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pagedkv.integrations.transformers import Engine
        >>> heads = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, intermediate_size=64, **heads)).eval()
        >>> engine = Engine(model, num_blocks=16)
        >>> made = engine.generate([[1, 5, 3], [2, 4]], max_tokens=2, ignore_eos=True)
        >>> [(len(one.tokens), one.finish_reason) for one in made]
        [(2, 'length'), (2, 'length')]
        """
        is_one = is_one_prompt(prompts)
        several: Any = [prompts] if is_one else prompts
        choices = options_of_choices(options, as_int("n", n, minimum=1))
        begin: Callable[..., Stream[Any]] = self.tokens if self._tokenizer is None else self.stream
        streams: list[Stream[Any]] = []
        try:
            for prompt in several:
                streams += [begin(prompt, max_tokens, **choice) for choice in choices]
            requests = [stream.request for stream in streams]
            wait_for(requests, self._run_step)
        finally:
            for stream in streams:
                stream.close()
        made = [Generation.of(requests[i : i + n]) for i in range(0, len(requests), n)]
        return made[0] if is_one else made

    def stats(self) -> EngineStats:
        """How the engine's memory is used, and what its requests do."""
        scheduler = self.scheduler
        return EngineStats(
            cache=self.cache.stats(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_finished=self._num_finished,
            num_preempted=scheduler.num_preempted,
            num_swapped=scheduler.num_swapped,
        )

    def _stream(
        self,
        prompt: Prompt,
        max_tokens: int,
        options: dict[str, Any],
        items_of: Callable[[EngineRequest], Sequence[_Item]],
    ) -> Stream[_Item]:
        number = self.add(prompt, max_tokens, **options)
        try:
            request = self._requests[number]
            request.is_streamed = True
            return Stream(request, items_of(request), self._run_step, partial(self._dropped.append, number))
        except BaseException:  # an interrupt: the caller will not get the stream
            self._dropped.append(number)
            raise

    @_one_at_a_time
    def _run_step(self, dropped: deque[int] | None = None) -> None:
        self._is_interrupted = True
        if dropped is None:
            dropped = self._dropped if self._ranks is None else self._ranks.begin(self._dropped)
        while dropped:
            if dropped[0] in self._requests:
                self._end(dropped[0])
            dropped.popleft()
        try:
            if step := self.scheduler.schedule():
                rows = rows_with_logits(step, self._requests)
                if self._hybrid is None:
                    logits = last_logits(self._model, self.cache, step, rows)
                else:
                    logits = self._hybrid.last_logits(step, rows)
                num_cached = [self.scheduler.num_cached(number) for number in step.requests.tolist()]
                made, writes, tokens = plan_results(logits, rows, step, self._requests, num_cached, self._ranks)
                if self._hybrid is not None:
                    self._hybrid.store_states()
        except Exception:
            self.scheduler.drop()
            self._is_interrupted = self._ranks is not None  # the others may be in the middle of it
            raise
        if step:
            # From here on the tokens count as chosen, even if the scheduler fails.
            results = [one for one in made if not self._requests[one.request].is_streamed]
            commit([*writes, (vars(self), "_results", self._results + results)])
            self._update(step, tokens, made)
        self._is_interrupted = False

    def _update(self, step: Step, tokens: list[int], made: list[Sampled]) -> None:
        for number, _, reason, *_ in made:
            if reason == "error":
                self.scheduler.abort(number)  # before the update, after which others could find its blocks
        finished = {number for number, _, _ in self.scheduler.update(step, tokens)}
        for number, _, reason, *_ in made:
            if reason == "stop" and number not in finished:
                self.scheduler.abort(number)
            if reason:
                del self._requests[number]
                self._num_finished += 1

    def _end(self, number: int) -> None:
        self._requests[number].reason = "aborted"  # first: an interrupted end is an end
        self._results = [made for made in self._results if made.request != number]
        self.scheduler.abort(number)
        del self._requests[number]

    def _recover(self) -> None:
        """Recover from an interrupted call: all requests wait, and are computed again with the tokens they have."""
        if self._ranks is not None:
            raise RuntimeError(
                f"the Engine of rank {self._ranks.rank} has ended: it was closed, or a step failed or was interrupted, "
                "after which ranks are not in step: end all of them"
            )
        self._requests = {number: request for number, request in self._requests.items() if not request.reason}
        self.scheduler.restart({number: request.all_tokens for number, request in self._requests.items()})
        self._is_interrupted = False
