"""Errors for bad entries that checked kernels have skipped, raised on the host."""

from __future__ import annotations

from ..arrays import between_graphs
from ..backends import gpu_backend


@between_graphs
def raise_if_failed() -> None:
    """Wait for the GPUs that this process has used, and raise for the first bad entry that a kernel has skipped.

    With ``check=True``, or under ``PAGEDKV_CHECK=1``, kernels check the values of block tables, lengths, slots,
    positions and pairs on a device: they record the first bad entry, skip it, and go on. This function raises for it
    once. Values in host arrays are checked in the call itself.

    Raises
    ------
    IndexError
        A block id outside 0..num_blocks-1, a slot at or past num_blocks * block_size, or a position outside
        0..max_positions-1.
    ValueError
        A sequence length below 0, or beyond the table's capacity or max_seq_len rounded up.
    RuntimeError
        A stream of the GPU is being captured in a CUDA graph, by any thread, so the GPU cannot be waited for.

    Examples
    --------
    >>> import pagedkv
    >>> pagedkv.raise_if_failed()  # after the calls of a step; without a GPU there is nothing to wait for
    """
    used = gpu_backend()
    if used is not None:
        used.raise_if_failed()
