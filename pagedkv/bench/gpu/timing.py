"""Runs the subjects of a bench on a GPU: makes, checks, times in turns, and checks again; a failure has its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..reasons import reason
from ..report import Row, median, spread
from .frameworks import Call, Gpu
from .samples import Sample, interleaved

READ, COPY = "read", "copy"


@dataclass
class Contest:
    """The result.

    Attributes
    ----------
    copy_bytes : int
        Bytes of one copy, and of one read.
    samples : dict
        For the read, for the copy, and for every subject that was right both times.
    errors : dict
        The largest error of every subject that returned a result.
    notes : dict
        Why subjects have no samples.
    """

    copy_bytes: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str) -> float | None:
        """The median time of a launch; None for a subject without samples."""
        if name not in self.samples:
            return None
        return median([each.milliseconds for each in self.samples[name]]) / 1e3

    def columns(self, name: str, num_bytes: int, limit: str) -> Row:
        """Time, error, bandwidth of a subject that has to move `num_bytes`, and its share of that of READ or COPY."""
        seconds, samples = self.seconds(name), self.samples.get(name)
        bandwidth = num_bytes / seconds / 1e9 if seconds else None
        moved = {READ: self.copy_bytes, COPY: 2 * self.copy_bytes}
        limits = {of: nbytes / taken / 1e9 for of, nbytes in moved.items() if (taken := self.seconds(of))}
        return {
            "subject": name,
            "us": seconds and seconds * 1e6,
            "spread": spread([each.milliseconds for each in samples]) if samples else None,
            "GB/s": bandwidth,
            "read GB/s": limits.get(READ),
            "copy GB/s": limits.get(COPY),
            "share": bandwidth / limits[limit] if bandwidth and limit in limits else None,
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
    """Make all subjects, and time those that are right, in turns with a read and a copy on the device.

    Parameters
    ----------
    gpu : Gpu
    subjects : mapping
        By name, functions that make the call or raise.
    error_of : callable
        The error of what a call returned.
    limit : float
        The largest error allowed, before timing and after it.
    repeats : int
        Samples of each.
    progress : callable
        Called with who is at work.
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
        except Exception as error:  # one subject's failure must not stop the others
            result.notes[name] = reason(error)
    progress("timing")
    try:
        samples = interleaved(gpu, {READ: gpu.read, COPY: gpu.copy, **calls}, repeats)
        wrong = [name for name, call in calls.items() if not is_right(name, call)]
        result.samples = {name: values for name, values in samples.items() if name not in wrong}
    except Exception as error:  # a failed device stays failed: keep what was measured
        result.notes |= dict.fromkeys(calls, reason(error))
    return result
