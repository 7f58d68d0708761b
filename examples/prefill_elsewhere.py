"""Compute a prompt in one process, and the text behind it in another: K and V go from one to the other in a store.

    python examples/prefill_elsewhere.py                                       (two processes, over a file)
    python examples/prefill_elsewhere.py --store redis://localhost:6379/0      (over a Redis server: the extra redis)

Two machines run one half each, with the same prompt and a Redis server that both reach, the first one first:

    python examples/prefill_elsewhere.py --store redis://server:6379/0 --only prefill
    python examples/prefill_elsewhere.py --store redis://server:6379/0 --only decode

The caches of the two have blocks of other sizes and another layout: what is in the store depends on neither. Without
`--only` the same text is generated in this process alone, and the exit code is 1 if any token differs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pagedkv
from engine import Engine, Sample
from generate import number
from pagedkv.stores import BlockStore, FileStore, StoredPrefixes
from pagedkv.stores.blocks import CacheBlocks
from sampling import Sampling
from tokenizer import Tokenizer
from transformer import Transformer, load

MODEL = "examples/weights.npz"  # whoever trains it again gives it another name
WIRE_TOKENS = 16  # the example's prompts are short
CAPACITY = 2**26


def make_cache(model: Transformer, block_size: int = 16, layout: str = "NHD") -> pagedkv.PagedKVCache:
    sizes = model.num_layers, None, block_size, model.num_kv_heads, model.head_dim
    return pagedkv.PagedKVCache(*sizes, layout=layout, memory="32MiB")


def open_store(where: str, cache: pagedkv.PagedKVCache) -> BlockStore:
    if "://" in where:
        from pagedkv.stores.redis import RedisStore

        return RedisStore(where, CAPACITY)
    return FileStore(where, CAPACITY, CacheBlocks(cache, MODEL, block_tokens=WIRE_TOKENS).wire.block_bytes)


def generate(model: Transformer, cache: pagedkv.PagedKVCache, prompt: list[int], num_tokens: int) -> tuple[Sample, int]:
    """Generate behind a prompt; returns the sample, and how many tokens of the prompt were computed for it."""
    options = {"num_samples": 1, "max_batch": 1, "max_new_tokens": num_tokens, "sampling": Sampling(0, 0, 1, 0)}
    engine = Engine(model, cache, [prompt], **options)
    for _ in engine.run():
        pass
    return engine.samples[0], engine.counts.prefilled


def prefill(model: Transformer, prompt: list[int], where: str) -> None:
    """Compute a prompt, and leave its K and V in the store."""
    cache = make_cache(model)
    with closing(open_store(where, cache)) as store:
        with StoredPrefixes(cache, store, MODEL, block_tokens=WIRE_TOKENS) as prefixes:
            num_loaded = prefixes.load(prompt)  # another prompt may have begun alike
            _, num_computed = generate(model, cache, prompt, 1)
            num_stored = prefixes.store(prompt)
            print(
                f"prefill: {num_loaded} tokens loaded, {num_computed} computed, {num_stored} in the store", flush=True
            )
        if error := prefixes.patient.last_error:
            print(f"prefill: the store failed: {error}", flush=True)


def decode(model: Transformer, prompt: list[int], where: str, num_tokens: int) -> Sample:
    """Generate behind a prompt that is in the store; what is not there is computed."""
    cache = make_cache(model, block_size=8, layout="HND")
    with closing(open_store(where, cache)) as store:
        with StoredPrefixes(cache, store, MODEL, block_tokens=WIRE_TOKENS) as prefixes:
            begin = time.perf_counter()
            num_loaded = prefixes.load(prompt)
            milliseconds = 1000 * (time.perf_counter() - begin)
            sample, num_computed = generate(model, cache, prompt, num_tokens)
            print(f"decode: {num_loaded} tokens loaded in {milliseconds:.1f} ms, {num_computed} computed")
        if error := prefixes.patient.last_error:
            print(f"decode: the store failed: {error}")
    return sample


def show(tokenizer: Tokenizer, prompt: list[int], sample: Sample) -> None:
    print(tokenizer.decode([*prompt[-20:], *sample.tokens]).decode("utf-8", "replace"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compute a prompt in one process, and the text behind it in another.")
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with; by default as this file does")
    parser.add_argument("--store", metavar="WHERE", help="a file, or the URL of a Redis server; by default a new file")
    parser.add_argument("--only", choices=["prefill", "decode"], help="run one half")
    parser.add_argument("--max-new-tokens", type=number(int, 1, 250), default=60, metavar="N")
    args = parser.parse_args()
    if args.only and not args.store:
        parser.error("--only needs a --store that both halves reach")
    model, tokenizer = load()
    text = args.prompt or Path(__file__).read_text()
    prompt = tokenizer.encode(text.encode())[: model.context - args.max_new_tokens]
    if args.only == "prefill":
        prefill(model, prompt, args.store)
        return 0
    if args.only == "decode":
        show(tokenizer, prompt, decode(model, prompt, args.store, args.max_new_tokens))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        where = args.store or str(Path(folder) / "blocks")
        command = [sys.executable, __file__, "--store", where, "--only", "prefill"]
        command += ["--prompt", args.prompt] if args.prompt else []
        if subprocess.run([*command, "--max-new-tokens", str(args.max_new_tokens)]).returncode:
            return 1
        sample = decode(model, prompt, where, args.max_new_tokens)
    show(tokenizer, prompt, sample)
    alone, _ = generate(model, make_cache(model), prompt, args.max_new_tokens)
    same = sample.tokens == alone.tokens
    print(f"check: {len(sample.tokens)} tokens {'equal' if same else 'DIFFER from'} those of one process")
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ModuleNotFoundError, OSError, ValueError) as error:
        sys.exit(f"prefill_elsewhere.py: {error}")
