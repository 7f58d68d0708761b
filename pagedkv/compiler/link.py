"""Link PTX to machine code (a cubin) without a driver, and read which resources it needs."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..environment import cache_dir
from ..errors import BackendUnavailableError
from ..kernel_cache.files import Store, hash_of_sources
from . import INSTALL, compiler_missing
from .occupancy import SYSTEM_SHARED_BYTES
from .ptx import Capability, external_functions, is_specific, versions

SUFFIX = ".cubin"
SOURCE = hash_of_sources(Path(__file__))
# ptxas's warnings that wgmma wait for each other, for registers or at a call; they name the kernel. They are matched by
# their words, since their numbers (C7509 to C7520 in CUDA 13.5) are documented nowhere.
_SERIALISED = re.compile(
    r"(?:\(C\d+\) )?(?:Potential Performance Loss: )?wgmma\S* (?:instructions are serialized|is injected).*"
)


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a kernel needs.

    Attributes
    ----------
    registers : int
        Per thread.
    stack_bytes, spill_bytes : int
        Stack frame of a thread, and bytes of its spill stores and loads.
    shared_bytes : int
        Static shared memory per block.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Linked:
    """Machine code of a PTX module with one kernel, and ptxas's log of it.

    Attributes
    ----------
    capability : tuple of int
    cubin : bytes
    log : str
    """

    capability: Capability
    cubin: bytes
    log: str

    def resources(self) -> Resources:
        """The resources of the kernel; spills are summed over all functions of the module."""
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)
        stacks = re.findall(r"(\d+) bytes stack frame", self.log)
        registers = re.findall(r"Used (\d+) registers", self.log)
        if not stacks or len(registers) != 1:
            raise RuntimeError(f"ptxas's log is not as expected: {self.log}")
        sections = _sections(self.cubin)
        system = SYSTEM_SHARED_BYTES if self.capability >= (9, 0) else 0
        return Resources(
            registers=int(registers[0]),
            stack_bytes=max(map(int, stacks)),
            spill_bytes=sum(map(int, spills)),
            shared_bytes=max(0, _total(sections, ".nv.shared.") - system),
        )


def load_or_link(ptx: str, capability: Capability) -> Linked:
    """The machine code of a PTX module, from disk, or linked now and kept; it always asks nvJitLink for its version."""
    store = Store(cache_dir("cuda"), SUFFIX)
    _, version = _nvjitlink()
    key = repr((capability, version, versions())).encode() + SOURCE + ptx.encode()
    with suppress(ValueError, TypeError, KeyError):
        header, cubin = (store.load(key) or b"").split(b"\n", 1)
        return Linked(capability, cubin, json.loads(header)["log"])
    linked = link_without_spills(ptx, capability)
    store.save(key, json.dumps({"log": linked.log}).encode() + b"\n" + linked.cubin)
    return linked


def link_without_spills(ptx: str, capability: Capability) -> Linked:
    """Link a PTX module, with several attempts until ptxas spills nothing.

    Its kernel asks for some thread blocks on a multiprocessor. What spills is linked again at level 1 of ptxas, which
    moves instructions less and may take fewer registers, and then for one thread block fewer, down to two, which leaves
    more registers for each thread. If all attempts spill, the one that spills least is returned.
    """
    asked = re.search(r"\.minnctapersm (\d+)", ptx)
    blocks = int(asked[1]) if asked else 0
    tried = []
    for n, level in product(range(blocks, 1, -1) or [blocks], (3, 1)):
        linked = link(ptx.replace(asked[0], f".minnctapersm {n}") if asked else ptx, capability, level)
        if not linked.resources().spill_bytes:
            return linked
        tried.append(linked)
    return min(tried, key=lambda linked: linked.resources().spill_bytes)


def link(ptx: str, capability: Capability, level: int = 3) -> Linked:
    """Link a PTX module into a cubin, at a level of ptxas.

    Raises
    ------
    BackendUnavailableError
        nvJitLink is not installed, does not know the device or the PTX, or makes the wgmma of the module wait for each
        other.
    ValueError
        The module calls a function that it does not define; with nvJitLink only the launch would fail.
    """
    if external := external_functions(ptx):
        raise ValueError(f"ptx must have all functions that it calls, got calls of {', '.join(external)}")
    nvjitlink, version = _nvjitlink()
    arch, code = f"sm_{capability[0]}{capability[1]}{'a' if is_specific(ptx) else ''}", ptx.encode()
    # Beside a driver nvJitLink finds machine code in the driver's cache, and then ptxas writes no log.
    options = [f"-arch={arch}", "-no-cache", "-Xptxas=-v", f"-Xptxas=-O{level}"]
    handle = None
    try:
        handle = nvjitlink.create(len(options), options)
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), "ptx")
        nvjitlink.complete(handle)
        cubin = _read_buffer(handle, nvjitlink.get_linked_cubin_size, nvjitlink.get_linked_cubin)
        log = _text(_read_buffer(handle, nvjitlink.get_info_log_size, nvjitlink.get_info_log))
    except nvjitlink.nvJitLinkError as error:
        errors = _read_buffer(handle, nvjitlink.get_error_log_size, nvjitlink.get_error_log) if handle else b""
        raise BackendUnavailableError(
            f"nvJitLink {version} cannot make code for {arch} ({error}: {_text(errors).strip()}): {_remedy()}"
        ) from error
    finally:
        if handle:
            nvjitlink.destroy(handle)
    if warnings := _SERIALISED.findall(log):
        raise BackendUnavailableError(
            f"nvJitLink {version} adds waits to the wgmma of a kernel, which would be slow ({'; '.join(warnings)}): "
            "take another version of nvidia-nvjitlink, and report this one"
        )
    return Linked(capability, cubin, log)


def compiler() -> str:
    """Load NVVM, nvrtc and nvJitLink, and return their versions.

    Raises
    ------
    BackendUnavailableError
        One of them is not installed, or does not work.
    """
    try:
        from cuda.bindings import nvrtc, nvvm

        found = {"NVVM": nvvm.version(), "nvrtc": nvrtc.nvrtcVersion()[1:]}
    except (ImportError, RuntimeError) as error:
        raise compiler_missing(error) from error
    return ", ".join(
        [*(f"{name} {'.'.join(map(str, version))}" for name, version in found.items()), f"nvJitLink {_nvjitlink()[1]}"]
    )


def _nvjitlink() -> tuple[Any, str]:
    """cuda.bindings.nvjitlink, and the version of its library, which is the one that torch has loaded, if any.

    Libraries before 12.3 cannot tell their version, which is an error here.

    cuda.core's Linker would take the driver's linker if the driver is of another major version, which is common with
    the extra cu12. That linker may be older than the PTX, and has no log of the resources.
    """
    try:
        from cuda.bindings import nvjitlink

        return nvjitlink, ".".join(map(str, nvjitlink.version()))
    except (ImportError, RuntimeError) as error:
        reason = str(error).split("\n", 1)[0]  # what follows lists folders
        raise BackendUnavailableError(
            f"CUDA kernels are linked by nvJitLink, which is missing or does not work ({reason}): {_remedy()}"
        ) from error


def _remedy() -> str:
    if "torch" not in sys.modules:
        return INSTALL
    return (
        "torch was imported, and a process has one nvJitLink, the first one that is loaded. If that is torch's, update "
        f"torch, or call pagedkv.warmup before you import torch, in every process. Otherwise {INSTALL}"
    )


def _read_buffer(handle: int, size_of: Callable[[int], int], fill: Callable[[int, bytearray], None]) -> bytes:
    buffer = bytearray(size_of(handle))
    if buffer:
        fill(handle, buffer)
    return bytes(buffer)


def _text(log: bytes) -> str:
    return log.decode(errors="backslashreplace").rstrip("\0")


def _sections(elf: bytes) -> dict[str, int]:
    """Bytes of each section of a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    text = headers[names][4]
    return {elf[text + h[0] : elf.index(b"\0", text + h[0])].decode(): h[5] for h in headers}


def _total(sections: dict[str, int], prefix: str) -> int:
    return sum(size for name, size in sections.items() if name.startswith(prefix))
