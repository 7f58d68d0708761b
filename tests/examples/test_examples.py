"""The examples: tokenizer, weights, the model against torch's, and generation from the command line."""

import functools
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv import cache
from pagedkv.calls import AttentionArguments, AttentionCall
from pagedkv.cpu import threads
from pagedkv.extras import pip_install
from pagedkv.operations import plan
from pagedkv.validation.attention import attention_call

from ..support.strategies import long

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import generate  # noqa: E402
from engine import Engine, dense_choices  # noqa: E402
from sampling import Sampling  # noqa: E402
from tokenizer import END, PIECES, Tokenizer, learn_merges  # noqa: E402
from transformer import WEIGHTS, DenseAttention, Transformer, load  # noqa: E402

MODEL, TOKENIZER = load()
HEADER = b"import os\nimport sys\nimport logging\nimport unittest\n\nlogger = logging.getLogger(__name__)\n\n\n"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "generate.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def engine_for(
    prompts: list[bytes], num_blocks: int = 200, seed: int = 0, prefix_cache: bool = True, **options: int
) -> Engine:
    shape = (MODEL.num_layers, num_blocks, 4, MODEL.num_kv_heads, MODEL.head_dim)
    cache = pagedkv.PagedKVCache(*shape, max_seq_len=MODEL.context, prefix_cache=prefix_cache)
    sizes = {"num_samples": 1, "max_new_tokens": 6, "max_batch": 8} | options
    return Engine(MODEL, cache, [TOKENIZER.encode(p) for p in prompts], sampling=Sampling(seed=seed), **sizes)


def finish(engine: Engine) -> list[list[int]]:
    """Run to the end, and check that the cache is empty and whole."""
    for _ in engine.run():
        engine.cache.check()
    assert all(sample.done for sample in engine.samples)
    assert engine.cache.stats().used == 0
    return [sample.tokens for sample in engine.samples]


SOURCE = st.lists(st.sampled_from(["def ", "    ", "\n", "self.", "x", "__init__", " = ", "é", "\r\n", "\t", "123456"]))


@given(st.one_of(st.binary(), st.text().map(str.encode), SOURCE.map(lambda parts: "".join(parts).encode())))
def test_every_byte_string_comes_back(data: bytes) -> None:
    tokens = TOKENIZER.encode(data)
    assert TOKENIZER.decode(tokens) == data
    assert b"".join(PIECES.findall(data)) == data
    assert all(0 <= token < 1024 for token in tokens)


@given(st.text())
def test_a_str_is_encoded_as_utf8(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text.encode("utf-8")


def test_merges_join_the_most_frequent_neighbours_first() -> None:
    merges = learn_merges([b"abab abab abx"], 258)
    assert merges == [(ord("a"), ord("b")), (256, 256)]
    assert Tokenizer(merges).encode(b"ababx") == [257, ord("x")]
    # Overlapping pairs join from the left.
    assert Tokenizer([(97, 97)]).encode(b"aaa") == [256, 97]


def test_source_takes_few_tokens() -> None:
    source = (EXAMPLES / "engine.py").read_bytes()
    assert len(TOKENIZER) == 1024
    assert len(TOKENIZER.encode(source)) < len(source) / 2


def test_weights_are_small_and_need_neither_torch_nor_pickle() -> None:
    assert WEIGHTS.stat().st_size <= 4_000_000
    with np.load(WEIGHTS, allow_pickle=False) as file:
        assert {value.dtype.kind for value in file.values()} <= {"f", "u", "i"}
        assert all(np.isfinite(value).all() for value in file.values())
    code = "import sys; sys.modules['torch'] = None; import transformer; transformer.load()"
    subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=True, timeout=60)


def test_the_model_has_learnt_python() -> None:
    """Held-out text: this very file."""
    tokens = [END, *TOKENIZER.encode(Path(__file__).read_bytes())][: MODEL.context]
    attend = DenseAttention(MODEL, MODEL.context)
    attend.extend(len(tokens))
    logits = MODEL.forward(tokens, attend, range(len(tokens))).astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert -logits[np.arange(len(tokens) - 1), tokens[1:]].mean() < 4.0  # log(1024) is 6.9


