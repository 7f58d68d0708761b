"""Compile a kernel's factory and config to PTX, without a driver, once: then it is kept in the process and on disk.

numba-cuda's own cache checks only the file that defines a function, so a kernel would survive a change of a function it
calls. The key of this one has the sources of all kernels, the config, the versions and the device's compute capability.
It keeps text and machine code on disk, never a pickle.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import kernels
from ..environment import cache_dir
from ..errors import BackendUnavailableError
from ..kernel_cache.compile_thread import made_once, on_compile_thread
from ..kernel_cache.files import Store, hash_of_sources
from ..kernel_cache.progress import showing_progress
from ..kernels.device.language import cuda, types
from ..kernels.device.source import KernelSource, with_lineinfo
from ..score_mod import can_raise, refusal
from . import compiler_missing, require_no_simulator
from .link import Linked, load_or_link
from .numba_overrides import overridden
from .ptx import Capability, external_functions, returns_0, specific, versions, with_lowest_version

SUFFIX = ".ptx"
SOURCES = hash_of_sources(Path(kernels.__file__).parent, Path(__file__).parent)

# numba-cuda's settings that change PTX.
CODE_SETTINGS = ("OPT", "BOUNDSCHECK", "CUDA_DEBUGINFO_DEFAULT", "CUDA_DEBUG_POLY", "CUDA_ENABLE_NRT")

MOST_KERNELS = 256  # kept in this process, whose memory a new score_mod for each call would fill


class CompiledKernel:
    """The PTX of one kernel, for one config and compute capability; compared by identity.

    Attributes
    ----------
    name : str
        For messages: ``v1[head_dim=128, ...]``.
    entry : str
        The PTX symbol of the kernel.
    ptx : str
        A module with only this kernel and no external function.
    num_threads : int
        Threads of a thread block.
    capability : tuple of int
        Compute capability, (9, 0) for an H100.
    """

    def __init__(self, name: str, entry: str, ptx: str, num_threads: int, capability: Capability) -> None:
        self.name = name
        self.entry = entry
        self.ptx = ptx
        self.num_threads = num_threads
        self.capability = capability
        self._linked: Linked | None = None

    def __repr__(self) -> str:
        return f"<CompiledKernel {self.name} for compute capability {self.capability[0]}.{self.capability[1]}>"

    @property
    def linked(self) -> Linked:
        """The machine code, linked when it is first used and kept on disk.

        Raises
        ------
        BackendUnavailableError
            nvJitLink is not installed, or is too old for the device.
        """
        return self._linked or on_compile_thread(self._link)

    @property
    def cubin(self) -> bytes:
        """The machine code of `linked`."""
        return self.linked.cubin

    def _link(self) -> Linked:
        self._linked = self._linked or load_or_link(self.ptx, self.capability)
        return self._linked


def compile_kernel(
    make: Callable[[Any], KernelSource], config: Any, capability: Capability = (9, 0), *, lineinfo: bool = False
) -> CompiledKernel:
    """The kernel that ``make(config)`` describes, from this process, from disk, or compiled now.

    Parameters
    ----------
    make : callable
        A function ``make_<kernel>(config) -> KernelSource`` of `pagedkv.kernels`.
    config : frozen dataclass or NamedTuple
        Ints, bools and strings, and at most a function in `score_mod`; a kernel with one is not kept on disk.
    capability : tuple of int
        Compute capability of the device to compile for.
    lineinfo : bool
        Whether PTX names the Python lines, for faults of the emulator and for profilers. Compilation takes a fifth
        longer, and the machine code is the same.

    Returns
    -------
    CompiledKernel
        The same object each time, unless MOST_KERNELS others have been compiled since.

    Raises
    ------
    TypeError
        numba cannot compile the config's `score_mod` for (float32, int32, int32, int32, int32).
    BackendUnavailableError
        NVVM, which numba-cuda needs to make PTX, is not installed or fails, or numba's CUDA simulator is on.
    """
    return _load_or_compile(make, config, capability, lineinfo)


@made_once(most=MOST_KERNELS)
def _load_or_compile(
    make: Callable[[Any], KernelSource], config: Any, capability: Capability, lineinfo: bool
) -> CompiledKernel:
    fields = _fields(config)
    name = make.__name__.removeprefix("make_")
    entry = f"pagedkv_{name}"
    # Line info names files by their full path, so another copy of the package makes another kernel.
    lines = lineinfo and __file__
    facts = (make.__module__, make.__qualname__, fields, capability, lines, versions(), _settings())
    store = Store(cache_dir("cuda"), SUFFIX, keep=all(map(_is_plain, fields.values())))
    key = repr(facts).encode() + SOURCES
    name = f"{name}[{', '.join(f'{field}={_text_of(value)}' for field, value in fields.items())}]"
    with suppress(ValueError, TypeError, KeyError):
        header, ptx = (store.load(key) or b"").decode().split("\n", 1)
        return CompiledKernel(name, entry, ptx, int(json.loads(header)["num_threads"]), capability)
    with showing_progress(f"the kernel {make.__name__.removeprefix('make_')} for {capability[0]}.{capability[1]}"):
        ptx, num_threads = _compile(make, config, capability, lineinfo, entry)
    header = json.dumps({"name": name, "num_threads": num_threads})
    store.save(key, f"{header}\n{ptx}".encode())
    return CompiledKernel(name, entry, ptx, num_threads, capability)


def _settings() -> list[Any]:
    from numba.cuda.core import config as settings

    settings.reload_config()  # as numba-cuda does before it compiles
    return [getattr(settings, name, None) for name in CODE_SETTINGS]


def _compile(
    make: Callable[[Any], KernelSource], config: Any, capability: Capability, lineinfo: bool, entry: str
) -> tuple[str, int]:
    from cuda.bindings.nvvm import nvvmError
    from cuda.pathfinder import DynamicLibNotFoundError
    from numba.cuda.cudadrv.error import NvvmSupportError

    require_no_simulator()
    score_mod, missing = getattr(config, "score_mod", None), (NvvmSupportError, DynamicLibNotFoundError)
    try:
        with overridden(capability):
            if score_mod is not None:
                _check(score_mod, capability, missing)
            return _make_ptx(make, config, capability, lineinfo, entry)
    except missing as error:
        raise compiler_missing(error) from error
    except nvvmError as error:
        raise BackendUnavailableError(
            f"NVVM cannot compile {entry} for {config} ({error}): use other options (a score_mod in float32, if "
            'there is one), or backend="cpu" on host arrays, and report it'
        ) from error


def _make_ptx(
    make: Callable[[Any], KernelSource], config: Any, capability: Capability, lineinfo: bool, entry: str
) -> tuple[str, int]:
    with with_lineinfo(lineinfo):
        source = make(config)
    ptx, _ = cuda.compile_ptx(
        source.function,
        source.signature,
        debug=False,
        opt=True,
        cc=capability,
        lineinfo=lineinfo,
        launch_bounds=(source.num_threads, source.min_blocks),
    )
    ptx = with_lowest_version(ptx, capability)
    if source.is_specific:
        ptx = specific(ptx)
    return _tidy(ptx, entry, _shared_arrays(source.function)), source.num_threads


def _tidy(ptx: str, entry: str, shared_arrays: Sequence[str] = ()) -> str:
    if external := external_functions(ptx):
        raise TypeError(f"{entry} calls {', '.join(external)}, which no device has")
    # numba puts counters of the process into symbols: equal kernels would differ, and faults would show the counters.
    (mangled,) = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)
    ptx = ptx.replace(mangled, entry)
    counters = sorted({int(counter) for counter in re.findall(r"\b_cudapy_smem_(\d+)\b", ptx)})
    names = shared_arrays if len(shared_arrays) == len(counters) else range(len(counters))
    symbols = {str(counter): f"shared_{name}" for counter, name in zip(counters, names, strict=True)}
    ptx = re.sub(r"\b_cudapy_smem_(\d+)\b", lambda match: symbols[match[1]], ptx)
    return re.sub(r"^\.common \.global .* _ZN08NumbaEnv\w+;\n", "", ptx, flags=re.MULTILINE)


def _shared_arrays(function: Callable[..., None]) -> list[str]:
    """The names of a kernel's shared arrays, in order, without those of its device functions."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):  # no source file, as for a function typed at a prompt
        return []
    assigned = [
        (target, value)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assign)
        for target, value in _pairs(statement.targets[0], statement.value)
    ]
    named = [
        (call.lineno, call.col_offset, target.id)
        for target, value in assigned
        for call in ast.walk(value)
        if isinstance(target, ast.Name) and isinstance(call, ast.Call) and ast.unparse(call.func) == "cuda.shared.array"
    ]
    return [name for *_, name in sorted(named)]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _check(score_mod: Callable[..., Any], capability: Capability, missing: tuple[type[Exception], ...]) -> None:
    """Raise TypeError if a user's function does not compile or can raise."""
    signature = types.float32, *[types.int32] * 4
    try:
        ptx, result = cuda.compile_ptx(score_mod, signature, debug=False, opt=True, device=True, cc=capability)
        if not isinstance(result, types.Float | types.Integer | types.Boolean):
            raise TypeError(f"it returns {result}, not a real number")
        if not returns_0(ptx):
            raise can_raise("an exception")
        _tidy(f"{ptx}\n.visible .entry score_mod(", "score_mod")
    except missing:
        raise
    except Exception as error:
        raise refusal(error) from error


def _fields(config: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dict(config._asdict())


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, str)


def _text_of(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
