"""The chart of bandwidth over length, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..report import Row

GROUP = "lengths"


def series(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """(length, GB/s) of each subject and of a read of the same bytes, over cells that differ only in length."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("decode") == GROUP and row["GB/s"] is not None:
            for name, value in ((row["subject"], row["GB/s"]), ("read", row["GB/s"] / row["share"])):
                points.setdefault(name, {})[int(row["L"])] = value
    return {name: sorted(values.items()) for name, values in points.items()}


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the PNG.

    Parameters
    ----------
    rows : sequence of dict
        From `decode.measure`.
    path : str
        Overwritten if it exists.

    Raises
    ------
    ValueError
        The rows have no cell of the group "lengths".
    """
    lines = series(rows)
    if not lines:
        raise ValueError(f'there is nothing to draw: no cell of the group "{GROUP}" was measured')
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in lines.items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if name == "read" else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    cell = next(row for row in rows if row.get("decode") == GROUP)
    axes.set_title(" ".join(f"{key}={cell[key]}" for key in ("B", "Hq", "Hkv", "D", "P", "kv")))
    axes.set_xlabel("tokens of each sequence")
    axes.set_ylabel("GB/s of K and V")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, format="png", dpi=150)
