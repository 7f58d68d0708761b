"""How fast decode or prefill is, within seconds, beside torch's SDPA: ``python -m tests.gpu.speeds [--dry] OPERATION``.

``host`` says what a call takes on the host, and which part of it takes how long.

`pagedkv bench` takes its time, and compares results; this appends each figure to the results as soon as it has it.
``--dry`` runs a little of it in the emulator, whose figures say nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pagedkv
from pagedkv.bench.contest import Sample, median
from pagedkv.bench.gpu.device import TURNS, open_gpu
from pagedkv.bench.gpu.measure import host_columns, host_time, on_gpu, sample
from pagedkv.cuda.driver import CudaDevice

from ..bench.gpu.fake_gpu import FakeGpu
from . import results

BLOCK, HEADS, KV_HEADS, SAMPLES = 16, 32, 8, 5
CALLS = 200  # in a row: fewer than the driver queues


class Cell(NamedTuple):
    """Sequences, tokens of each, head_dim, dtype of the caches; queries have it, too, or float16."""

    num_seqs: int
    length: int
    head_dim: int
    kind: str


# Kernels that the families have compiled.
CELLS = {
    "decode": [
        *(Cell(32, length, 128, "bfloat16") for length in (8192, 2048)),
        *(Cell(1, length, 128, "bfloat16") for length in (4096, 32768)),
        Cell(32, 8192, 128, "fp8_e4m3"),
    ],
    "prefill": [
        *(Cell(8, 4096, 128, "float16"), Cell(1, 16384, 128, "float16"), Cell(4, 4096, 64, "float16")),
        Cell(4, 4096, 256, "bfloat16"),
    ],
    "host": [Cell(1, 64, 128, "bfloat16")],
}
# Prefill, and backends of torch.
SUBJECTS = {"prefill": None, "SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
DRY = [Cell(2, 64, 64, "float16")]


class OnTheHost(FakeGpu):
    """The host's clock, around calls of the emulator."""

    def record(self) -> float:
        return perf_counter() * 1e3

    def flush(self) -> None:
        """Leave what is in the cache."""


