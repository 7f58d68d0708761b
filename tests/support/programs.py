"""Programs beside the tests that run them: what they do to a process could hang or end pytest."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500


def printed_by(program: str, *arguments: object) -> list[str]:
    """The lines that a program prints, named as a module of `tests`."""
    command = [sys.executable, "-m", f"tests.{program}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