def test_numpy_computes_what_torch_trained() -> None:
    torch = pytest.importorskip("torch")
    train = pytest.importorskip("train")
    with np.load(WEIGHTS) as file:
        arrays = dict(file)
    sizes = {name.removeprefix("config."): int(arrays.pop(name)) for name in list(arrays) if name.startswith("config.")}
    model = train.Model(sizes)
    model.load_state_dict({name: torch.from_numpy(arrays[name]).float() for name in arrays if name != "merges"})
    tokens = TOKENIZER.encode(HEADER)
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[0].numpy()
    attend = DenseAttention(MODEL, len(tokens))
    got = []
    for part in (tokens[:7], tokens[7:8], tokens[8:]):
        attend.extend(len(part))
        got.append(MODEL.forward(part, attend, range(len(part))))
    np.testing.assert_allclose(np.concatenate(got), expected, atol=2e-3)


def test_training_writes_weights_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    train = importlib.import_module("train")
    for i in range(25):
        (tmp_path / f"{i}.py").write_bytes((EXAMPLES / "engine.py").read_bytes())
    out = tmp_path / "weights.npz"
    words = ["--steps", "2", "--batch", "2", "--text", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with torch.random.fork_rng():
        train.main()
    assert re.search(r"held-out loss \d\.\d+ nats/token", capsys.readouterr().out)
    model, tokenizer = load(out)
    assert isinstance(model, Transformer)
    assert len(tokenizer) == len(model.embed)
    assert [path.name for path in tmp_path.glob("*.npz")] == ["weights.npz"]


def test_generate_from_the_command_line(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"\r\nclass Queue:\r\n    def put(\r\n\r\n\r\ndef main(\r\n")
    args = ["--file", str(prompts), "--samples", "2", "--max-new-tokens", "20", "--block-size", "4"]
    first, second = run(*args), run(*args, "--max-batch", "1", "--num-blocks", "20")
    assert (first.returncode, second.returncode) == (0, 0)
    assert all(line.startswith("pagedkv: compiling") for line in (first.stderr + second.stderr).splitlines())
    assert "check: all " in first.stdout
    assert first.stdout.count("class Queue:\n    def put(") == first.stdout.count("\ndef main(") == 2
    assert re.search(r"\d+ tokens in .* tokens/s\n.* found in the prefix cache\nblocks: .*\nmemory: ", first.stdout)
    # The texts do not depend on what runs beside them.
    assert first.stdout.partition(" tokens in ")[0] == second.stdout.partition(" tokens in ")[0]


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_a_cache_in_8_bits(kv_dtype: str) -> None:
    done = run("def main(", "--kv-dtype", kv_dtype, "--max-new-tokens", "12")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_operation_runs_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, asked = finish(engine_for([b"def main("])), set()

    def on_cpu(operation: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, backend: str, **options: object) -> object:
            asked.add((operation.__name__, backend))
            return operation(*args, **options)

        return call

    monkeypatch.setattr(pagedkv, "apply_rotary", on_cpu(pagedkv.apply_rotary))
    monkeypatch.setattr(cache, "write_kv", on_cpu(pagedkv.write_kv))  # as `PagedKVCache` calls it

    def planned(arguments: AttentionArguments) -> AttentionCall:
        asked.add((arguments.ragged, arguments.backend))
        return attention_call(arguments._replace(backend="cpu"))

    monkeypatch.setattr(plan, "attention_call", planned)
    assert finish(engine_for([b"def main("], backend="emulator")) == expected
    assert {backend for _, backend in asked} == {"emulator"}
    assert len(asked) == 4


@pytest.mark.long
def test_the_cuda_kernels_generate_in_the_emulator() -> None:
    done = run("def main(", "--backend", "emulator", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "check: all 4 tokens match" in done.stdout


def test_a_common_beginning_is_computed_and_stored_once() -> None:
    prompts = [HEADER + b"class Queue", HEADER + b"def main("]
    alone, shared = (engine_for(prompts, num_samples=3, prefix_cache=found) for found in (False, True))
    assert finish(alone) == finish(shared)
    assert alone.cache.stats().hit_tokens == alone.counts.peak_shared == 0
    assert shared.counts.peak_blocks < alone.counts.peak_blocks / 2
    found = shared.cache.stats().hit_tokens
    assert shared.counts.prefilled + found == alone.counts.prefilled > 2 * shared.counts.prefilled


def test_a_beginning_of_512_tokens_is_computed_by_the_first_of_three() -> None:
    beginning = "import os, sys\n" * 110
    prompts = [beginning + rest for rest in ("def main(", "class Queue:", "x = ")]
    encoded = [TOKENIZER.encode(generate.NEW_PARAGRAPH + prompt.encode()) for prompt in prompts]
    num_shared = next(i for i, tokens in enumerate(zip(*encoded, strict=False)) if len(set(tokens)) > 1)
    assert num_shared >= 512
    sizes = ["--context", str(num_shared + 50), "--block-size", "1", "--num-blocks", "4000", "--max-new-tokens", "8"]
    texts, computed = [], []
    for flags in ([], ["--no-prefix-cache"]):
        done = run(*prompts, *sizes, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        texts.append(done.stdout.partition(" tokens in ")[0])
        computed.append(int(re.search(r"prompts: (\d+) tokens computed", done.stdout)[1]))
    assert texts[0] == texts[1]
    assert computed[1] == sum(map(len, encoded))
    assert computed[1] - computed[0] == 2 * num_shared


def test_sampling_is_a_function_of_the_seed() -> None:
    prompts = [HEADER, b"def main("]
    assert finish(engine_for(prompts, seed=1)) == finish(engine_for(prompts, seed=1, max_batch=1))
    assert finish(engine_for(prompts, seed=1)) != finish(engine_for(prompts, seed=2))


THREE_TEXTS = functools.partial(
    engine_for, [b"def main(", b"def main(self, other):\n", b"x"], num_samples=2, max_new_tokens=20, max_batch=6
)


@pytest.fixture(scope="module")
def three_texts():
    return finish(THREE_TEXTS())


@pytest.mark.parametrize("num_blocks", [2, 11, 12, *long(n for n in range(1, 31) if n not in (2, 11, 12))])
def test_any_pool_is_survived(three_texts: list, num_blocks: int) -> None:
    engine = THREE_TEXTS(num_blocks=num_blocks)
    for tokens, expected in zip(finish(engine), three_texts, strict=True):
        assert tokens == expected[: len(tokens)]
    if num_blocks >= 12:  # as many as the longest text needs alone
        assert all(sample.done != "the pool is too small" for sample in engine.samples)


def test_a_full_pool_sends_texts_back_to_wait() -> None:
    engine = engine_for([b"def main(", b"class Queue"], 16, num_samples=3, max_new_tokens=40)
    assert finish(engine) == finish(engine_for([b"def main(", b"class Queue"], num_samples=3, max_new_tokens=40))
    assert engine.scheduler.num_preempted > 0
    assert engine.counts.peak_blocks <= 16


def test_a_pool_too_small_for_one_of_two_texts_is_said_and_no_failure() -> None:
    done = run("x", "def main(self, other):", "--num-blocks", "4", "--block-size", "2", "--max-new-tokens", "2")
    assert done.returncode == 0
    assert done.stdout.count("[the pool is too small]") == 1
    assert "check: all 2 tokens match" in done.stdout


def test_the_check_finds_a_wrong_token() -> None:
    engine = engine_for([b"def main("])
    finish(engine)
    (sample,) = engine.samples
    assert dense_choices(MODEL, sample, engine.sampling, "float32") == sample.tokens
    sample.tokens[2] = (sample.tokens[2] + 1) % 1024
    assert dense_choices(MODEL, sample, engine.sampling, "float32")[2] != sample.tokens[2]


@given(st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True), st.integers(0, 5), st.floats(0, 1))
def test_a_draw_respects_the_limits(seed: int, draw: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).standard_normal(8).astype(np.float32)
    order = np.argsort(-logits)
    assert Sampling(temperature=0).choose(logits, draw) == order[0]
    assert Sampling(0.5, top_k=1, top_p=1).choose(logits, draw) == order[0]
    assert Sampling(0.5, top_k=0, top_p=0).choose(logits, draw) == order[0]
    assert Sampling(0.5, top_k, top_p).choose(logits, draw) in order[: top_k or 8]


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.1, 0.4], np.float32))
    chosen = [Sampling(1.0, 0, 1.0).choose(logits, draw) for draw in (0, 0.49, 0.51, 0.59, 0.61, 0.999999)]
    assert chosen == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["x", ""], "prompt 2 is empty"),
        (["--file", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--samples", "0"], "'0' is not a whole number, 1 or more"),
        (["--top-p", "nan"], "'nan' is not a number, 0 to 1"),
        (["--weights", "nowhere.npz"], "train.py makes it"),
        (["--num-blocks", str(10**15)], "no pool of 1000000000000000 blocks"),
        (["word " * 400], "the model takes fewer than"),
        (
            ["x", "y", "--num-blocks", "1"],
            "a pool of 1 x 16 tokens is too small for a prompt and 120 new tokens: raise",
        ),
    ],
)
def test_mistakes_are_explained(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py", *args])
    with pytest.raises(SystemExit) as left:
        generate.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_wrong_number_of_threads_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threads._state, "count", None)
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "abc")
    monkeypatch.setattr(sys, "argv", ["generate.py", "x"])
    with pytest.raises(SystemExit, match=r"^2$"):
        generate.main()
    assert "error: PAGEDKV_NUM_THREADS must be an integer in 1..1024, got 'abc'\n" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_reports_and_exits_130() -> None:
    command = [sys.executable, str(EXAMPLES / "generate.py"), "def main(", "--samples", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        start = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert start.startswith("----- prompt 1")
    assert "tokens/s" in rest
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("script", "missing", "extra", "said"),
    [
        ("serve.py", "uvicorn", "serve", "the server needs starlette and uvicorn: "),
        ("paged_minimal.py", "torch", "torch", "pagedkv.compat takes tensors of torch, which cannot be imported "),
    ],
)
def test_examples_say_what_to_install(script, missing, extra, said):
    hidden = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", hidden, str(EXAMPLES / script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(said)
    assert done.stderr.endswith(f": {pip_install(extra)}\n")


