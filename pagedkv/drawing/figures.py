"""The check for matplotlib, which draws the charts of ``--plot``."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import BackendUnavailableError


def require() -> None:
    """Raise BackendUnavailableError unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise BackendUnavailableError(
            'plots are drawn by matplotlib, which is not installed: pip install "pagedkv[plot]"'
        )
