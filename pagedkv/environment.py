"""Settings from environment variables, each read whenever it is needed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

MOST_THREADS = 1024
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def is_on(name: str) -> bool:
    """Whether a variable is 1, true, yes or on, in any case; an unset one is off.

    Raises
    ------
    ValueError
        It says something else.
    """
    text = os.environ.get(name, "").strip().lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    raise ValueError(f"{name} must be {', '.join(_YES)}, or {', '.join(_NO[:-1])} or empty, got {text[:80]!r}")


def check_setting() -> str | None:
    """``os.environ.get("PAGEDKV_CHECK")``, in half the time if the variable is not set."""
    try:
        return os.environ["PAGEDKV_CHECK"]
    except KeyError:
        return None


def num_threads() -> int | None:
    """The number in ``PAGEDKV_NUM_THREADS``, None if it is not set; ValueError unless it is in 1..MOST_THREADS."""
    text = os.environ.get("PAGEDKV_NUM_THREADS")
    if not text:
        return None
    # Check the length first, since Python refuses to parse thousands of digits.
    if not text.isdecimal() or len(text) > 80 or not 1 <= int(text) <= MOST_THREADS:
        raise ValueError(f"PAGEDKV_NUM_THREADS must be an integer in 1..{MOST_THREADS}, got {text[:80]!r}")
    return int(text)


def cache_dir(kind: str) -> Path | None:
    """Where compiled kernels of one kind ("cpu", "cuda") are kept.

    A folder of ``PAGEDKV_CACHE_DIR``, or of ``pagedkv`` in the user's own cache directory; None for a user without a
    home directory.
    """
    if chosen := os.environ.get("PAGEDKV_CACHE_DIR"):
        return Path(chosen) / kind
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "pagedkv" / kind