class Speeds:
    """Measures cells on a GPU, or in the emulator."""

    def __init__(self, is_dry: bool) -> None:
        self.gpu = OnTheHost("torch") if is_dry else open_gpu()
        self.device = "cpu" if is_dry else "cuda"
        self.options = {"backend": "emulator"} if is_dry else {}
        self.calls = 2 if is_dry else CALLS

    def seconds(self, call: Callable[[], Any]) -> float:
        take = on_gpu(self.gpu)(call)
        return median([take().seconds for _ in range(SAMPLES)])

    def report(
        self, operation: str, cell: Cell | None, subject: str, amount: float, unit: str, call: Callable[[], Any]
    ):
        """Append what a call takes, and its amount of work over that."""
        row = {"speed": operation, "device": self.gpu.facts["device"], "subject": subject}
        row |= cell._asdict() if cell else {}
        try:
            taken = self.seconds(call)
        except Exception as error:  # the others have their turn
            results.append(**row, why=f"{type(error).__name__}: {error}"[: results.MOST_CHARACTERS])
        else:
            results.append(**row, us=taken * 1e6, **{unit: amount / taken})

    def normal(self, *shape: int, like: str) -> torch.Tensor:
        return torch.randn(shape, dtype=getattr(torch, like), device=self.device)

    def paged(self, cell: Cell) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """K, V, tables and lengths, the blocks of each sequence anywhere; and the options of every call."""
        shape, is_fp8 = (cell.num_seqs * cell.length // BLOCK, BLOCK, KV_HEADS, cell.head_dim), "fp8" in cell.kind
        if is_fp8:
            caches = [torch.randint(0, 0x60, shape, dtype=torch.uint8, device=self.device) for _ in "kv"]
        else:
            caches = [self.normal(*shape, like=cell.kind) for _ in "kv"]
        tables = torch.randperm(shape[0], device=self.device).int().reshape(cell.num_seqs, -1)
        lengths = torch.full((cell.num_seqs,), cell.length, dtype=torch.int32, device=self.device)
        return [*caches, tables, lengths], self.options | ({"kv_dtype": cell.kind} if is_fp8 else {})

    def decode(self, cells: Sequence[Cell]) -> None:
        """Bytes of K and V a second, beside a kernel that only reads."""
        call = partial(self.gpu.read, self.gpu.copy_bytes, TURNS)
        self.report("decode", None, "read", self.gpu.copy_bytes / 1e9, "GB/s", call)
        for cell in cells:
            kind = "float16" if "fp8" in cell.kind else cell.kind
            gigabytes = 2e-9 * cell.num_seqs * cell.length * KV_HEADS * cell.head_dim * (1 if "fp8" in cell.kind else 2)
            q = self.normal(cell.num_seqs, HEADS, cell.head_dim, like=kind)
            arrays, options = self.paged(cell)
            call = partial(pagedkv.decode_attention, q, *arrays, **options, out=torch.empty_like(q))
            self.report("decode", cell, "split", gigabytes, "GB/s", call)
            starts = torch.arange(cell.num_seqs + 1, dtype=torch.int32, device=self.device)
            call = partial(pagedkv.prefill_attention, q, *arrays, starts, **options, out=torch.empty_like(q))
            self.report("decode", cell, "prefill", gigabytes, "GB/s", call)
            if kind == cell.kind:
                dense = [self.normal(cell.num_seqs, KV_HEADS, cell.length, cell.head_dim, like=kind) for _ in "kv"]
                rows = q.reshape(cell.num_seqs, KV_HEADS, -1, cell.head_dim)  # the heads of a KV head as its queries
                self.report(
                    "decode", cell, "SDPA", gigabytes, "GB/s", partial(scaled_dot_product_attention, rows, *dense)
                )

    def prefill(self, cells: Sequence[Cell]) -> None:
        """Products a second."""
        for subject, backend in SUBJECTS.items():
            for cell in cells:
                pairs = cell.num_seqs * cell.length * (cell.length + 1) / 2
                if backend:
                    dense = [
                        self.normal(cell.num_seqs, HEADS, cell.length, cell.head_dim, like=cell.kind) for _ in "qkv"
                    ]
                    call = sdpa_kernel(backend)(partial(scaled_dot_product_attention, *dense, is_causal=True))
                else:
                    q = self.normal(cell.num_seqs * cell.length, HEADS, cell.head_dim, like=cell.kind)
                    starts = torch.arange(cell.num_seqs + 1, dtype=torch.int32, device=self.device) * cell.length
                    arrays, options = self.paged(cell)
                    call = partial(pagedkv.prefill_attention, q, *arrays, starts, **options, out=torch.empty_like(q))
                self.report("prefill", cell, subject, 4e-12 * cell.head_dim * HEADS * pairs, "TFLOP/s", call)

    def host(self, cells: Sequence[Cell]) -> None:
        """What a repeated call takes on the host, and its parts.

        Beside them, a loop of Python tells how fast the host is, and an operation of torch's what its driver takes.
        """
        (cell,) = cells
        q, launched = self.normal(cell.num_seqs, HEADS, cell.head_dim, like=cell.kind), []
        arrays, options = self.paged(cell)
        out = torch.empty_like(q)
        call = partial(pagedkv.decode_attention, q, *arrays, **options, out=out)
        plan = pagedkv.plan_decode(q, *arrays, **options)
        call()
        with mock.patch.object(CudaDevice, "start", lambda *given: launched.append(given)):
            call()
        known = sum(is_ready for *_, is_ready in launched)  # a call without a known plan makes one that is not
        results.append(speed="host", subject="launches of a repeated call", number=known)
        self.report_host("decode_attention", call)
        self.report_host("run of a plan", partial(plan.run, q, *arrays[:2], out=out))
        dense = [self.normal(cell.num_seqs, KV_HEADS, cell.length, cell.head_dim, like=cell.kind) for _ in "kv"]
        rows = q.reshape(cell.num_seqs, KV_HEADS, -1, cell.head_dim)
        self.report_host("SDPA", partial(scaled_dot_product_attention, rows, *dense))
        self.report_host("neg_ of torch", q.neg_)
        self.report_host("1000 turns of a loop", lambda: [None for _ in range(1000)])
        for device, prepared, is_ready in launched:  # none in the emulator
            self.report_host("its launch", partial(CudaDevice.start, device, prepared, is_ready))
            self.report_host("cuLaunchKernelEx", partial(device._start, *prepared[0]))
            self.report_host("cuCtxGetCurrent", device._gpu.driver.cuCtxGetCurrent)
            self.report_host("torch's stream", lambda: torch.cuda.current_stream(q.device).cuda_stream)
        with mock.patch.object(CudaDevice, "start"):
            self.report_host("all but its launch", call)

    def report_host(self, subject: str, call: Callable[[], Any]) -> None:
        """Append what single calls take on the host, in a row and behind flushes."""
        call()
        self.gpu.synchronize()
        taken = zip(*(host_time(call) for _ in range(self.calls)), strict=True)
        self.gpu.synchronize()
        row = {"speed": "host", "device": self.gpu.facts["device"], "subject": subject}
        for where, samples in (
            ("in a row", [Sample(0.0, *taken)]),
            ("behind a flush", [sample(self.gpu, call, 10) for _ in range(SAMPLES)]),
        ):
            results.append(**row, where=where, **host_columns(samples))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.speeds", description=__doc__)
    parser.add_argument("operation", choices=CELLS)
    parser.add_argument("--dry", action="store_true", help="in the emulator")
    given = parser.parse_args()
    getattr(Speeds(given.dry), given.operation)(DRY if given.dry else CELLS[given.operation])


if __name__ == "__main__":
    main()
