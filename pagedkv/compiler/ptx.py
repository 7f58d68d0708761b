"""What compiling and linking share: the versions of the tools, and edits and queries of PTX modules."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from functools import cache

Capability = tuple[int, int]

# The distributions that make PTX and machine code, under the names of both CUDA major versions.
TOOLS = (
    *("numba", "numba-cuda", "llvmlite", "numpy", "cuda-bindings", "cuda-core"),
    *("nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
)
# Libraries that a toolkit has, too, and the distributions of theirs.
LIBRARIES = {
    "nvvm": ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"),
    "nvJitLink": ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
}


@cache
def versions() -> tuple[str | None, ...]:
    """The versions of all that makes PTX and machine code; None for what is not installed."""

    def version(distribution: str) -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    found = {tool: version(tool) for tool in TOOLS}
    for library, distributions in LIBRARIES.items():
        if not any(found[distribution] for distribution in distributions):
            found[distributions[0]] = _file_of(library)
    return sys.version, *found.values()


def _file_of(library: str) -> str | None:
    """Which file of a toolkit is loaded: none brings a version, and NVVM 13.0 and 13.5 both call themselves 2.0."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib(library).abs_path
    except DynamicLibNotFoundError:
        return None
    facts = path and os.stat(path)
    return facts and f"{path}, {facts.st_size} bytes, {facts.st_mtime_ns}"


# The lowest version of the PTX ISA for each target and the instructions of our kernels: that of CUDA 12.0 up to 9.0;
# 8.1 for the conversions of fp8 on 8.9. PTX ISA, .target and release notes.
_FROM_CUDA_12 = (8, 0)
_LOWEST_VERSIONS = {
    (8, 8): (9, 0),
    (8, 9): (8, 1),
    (10, 0): (8, 6),
    (10, 1): (8, 6),
    (10, 3): (8, 8),
    (11, 0): (9, 0),
    (12, 0): (8, 7),
    (12, 1): (8, 8),
}


def with_lowest_version(ptx: str, capability: Capability) -> str:
    """A PTX module with the lowest version of the PTX ISA that it needs in its header.

    NVVM writes the newest version that it knows, and an older linker, such as one that torch has loaded, refuses that.
    """
    lowest = _LOWEST_VERSIONS.get(capability, _FROM_CUDA_12 if capability <= (9, 0) else None)

    def version(match: re.Match[str]) -> str:
        own = int(match[1]), int(match[2])
        major, minor = own if lowest is None else min(own, lowest)
        return f".version {major}.{minor}"

    return re.sub(r"^\.version (\d+)\.(\d+)", version, ptx, count=1, flags=re.MULTILINE)


_TARGET = re.compile(r"^\.target (sm_\d+)(a?)", re.MULTILINE)


def specific(ptx: str) -> str:
    """A PTX module for just the compute capability that it names, with all of its instructions: sm_90a for sm_90.

    NVVM need not know: it leaves inline assembly alone.
    """
    return _TARGET.sub(r".target \1a", ptx, count=1)


def is_specific(ptx: str) -> bool:
    """Whether a PTX module is for one compute capability alone."""
    match = _TARGET.search(ptx)
    return match is not None and match[2] == "a"


# Functions that the driver defines for every module: CUDA C++ Programming Guide on output, assertion and allocation.
SYSTEM_CALLS = ("vprintf", "__assertfail", "malloc", "free")


def external_functions(ptx: str) -> list[str]:
    """The functions that a PTX module calls but neither it nor the driver defines."""
    declared = re.findall(r"\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)
    return [name for name in declared if name not in SYSTEM_CALLS]


_STATUS = re.compile(
    r"^\.visible \.func(?:.|\n)*?^\s*st\.param\.\w+\s+\[func_retval0(?:\+0)?\], ([%\w]+);", re.MULTILINE
)


def returns_0(ptx: str) -> bool:
    """Whether the visible device function of a PTX module always returns 0: numba's status of no exception."""
    match = _STATUS.search(ptx)
    if match is None:
        return False
    body = ptx[match.start() : match.end()]
    return match[1] == "0" or re.findall(rf"^\s+\S+\s+{re.escape(match[1])}, (.*);", body, re.MULTILINE) == ["0"]