def test_logits_that_are_not_finite_end_a_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a chunk of a prompt, too, none of whose blocks are ever found."""
    engine = engine_for([b"def f(x):\n    return", b"class"], max_new_tokens=4)
    expected = finish(engine)[1]
    engine = engine_for([b"def f(x):\n    return", b"class"], max_new_tokens=4)
    forward = Transformer.forward
    with monkeypatch.context() as patch:

        def spoiled(*args: object) -> np.ndarray:
            logits = forward(*args)
            logits[0] = np.nan
            return logits

        patch.setattr(Transformer, "forward", spoiled)
        next(engine.run())
    assert engine.samples[0].done.startswith("error: the model's logits are not finite")
    assert engine.cache.find(engine.samples[0].prompt) == 0
    assert finish(engine) == [[], expected]


def test_options_of_a_draw() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
    draws = np.linspace(0, 0.999, 20)

    def drawn(seen: tuple[int, ...] = (), banned: tuple[int, ...] = (), **options: float) -> set[int]:
        sampling = Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options)
        return {sampling.choose(logits, draw, seen, banned) for draw in draws}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(min_p=0.4) == {1, 3, 4}
    assert drawn(min_p=0.3, banned=(1,)) == {0, 3, 4}
    assert drawn(temperature=0, banned=(1,)) == {3}
    assert drawn(temperature=0, repetition_penalty=3.0, seen=(1, 1, 0)) == {3}
    for row in ([0, np.nan], [np.inf, 0], [-np.inf, -np.inf]):
        with pytest.raises(FloatingPointError, match="the model's logits are not finite"):
            Sampling().choose(np.array(row, np.float32), 0.5)
