"""Bench of a model of transformers on pagedkv, beside its own attention: a small Llama on the CPU."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

from ..cpu.threads import get_num_threads, set_num_threads
from ..errors import BackendUnavailableError
from ..extras import pip_install
from .contest import interleaved, on_host
from .report import Row

try:
    import torch
    from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.generation import ContinuousBatchingConfig
except ModuleNotFoundError as error:
    raise BackendUnavailableError(
        f"bench transformers needs torch and transformers: {pip_install('transformers')} ({error})"
    ) from error

from ..integrations.transformers import Engine, PagedCache, use_pagedkv

BLOCK_SIZE = 16
VOCAB = 1000
MOST_TOKENS = 512  # of a step


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument("--quick", action="store_true", help="one layer and short texts, in seconds")


def run(*, repeats: int = 9, progress: Callable[[str], Any] = print, quick: bool = False) -> list[Row]:
    """Time a model's own attention and pagedkv in turns, with one thread each.

    A Llama of 4 layers, hidden size 512, 8 query heads and 2 KV heads, float32. Continuous batching gets 16
    prompts of 50 to 1,000 tokens and adds 48 to each, in batches of at most 512 tokens and pages of 16, and `Engine` is
    timed against the same with sdpa; ``generate`` gets one prompt of 2,000 tokens and adds 64.

    Parameters
    ----------
    repeats : int
        How often each is timed, after a run that is not.
    progress : callable
        Called with what is being measured.
    quick : bool
        A smaller model and shorter texts, to see that everything runs.

    Returns
    -------
    list of dict
        The least CPU seconds of both, all samples, how many times as long the model's own attention takes, and whether
        both said the same.
    """
    threads = get_num_threads(), torch.get_num_threads()
    logger = logging.getLogger("ContinuousBatchingLogger")  # asks for psutil, twice in every run
    was_disabled = logger.disabled
    try:
        logger.disabled = True
        set_num_threads(1)
        torch.set_num_threads(1)
        return _rows(repeats, progress, quick)
    finally:
        logger.disabled = was_disabled
        set_num_threads(threads[0])
        torch.set_num_threads(threads[1])


def _rows(repeats: int, progress: Callable[[str], Any], quick: bool) -> list[Row]:
    model, shrink = _model(1 if quick else 4), 20 if quick else 1
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(1, VOCAB, (length // shrink,), generator=generator).tolist()

    ragged, long, rows = [prompt(50 + 950 * i // 15) for i in range(16)], prompt(2000), []
    batched, alone = 48 // shrink, 64 // shrink
    contests: list[dict[str, Callable[[], Any]]] = [
        {
            "sdpa": lambda: _continuous(model, ragged, batched),
            "continuous batching": lambda: _continuous(model, ragged, batched),
            "Engine": lambda: _engine(model, ragged, batched),
        },
        {"sdpa": lambda: _generate(model, long, alone, False), "generate": lambda: _generate(model, long, alone, True)},
    ]
    said: dict[str, Any] = {}

    def say(name: str, call: Callable[[], Any]) -> None:
        if name == "sdpa":
            model.set_attn_implementation("sdpa")
        else:
            use_pagedkv(model)
        said[name] = call()

    for calls in contests:
        progress(f"transformers, {' and '.join(list(calls)[1:])}")
        said_by = {name: partial(say, name, call) for name, call in calls.items()}
        samples = interleaved(said_by, repeats, partial(on_host, pause=0, clock=process_time))
        seconds = {name: [each.seconds for each in of] for name, of in samples.items()}
        theirs = seconds.pop("sdpa")
        for name, ours in seconds.items():
            row = {"transformers": name, "pagedkv s": min(ours), "sdpa s": min(theirs)}
            row |= {"times": min(theirs) / min(ours), "same": said[name] == said["sdpa"]}
            rows.append(row | {"pagedkv samples": ours, "sdpa samples": theirs})
    return rows


def _model(num_layers: int) -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=num_layers,
        max_position_embeddings=4096,
        pad_token_id=0,
        **heads,
    )
    return LlamaForCausalLM(config).eval()


def _continuous(model: Any, texts: list[list[int]], num_new: int) -> list[list[int]]:
    num_blocks = _num_blocks(texts, num_new)
    done = model.generate_batch(
        texts,
        generation_config=GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=num_blocks, page_size=BLOCK_SIZE, max_batch_tokens=MOST_TOKENS
        ),
        progress_bar=False,
    )
    return sorted(one.generated_tokens for one in done.values())


def _engine(model: Any, texts: list[list[int]], num_new: int) -> list[list[int]]:
    sizes = {"num_blocks": _num_blocks(texts, num_new), "block_size": BLOCK_SIZE, "max_num_batched_tokens": MOST_TOKENS}
    engine = Engine(model, **sizes, eos_token_id=())
    said: dict[int, list[int]] = {engine.add(text, num_new): [] for text in texts}
    for made in engine.run():
        said[made.request].append(made.token)
    return sorted(said.values())


def _num_blocks(texts: list[list[int]], num_new: int) -> int:
    return sum(-(-(len(text) + num_new) // BLOCK_SIZE) for text in texts)


def _generate(model: Any, text: list[int], num_new: int, paged: bool) -> list[int]:
    ids = torch.tensor([text])
    num_blocks = -(-(len(text) + num_new) // BLOCK_SIZE)
    cache = PagedCache(model, num_blocks, BLOCK_SIZE) if paged else DynamicCache(config=model.config)
    lengths = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **lengths)
    return said[0, len(text) :].tolist()
