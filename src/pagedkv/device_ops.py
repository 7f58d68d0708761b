"""The public operations on devices as such: kernels compiled ahead, and what checked kernels have found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from .device_arrays import current_streams


def raise_if_failed() -> None:
    """Wait for the GPUs that calls of this process went to, and raise the first bad entry that a kernel has skipped.

    Kernels look at the values of block tables, lengths, slots and pairs on a device when they are called with
    ``check=True``, or under ``PAGEDKV_CHECK=1``; they skip a bad entry, note the first one, and go on. It is raised
    once. Values in host arrays are checked, and raise, in the call itself.

    Raises
    ------
    IndexError
        A block id outside 0..num_blocks-1, or a slot at or past num_blocks * block_size.
    ValueError
        A sequence length below 0 or beyond the table's capacity.
    RuntimeError
        The current stream is being captured in a CUDA graph, which cannot wait.
    """
    driver = sys.modules.get("pagedkv.cuda.driver")
    if driver is not None:  # otherwise no call has gone to a device
        from .cuda.report import raise_if_failed as look

        driver.refuse_capture(current_streams(), "raise_if_failed waits for the GPU: call it after the replay")
        look(driver.cuda_devices())


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
    capabilities: Sequence[tuple[int, int]] | None = None,
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
    from .cuda.warmup import warmup as compile_ahead

    return compile_ahead(
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        dtype,
        layout=layout,
        cache_dtype=cache_dtype,
        kv_dtype=kv_dtype,
        score_mod=score_mod,
        kernels=kernels,
        check=check,
        capabilities=capabilities,
    )
