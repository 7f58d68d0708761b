"""Which numba.cuda compiles the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import numba

import pagedkv


def test_numba_cuda_in_a_folder_on_the_path_is_found():
    folders = [Path(module.__file__).parents[1] for module in (pagedkv, numba)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    program = "import pagedkv.cuda, numba.cuda; print(numba.cuda.__file__)"
    command = [sys.executable, "-S", "-c", program]  # without site, no .pth file is read
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "numba_cuda" in done.stdout
