"""Continuous batching over a paged KV cache: sequences join when there is room and leave when they are done.

Three things here cannot be done with one contiguous cache for each sequence:

* a sequence takes blocks as it grows, so nothing is reserved for what it may never write;
* sequences that begin alike share the blocks of their common beginning: it is computed once, held as a sequence of its
  own, and forked;
* when the pool is full, the sequence that joined last gives its blocks back and is computed again later.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

import pagedkv
from sampling import Sampling
from tokenizer import END
from transformer import DenseAttention, PagedAttention, Transformer


@dataclass(eq=False)
class Sample:
    """One text in the making.

    Attributes
    ----------
    prompt_index, sample_index : int
        Which prompt, and which sample of it.
    prompt, tokens : list of int
        What it began with, and what was generated so far.
    done : str
        Why it ended; empty until then.
    seq : int
        The handle of its sequence in the cache while it runs.
    """

    prompt_index: int
    sample_index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    done: str = ""
    seq: int = -1

    def draws(self, seed: int) -> np.random.Generator:
        """Return the source of this sample's draws: it depends on nothing else in the batch."""
        return np.random.default_rng([seed, self.prompt_index, self.sample_index])


@dataclass
class Counts:
    """What the engine has used so far.

    Attributes
    ----------
    peak_blocks, peak_shared, peak_running : int
        The most blocks in use, blocks shared and samples running at a time.
    prefilled, forked : int
        Tokens at the start of sequences that were computed, and that were shared instead.
    preempted : int
        How often a sample gave its blocks back.
    """

    peak_blocks: int = 0
    peak_shared: int = 0
    peak_running: int = 0
    prefilled: int = 0
    forked: int = 0
    preempted: int = 0


