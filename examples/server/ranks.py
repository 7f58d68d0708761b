"""The ranks that torchrun starts: rank 0 serves, and the engines of the others follow its own."""

import contextlib
import os
import signal
import sys
from importlib.util import find_spec
from typing import Any

from pagedkv.extras import pip_install


def joined(model: str | None, timeout: float) -> contextlib.AbstractContextManager[int]:
    """A context that gives the number of this rank: 0 if torchrun has not started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return contextlib.nullcontext(0)
    if model is None:
        raise SystemExit("the small model runs on one rank: give torchrun's ranks a --model of transformers")
    if missing := [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]:
        raise SystemExit(f"ranks need {', '.join(missing)}: {pip_install('tensor-parallel')}")
    from pagedkv.integrations.transformers.ranks import join_ranks  # imported here because it imports torch

    # torchrun sends it when another rank has died: it has to end the block, and not the process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return join_ranks(timeout)


def follow(engine: Any) -> int:
    """Compute what rank 0 computes, until it ends; the exit code."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # rank 0 gets them as well, and says when it ends
    return _unless_lost(engine.follow)


def release(engine: Any) -> int:
    """Let the other ranks end; the exit code."""
    return _unless_lost(getattr(engine, "close", lambda: None))


def _unless_lost(call: Any) -> int:
    try:
        call()
    except RuntimeError as error:
        print(f"rank {os.environ['RANK']} has lost another rank: {error}", file=sys.stderr)
        return 1
    return 0
