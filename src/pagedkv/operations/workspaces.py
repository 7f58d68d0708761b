"""The memory that kernels on a GPU keep partial results in."""

from __future__ import annotations

from ..backends import gpus


def workspace_bytes() -> int:
    """Memory of GPUs that the package holds for its kernels: of all GPUs, streams and graphs.

    Neither torch's nor CuPy's figures include it.

    Returns
    -------
    int
        Bytes.
    """
    used = gpus()
    return 0 if used is None else used.workspace_bytes()


def release_workspaces() -> int:
    """Wait for the GPUs that calls of this process went to, and free the workspaces of calls.

    All but the few bytes that ``check=True`` records in, which `raise_if_failed` still has to read.
    The next calls make those anew that they need. What has been captured in CUDA graphs keeps its workspaces.

    Returns
    -------
    int
        Bytes that have been freed.

    Raises
    ------
    RuntimeError
        A stream of the GPU is being captured in a CUDA graph, by any thread, and cannot be waited for.
    """
    used = gpus()
    return 0 if used is None else used.release_workspaces()
