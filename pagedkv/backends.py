"""The backend that runs a call; each is imported for the first call that needs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from .arithmetic import with_default_float_env
from .arrays import Array
from .calls import AttentionCall, Caches, CopyCall, GatherCall, MergeCall, RotaryCall, SwapCall, WriteCall
from .kernel_cache.compile_thread import on_compile_thread
from .placement import Placement

if TYPE_CHECKING:
    from .cuda.backend import GpuBackend


class Backend(Protocol):
    """Runs each operation on a valid call, and stores its results in arrays that the caller has made."""

    def plan(self, call: AttentionCall) -> Any:
        """Plan a call of decode_attention or prefill_attention, and others like it.

        The plan is of the values of tables and lengths on the host, and of the addresses of those on a GPU.
        """

    def run(self, plan: Any, q: Array, caches: Caches, out: Array, lse: Array | None, *, is_given: bool) -> None:
        """Run a plan with q and caches like those of its call; `is_given` says that `out` is the caller's own array."""

    def write_kv(self, call: WriteCall) -> None: ...

    def gather_kv(self, call: GatherCall, k: Array, v: Array) -> None: ...

    def copy_blocks(self, call: CopyCall) -> None: ...

    def swap_blocks(self, call: SwapCall) -> None: ...

    def merge_states(self, call: MergeCall, out: Array, lse: Array) -> None: ...

    def apply_rotary(self, call: RotaryCall, q_out: Array, k_out: Array | None) -> None: ...


_OPERATIONS = (
    *("plan", "run", "merge_states", "apply_rotary"),
    *("write_kv", "gather_kv", "copy_blocks", "swap_blocks"),
)
_backends: dict[str, Backend] = {}


def backend_of(placement: Placement) -> Backend:
    """The backend of a call, imported if this is its first one.

    Raises
    ------
    BackendUnavailableError
        A package that the backend needs is missing.
    """
    backend = _backends.get(placement.backend)
    if backend is None:
        # an interrupt in the middle of numba's import would break it
        backend = _backends[placement.backend] = on_compile_thread(lambda: _load(placement.backend))
    return backend


def _load(name: str) -> Backend:
    if name == "cpu":
        from .cpu import backend as cpu

        return cpu
    if name == "emulator":
        from .cuda.backend import KernelBackend
        from .emulator import EmulatorDevice

        emulator = KernelBackend(lambda placement: (placement.emulator or EmulatorDevice()).again())
        return cast(Backend, SimpleNamespace(**{x: with_default_float_env(getattr(emulator, x)) for x in _OPERATIONS}))
    from .cuda.backend import GpuBackend

    return GpuBackend()


def gpu_backend() -> GpuBackend | None:
    """The backend of calls on GPUs, None before the first one: it has the plans and errors of earlier calls."""
    return cast("GpuBackend | None", _backends.get("cuda"))
