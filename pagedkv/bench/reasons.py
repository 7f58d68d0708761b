"""Why a contestant of a bench has no time, in one line."""

from __future__ import annotations

REASON_LENGTH = 160
NOT_INSTALLED = " is not installed"


class Refused(Exception):
    """A contestant does not support the problem; the message says why."""


def reason(error: Exception) -> str:
    """The first line of the error, with the exception's type unless that adds nothing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name}{NOT_INSTALLED}"
    first = (str(error).strip().splitlines() or [""])[0]
    text = (
        first if type(error).__name__ in ("Refused", "BackendUnavailableError") else f"{type(error).__name__}: {first}"
    )
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."
