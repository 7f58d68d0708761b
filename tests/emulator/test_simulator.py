"""The page that sets the emulator beside numba's simulator: what it says of planted mistakes, in both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.testing import edited

DOCS = Path(__file__).parents[2] / "docs"
MISTAKES = {"a missing barrier": "RaceFault", "a barrier that half of the threads reach": "SyncFault"}
# What the simulator says of each, in a process of its own.
SIMULATED = """
import json, compare_simulator as compare
from pagedkv.testing import edited
names = {names}
print(json.dumps([compare.outcome(edited(compare.paged_attention, *compare.PLANTED[name])) for name in names]))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_the_emulator_finds_it(name, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "scripts")
    import compare_simulator as compare

    assert compare.outcome(edited(compare.paged_attention, *compare.PLANTED[name])) == MISTAKES[name]


@pytest.mark.long
def test_the_simulator_says_nothing():
    path = os.pathsep.join([str(DOCS / "scripts"), *filter(None, sys.path)])
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", SIMULATED.format(names=[*MISTAKES])]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert all(said.startswith("nothing, ") for said in json.loads(done.stdout))


def test_the_page_has_what_is_planted(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "scripts")
    import compare_simulator as compare

    page = (DOCS / "explanation" / "simulators.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if "Fault |" in line]
    assert rows == [*compare.PLANTED]
