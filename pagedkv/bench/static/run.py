"""What can be said of the CUDA kernels without a GPU: counts of machine code, or how split fills one."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any

from .. import waves as model
from ..report import Row

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
_NAMED = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument(
        "--cc",
        nargs="+",
        type=_capability,
        default=CAPABILITIES,
        dest="capabilities",
        metavar="CC",
        help=f"compute capabilities, of {_NAMED} (default: all)",
    )
    parser.add_argument("--cold", action="store_true", help="compile all, and take nothing from the cache on disk")
    parser.add_argument("--quick", action="store_true", help="one variant of a kernel")
    parser.add_argument(
        "--waves",
        action="store_true",
        help="compile nothing: a model of how split's thread blocks fill an H100; takes --quick, and ignores the rest",
    )


def _capability(text: str) -> tuple[int, int]:
    for major, minor in CAPABILITIES:
        if text == f"{major}.{minor}":
            return major, minor
    raise ArgumentTypeError(f"must be of {_NAMED}, got {text}")


def run(
    *,
    repeats: int = 9,
    progress: Callable[[str], Any] = print,
    capabilities: Sequence[tuple[int, int]] = CAPABILITIES,
    quick: bool = False,
    cold: bool = False,
    waves: bool = False,
    processes: int = 2,
) -> list[Row]:
    """Count the kernels' machine code, or model how split fills an H100.

    Parameters
    ----------
    repeats : int
        Timed loads of each kernel from disk.
    progress : callable
        Called with what is being measured.
    capabilities : sequence of (int, int)
    quick : bool
        One variant of each kernel; with `waves`, one of split.
    cold : bool
        Compile everything, into an empty cache directory, instead of loading it from disk.
    waves : bool
        The model of `waves.rows`, which compiles nothing, instead of the counts of `counts.rows`. Of the other
        arguments only `quick` has a meaning for it.
    processes : int
        How many to use; 1 for this one alone.
    """
    if waves:
        return model.rows(quick=quick)
    from . import counts  # compiles kernels, which an installation without extras cannot

    return counts.rows(repeats, progress, capabilities, quick=quick, cold=cold, processes=processes)
