"""Bench of write_kv on a GPU, in turns with a copy and with indexed assignment in torch.

Traffic is what has to move: K and V of the new tokens, read once in their dtype and written once in the cache's. The
8 bytes of each token's slot do not count.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...layouts import LAYOUTS, KvFormat
from ...operations.caches import write_kv
from ...typing import KvDtype, Layout
from ..contest import Call, Refused, contest
from ..report import Row
from .device import COPY_BYTES, QUICK_COPY_BYTES, Gpu, open_gpu
from .measure import COPY, EMPTY, columns, on_gpu

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE = 8, 128, 16, np.dtype(np.float16)


class Case(NamedTuple):
    """`num_tokens` tokens, one in each block as in a decode step, or in whole blocks as for prompts."""

    name: str
    num_tokens: int
    kv_dtype: KvDtype | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V, read and written."""
        itemsize = DTYPE.itemsize + KvFormat.of(DTYPE, self.kv_dtype).stored.itemsize
        return 2 * self.num_tokens * NUM_KV_HEADS * HEAD_DIM * itemsize

    def slots(self) -> npt.NDArray[np.int64]:
        """The tokens' slots, in random blocks."""
        rng = np.random.default_rng(0)
        if self.name == "step":
            return rng.permutation(self.num_tokens) * BLOCK_SIZE + rng.integers(0, BLOCK_SIZE, self.num_tokens)
        blocks = rng.permutation(self.num_blocks)[:, None]
        return (blocks * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[: self.num_tokens]

    @property
    def num_blocks(self) -> int:
        return self.num_tokens if self.name == "step" else -(-self.num_tokens // BLOCK_SIZE)


CASES = tuple(Case(name, n, kv) for kv in (None, "fp8_e4m3") for name, n in (("step", 256), ("prompt", 8192)))
QUICK_CASES = (Case("step", 8), Case("prompt", 40, "fp8_e4m3"))


class _Problem:
    """The new tokens and their slots, on the host and on the GPU."""

    def __init__(self, gpu: Gpu, case: Case) -> None:
        self.gpu, self.case = gpu, case
        shape = (2, case.num_tokens, NUM_KV_HEADS, HEAD_DIM)
        self.host = (*np.random.default_rng(1).standard_normal(shape, np.float32).astype(DTYPE), case.slots())
        self.k, self.v, self.slots = map(gpu.array, self.host)

    def new_caches(self, layout: Layout) -> list[npt.NDArray[Any]]:
        kv_format = KvFormat.of(DTYPE, self.case.kv_dtype)
        parts = kv_format.parts(layout, self.case.num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        return [np.zeros(*part) for part in parts]

    def differing(self, layout: Layout, caches: Any) -> int:
        """Count the elements of caches on the GPU that differ from what the CPU backend writes."""
        expected = self.new_caches(layout)
        k, v, slots = self.host
        write_kv(k, v, expected[0], expected[1], slots, layout=layout, kv_dtype=self.case.kv_dtype)
        pairs = zip(map(self.gpu.numpy, caches), expected, strict=True)
        return sum(int((own != other.astype(np.float32)).sum()) for own, other in pairs)


def _pagedkv(problem: _Problem, layout: Layout) -> Call:
    k_cache, v_cache = map(problem.gpu.array, problem.new_caches(layout))

    def call() -> Any:
        write_kv(problem.k, problem.v, k_cache, v_cache, problem.slots, layout=layout, kv_dtype=problem.case.kv_dtype)
        return layout, (k_cache, v_cache)

    return call


def _torch_index(problem: _Problem) -> Call:
    """``cache[slots] = new`` for K and for V in layout NHD."""
    if problem.gpu.framework != "torch":
        raise Refused("needs torch with CUDA")
    if problem.case.kv_dtype:
        raise Refused("no conversion to fp8")
    caches = [problem.gpu.array(x) for x in problem.new_caches("NHD")]
    flat = [x.view(-1, NUM_KV_HEADS, HEAD_DIM) for x in caches]

    def call() -> Any:
        flat[0][problem.slots], flat[1][problem.slots] = problem.k, problem.v
        return "NHD", caches

    return call


def measure(gpu: Gpu, case: Case, repeats: int, progress: Callable[[str], Any]) -> list[Row]:
    """Measure every layout and torch; return a row for each, whose *error* counts wrong elements."""
    problem = _Problem(gpu, case)
    subjects: dict[str, Callable[[], Call]] = {layout: partial(_pagedkv, problem, layout) for layout in LAYOUTS}
    subjects["torch index"] = partial(_torch_index, problem)
    result = contest(
        subjects,
        {EMPTY: partial(gpu.read, 0), COPY: gpu.copy},
        lambda written: problem.differing(*written),
        0,
        repeats,
        timer=on_gpu(gpu),
        progress=lambda name: progress(f"write, {case.name}: {name}"),
    )
    copies = result.seconds(COPY)
    least = copies and copies * case.num_bytes / (2 * gpu.copy_bytes)
    shape = {"write": case.name, "T": case.num_tokens, "Hkv": NUM_KV_HEADS, "D": HEAD_DIM, "P": BLOCK_SIZE}
    shape |= {"of": DTYPE.name, "kv": case.kv_dtype or DTYPE.name}
    return [
        shape | columns(result, name, case.num_bytes, COPY, least) | {"note": result.notes.get(name)}
        for name in subjects
    ]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument("--quick", action="store_true", help="small cells")


def run(*, repeats: int = 9, progress: Callable[[str], Any] = print, quick: bool = False) -> list[Row]:
    """Measure on the first GPU; returns rows like those of `decode.run`.

    Raises
    ------
    BackendUnavailableError
        There is no GPU, or a package that it needs is missing.
    """
    gpu = open_gpu(QUICK_COPY_BYTES if quick else COPY_BYTES)
    rows = [row for case in (QUICK_CASES if quick else CASES) for row in measure(gpu, case, repeats, progress)]
    return [gpu.facts, *rows]
