"""Counts one kernel for one compute capability, in its machine code and on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pagedkv import backends
from pagedkv.bench.report import Row
from pagedkv.compiler.compile import CompiledKernel
from pagedkv.compiler.occupancy import occupancy
from pagedkv.compiler.ptx import Capability, external_functions
from pagedkv.cuda.backend import KernelBackend
from pagedkv.emulator import BufferTraffic, EmulatorDevice, LaunchStats
from pagedkv.kernels.device.sizes import ELEMENT_BITS

from .sass import code_of, copies_of, loads_of, loop_of, moves_between, overlap_of, products_of
from .variants import STRETCHES, WGMMA, WORK, Variant, Work

COUNTED = EmulatorDevice.capability
SECTOR_BYTES = 32
UNIT_BYTES = 512  # one 16-byte load by each lane of a warp
NARROWEST = 8  # narrowest load of q, K or V, in bytes
PREFILL = ("prefill", "prefill_split", WGMMA, *STRETCHES)
ATTENTION = ("v1", "v2", "split", *PREFILL)


class _Device(EmulatorDevice):
    """Records launches; runs them, on aligned arrays, for the emulator's own compute capability."""

    lineinfo = False  # as for a GPU

    def __init__(self, capability: Capability) -> None:
        super().__init__(race=False, init_check=False, stats=True)
        self.capability = capability
        self.noted: list[tuple[CompiledKernel, int]] = []

    def address(self, name: str, array: Any, *, aligned: bool = True) -> int:
        return super().address(name, array, aligned=aligned)

    def launch(
        self, kernel: Any, grid: int | Sequence[int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        self.noted.append((kernel, shared_bytes))
        if self.capability == COUNTED:
            super().launch(kernel, grid, args, shared_bytes)


@contextmanager
def emulated_on(make: Callable[[], EmulatorDevice]) -> Iterator[None]:
    """Run each call for the emulator on the device that ``make()`` returns."""
    with patch.dict(backends._backends, emulator=KernelBackend(lambda placement: make())):
        yield


def measure(variant: Variant, capability: Capability) -> Row:
    """Count one kernel for one compute capability; returns a row."""
    work, entry = WORK[variant.kernel](variant), f"pagedkv_{variant.kernel}"
    device = _Device(capability)
    with emulated_on(lambda: device):
        work.call()
    at = next(i for i, (kernel, _) in enumerate(device.noted) if kernel.entry == entry)
    kernel, dynamic = device.noted[at]
    resources = kernel.linked.resources()
    static, warps = resources.shared_bytes, kernel.num_threads // 32
    blocks, limit = _occupancy(kernel, resources.registers, static + dynamic)
    code = code_of(kernel.cubin, entry)
    loads = loads_by_column(code, tuple(work.read), capability)
    stats = device.launches[at] if device.launches else None
    row: Row = {
        "kernel": variant.kernel,
        "q" if variant.kernel in ATTENTION else "of": variant.kind,
        **({"kv": variant.kv_kind} if variant.kv_kind else {}),
        "D": variant.head_dim,
        **({"G": variant.group_size} if variant.kernel in ("split", *PREFILL) else {}),
        **({"P": variant.block_size} if variant.block_size else {}),
        "case": variant.options or "-",
        "cc": f"{capability[0]}.{capability[1]}",
        "registers": resources.registers,
        "spill B": resources.spill_bytes,
        "stack B": resources.stack_bytes,
        "static B": static,
        "dynamic B": dynamic,
        "blocks/SM": blocks,
        "limit": limit,
        "external": len(external_functions(kernel.ptx)),
    }
    for i, name in enumerate(work.read if variant.kernel != "prefill_split" else ()):  # whose copies are in branches
        row[f"{name} load B"], per_thread = loads[i]
        row[f"{name} in flight KiB"] = per_thread * 32 * warps * blocks / 1024
    row |= _counts(stats, work)
    if variant.kernel == "split":
        row["merge in flight KiB"] = max(x.in_flight for x in loads_of(code, strong=True)) * 32 * warps / 1024
        row["loop instr/512B"] = _loop_instructions(code, capability)
        row["partials"] = stats and _partials(stats) / work.read["KV"][1]
    if variant.kernel in ("prefill", STRETCHES[0]):
        loop = products_of(code, capability)
        row["other/mma"] = loop and (loop.instructions - loop.mma) / loop.mma
        row["ldmatrix/mma"] = loop and loop.load_matrices / loop.mma
    if variant.kernel in (WGMMA, STRETCHES[1]):
        loop = products_of(code, capability)
        row["other/tile"] = loop and loop.instructions - loop.mma
        row["moves"] = moves_between(code, capability)
        row["before wgmma"], row["late MUFU"] = overlap_of(code, capability)
    if variant.kernel == "prefill_split":
        loop = products_of(code, capability)
        copied = 32 * ELEMENT_BITS[variant.kv_kind]  # bytes: 8 elements for each lane
        row["loop instr/512B"] = loop and loop.instructions * UNIT_BYTES / (copied * loop.copies)
        row["partials"] = stats and sum(map(_partials, device.launches)) / work.read["KV"][1]
    return row


def _occupancy(kernel: CompiledKernel, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Resident thread blocks of a multiprocessor, and what limits them."""
    capability, num_threads = kernel.capability, kernel.num_threads
    alone = {
        "registers": occupancy(capability, registers, num_threads, 0),
        "shared": occupancy(capability, 1, num_threads, shared_bytes),
        "threads": occupancy(capability, 1, num_threads, 0),
    }
    blocks = occupancy(capability, registers, num_threads, shared_bytes)
    return blocks, "+".join(name for name, most in alone.items() if most == blocks)


def loads_by_column(code: bytes, columns: tuple[str, ...], capability: Capability) -> list[tuple[int, int]]:
    """By column, bytes of one load (for K and V the narrowest, else the widest) and of all in flight in a thread.

    If the kernel copies to shared memory, it copies K and V, and nothing else. Otherwise v1, v2 and split read q, K and
    V with loads of 8 bytes or more. v1 and v2 read nothing else that way, and have barriers between the three; if the
    code does not look like that, the counts are 0. Of split, q that is still on its way when the first rows are asked
    for counts, too: the inner loop alone may have less in flight.
    """
    copies = copies_of(code, capability)
    if copies is not None:
        return [(copies.widest, copies.in_flight)]
    if columns != ("K", "V"):
        loads = loads_of(code, NARROWEST if columns == ("KV",) else 1)
        return [(max(x.widest for x in loads), max(x.in_flight for x in loads))]
    loads = loads_of(code, NARROWEST)
    return [(x.narrowest, x.in_flight) for x in loads[1:]] if len(loads) == 3 else [(0, 0)] * 2


def _loop_instructions(code: bytes, capability: Capability) -> float | None:
    """Warp instructions for every 512 bytes that the inner loop loads."""
    loop = loop_of(code, capability, NARROWEST)
    return loop and loop.instructions * UNIT_BYTES / (32 * loop.bytes_loaded)


def _partials(stats: LaunchStats) -> int:
    """Bytes of partial results that a kernel writes and reads back."""
    names = (f"{kernel}_{what}" for kernel in ("split", "prefill") for what in ("sums", "states"))
    buffers = [stats.buffers.get(name, BufferTraffic()) for name in names]
    return sum(buffer.bytes_read + buffer.bytes_written for buffer in buffers)


def _counts(stats: LaunchStats | None, work: Work) -> Row:
    """The emulator's counts; None for a compute capability that it does not run."""
    row: Row = {}
    nbytes = 0
    for name, (buffers, least) in work.read.items():
        row[f"{name} sectors"] = stats and _sectors(stats, buffers, "sectors_read") * SECTOR_BYTES / least
        nbytes += least
    if work.written:
        buffers, least = work.written
        row["written sectors"] = stats and _sectors(stats, buffers, "sectors_written") * SECTOR_BYTES / least
    row["wavefronts"] = stats and (
        stats.shared_wavefronts / stats.shared_wavefronts_min if stats.shared_requests else None
    )
    return row | {"instr/512B": stats and stats.total_warp_instructions * UNIT_BYTES / nbytes}


def _sectors(stats: LaunchStats, buffers: tuple[str, ...], which: str) -> int:
    return sum(getattr(stats.buffers.get(name, BufferTraffic()), which) for name in buffers)
