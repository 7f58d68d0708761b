"""The attention kernels that tests compile, and one way to call each of them on its backend."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pagedkv.calls import AttentionArguments, AttentionCall
from pagedkv.cuda import driver
from pagedkv.cuda.plans import attention
from pagedkv.cuda.plans import prefill as planning
from pagedkv.cuda.plans.plan import run_plan
from pagedkv.kernels.prefill.config import PART
from pagedkv.kernels.split.config import SHORTEST_SPLIT
from pagedkv.validation.attention import attention_call

from ..support.devices import CopyingDevice, emulator, with_capability
from ..support.problems import Problem, Spec, build, run
from ..support.strategies import SPLIT as CPU_SPLIT

PARTITION = 512  # tokens of a partition of v2
FEW_ROWS_SPLIT = 4 * PART  # tokens of a thread block of prefill for few rows


@dataclass(frozen=True)
class Kernel:
    """A kernel as a test compiles it: a second or two for v1 and v2, 2 to 10 for the others.

    Attributes
    ----------
    kernel : str
        "v1", "v2", "split", "prefill", "wgmma" (prefill on warpgroups, if the device has them), or "cpu".
    name : str
        Tells apart what one kernel is compiled for.
    spec : Spec
        What it is compiled for, in a batch of sequences of which each is another case.
    capability : (int, int)
        What an emulator says it has; a GPU has its own.
    stretch : int or None
        Tokens after which the sums of rows begin anew in prefill, whatever the number of KV heads; None for what calls
        of users have.
    """

    kernel: str
    name: str
    spec: Spec
    capability: tuple[int, int] = (9, 0)
    stretch: int | None = None

    def __str__(self) -> str:
        suffix = "" if self.capability == (9, 0) else "-cc{}.{}".format(*self.capability)
        return f"{self.kernel}-{self.name}{suffix}"

    @property
    def is_prefill(self) -> bool:
        return self.spec.query_lens is not None

    @property
    def edge(self) -> int:
        """The number of tokens after which a kernel goes on in another split, partition or tile."""
        edges = {"v1": PARTITION, "v2": PARTITION, "split": SHORTEST_SPLIT, "prefill": 64, "wgmma": 128}
        return edges.get(self.kernel) or (256 if self.is_prefill else CPU_SPLIT)

    @property
    def is_slow(self) -> bool:
        """Whether a call takes long: prefill in the emulator."""
        return self.is_prefill and self.kernel != "cpu"

    def build(self, **fields: Any) -> Problem:
        """A problem for this kernel; without fields, its usual batch."""
        return build(self.spec.replace(**fields))

    def replace(self, suffix: str, **fields: Any) -> "Kernel":
        """The same kernel, compiled for something else, which its name ends with."""
        return replace(self, name=f"{self.name}-{suffix}", spec=self.spec.replace(**fields))

    def call(self, problem: Problem, check: bool = False) -> AttentionCall:
        """The call of a problem as the public operation validates it."""
        ours: dict[str, Any] = {"kernel": "auto" if self.is_prefill else self.kernel, "backend": "emulator"}
        ours |= {"check": check, "out": problem.out, "return_lse": True}
        return attention_call(AttentionArguments(*problem.args, ragged=self.is_prefill, **problem.options, **ours))

    def launch(self, device: Any, call: AttentionCall, out: np.ndarray, lse: np.ndarray | None) -> None:
        """Run a call on a device that is open."""
        device = with_capability(device, self.capability)
        shared = {"STRETCH": self.stretch, "FEW_KV_HEADS": 99} if self.stretch else {"STRETCH": planning.STRETCH}
        with patch.multiple(planning, **shared):
            plan = attention.plan(device, call._replace(out=out))
        run_plan(device, plan, call.q, call.caches, out, lse)

    def attend(
        self, problem: Problem, open_device: Callable[..., Any] | None = emulator, *, device: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of a problem on `device` or a new one, and that nothing beside the rows of `out` was written."""
        if self.kernel == "cpu":
            return run(problem)
        call, (_, lse) = self.call(problem), new_results(problem)
        problem.out_buffer[...] = np.nan
        with device or open_device(global_race=True) as device:
            self.launch(device, call, problem.out, lse)
        rows = problem.num_written
        written = problem.out[:rows].copy()
        problem.out[:rows] = np.nan
        assert np.isnan(problem.out_buffer.astype(np.float32)).all(), "something was written beside the rows of out"
        assert np.isnan(lse[rows:]).all()
        return written, lse[:rows]

    def attend_rows(
        self, whole: Problem, start: int, stop: int, open_device: Callable[..., Any] | None, **checks: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of rows start to stop of the only sequence of a prefill problem, as its last ones."""
        (length,), (query_len,) = whole.spec.seq_lens, whole.spec.query_lens or (1,)
        part = build(whole.spec.replace(seq_lens=(length - query_len + stop,), query_lens=(stop - start,)))
        part.q[...] = whole.q[start:stop]
        part.k_cache, part.v_cache, part.block_tables = whole.k_cache, whole.v_cache, whole.block_tables
        part.options.update((name, x) for name, x in whole.options.items() if name in ("k_scales", "v_scales"))
        return self.attend(part, device=open_device(global_race=True, **checks) if open_device else None)


def new_results(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of NaN for the output and the LSE."""
    return np.full(problem.q.shape, np.nan, problem.q.dtype), np.full(problem.q.shape[:2], np.nan, np.float32)


def assert_same_bits(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    """Equal outputs and LSEs, bit by bit."""
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


def decode_kernel(
    kernel: str,
    head_dim: int,
    block_size: int,
    q_dtype: str,
    kv_dtype: str,
    strides: str = "own",
    *,
    group_size: int | None = None,
    capability: tuple[int, int] = (9, 0),
    **options: Any,
) -> Kernel:
    """v1, v2 or split; the group size is a constant of split alone, and an argument of the launch of v1 and v2."""
    parts = [f"D{head_dim}", *([f"G{group_size}"] if group_size else []), f"P{block_size}", q_dtype, kv_dtype]
    parts += [strides] if strides != "own" else []
    parts += ["modified"] if {"softcap", "alibi"} & options.keys() else []
    parts += [options["score_mod"].__name__] if "score_mod" in options else []
    spec = Spec(
        seq_lens=(37, 3, 600, 0),
        head_dim=head_dim,
        block_size=block_size,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        strides=strides,
        group_size=group_size or 2,
        layout="NHD" if kernel == "split" else "vllm",
        **options,
    )
    return Kernel(kernel, "-".join(parts), spec, capability)


def prefill_kernel(name: str, kernel: str = "prefill", capability: tuple[int, int] = (9, 0), **fields: Any) -> Kernel:
    batch = {"seq_lens": (37, 1, 150 if kernel == "wgmma" else 130, 0), "query_lens": (20, 1, 30, 0)}
    return Kernel(kernel, name, Spec(**{**batch, **fields}), capability)


def cpu_kernel(operation: str, **fields: Any) -> Kernel:
    batch = {"seq_lens": (CPU_SPLIT + 5, 16, 17, 0, 7)}
    if operation == "prefill":
        batch = {"seq_lens": (CPU_SPLIT + 5, 16, 17, 0), "query_lens": (70, 16, 3, 0)}
    name = f"{operation}-{fields.get('layout', 'NHD')}-{fields['kv_dtype']}-D{fields['head_dim']}"
    return Kernel("cpu", name, Spec(**batch, **fields))


V1 = decode_kernel("v1", 64, 16, "float32", "float32")
V2 = decode_kernel("v2", 64, 8, "float16", "float16")
# Each form of split: operands on tensor cores, on CUDA cores, rows in shared memory, fp8.
SPLIT = decode_kernel("split", 64, 16, "float16", "float16", group_size=4)
CUDA_CORES = decode_kernel("split", 64, 16, "float32", "float32", group_size=3)
MANY_HEADS = decode_kernel("split", 64, 16, "float16", "float16", group_size=17)
SPLIT_FP8 = decode_kernel("split", 64, 16, "float16", "fp8_e4m3", group_size=8)  # four blocks on a multiprocessor
SPLIT_INT8 = decode_kernel("split", 64, 16, "float16", "int8", group_size=8)
CORES_INT8 = decode_kernel("split", 64, 16, "float32", "int8", group_size=3)
DECODE = (V1, V2, SPLIT, CUDA_CORES, MANY_HEADS)
STAGES_OF_16 = decode_kernel("split", 128, 3, "bfloat16", "bfloat16", group_size=24)  # tokens, of MANY_HEADS 32
LOOPS = (SPLIT, CUDA_CORES, MANY_HEADS)  # of split

HALF = {"q_dtype": "float16", "kv_dtype": "float16"}
BF16 = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
# Two stages and 32 rows of a warp; a gap in rows, options, 16 rows; one stage; fp8 on its way to operands, 16 at once.
NO_WARPGROUPS = (10, 0)  # for the kernel on mma.sync where 9.0 takes the one on warpgroups; a GPU takes its own
PREFILL = prefill_kernel("tensor cores", **HALF, group_size=4)
OPTIONS = prefill_kernel("options", **BF16, head_dim=72, group_size=3, block_size=3, softcap=3.0)
ONE_STAGE = prefill_kernel("one stage", capability=NO_WARPGROUPS, **HALF, head_dim=256, group_size=1)
FP8 = {"q_dtype": "bfloat16", "kv_dtype": "fp8_e4m3", "group_size": 2, "kv_scales": "per head"}
PREFILL_FP8 = prefill_kernel("fp8", **FP8, head_dim=80)
PREFILL_CORES = prefill_kernel("CUDA cores", group_size=3)
PREFILL_INT8 = prefill_kernel("int8", q_dtype="bfloat16", kv_dtype="int8", group_size=2, head_dim=80)
VLLM = {"q_dtype": "float16", "kv_dtype": "fp8_e5m2", "group_size": 2, "layout": "vllm", "kv_scales": "scalar"}
PREFILL_VLLM = prefill_kernel("vllm", **VLLM, head_dim=48)
BOTH_PREFILLS = (PREFILL, PREFILL_CORES)
PREFILLS = (PREFILL, OPTIONS, ONE_STAGE, PREFILL_FP8, PREFILL_INT8, PREFILL_CORES, PREFILL_VLLM)
# The kernel for a few rows over a long context, whose keys are split over warps and thread blocks.
FEW = {"seq_lens": (FEW_ROWS_SPLIT + 9, 600, 0), "query_lens": (4, 8, 0)}
FEW_ROWS = replace(PREFILL, name="few rows, tensor cores", spec=PREFILL.spec.replace(**FEW))
WGMMA = prefill_kernel("128 dims", "wgmma", **HALF, head_dim=128, group_size=3)
# Those of few KV heads, whose thread blocks share the keys of rows.
STRETCHES = replace(PREFILL, name="stretches", stretch=64)
WGMMA_STRETCHES = replace(WGMMA, name="stretches", stretch=128)

CPU_DECODE = (
    cpu_kernel("decode", kv_dtype="float32", head_dim=64),
    cpu_kernel("decode", **BF16, head_dim=128, layout="HND", strides="halves"),
    cpu_kernel("decode", kv_dtype="fp8_e4m3", q_dtype="float16", head_dim=96, strides="strided"),
    cpu_kernel("decode", kv_dtype="float32", head_dim=40, layout="vllm", strides="strided"),
    cpu_kernel("decode", kv_dtype="fp8_e4m3", head_dim=80, layout="vllm"),
    cpu_kernel("decode", kv_dtype="int8", q_dtype="bfloat16", head_dim=96, strides="strided"),
    cpu_kernel("decode", kv_dtype="int8", head_dim=80, layout="vllm"),
)
CPU_PREFILL = (
    cpu_kernel("prefill", kv_dtype="float32", head_dim=64),
    cpu_kernel("prefill", **BF16, head_dim=128, layout="HND", strides="halves"),
    cpu_kernel("prefill", kv_dtype="fp8_e4m3", q_dtype="float16", head_dim=96, strides="strided"),
    cpu_kernel("prefill", kv_dtype="fp8_e4m3", head_dim=80, layout="vllm", strides="strided"),
    cpu_kernel("prefill", kv_dtype="int8", q_dtype="bfloat16", head_dim=96, strides="strided"),
    cpu_kernel("prefill", kv_dtype="int8", head_dim=80, layout="vllm"),
    cpu_kernel("prefill", kv_dtype="float32", head_dim=40),  # whose last vector is partly filled
)
CPU = (*CPU_DECODE, *CPU_PREFILL)
# Every kernel on a device; in the short run those of prefill that have the most of their own.
ON_DEVICE = (*DECODE, SPLIT_FP8, SPLIT_INT8, *BOTH_PREFILLS, FEW_ROWS, WGMMA, STRETCHES)
# Those whose launches take long in the emulator.
SLOW = (FEW_ROWS, WGMMA, STRETCHES)
QUICK = (*CPU, *(kernel for kernel in ON_DEVICE if kernel not in SLOW))
LONG = (OPTIONS, ONE_STAGE, PREFILL_FP8, PREFILL_INT8, PREFILL_VLLM, WGMMA_STRETCHES)
ALL = (*CPU, *ON_DEVICE)


def gpu(**checks: Any) -> CopyingDevice:
    """The GPU at hand, which has no checks."""
    return CopyingDevice(driver.cuda_device(0, 0))


def each_kernel(*kernels: Kernel, long: tuple[Kernel, ...] = ()) -> pytest.MarkDecorator:
    """Run a test of (kernel, open_device) for each kernel on its backend, and on a GPU if it is for one."""
    cases = []
    for kernel in (*kernels, *long):
        marks = [pytest.mark.long] if kernel in long else []
        if kernel.kernel == "cpu":
            cases.append(pytest.param(kernel, None, id=str(kernel), marks=marks))
            continue
        cases.append(pytest.param(kernel, emulator, id=f"emulator-{kernel}", marks=marks))
        cases.append(pytest.param(kernel, gpu, id=f"gpu-{kernel}", marks=[*marks, pytest.mark.gpu]))
    return pytest.mark.parametrize(("kernel", "open_device"), cases)


def each_emulated(*kernels: Kernel, long: tuple[Kernel, ...] = ()) -> pytest.MarkDecorator:
    """Run a test of a kernel for each, on what only the emulator can tell."""
    marks = {True: [pytest.mark.long], False: []}
    cases = [pytest.param(kernel, id=str(kernel), marks=marks[kernel in long]) for kernel in (*kernels, *long)]
    return pytest.mark.parametrize("kernel", cases)
