"""What is said where kernels cannot be compiled: which library is missing or fails, and what to do."""

import os
import subprocess
import sys

import pytest

import pagedkv.compiler.compile as compiling
from pagedkv.compiler.compile import compile_kernel
from pagedkv.errors import BackendUnavailableError
from pagedkv.extras import pip_install

from .compile_cases import Config, make_scale

pytestmark = pytest.mark.usefixtures("directory")


def test_what_nvvm_cannot_compile_is_named_with_what_to_do(monkeypatch):
    from cuda.bindings.nvvm import nvvmError

    def fail(*args):
        raise nvvmError(9)

    monkeypatch.setattr(compiling, "_make_ptx", fail)
    with pytest.raises(BackendUnavailableError, match=r"pagedkv_scale.*factor=77.*ERROR_COMPILATION.*backend=.cpu"):
        compile_kernel(make_scale, Config(77))


def test_without_nvvm_the_message_says_what_to_install(monkeypatch):
    from numba.cuda.cudadrv import nvvm

    with monkeypatch.context() as patch:
        patch.setattr(nvvm, "_nvvm", None)
        with pytest.raises(BackendUnavailableError, match=r'NVVM.*pip install .*\[cu13\]"'):
            compile_kernel(make_scale, Config(7))
    compile_kernel(make_scale, Config(7))


@pytest.mark.parametrize(("library", "need"), [("nvvm", "are compiled by NVVM"), ("nvrtc", "need nvrtc")])
def test_a_library_of_the_compiler_that_is_not_there_is_named(library, need, tmp_path):
    # numba-cuda alone brings the bindings of the compiler, and the compiler only by its extras.
    program = f"""
import cuda.pathfinder as pathfinder
load = pathfinder.load_nvidia_dynamic_lib
def without(name):
    if name == {library!r}:
        raise pathfinder.DynamicLibNotFoundError(f"no such file: lib{{name}}.so\\n  listdir of many folders")
    return load(name)
pathfinder.load_nvidia_dynamic_lib = without
import pagedkv
try:
    pagedkv.warmup(8, 2, 64, 16, "float16", layout="vllm", kernels=["v1"], capabilities=[(9, 0)])
except pagedkv.BackendUnavailableError as error:
    print(error)
from pagedkv.compiler.link import compiler  # what `pagedkv info` asks
try:
    compiler()
except pagedkv.BackendUnavailableError as error:
    print(error)
"""
    environment = {**os.environ, "PAGEDKV_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    told = f"CUDA kernels {need}, which is missing or does not work (no such file: lib{library}.so): pip install "
    first, second = done.stdout.splitlines()
    assert first.startswith(told)
    assert second == first


def test_the_simulator_is_refused_by_all_that_compiles_for_cuda():
    program = """
import numpy as np
import pagedkv, pagedkv.emulator
from pagedkv.info.command import run
cache = np.ones((2, 4, 1, 16), np.float32)
arguments = cache[0, :1], cache, cache, np.array([[0]], np.int32), np.array([3], np.int32)
for call in (
    lambda: pagedkv.decode_attention(*arguments, backend="emulator"),
    lambda: pagedkv.warmup(8, 2, 64, 16, "float16", capabilities=[(9, 0)]),
    lambda: pagedkv.emulator.run(lambda x: None, 1, 32, cache),
):
    try:
        call()
    except pagedkv.BackendUnavailableError as error:
        print(error)
print(*(row["what is missing"] for row in run(progress=print) if row.get("to use") == 'backend="emulator"'))
pagedkv.gather_kv(cache, cache, arguments[3][0], 3)  # on the CPU all is as ever
"""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    said = [line for line in done.stdout.splitlines() if line.startswith("NUMBA_ENABLE_CUDASIM is set")]
    assert len(said) == 4


def test_the_simulator_is_refused_when_it_is_chosen_later(monkeypatch):
    from numba.cuda.core import config

    monkeypatch.setattr(config, "ENABLE_CUDASIM", 1)
    with pytest.raises(BackendUnavailableError, match="NUMBA_ENABLE_CUDASIM"):
        compile_kernel(make_scale, Config(3))


def test_without_numba_cuda_the_package_says_what_to_install():
    program = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba_cuda" else find(name, *rest)
import pagedkv
try:
    import pagedkv.compiler.compile
except pagedkv.BackendUnavailableError as error:
    print(error)
importlib.util.find_spec = find
import pagedkv.compiler.compile
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"numba-cuda, which is not installed: {pip_install('cu13')} (or [cu12]" in done.stdout
