"""Generate Python-like text over a paged KV cache, with NumPy and pagedkv alone.

    python examples/generate.py "def main("
    python examples/generate.py "class Queue:" "class Stack:" --samples 4
    python examples/generate.py --file prompts.txt      (prompts separated by blank lines)
    python examples/generate.py "def main(" --backend emulator --max-new-tokens 4      (the CUDA kernels, without a GPU)
    python examples/generate.py "def main(" --device cuda      (all of it on a GPU, with CuPy in the place of NumPy)

Texts appear in the order of the prompts, the first as its tokens come. Afterwards the same tokens are drawn from a
model run with contiguous caches; the exit code is 1 if any differs, and 130 after Ctrl-C.
"""

import argparse
import codecs
import importlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pagedkv
from engine import Engine, Sample, dense_choices
from sampling import Sampling
from tokenizer import END, Tokenizer
from transformer import WEIGHTS, Transformer, load

HEADER = (
    b"import os\nimport sys\nimport logging\nfrom pathlib import Path\n\nlogger = logging.getLogger(__name__)\n\n\n"
)
PROMPTS = [HEADER + b"def main(", HEADER + b"def read_file(path", HEADER + b"class Parser:\n    def __init__(self"]
# Precedes every prompt invisibly, so that the model takes the prompt for the start of a line.
NEW_PARAGRAPH = b"\n\n\n"