class Engine:
    """Generates all samples of some prompts.

    Parameters
    ----------
    model : Transformer
    cache : pagedkv.PagedKVCache
        Empty, with room for max_batch sequences, one more for each prompt and one for what all prompts begin with.
    prompts : list of list of int
        Each at least one token.
    num_samples, max_new_tokens, max_batch : int
        Samples of each prompt, tokens of each sample, samples that run at a time.
    sampling : Sampling
    kv_dtype : str or None
        The fp8 format of the cache, if it has one.
    backend : str
        Where attention runs: "cpu", or "emulator" for the CUDA kernels without a GPU.
    """

    def __init__(
        self,
        model: Transformer,
        cache: pagedkv.PagedKVCache,
        prompts: Sequence[list[int]],
        *,
        num_samples: int,
        max_new_tokens: int,
        max_batch: int,
        sampling: Sampling,
        kv_dtype: str | None = None,
        backend: str = "cpu",
    ) -> None:
        self.model, self.cache, self.sampling = model, cache, sampling
        self.kv_dtype, self.backend = kv_dtype, backend
        self.max_new_tokens, self.max_batch = max_new_tokens, max_batch
        self.samples = [Sample(i, j, prompt) for i, prompt in enumerate(prompts) for j in range(num_samples)]
        self.draws = {sample: sample.draws(sampling.seed) for sample in self.samples}
        self.waiting = deque(self.samples)
        self.running: list[Sample] = []
        self.counts = Counts()
        # What several samples begin with. A prompt's last token is left to each sample, which needs its logits.
        common = common_beginning(prompts) if len(prompts) > 1 else ()
        self.beginnings = {common, *(tuple(prompt[:-1]) for prompt in prompts if num_samples > 1)} - {()}
        self.held: dict[tuple[int, ...], int] = {}

    def run(self) -> Iterator[None]:
        """Generate; yields whenever samples got a token each."""
        while self.waiting or self.running:
            if self._join():
                yield
            if self._decode():
                yield

    def _join(self) -> bool:
        """Start the samples that there is room for and compute their first token, all in one ragged batch."""
        joined: list[Sample] = []
        slots, new_tokens = [], []
        while self.waiting and len(self.running) + len(joined) < self.max_batch:
            sample = self.waiting[0]
            for beginning in sorted(self.beginnings - self.held.keys(), key=len):
                if begins_with(sample.prompt, beginning):
                    self._hold(beginning)
            # A block more for each running sample, or the new one would soon be thrown out again.
            started = self._start(sample.prompt + sample.tokens, reserve=len(self.running) + len(joined))
            if started is None:
                if self.running or joined:
                    break
                if self.held:
                    self._release(self.held)
                else:
                    sample.done = "the pool is too small"
                    self.waiting.popleft()
                continue
            sample.seq = started[0]
            slots.append(started[1])
            new_tokens.append(started[2])
            joined.append(self.waiting.popleft())
        if joined:
            logits = self._forward([s.seq for s in joined], np.concatenate(slots), new_tokens)
            self.running += joined
            self._take(joined, logits)
        self._release([b for b in self.held if not any(begins_with(s.prompt, b) for s in self.waiting)])
        return bool(joined)

    def _decode(self) -> bool:
        """Compute one more token of every running sample."""
        while self.running:
            try:
                slots = self.cache.append([sample.seq for sample in self.running])
            except pagedkv.OutOfBlocksError:
                # Nothing has changed: append is all or nothing.
                self._make_room()
                continue
            running = list(self.running)
            logits = self._forward([s.seq for s in running], slots, [s.tokens[-1:] for s in running])
            self._take(running, logits)
            return True
        return False

    def _make_room(self) -> None:
        if len(self.running) > 1:
            sample = self.running.pop()
            self.cache.free([sample.seq])
            self.waiting.appendleft(sample)
            self.counts.preempted += 1
        elif self.held:
            self._release(self.held)
        else:
            self._finish(self.running[0], "the pool is too small")

    def _start(self, tokens: list[int], reserve: int = 0) -> tuple[int, np.ndarray, list[int]] | None:
        """Start a sequence, forked from the longest beginning that is held.

        Returns
        -------
        (seq, slots, new_tokens), or None
            Its handle, and what is left to compute and where it goes; None when the pool has no room for it.
        """
        beginning = max((b for b in self.held if begins_with(tokens, b)), key=len, default=())
        size = self.cache.table.block_size
        if -(-len(tokens) // size) - len(beginning) // size + reserve > self.cache.pool.num_free:
            return None
        seq = self.cache.fork(self.held[beginning])[0] if beginning else self.cache.add(0).seq
        new_tokens = tokens[len(beginning) :]
        self.counts.prefilled += len(new_tokens)
        self.counts.forked += len(beginning)
        # The block that the beginning ends in is shared and partly full: append replaces it by a copy.
        return seq, self.cache.append([seq], len(new_tokens)), new_tokens

    def _hold(self, beginning: tuple[int, ...]) -> None:
        started = self._start(list(beginning))
        if started is not None:
            seq, slots, new_tokens = started
            self._forward([seq], slots, [new_tokens])
            self.held[beginning] = seq

    def _release(self, beginnings: Iterable[tuple[int, ...]]) -> None:
        """Give up beginnings; their blocks stay as long as a running sample shares them."""
        for beginning in list(beginnings):
            self.cache.free([self.held.pop(beginning)])
            self.beginnings.discard(beginning)

    def _forward(self, seqs: list[int], slots: np.ndarray, new_tokens: list[list[int]]) -> np.ndarray:
        query_lens = [len(tokens) for tokens in new_tokens]
        attend = PagedAttention(self.model, self.cache, seqs, slots, query_lens, self.kv_dtype, self.backend)
        stats, counts = self.cache.stats(), self.counts
        counts.peak_blocks = max(counts.peak_blocks, stats.used)
        counts.peak_shared = max(counts.peak_shared, stats.shared)
        return self.model.forward(list(chain(*new_tokens)), attend, attend.last_rows)

    def _take(self, samples: list[Sample], logits: np.ndarray) -> None:
        """Draw the next token of each sample, and let those that are done leave."""
        self.counts.peak_running = max(self.counts.peak_running, len(self.running))
        for sample, row in zip(samples, logits, strict=True):
            token = self.sampling.choose(row, self.draws[sample].random())
            sample.tokens.append(token)
            if token == END:
                self._finish(sample, "end of file")
            elif len(sample.tokens) == self.max_new_tokens:
                self._finish(sample, "length")
            elif len(sample.prompt) + len(sample.tokens) == self.model.context:
                self._finish(sample, "the model's context is full")

    def _finish(self, sample: Sample, why: str) -> None:
        sample.done = why
        self.running.remove(sample)
        self.cache.free([sample.seq])


def begins_with(tokens: Sequence[int], beginning: tuple[int, ...]) -> bool:
    """Whether `beginning` is followed by at least one more token in `tokens`."""
    return len(beginning) < len(tokens) and tuple(tokens[: len(beginning)]) == beginning


def common_beginning(prompts: Sequence[list[int]]) -> tuple[int, ...]:
    """Return the tokens that all prompts begin with and none ends with."""
    first, last = min(prompts), max(prompts)
    shortest = min(map(len, prompts)) - 1
    return tuple(first[: next((i for i in range(shortest) if first[i] != last[i]), shortest)])


def dense_choices(model: Transformer, sample: Sample, sampling: Sampling, dtype: str) -> list[int]:
    """Return the tokens that a contiguous cache of maximum length leads to, each after those before it in `sample`.

    Every token is drawn with the same uniform number as in the sample. Where the two agree on all tokens, a run that
    goes its own way with the contiguous cache generates the same text, and one that differs is shown where it begins.
    """
    attend = DenseAttention(model, model.context, dtype)
    logits = []
    for tokens in (sample.prompt, sample.tokens[:-1]):
        attend.extend(len(tokens))
        rows = range(len(tokens)) if logits else [len(tokens) - 1]
        if len(tokens):
            logits.extend(model.forward(tokens, attend, rows))
    draws = sample.draws(sampling.seed)
    return [sampling.choose(row, draws.random()) for row, _ in zip(logits, sample.tokens, strict=False)]
