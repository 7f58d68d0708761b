"""The tables that the command prints: what is installed, and which uses of pagedkv work.

It must run on machines where something does not work, so an error of a probe becomes its answer.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from .. import __version__
from ..cpu.threads import get_num_threads
from ..environment import cache_dir
from ..errors import BackendUnavailableError
from ..extras import pip_install
from ..kernel_cache.private_folder import RefusedError, require_private
from .driver import LIBRARY, Driver, find_driver

Row = dict[str, Any]
PACKAGES = (
    *("numpy", "numba", "llvmlite", "ml_dtypes", "numba-cuda", "cuda-core", "cuda-bindings"),
    *("cupy-cuda13x", "cupy-cuda12x", "torch", "transformers", "matplotlib"),
)
# For each use: the module that it needs, the extra that installs it, and a module of pagedkv that checks its version.
EXTRAS = {
    "torch tensors": ("torch", "torch"),
    "models of transformers": ("transformers", "transformers", "pagedkv.integrations.transformers"),
    "texts of a JSON schema": ("llguidance", "guidance"),
    "KV events for routers": ("zmq", "kv-events"),
    "blocks in Redis": ("redis", "redis"),
    "plots": ("matplotlib", "plot"),
    "pagedkv.testing": ("hypothesis", "testing"),
    "pagedkv serve": ("uvicorn", "serve", "pagedkv.server"),
    "examples/replicas.py": ("ray", "replicas"),
}
_OWN = "set PAGEDKV_CACHE_DIR to a folder of your own"


def run(*, progress: Callable[[str], Any]) -> list[Row]:
    """Describe this machine.

    Returns
    -------
    list of dict
        A row for each fact, then one for each use.
    """
    progress("looking at what is installed")
    driver = _probe(find_driver)
    facts = {
        "pagedkv": __version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "threads": _probe(lambda: f"{get_num_threads()} of {os.cpu_count()} cores"),
        **{package: found for package in PACKAGES if (found := _version_of(package))},
        "CUDA driver": _describe_driver(driver),
        **{f"GPU {i}": gpu for i, gpu in enumerate(driver.gpus if isinstance(driver, Driver) else [])},
        "CUDA compiler": _probe(_compiler),
        **{f"{kind} kernels kept in": _probe(_describe_cache, kind) for kind in ("cpu", "cuda")},
    }
    uses = {
        "NumPy arrays, on the CPU": _probe(_import_cpu_backend),
        **{use: _probe(_import_extra, *needed) for use, needed in EXTRAS.items()},
        "CuPy and torch arrays, on a GPU": _probe(_missing_for_gpu, driver),
        'backend="emulator"': _probe(_missing_for_emulator),
    }
    return [
        *({"what": name, "here": fact} for name, fact in facts.items()),
        *({"to use": use, "works": "no" if why else "yes", "what is missing": why or ""} for use, why in uses.items()),
    ]


def _probe(probe: Callable[..., Any], *args: Any) -> Any:
    """The result of a probe, or the message of its error."""
    try:
        return probe(*args)
    except BackendUnavailableError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_driver(driver: Any) -> str:
    if driver is None:
        return f"none ({LIBRARY} is not found)"
    return f"for CUDA {driver.version[0]}.{driver.version[1]}" if isinstance(driver, Driver) else str(driver)


def _compiler() -> str:
    said: str = import_module("..compiler.link", __package__).compiler()
    return said


def _describe_cache(kind: str) -> str:
    """Where kernels of a kind are kept, and how many there are."""
    directory = cache_dir(kind)
    if directory is None:
        return "nowhere, for there is no home directory: set PAGEDKV_CACHE_DIR"
    try:
        require_private(directory, make=False)
        sizes = [file.stat().st_size for file in directory.iterdir()]
    except FileNotFoundError:
        above = next(folder for folder in directory.absolute().parents if folder.exists())
        if os.access(above, os.W_OK | os.X_OK):
            return f"{directory}, which the first one makes"
        return f"nowhere: {directory} cannot be made in {above}; {_OWN}"
    except RefusedError as refused:
        return f"nowhere: {refused}; {_OWN}"
    except OSError as error:
        return f"nowhere: {directory}: {error.strerror}; {_OWN}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory}, {len(sizes)} files; it is not writable, so that others are compiled anew: {_OWN}"
    return f"{directory}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"


def _import_cpu_backend() -> None:
    import_module("..cpu.compile", __package__)


def _import_extra(module: str, extra: str, ours: str | None = None) -> str | None:
    if find_spec(module) is None:
        return pip_install(extra)
    import_module(ours or module)
    return None


def _missing_for_gpu(driver: Driver | str | None) -> str | None:
    """What is missing to run kernels on a GPU; None if nothing is."""
    if driver is None:
        return "a GPU with the NVIDIA driver"
    if isinstance(driver, str):
        return driver
    if not driver.gpus:
        return "a GPU: the driver finds none; see CUDA_VISIBLE_DEVICES"
    if find_spec("numba_cuda") is None:
        return pip_install(driver.extra)
    import_module("..cuda.driver", __package__).capabilities()
    _compiler()
    return None


def _missing_for_emulator() -> str | None:
    if find_spec("numba_cuda") is None:
        return pip_install("emulator")
    _compiler()
    return None
