"""Subjects of a bench on a GPU: made, checked, timed in turns and checked again; whoever fails has a reason instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report import Row, median, spread
from .frameworks import Call, Gpu
from .samples import Sample, interleaved

REASON_LENGTH = 160
COPY = "copy"
NOT_INSTALLED = " is not installed"


class Refused(Exception):
    """A subject cannot do what is asked for; the message says why."""


def reason(error: Exception) -> str:
    """The first line of what went wrong, and what kind of exception it was unless that says nothing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name}{NOT_INSTALLED}"
    first = (str(error).strip().splitlines() or [""])[0]
    text = (
        first if type(error).__name__ in ("Refused", "BackendUnavailableError") else f"{type(error).__name__}: {first}"
    )
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


@dataclass
class Contest:
    """What came out.

    Attributes
    ----------
    copy_bytes : int
        What one copy copies.
    samples : dict
        Of the copy, and of every subject that was right each time.
    errors : dict
        The largest error of every subject that returned something.
    notes : dict
        Why a subject has no samples.
    """

    copy_bytes: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str) -> float | None:
        """The median time of a launch; None if it was not timed."""
        if name not in self.samples:
            return None
        return median([each.milliseconds for each in self.samples[name]]) / 1e3

    def columns(self, name: str, num_bytes: int) -> Row:
        """Time and bandwidth of a subject that has to move so many bytes, and its error."""
        seconds, copied = self.seconds(name), self.seconds(COPY)
        samples = self.samples.get(name)
        bandwidth = num_bytes / seconds / 1e9 if seconds else None
        copy_bandwidth = 2 * self.copy_bytes / copied / 1e9 if copied else None
        return {
            "subject": name,
            "us": seconds and seconds * 1e6,
            "spread": spread([each.milliseconds for each in samples]) if samples else None,
            "GB/s": bandwidth,
            "copy GB/s": copy_bandwidth,
            "share": bandwidth / copy_bandwidth if bandwidth and copy_bandwidth else None,
            "late": sum(each.late for each in samples) / len(samples) if samples else None,
            "error": self.errors.get(name),
        }

    def note(self, name: str) -> Row:
        """The last column: why a subject has no time, or None."""
        return {"note": self.notes.get(name)}


def contest(
    gpu: Gpu,
    subjects: Mapping[str, Callable[[], Call]],
    error_of: Callable[[Any], float],
    limit: float,
    repeats: int,
    progress: Callable[[str], Any],
) -> Contest:
    """Make every subject, and time those that are right, in turns with a copy within the device.

    Parameters
    ----------
    gpu : Gpu
    subjects : mapping
        From a name to a function that makes the call, or raises.
    error_of : callable
        How wrong what a call returned is.
    limit : float
        The largest error that is allowed, before the turns and after them.
    repeats : int
        Samples of each.
    progress : callable
        Told who is at work.
    """
    result = Contest(gpu.copy_bytes)
    calls: dict[str, Call] = {}

    def is_right(name: str, call: Call) -> bool:
        error = error_of(call())
        result.errors[name] = max(result.errors.get(name, 0.0), error)
        if not error <= limit:
            result.notes[name] = f"wrong: error {error:.2g}, allowed {limit:g}"
        return error <= limit

    for name, make in subjects.items():
        progress(name)
        try:
            call = make()
            if is_right(name, call):
                calls[name] = call
        except Exception as error:  # whatever one raises, the others are measured
            result.notes[name] = reason(error)
    progress("timing")
    try:
        samples = interleaved(gpu, {COPY: gpu.copy, **calls}, repeats)
        wrong = [name for name, call in calls.items() if not is_right(name, call)]
        result.samples = {name: values for name, values in samples.items() if name not in wrong}
    except Exception as error:  # a device that has failed stays so: what was measured before must not be lost
        result.notes |= dict.fromkeys(calls, reason(error))
    return result
