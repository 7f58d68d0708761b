"""The memory that kernels on a GPU keep partial results in."""

from __future__ import annotations

from ..backends import gpus


def workspace_bytes() -> int:
    """Memory of GPUs that the package holds for its kernels, in bytes: of all GPUs, streams and graphs.

    Neither torch's nor CuPy's figures include it.
    """
    used = gpus()
    return 0 if used is None else used.workspace_bytes()


def release_workspaces() -> int:
    """Wait for the GPUs that calls of this process went to, and free the workspaces of calls.

    The next calls make those anew that they need. What has been captured in CUDA graphs keeps its workspaces.

    Returns
    -------
    int
        Bytes that have been freed.

    Raises
    ------
    RuntimeError
        The current stream is being captured in a CUDA graph, which cannot wait.
    """
    used = gpus()
    return 0 if used is None else used.release_workspaces()
