"""What the benches of attention on a GPU say alike: the machine, the error of a result, a target and how near it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import numpy.typing as npt

from ..report import Row, median, spread
from .frameworks import Gpu
from .peers import PACKAGES
from .samples import interleaved, sample

# Largest error allowed, relative to the largest expected magnitude.
TOLERANCE = {"float16": 5e-3, "bfloat16": 2e-2}


def error_of(result: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The largest error relative to the largest expected magnitude; infinite if a value is not finite."""
    difference = np.abs(result.reshape(expected.shape) - expected).max()
    return float(difference / np.abs(expected).max()) if np.isfinite(difference) else math.inf


def header(gpu: Gpu, repeats: int) -> Row:
    """Device, driver and versions, bandwidth of reading and of a copy, and time between two events in a row."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    samples = interleaved(gpu, {"read": gpu.read, "copy": gpu.copy}, repeats)
    reads, copies = ([each.milliseconds for each in of] for of in samples.values())
    nothing = [sample(gpu, lambda: None, 1).milliseconds * 1e3 for _ in range(repeats)]
    measured = {
        "copy MiB": gpu.copy_bytes / 2**20,
        "read GB/s": gpu.copy_bytes / median(reads) / 1e6,
        "copy GB/s": 2 * gpu.copy_bytes / median(copies) / 1e6,
        "read spread": spread(reads),
        "copy spread": spread(copies),
        "empty us": median(nothing),
    }
    return {**gpu.facts, **versions, **measured}


def targets_of(found: Sequence[tuple[str, str, float, Sequence[float]]]) -> list[Row]:
    """Rows for targets (name, ">=" or "<=", limit, values) by the worst of their values; without values, none."""
    result = []
    for name, sign, limit, values in found:
        if values:
            worst = max(values) if sign == "<=" else min(values)
            reached = worst <= limit if sign == "<=" else worst >= limit
            result.append(target(name, f"{sign} {limit:g}", worst, reached, "-"))
    return result


def target(name: str, limit: str, measured: float, reached: bool, where: str) -> Row:
    """A row that says what a figure should be, what it is, whether that is enough, and where it was measured."""
    return {"target": name, "limit": limit, "measured": measured, "reached": "yes" if reached else "no", "where": where}
