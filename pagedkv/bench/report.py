"""Rows of measurements, printed as tables, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Row = dict[str, Any]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a long bench; `rows` holds what was measured before it."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def machine() -> dict[str, str]:
    """Identify this machine and its software."""
    versions = {}
    for package in ("pagedkv", "numpy", "numba", "llvmlite", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def as_json(rows: list[Row]) -> str:
    """Format the machine and the rows as JSON, one row to a line."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{\n "machine": {json.dumps(machine())},\n "rows": [\n{lines}\n ]\n}}'


def _without_samples(rows: list[Row]) -> list[Row]:
    """Drop the columns that are lists, which only JSON has room for."""
    lists = {name for row in rows for name, value in row.items() if isinstance(value, list)}
    return [{name: value for name, value in row.items() if name not in lists} for row in rows]


def as_csv(rows: list[Row]) -> str:
    """Format all rows as one CSV table with the union of their columns, without samples."""
    rows = _without_samples(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def as_table(rows: list[Row]) -> str:
    """Format the machine and the rows as text."""
    return "\n\n".join([", ".join(f"{name} {value}" for name, value in machine().items()), as_tables(rows)])


def as_tables(rows: list[Row]) -> str:
    """Format each run of rows with the same columns as a text table, without samples."""
    lines: list[str] = []
    columns: list[str] = []
    group: list[Row] = []
    for row in [*_without_samples(rows), {}]:
        if list(row) != columns and group:
            lines += ["", *_format(columns, group)]
            group = []
        columns = list(row)
        group.append(row)
    return "\n".join(lines[1:])


def _format(columns: list[str], rows: list[Row]) -> list[str]:
    cells = [columns, *([_cell(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    if all(isinstance(row[columns[-1]], str) for row in rows):  # sentences may be longer than a line
        widths[-1] = 0
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return [line.rstrip() for line in lines]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
