"""Continuous batching over a paged KV cache: sequences join when there is room and leave when they are done.

Three things here cannot be done with one contiguous cache for each sequence:

* a sequence takes blocks as it grows, so nothing is reserved for what it may never write;
* sequences that begin alike share the blocks of their common beginning, which is computed once;
* when the pool is full, the sequence that joined last is preempted and computed again later.

`pagedkv.Scheduler` does all of this; the code here runs the model, draws tokens and collects texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

import pagedkv
from sampling import Sampling, require_finite
from tokenizer import END
from transformer import DenseAttention, PagedAttention, Transformer


@dataclass(eq=False)
class Sample:
    """A sample of a prompt: its tokens so far, and why it ended.

    Attributes
    ----------
    prompt_index, sample_index : int
        The number of the prompt, and of the sample of it.
    prompt, tokens : list of int
        The tokens of the prompt, and those generated so far.
    done : str
        Why it ended; empty until then.
    """

    prompt_index: int
    sample_index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    done: str = ""

    def draws(self, seed: int) -> np.random.Generator:
        """Make this sample's random generator, which does not depend on the rest of the batch."""
        return np.random.default_rng([seed, self.prompt_index, self.sample_index])


@dataclass
class Counts:
    """Statistics of a run.

    Attributes
    ----------
    peak_blocks, peak_shared, peak_running : int
        The most blocks in use, blocks shared and samples running at a time.
    prefilled : int
        Prompt tokens that were computed.
    """

    peak_blocks: int = 0
    peak_shared: int = 0
    peak_running: int = 0
    prefilled: int = 0


class Engine:
    """Generates all samples of some prompts.

    Parameters
    ----------
    model : Transformer
        A model of NumPy arrays.
    cache : pagedkv.PagedKVCache
        A cache with room for max_batch sequences, of arrays of array_module.
    prompts : list of list of int
        Token ids of each prompt, at least one.
    num_samples, max_new_tokens, max_batch : int
        Samples of each prompt, tokens of each sample, samples that run at a time.
    sampling : Sampling
    backend : str
        Where attention runs: "auto" follows the arrays, "emulator" runs the CUDA kernels without a GPU.
    array_module : module
        NumPy, or CuPy for a GPU.
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
        backend: str = "auto",
        array_module: ModuleType = np,
    ) -> None:
        self.model, self.cache, self.sampling, self.backend = model, cache, sampling, backend
        self.model_there = model.on(array_module)
        self.to_host = getattr(array_module, "asnumpy", np.asarray)
        self.samples = [Sample(i, j, prompt) for i, prompt in enumerate(prompts) for j in range(num_samples)]
        self.draws = {sample: sample.draws(sampling.seed) for sample in self.samples}
        self.scheduler = pagedkv.Scheduler(cache, max_num_seqs=max_batch, eos_token_id=END)
        self.counts = Counts()
        self.requests: dict[int, Sample] = {}
        for sample in self.samples:
            max_tokens = min(max_new_tokens, model.context - len(sample.prompt))
            try:
                self.requests[self.scheduler.add(sample.prompt, max_tokens)] = sample
            except ValueError:
                sample.done = "the pool is too small"

    def run(self) -> Iterator[None]:
        """Generate all samples; yield after each step."""
        while step := self.scheduler.schedule():
            self._count(step)
            attend = PagedAttention(self.model_there, self.cache, step, self.backend)
            # Check the last row of each sample, even if no token is drawn: if it is finite, so are the keys and values.
            logits = self.to_host(self.model_there.forward(step.tokens, attend, step.batch.query_starts[1:] - 1))
            tokens, sampled = [], {*step.sampled.tolist()}
            for request, row in zip(step.requests.tolist(), logits, strict=True):
                sample = self.requests[request]
                try:
                    require_finite(row)
                except FloatingPointError as error:
                    sample.done = f"error: {error}"
                    self.scheduler.abort(request)  # before the update, after which others could find its blocks
                    tokens += [0] * (request in sampled)
                    continue
                if request in sampled:
                    seen = [*sample.prompt, *sample.tokens]
                    tokens.append(self.sampling.choose(row, self.draws[sample].random(), seen))
                    sample.tokens.append(tokens[-1])
            for request, _, reason in self.scheduler.update(step, tokens):
                sample = self.requests[request]
                if len(sample.prompt) + len(sample.tokens) == self.model.context:
                    reason = "the model's context is full"
                sample.done = "end of file" if sample.tokens[-1] == END else reason
            yield

    def _count(self, step: pagedkv.scheduling.Step) -> None:
        stats, counts = self.cache.stats(), self.counts
        counts.peak_blocks = max(counts.peak_blocks, stats.used)
        counts.peak_shared = max(counts.peak_shared, stats.shared)
        counts.peak_running = max(counts.peak_running, self.scheduler.num_running)
        query_lens, seq_lens = np.diff(self.to_host(step.batch.query_starts)), self.to_host(step.batch.seq_lens)
        prompt_lens = np.array([len(self.requests[request].prompt) for request in step.requests.tolist()])
        counts.prefilled += int(np.clip(prompt_lens - (seq_lens - query_lens), 0, query_lens).sum())


def dense_choices(model: Transformer, sample: Sample, sampling: Sampling, dtype: str) -> list[int]:
    """Draw each token of a sample again with a contiguous cache, after the same tokens before it.

    Every token is drawn with the same random number as in the sample. If all tokens agree, a run with the contiguous
    cache generates the same text; otherwise the first difference shows where it departs.
    """
    attend = DenseAttention(model, model.context, dtype)
    logits = []
    for tokens in (sample.prompt, sample.tokens[:-1]):
        attend.extend(len(tokens))
        rows = range(len(tokens)) if logits else [len(tokens) - 1]
        if len(tokens):
            logits.extend(model.forward(tokens, attend, rows))
    draws = sample.draws(sampling.seed)
    return [
        sampling.choose(row, draws.random(), [*sample.prompt, *sample.tokens[:i]])
        for i, (row, _) in enumerate(zip(logits, sample.tokens, strict=False))
    ]
