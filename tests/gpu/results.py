"""JSON lines of what a run on a GPU finds, appended as they come: a run that is cut off leaves all that it had.

A plugin of pytest, too (``-p tests.gpu.results``): a line for each test that has run, and why those that fail do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

VARIABLE = "PAGEDKV_RESULTS"  # names the file, for the processes of all steps
MOST_CHARACTERS = 600


def append(**row: object) -> None:
    """Append a line to the file, in one write."""
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for a test that has passed, or failed anywhere; xdist hands those of its workers on to this process."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.failed or (report.passed and report.when == "call")):
        return
    why = {"why": report.longreprtext[-MOST_CHARACTERS:]} if report.failed else {}
    append(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), **why)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A line for a file that cannot be imported."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        append(test=report.nodeid, outcome="not collected", why=report.longreprtext[-MOST_CHARACTERS:])
