"""Compile kernels ahead of the first call that needs them, without arrays and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import cache_validation, validation
from ..arrays import Array
from ..layouts import cache_shapes, storage_dtype
from .attention import decode_attention
from .blocks import copy_blocks, gather_kv, write_kv
from .compile import Capability, CompiledKernel

_KERNELS = {"vllm": ("v1", "v2"), "NHD": ("split",), "HND": ("split",)}
# Kernel "split" is compiled with or without softcap and ALiBi; v1 and v2 decide when they run.
_SOFTCAPS = {"vllm": (None,), "NHD": (None, 1.0), "HND": (None, 1.0)}


class _Compiler:
    """As much of a Device as launches need; it takes note of kernels instead."""

    max_shared_bytes = 48 * 1024

    def __init__(self, capability: Capability) -> None:
        self.capability = capability
        self.kernels: list[CompiledKernel] = []

    def address(self, name: str, array: Array) -> int:
        return 0

    def scratch(self, name: str, nbytes: int) -> int:
        return 0

    def launch(
        self, kernel: CompiledKernel, grid: tuple[int, int, int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        if kernel not in self.kernels:
            self.kernels.append(kernel)


def warmup(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: Any,
    *,
    layout: str = "NHD",
    cache_dtype: Any = None,
    kv_dtype: str | None = None,
    score_mod: Callable[..., Any] | None = None,
    kernels: Sequence[str] | None = None,
    check: bool | None = None,
    capabilities: Sequence[Capability] | None = None,
) -> list[str]:
    """Compile what CUDA calls with these shapes and options need, so that the first of them starts at once.

    What is compiled is kept on disk as well (see ``PAGEDKV_CACHE_DIR``): this can run where there is no GPU, while an
    image is built. Calls whose arrays are not contiguous, or whose caches are larger than 64 GiB, may need kernels of
    their own.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim, block_size : int
        Hq, Hkv, D and P.
    dtype : dtype-like
        Of q: float32, float16 or bfloat16; a name, or a dtype of NumPy, CuPy or torch.
    layout : str
        "NHD", "HND" or "vllm".
    cache_dtype : dtype-like, optional
        Of the caches; that of q by default.
    kv_dtype : str, optional
        "fp8_e4m3" or "fp8_e5m2", for caches in uint8.
    score_mod : callable, optional
        The very function that calls will pass; its kernels live in this process alone.
    kernels : sequence of str, optional
        What calls will pass as `kernel`; all of the layout's by default.
    check : bool, optional
        As in the calls.
    capabilities : sequence of (int, int), optional
        Compute capabilities of the GPUs, (9, 0) for an H100. By default those of the GPUs of this machine.

    Returns
    -------
    list of str
        Names of the kernels: those of decode_attention, write_kv, gather_kv and copy_blocks.

    Raises
    ------
    TypeError, ValueError
        As the calls would.
    BackendUnavailableError
        There is no compiler; `capabilities` is not given, and there is no GPU.
    """
    q_dtype = storage_dtype(dtype, None)
    stored = storage_dtype(dtype if cache_dtype is None else cache_dtype, kv_dtype)
    shapes = cache_shapes(layout, 2, block_size, num_kv_heads, head_dim, stored.itemsize)
    k_cache, v_cache = (np.zeros(shape, stored) for shape in shapes)
    q = np.zeros((1, num_heads, head_dim), q_dtype)
    k = np.zeros((1, num_kv_heads, head_dim), q_dtype if kv_dtype is not None else stored)
    table, lengths, slots = np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.zeros(1, np.int64)
    pairs = np.array([[0, 1]])
    place: dict[str, Any] = {"layout": layout, "kv_dtype": kv_dtype, "k_scale": None, "v_scale": None}
    options: dict[str, Any] = dict.fromkeys(("scale", "alibi_slopes", "window", "sinks", "out"))
    options |= {"ragged": False, "causal": True, "score_mod": score_mod, "return_lse": False}
    calls = [
        validation.attention(
            q,
            k_cache,
            v_cache,
            table,
            lengths,
            None,
            kernel=kernel,
            backend="emulator",
            check=check,
            softcap=softcap,
            **options,
            **place,
        )
        for kernel in (_KERNELS[layout] if kernels is None else kernels)
        for softcap in _SOFTCAPS[layout]
    ]
    write = cache_validation.write(k, k.copy(), k_cache, v_cache, slots, backend="emulator", check=check, **place)
    gather = cache_validation.gather(k_cache, v_cache, table[0], 1, backend="emulator", **place)
    dense = np.float32 if kv_dtype is not None else stored
    gathered = [np.zeros((1, num_kv_heads, head_dim), dense) for _ in range(2)]

    names = []
    for capability in _capabilities() if capabilities is None else capabilities:
        device: Any = _Compiler(capability)
        for call in calls:
            decode_attention(device, call, q.copy(), None, kernel=call.kernel, checked=call.checked)
        write_kv(device, write)
        gather_kv(device, gather, *gathered, checked=gather.checked)
        copy_blocks(device, [k_cache, v_cache], pairs, checked=gather.checked)
        for compiled in device.kernels:
            compiled.linked  # noqa: B018
            names.append(f"{compiled.name} for {capability[0]}.{capability[1]}")
    return names


def _capabilities() -> list[Capability]:
    from .driver import capabilities

    return sorted(set(capabilities()))
