"""What makes a run on a GPU survive a bad kernel, tried where there is none."""

import json
import os
import subprocess
import sys
import tarfile
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedkv.bench.gpu import decode, prefill
from pagedkv.cuda import driver

from ..conftest import pytest_runtest_teardown
from ..cuda.conftest import recorded
from ..cuda.driver_fakes import Recorder
from . import results, speeds, steps, variants
from .__main__ import compare, first, repeat, second
from .steps import Run, Step

ROOT = Path(__file__).parents[2]


def test_a_worker_on_which_an_error_sticks_ends_before_its_next_test(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    item = SimpleNamespace(path="test_kernel.py", get_closest_marker=lambda name: name == "gpu")
    with recorded(Recorder()) as cuda:
        driver.cuda_device(0, 0)
        next(pytest_runtest_teardown(item, item))
        assert not ended
        cuda.fail["wait"] = 700  # an illegal address: every later call of the process fails with it
        next(pytest_runtest_teardown(item, item))
        assert ended


SOME = """
import pytest
def test_right(): pass
def test_wrong(): assert not "the reason"
def test_elsewhere(): pytest.skip()
"""


@pytest.fixture
def out(tmp_path, monkeypatch):
    """Where a run leaves what it finds."""
    monkeypatch.setenv(results.VARIABLE, str(tmp_path / "results.jsonl"))
    monkeypatch.setattr(steps, "LEAST", 0)
    (tmp_path / "logs").mkdir()
    return tmp_path


def outcomes(out):
    rows = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {row["step"]: row["outcome"] for row in rows if "step" in row}


def test_pytest_leaves_a_line_for_each_test_that_has_run_and_each_file_that_cannot_be_imported(out, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # a worker leaves the lines to the process that started it
    (out / "test_some.py").write_text(SOME)
    (out / "test_none.py").write_text("import no_such_package")
    options = "-q -c /dev/null -p no:cacheprovider -p tests.gpu.results --continue-on-collection-errors"
    subprocess.run([sys.executable, "-m", "pytest", *options.split(), out], cwd=ROOT, stdout=subprocess.DEVNULL)
    none, right, wrong = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert none["outcome"] == "not collected"
    assert "No module named 'no_such_package'" in none["why"]
    assert (right["outcome"], wrong["outcome"]) == ("passed", "failed")
    assert wrong["test"].endswith("test_some.py::test_wrong")
    assert "the reason" in wrong["why"]


def test_each_step_has_an_end_and_leaves_what_it_had(out):
    found = "from tests.gpu import results; results.append(found=1); print('said'); raise SystemExit(3)"
    taken = [
        Step("fails", 60, [sys.executable, "-c", found]),
        Step("sleeps", 0.4, ["sleep", "60"]),
        Step("is deaf", 0.4, ["sh", "-c", "trap '' INT; sleep 60; sleep 60"]),
        Step("is not here", 60, ["no-such-tool"]),
        Step("is right", 60, ["sh", "-c", 'test "$ANSWER" = 42'], {"ANSWER": "42"}),
    ]
    failed = Run(out, {"logs": out / "logs"}, 600).take(taken)
    assert outcomes(out) == {
        **{"fails": "exit 3", "sleeps": "too slow", "is deaf": "hung"},
        **{"is not here": "cannot begin", "is right": "ok"},
    }
    assert failed == ["fails", "sleeps", "is deaf", "is not here"]
    assert '{"found": 1}' in (out / "results.jsonl").read_text()
    with tarfile.open(out / "logs.tgz") as archive:
        assert archive.extractfile("logs/fails.log").read() == b"said\n"


def test_a_run_ends_in_time_though_its_steps_do_not(out, monkeypatch):
    """What has been written by then is packed while a step runs."""
    monkeypatch.setattr(steps, "LEAST", 1)
    monkeypatch.setattr(steps, "PACK_SECONDS", 0.1)
    run, packed = Run(out, {"logs": out / "logs"}, 2), []
    pack = run.pack
    monkeypatch.setattr(run, "pack", lambda: packed.append((out / "results.jsonl").exists()) or pack())
    assert run.take([Step("sleeps", 60, ["sleep", "60"]), Step("waits", 60, ["true"])]) == ["sleeps", "waits"]
    assert outcomes(out) == {"sleeps": "too slow", "waits": "no time left"}
    assert packed[0] is False  # nothing has ended yet


def test_nothing_follows_a_required_step_that_fails(out):
    taken = [Step("loads", 60, ["false"], required=True), Step("is right", 60, ["true"])]
    assert Run(out, {"logs": out / "logs"}, 600).take(taken) == ["loads"]
    assert outcomes(out) == {"loads": "exit 1"}


@pytest.mark.parametrize("make", [first, second, compare, repeat])
def test_steps_name_what_is_there(make):
    """Files of tests, cells and subjects of benches, and what is timed."""
    made = make(False)
    assert len({step.name for step in made}) == len(made)
    for step in made:
        for word in step.command:
            if word.startswith(("tests/", "--ignore=")):
                assert (ROOT / word.removeprefix("--ignore=")).exists()
        if "bench" in step.command:
            bench = {"decode": decode, "prefill": prefill}[step.command[step.command.index("bench") + 1]]
            bench.add_options(parser := ArgumentParser())
            parser.parse_args(step.command[step.command.index("--only") :])
        if "tests.gpu.speeds" in step.command:
            assert step.command[-1] in speeds.CELLS
            assert hasattr(speeds.Speeds, step.command[-1])
        if "tests.gpu.variants" in step.command:
            assert hasattr(variants.Comparison, step.command[step.command.index("tests.gpu.variants") + 1])


def test_the_command_leaves_three_files_and_says_what_had_no_time(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = [ROOT / ".ci" / "gpu", "first", "--dry", "--seconds", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "not ok: machine, environment\n")
    assert {path.name for path in tmp_path.iterdir()} == {"first.jsonl", "logs.tgz", "kernels.tgz"}