class Console:
    """Writes the samples in order as their tokens come, and a progress line if stderr is a terminal."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prompts: list[bytes]) -> None:
        self.engine, self.tokenizer, self.prompts = engine, tokenizer, prompts
        self.current = self.shown = 0
        self.started = time.perf_counter()
        self.line = ""  # the unfinished last line of text, which on a terminal shares a line with the progress
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.progress = sys.stderr.isatty()
        self.merged = self.progress and sys.stdout.isatty()

    def update(self) -> None:
        """Write the tokens that have come since the last update."""
        samples = self.engine.samples
        text = ""
        while self.current < len(samples):
            sample = samples[self.current]
            if self.shown == 0 and (sample.tokens or sample.done):
                text += self._title(sample) + self.decoder.decode(self.prompts[sample.prompt_index])
            new_tokens = [token for token in sample.tokens[self.shown :] if token != END]
            text += self.decoder.decode(self.tokenizer.decode(new_tokens))
            self.shown = len(sample.tokens)
            if not sample.done:
                break
            text += self.decoder.decode(b"", final=True) + ("\n" if sample.done == "length" else f"\n[{sample.done}]\n")
            self.decoder.reset()
            self.current, self.shown = self.current + 1, 0
        self._write(text)

    def close(self) -> None:
        """Erase the progress line, and end the last line of text."""
        if self.merged:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            sys.stdout.write(self.line)
        elif self.progress:
            sys.stderr.write("\r\x1b[K")
        if self.shown:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _title(self, sample: Sample) -> str:
        if len(self.engine.samples) == 1:
            return ""
        of_prompt = f", sample {sample.sample_index + 1}" if len(self.engine.samples) > len(self.prompts) else ""
        return f"----- prompt {sample.prompt_index + 1}{of_prompt} -----\n"

    def _write(self, text: str) -> None:
        if self.progress:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        if self.merged:
            complete, newline, self.line = (self.line + text).rpartition("\n")
            text = complete + newline
        sys.stdout.write(text)
        sys.stdout.flush()
        if self.progress:
            engine, seconds = self.engine, time.perf_counter() - self.started
            done = sum(bool(sample.done) for sample in engine.samples)
            num_tokens = sum(len(sample.tokens) for sample in engine.samples)
            pool = engine.cache.pool
            status = (
                f"[{done}/{len(engine.samples)} done, {engine.scheduler.num_running} running, "
                f"{num_tokens / seconds:.0f} tokens/s, {pool.num_blocks - pool.num_free}/{pool.num_blocks} blocks]"
            )
            width = shutil.get_terminal_size().columns - 1
            room = max(0, width - len(status) - 2)
            sys.stderr.write(f"{self.line[-room:] if room else ''}  {status}"[:width])
            sys.stderr.flush()


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Make a converter for argparse whose error names the allowed range."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            limit = f"{low} to {high}" if math.isfinite(high) else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number, {limit}")
        return value

    return convert


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Generate Python-like text over a paged KV cache.")
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="what a text begins with")
    add("--file", type=Path, help="read prompts from a file, separated by blank lines")
    add("--samples", type=number(int, 1), default=1, metavar="N", help="texts for each prompt, sharing its blocks")
    add("--max-new-tokens", type=number(int, 1), default=120, metavar="N")
    add("--temperature", type=number(float, 0), default=0.7, metavar="T", help="0 takes the most probable token")
    add("--top-k", type=number(int, 0), default=20, metavar="K", help="choose among the K most probable; 0 for all")
    add("--top-p", type=number(float, 0, 1), default=0.95, metavar="P", help="... that have probability P together")
    add("--seed", type=number(int, 0), default=0)
    add("--max-batch", type=number(int, 1), default=16, metavar="N", help="texts generated at a time")
    add("--num-blocks", type=number(int, 1), default=256, metavar="N", help="blocks in the pool")
    add("--block-size", type=number(int, 1), default=16, metavar="N", help="tokens in a block")
    kv_dtypes = ["float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"]
    add("--kv-dtype", choices=kv_dtypes, default="float32", help="what the cache stores")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU, by CuPy with cuBLAS (cupy-cuda13x[ctk])")
    add("--backend", choices=["auto", "emulator"], default="auto", help="emulator: the CUDA kernels, without a GPU")
    add("--no-prefix-cache", action="store_true", help="compute what prompts begin with anew for each")
    add("--weights", type=Path, default=WEIGHTS, help="a file that train.py wrote")
    add("--context", type=number(int, 1), metavar="N", help="tokens of a text, at most; by default as in training")
    add("--no-check", action="store_true", help="don't compare with contiguous caches")
    args = parser.parse_args()
    if args.device == "cuda" and args.backend == "emulator":
        parser.error("the emulator takes arrays of the host: --backend emulator without --device cuda")
    return parser, args


def read_prompts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[bytes]:
    prompts = [prompt.encode("utf-8", "surrogateescape") for prompt in args.prompts]
    if args.file is not None:
        try:
            text = args.file.read_bytes().replace(b"\r\n", b"\n")
        except OSError as error:
            parser.error(f"cannot read {args.file}: {error.strerror}")
        paragraphs = [paragraph.strip(b"\n") for paragraph in re.split(rb"\n[ \t]*\n", text)]
        prompts += [paragraph for paragraph in paragraphs if paragraph.strip()]
        if not prompts:
            parser.error(f"{args.file} has no prompt in it")
    for i, prompt in enumerate(prompts):
        if not prompt:
            parser.error(f"prompt {i + 1} is empty: give it at least one character")
    return prompts or PROMPTS


def report(engine: Engine, seconds: float) -> None:
    cache, counts, preempted = engine.cache, engine.counts, engine.scheduler.num_preempted
    num_tokens = sum(len(sample.tokens) for sample in engine.samples)
    block_bytes = sum(array.nbytes for array in (*cache.k_caches, *cache.v_caches)) / cache.pool.num_blocks
    paged = counts.peak_blocks * block_bytes
    dense = counts.peak_running * engine.model.context / cache.block_size * block_bytes
    print(f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s")
    print(f"prompts: {counts.prefilled} tokens computed, {cache.stats().hit_tokens} found in the prefix cache")
    print(
        f"blocks: {counts.peak_blocks} of {cache.pool.num_blocks} used at the peak, {counts.peak_shared} of them shared"
        + (f"; {preempted} times a text gave its blocks back for a while" if preempted else "")
    )
    print(
        f"memory: {paged / 1e6:.2f} MB in those blocks; contiguous caches of {engine.model.context} tokens for "
        f"{counts.peak_running} text{'s' * (counts.peak_running != 1)} take {dense / 1e6:.2f} MB"
    )


def check(engine: Engine, tokenizer: Tokenizer, dtype: str) -> bool:
    """Compare with a run on contiguous caches and print the outcome."""
    num_tokens = num_different = 0
    for sample in engine.samples:
        dense = dense_choices(engine.model, sample, engine.sampling, dtype)
        different = [i for i, token in enumerate(sample.tokens) if token != dense[i]]
        num_tokens, num_different = num_tokens + len(dense), num_different + len(different)
        if different:
            i = different[0]
            paged, other = (tokenizer.decode([token]) for token in (sample.tokens[i], dense[i]))
            where = f"prompt {sample.prompt_index + 1}, sample {sample.sample_index + 1}, token {i + 1}"
            print(f"check: {where}: {paged!r} here, {other!r} with a contiguous cache")
    if num_different:
        print(f"check: FAILED, {num_different} of {num_tokens} tokens differ from a run with contiguous caches")
    else:
        print(f"check: all {num_tokens} tokens match a run with contiguous caches")
    return num_different == 0


def prepare(args: argparse.Namespace, model: Transformer, prompts: list[list[int]]) -> Engine:
    coded = args.kv_dtype if args.kv_dtype.endswith(("int8", "e4m3", "e5m2")) else None
    array_module = "cupy" if args.device == "cuda" else "numpy"
    cache = pagedkv.PagedKVCache(
        model.num_layers,
        args.num_blocks,
        args.block_size,
        model.num_kv_heads,
        model.head_dim,
        dtype="float32" if coded else args.kv_dtype,
        kv_dtype=coded,
        max_seqs=args.max_batch,
        max_seq_len=model.context,
        array_module=array_module,
        prefix_cache=not args.no_prefix_cache,
    )
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    for warm_up in (True, False):  # so that compiling the kernels, once for each machine, does not count as speed
        engine = Engine(
            model,
            cache,
            [[1, 2]] if warm_up else prompts,
            num_samples=1 if warm_up else args.samples,
            max_new_tokens=2 if warm_up else args.max_new_tokens,
            max_batch=args.max_batch,
            sampling=sampling,
            backend=args.backend,
            array_module=importlib.import_module(array_module),
        )
        if warm_up:
            list(engine.run())
            cache.reset()
    return engine


def main() -> int:
    parser, args = parse()
    prompts = read_prompts(parser, args)
    try:
        pagedkv.get_num_threads()  # raises for a wrong PAGEDKV_NUM_THREADS
        model, tokenizer = load(args.weights, args.context)
    except ValueError as error:
        parser.error(str(error))
    except MemoryError as error:
        parser.error(f"{error}: a smaller --context")
    encoded = [tokenizer.encode(NEW_PARAGRAPH + prompt) for prompt in prompts]
    for i, tokens in enumerate(encoded):
        if len(tokens) >= model.context:
            parser.error(
                f"prompt {i + 1} has {len(tokens)} tokens; the model takes fewer than {model.context}: see --context"
            )
    sys.stdout.reconfigure(errors="replace")
    if sys.stderr.isatty():
        print("preparing the kernels ...", end="\r", file=sys.stderr, flush=True)
    try:
        engine = prepare(args, model, encoded)
    except (pagedkv.BackendUnavailableError, ModuleNotFoundError) as error:
        parser.error(str(error))
    except (MemoryError, ValueError) as error:
        parser.error(f"no pool of {args.num_blocks} blocks of {args.block_size} tokens: {error}")
    if all(sample.done for sample in engine.samples):
        parser.error(
            f"a pool of {args.num_blocks} x {args.block_size} tokens is too small for a prompt and "
            f"{args.max_new_tokens} new tokens: raise --num-blocks, or lower --max-new-tokens"
        )
    console = Console(engine, tokenizer, prompts)
    try:
        for _ in engine.run():
            console.update()
        console.update()
    finally:
        console.close()
        report(engine, time.perf_counter() - console.started)
    return 0 if args.no_check or check(engine, tokenizer, args.kv_dtype) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped")
        sys.exit(130)
    except BrokenPipeError:  # as in `generate.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
