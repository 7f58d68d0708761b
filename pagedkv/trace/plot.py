"""The chart of ``python -m pagedkv trace --plot``, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .simulate import KINDS

# In the order of figure 2 of the vLLM paper: used slots, then three kinds of waste. Distinct in grey, too.
COLOURS = {"tokens": "#2f6f9f", "reserved": "#9fc6e0", "internal": "#e8a33d", "external": "#b5483a"}
NAMES = {"tokens": "tokens", "reserved": "reserved", "internal": "internal frag.", "external": "external frag."}

Row = dict[str, Any]


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the chart: shares of the memory, sequences at once over time, and waste by block size.

    Parameters
    ----------
    rows : sequence of dict
        From `command.run`.
    path : str
        Overwritten if it exists; its suffix says the format.

    Raises
    ------
    OSError, ValueError
        The file cannot be written, or matplotlib does not know the suffix.
    """
    from matplotlib.figure import Figure

    head, *runs = rows
    paged = [row for row in runs if row["P"]]
    figure = Figure(figsize=(12, 4), layout="constrained")
    shares, running, sizes = figure.subplots(1, 3)
    _draw_shares(shares, runs)
    for row in (*(row for row in runs if not row["P"]), min(paged, key=lambda row: abs(row["P"] - 16))):
        running.plot(row["steps over time"], row["running over time"], label=_name(row), linewidth=1)
    running.set(xlabel="steps", ylabel="sequences at once", ylim=(0, None), title="Sequences at once")
    running.legend(fontsize=8)
    for row in paged:
        sizes.plot(row["table entries"], row["waste %"], "o", color=COLOURS["tokens"])
        at = (row["table entries"], row["waste %"])
        sizes.annotate(f"P = {row['P']}", at, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    sizes.set(xscale="log", xlabel="entries of all block tables", ylabel="waste, %", title="Block size")
    sizes.margins(0.15)
    sizes.set_ylim(0)
    figure.suptitle(
        f"{head['requests']} requests of {head['mean prompt']:.0f} + {head['mean output']:.0f} tokens on average, "
        f"{head['memory']} slots"
    )
    figure.savefig(path, dpi=150)


def _name(row: Row) -> str:
    return f"{row['manager']}, P = {row['P']}" if row["P"] else row["manager"]


def _draw_shares(axes: Any, runs: Sequence[Row]) -> None:
    names = [_name(row) for row in runs]
    left = [0.0] * len(runs)
    for kind in KINDS:
        values = [row[f"{kind} %"] for row in runs]
        axes.barh(names, values, left=left, color=COLOURS[kind], label=NAMES[kind])
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="% of the slots that are not idle", title="What slots hold")
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.15))
