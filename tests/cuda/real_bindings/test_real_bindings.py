"""cuda.bindings and cuda.core take what they are given, and give what is expected: types, names and contexts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ...support.programs import ROOT, TIMEOUT_S

COMPILER = shutil.which("cc")


@pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="a fake driver needs Linux and a C compiler")
def test_calls_run_on_a_fake_driver(tmp_path):
    command = [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([*command, Path(__file__).with_name("libcuda.c"), "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    program = [sys.executable, "-m", "tests.cuda.real_bindings.program"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = ["attention", "copies", "bad_entries", "graphs", "within_the_context"]
    assert done.stdout.splitlines() == [f"{part} done" for part in parts]
