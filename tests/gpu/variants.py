"""Kernels of several commits side by side, in one process: ``python -m tests.gpu.variants OPERATION``.

``record COMMIT ...`` compiles what each commit launches in each cell, without a GPU, and leaves a file for each in
``.gpu/variants``, in this order: see `recordings`. The rest run them on a GPU, where nothing is compiled. ``decode``
and ``prefill`` time them in turns, beside peers, and ``few`` decode beside prefill's kernel for few rows; ``same`` runs
each ``--repeats`` times and compares bits, those of the first commit too; ``once`` runs each once, for a profiler.
``--dry`` runs small cells in the emulator, whose figures say nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pagedkv.bench.contest import Sample, contest, reason
from pagedkv.bench.gpu import decode_peers, measure, prefill_peers
from pagedkv.bench.gpu.arrays import GpuProblem
from pagedkv.bench.gpu.device import Gpu, open_gpu
from pagedkv.bench.problem import TOLERANCE, Cell
from pagedkv.bench.report import as_tables
from pagedkv.cached_property import cached_property
from pagedkv.cuda import driver
from pagedkv.emulator import EmulatorDevice

from . import results
from .record import MULTIPROCESSORS
from .recordings import CELLS, DRY, Variant, folder_of, operations, record, recorded_variants
from .speeds import OnTheHost

REPEATS = 15
MIB = 2**20
FLOORS = (4, 8, 16, 32, 64, 96, 256, 1024)  # MiB that are read
SM_CLOCK = 1  # NVML_CLOCK_SM
SHOWN = (  # in the log, of each row
    *("B", "n", "L", "Hq", "Hkv", "D", "kv", "us", "read us", "share", "TFLOP/s", "spread", "late", "MHz", "same bits"),
    *("subject", "note"),
)
# What a bit pattern is compared as: NaN is not equal to itself.
WORDS = {2: torch.int16, 4: torch.int32}


PEERS = {"decode": ("SDPA", "cuDNN", "FlashAttention 3"), "prefill": ("SDPA", "cuDNN dense", "FlashAttention 3")}
FEW = "few rows of prefill"


class Drawn(GpuProblem):
    """A problem whose arrays are drawn on the GPU, which takes less time than on the host."""

    def __init__(self, gpu: Gpu, cell: Cell, where: str) -> None:
        self.gpu, self.cell, self._where = gpu, cell, where
        lens = np.array(cell.seq_lens, np.int32)
        counts = -(-lens // cell.block_size)
        tables = np.zeros((len(lens), counts.max()), np.int32)
        tables[np.arange(counts.max()) < counts[:, None]] = np.random.default_rng(0).permutation(counts.sum())
        self.host: Any = SimpleNamespace(block_tables=tables, seq_lens=lens)
        self.block_tables, self.seq_lens = gpu.array(tables), gpu.array(lens)
        self.query_starts = gpu.array(np.cumsum([0, *cell.query_lens], dtype=np.int32))
        self.q = self._normal(sum(cell.query_lens), cell.num_heads, cell.head_dim)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=getattr(torch, self.cell.dtype), device=self._where)

    def new_out(self) -> torch.Tensor:
        return torch.zeros_like(self.q)

    @cached_property
    def nhd(self) -> tuple[Any, Any]:
        cell = self.cell
        shape = (len(np.unique(self.host.block_tables)), cell.block_size, cell.num_kv_heads, cell.head_dim)
        k, v = self._normal(*shape), self._normal(*shape)
        return (
            (k.to(torch.float8_e4m3fn).view(torch.uint8), v.to(torch.float8_e4m3fn).view(torch.uint8))
            if cell.kv_dtype
            else (k, v)
        )


class Comparison:
    """Variants on a GPU, or in the emulator."""

    def __init__(self, is_dry: bool) -> None:
        self.gpu: Any = OnTheHost("torch") if is_dry else open_gpu()
        self.is_dry, self.where = is_dry, "cpu" if is_dry else "cuda"
        self.variants = recorded_variants(folder_of(is_dry))
        if not self.variants:
            raise SystemExit(
                "nothing is recorded: `python -m tests.gpu.variants record COMMIT ...` without a GPU first"
            )
        if not is_dry and self.gpu.num_multiprocessors != MULTIPROCESSORS:
            results.append(
                note=f"recorded for {MULTIPROCESSORS} multiprocessors, here are {self.gpu.num_multiprocessors}"
            )
        self.clock, self.clocks = Clock(), list[int]()
        if not is_dry:
            self._require_code()

    def _require_code(self) -> None:
        """Link all kernels here if this driver does not load what another nvJitLink has linked."""
        gpu = driver.cuda_device(0, 0)._gpu
        try:
            with gpu.relaxed():
                gpu.kernel(self.variants[0].kernels[0], 0)
        except Exception as error:
            results.append(note=f"kernels are linked here: {reason(error)}")
            for kernel in [kernel for variant in self.variants for kernel in variant.kernels]:
                kernel._linked = None

    def call(self, variant: Variant, operation: str, problem: GpuProblem) -> Callable[[], torch.Tensor]:
        """A call that launches what a commit does, and returns its result."""
        recorded, out = variant.of(problem.cell, operation), problem.new_out()
        arrays = {"q": problem.q, "out": out, "block_tables": problem.block_tables, "seq_lens": problem.seq_lens}
        arrays |= {"query_starts": problem.query_starts, "k_cache": problem.nhd[0], "v_cache": problem.nhd[1]}
        workspaces = recorded["workspaces"].items()

        def emulated() -> torch.Tensor:
            with EmulatorDevice() as device:
                addresses = {name: device.address(name, x.view(torch.uint8).numpy()) for name, x in arrays.items()}
                addresses |= {name: device.scratch(name, nbytes) for name, nbytes in workspaces}
                for launch in variant.bind(recorded, addresses):
                    device.launch(*launch)
            return out

        if self.is_dry:
            return emulated
        device = driver.cuda_device(0, torch.cuda.current_stream().cuda_stream)
        addresses = {name: x.data_ptr() for name, x in arrays.items()}
        addresses |= {name: device.scratch(f"{name} of {variant.name}", nbytes) for name, nbytes in workspaces}
        launches = variant.bind(recorded, addresses)

        def launched() -> torch.Tensor:
            for launch in launches:
                device.launch(*launch)
            return out

        return launched

    def timer(self, call: Callable[[], Any]) -> Callable[[], Sample]:
        """A timer that asks for the clock behind each sample."""
        take = measure.on_gpu(self.gpu)(call)

        def sampled() -> Sample:
            sample = take()
            self.clocks.extend(filter(None, [self.clock()]))
            return sample

        return sampled

    def clock_columns(self) -> dict[str, float]:
        """The median clock of the samples since the list was cleared, and the least one."""
        return {"MHz": median(self.clocks), "least MHz": min(self.clocks)} if self.clocks else {}

    def calls(self, problem: GpuProblem) -> dict[str, Callable[[], Callable[[], torch.Tensor]]]:
        """What makes the calls of each variant on a cell, of each operation that is recorded."""
        cell = problem.cell
        return {
            f"{variant.name}{f', {FEW}' if operation != operations(cell)[0] else ''}": partial(
                self.call, variant, operation, problem
            )
            for operation in operations(cell)
            for variant in self.variants
        }

    def floor(self) -> None:
        """Append what an empty launch takes, and reads of a few sizes, by thread blocks of one turn and of four."""
        calls = {(0, 1): partial(self.gpu.read, 0)}
        calls |= {(mib, turns): partial(self.gpu.read, mib * MIB, turns) for mib in FLOORS for turns in (1, 4)}
        for (mib, turns), call in calls.items():
            take = self.timer(call)
            results.append(floor=mib, turns=turns, us=median(take().seconds for _ in range(REPEATS)) * 1e6)

    def decode(self, cells: Sequence[Cell]) -> None:
        self.floor()
        for cell in cells:
            self.compare("decode", cell)

    def few(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            self.compare("decode", cell, peers=())

    def prefill(self, cells: Sequence[Cell]) -> None:
        times: dict[str, dict[Cell, float]] = {}
        megahertz: dict[str, float] = {}
        for cell in cells:
            for name, seconds in self.compare("prefill", cell).items():
                times.setdefault(name, {})[cell] = seconds
            if cell.group == "prompt":
                megahertz = self.clock_columns()
        for name, of_cells in times.items():
            prompts = {cell: seconds for cell, seconds in of_cells.items() if cell.group == "prompt"}
            if len(prompts) > 2:
                results.append(fit="prefill", variant=name, **fit(prompts), **megahertz)

    def compare(self, operation: str, cell: Cell, peers: Sequence[str] | None = None) -> dict[str, float]:
        """Append a row for each variant and each peer on a cell, in turns; returns their seconds."""
        problem, same, expected = Drawn(self.gpu, cell, self.where), {}, {}

        def named(name: str, make: Callable[[], Callable[[], Any]]) -> Callable[[], tuple[str, Any]]:
            call = make()
            return lambda: (name, call())

        def error_of(given: tuple[str, torch.Tensor]) -> float:
            name, out = given[0], given[1].reshape(problem.q.shape)
            right = expected.setdefault("", out.clone())
            same[name] = bool(torch.equal(words(out), words(expected.setdefault(name.endswith(FEW), out.clone()))))
            error = (out.float() - right.float()).abs().max() / right.float().abs().max()
            return float(error) if bool(torch.isfinite(out).all()) else float("inf")

        those = {"decode": decode_peers, "prefill": prefill_peers}[operation].SUBJECTS
        chosen = PEERS[operation] if peers is None else peers
        makers = self.calls(problem) | {name: partial(those[name], problem) for name in chosen}
        subjects = {name: partial(named, name, make) for name, make in makers.items()}
        num_bytes = cell.num_bytes if operation == "decode" else None
        others: dict[str, Callable[[], Any]] = {measure.EMPTY: partial(self.gpu.read, 0)}
        if num_bytes:
            others[measure.READ] = partial(self.gpu.read, min(num_bytes, self.gpu.copy_bytes))
        self.clocks.clear()
        found = contest(subjects, others, error_of, TOLERANCE[cell.dtype], REPEATS, timer=self.timer)
        row = {"compare": operation, "device": self.gpu.facts["device"], "group": cell.group, **self.clock_columns()}
        row |= {name: x for name, x in cell.columns("prefill").items() if name != "prefill"}
        least, made = found.seconds(measure.READ) if num_bytes else None, []
        for name in subjects:
            seconds = found.seconds(name)
            columns = measure.columns(found, name, num_bytes, measure.READ, least)
            rate = {} if num_bytes else {"TFLOP/s": seconds and cell.num_flops / seconds / 1e12}
            more = {"same bits": same.get(name), "note": found.notes.get(name)}
            made.append(row | columns | rate | more)
            results.append(**made[-1])
        print(as_tables([{name: each.get(name) for name in SHOWN} for each in made]), end="\n\n", flush=True)
        return {name: seconds for name in subjects if (seconds := found.seconds(name))}

    def same(self, cells: Sequence[Cell], repeats: int) -> bool:
        """Run each variant again and again; whether it has its own bits each time, and right ones."""
        is_right = True
        for cell in cells:
            problem, expected = Drawn(self.gpu, cell, self.where), {}
            for name, make in self.calls(problem).items():
                row = {"same": repr(cell), "variant": name, "repeats": repeats}
                try:
                    call = make()
                    first = words(call().clone())
                    as_first = bool(torch.equal(first, expected.setdefault(name.endswith(FEW), first)))
                    differ = 0
                    for _ in range(repeats):
                        call().zero_()
                        differ += not torch.equal(words(call()), first)
                except Exception as error:  # the others have their turn
                    is_right = False
                    results.append(**row, note=reason(error))
                    continue
                is_right &= not differ
                results.append(**row, differ=differ, **{"as the first": as_first})
        return is_right

    def once(self, cells: Sequence[Cell]) -> None:
        """Run each variant once on the second cell, if there is one, for a profiler."""
        for name, make in self.calls(Drawn(self.gpu, cells[:2][-1], self.where)).items():
            print(name, flush=True)
            make()()
        self.gpu.synchronize()


def words(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(WORDS[x.element_size()])


def tiles_of(cell: Cell) -> tuple[float, float]:
    """Items of 128 query rows, and tiles of 128 keys that they see, for each multiprocessor."""
    tokens, items, tiles = 128 // cell.group_size, 0, 0
    for queries, length in zip(cell.query_lens, cell.seq_lens, strict=True):
        for last in range(tokens, queries + tokens, tokens):
            items += 1
            tiles += -(-(length - queries + min(last, queries)) // 128)
    return items * cell.num_kv_heads / MULTIPROCESSORS, tiles * cell.num_kv_heads / MULTIPROCESSORS


def fit(times: dict[Cell, float]) -> dict[str, float]:
    """The fixed microseconds of an item, those of a tile, and the worst error of the sum, as a share of a time."""
    taken = np.array(list(times.values())) * 1e6
    shares = np.array([tiles_of(cell) for cell in times]) / taken[:, None]
    (of_item, of_tile), *_ = np.linalg.lstsq(shares, np.ones(len(taken)), rcond=None)
    error = np.abs(shares @ (of_item, of_tile) - 1).max()
    return {"us an item": float(of_item), "us a tile": float(of_tile), "worst error": float(error)}


class Clock:
    """The clock of the multiprocessors, as NVML says it: call it for MHz, or None where there is no NVML."""

    def __init__(self) -> None:
        self._ask: Callable[..., int] | None = None
        with suppress(OSError):
            nvml, self._device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
            if not nvml.nvmlInit_v2() and not nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)):
                self._ask = nvml.nvmlDeviceGetClockInfo

    def __call__(self) -> int | None:
        megahertz = ctypes.c_uint()
        if self._ask is None or self._ask(self._device, SM_CLOCK, ctypes.byref(megahertz)):
            return None
        return megahertz.value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.variants", description=__doc__)
    parser.add_argument("operation", choices=["record", "decode", "prefill", "few", "same", "once"])
    parser.add_argument("commits", nargs="*", help="to record")
    parser.add_argument("--cells", choices=["decode", "prefill"], default="decode", help="of which once runs one")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dry", action="store_true", help="small cells, in the emulator")
    given = parser.parse_intermixed_args()
    cells = DRY if given.dry else CELLS
    if given.operation == "record":
        return record(given.commits, [cell for of in cells.values() for cell in of], folder_of(given.dry))
    comparison = Comparison(given.dry)
    if given.operation == "same":
        sys.exit(not comparison.same(cells["same"], 2 if given.dry else given.repeats))
    getattr(comparison, given.operation)(cells[given.cells if given.operation == "once" else given.operation])


if __name__ == "__main__":
    main()
