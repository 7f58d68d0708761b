"""Ctrl-C at any time of a call: no hang, no other error, and all or nothing is written."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(program, *arguments):
    """What a program beside this test prints; here and not in pytest, which a hang or a crash would end."""
    command = [sys.executable, "-m", f"tests.{program}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timer of signals")
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_interrupts(number):
    assert run("interrupted", number).startswith(f"{number} interrupts")


@pytest.mark.parametrize(
    "arguments", [(600, 1), pytest.param((10_000, 2, "score_mod"), marks=pytest.mark.long)], ids=["short", "long"]
)
def test_a_thread_that_rewrites_tables_lengths_slots_and_options(arguments):
    assert run("rewritten", *arguments).startswith(f"{arguments[0]} calls")
