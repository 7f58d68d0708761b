"""Run examples' notebooks, and keep what their cells print: ``python docs/scripts/run_notebooks.py``. No Jupyter."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def with_outputs(text: str, name: str) -> str:
    """The text of a notebook with what its cells print today."""
    notebook, namespace = json.loads(text), {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        code = compile("".join(cell["source"]), f"{name}, cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(code, namespace)
        cell["execution_count"], cell["outputs"] = number, _stream(stdout.getvalue())
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _stream(printed: str) -> list[dict[str, Any]]:
    lines = printed.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


if __name__ == "__main__":
    for path in NOTEBOOKS:
        path.write_text(with_outputs(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")
