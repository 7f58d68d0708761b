"""Compiling kernels without a driver: once, from disk when it can be, and never from what does not fit."""

import contextlib
import dataclasses
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from numba import cuda, float32, types

import pagedkv
import pagedkv.compiler.compile as compiling
from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.ptx import TOOLS
from pagedkv.cuda.driver import wants_lineinfo
from pagedkv.cuda.plans.plan import compile_for
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.device.source import KernelSource, device_function

from ..machine_code.sass import code_of
from ..support.device_fakes import RecordingDevice
from .compile_cases import Config, make_scale
from .conftest import start_again

pytestmark = pytest.mark.usefixtures("directory")


class TupleConfig(NamedTuple):
    factor: int


def make_squares(config):
    """values[i] *= values[i], by a device function."""

    @device_function
    def square(x):
        return x * x

    def kernel(values, count):
        i = cuda.grid(1)
        if i < count:
            values[i] = square(values[i])

    return KernelSource(kernel, types.void(types.CPointer(float32), types.int64), 64)


def test_a_kernel_says_what_it_is():
    kernel = compile_kernel(make_scale, Config(3), (8, 0))
    assert kernel.name == "scale[factor=3, score_mod=None]"
    assert kernel.entry == "pagedkv_scale"
    assert kernel.num_threads == 64
    assert kernel.capability == (8, 0)
    assert "scale[factor=3" in repr(kernel)
    assert kernel.ptx.count(".visible .entry pagedkv_scale(") == 1
    assert ".version 8.0\n.target sm_80\n" in kernel.ptx
    assert ".maxntid 64" in kernel.ptx
    assert "NumbaEnv" not in kernel.ptx
    assert compile_kernel(make_scale, TupleConfig(3)).name == "scale[factor=3]"


def make_shared(config):
    """values[i] = values[63 - i] * factor, through shared arrays; for factor 0, one is a device function's."""
    factor = config.factor

    @cuda.jit(device=True)
    def reverse(mirror, values, i):
        more = cuda.shared.array(64, float32)
        more[i] = mirror[63 - i]
        return more[i]

    if factor:

        def kernel(values):
            mirror, scaled = cuda.shared.array(64, float32), cuda.shared.array(64, float32)
            i = cuda.grid(1)
            mirror[i] = values[i]
            cuda.syncthreads()
            scaled[i] = mirror[63 - i] * factor
            values[i] = scaled[i]
    else:

        def kernel(values):
            mirror = cuda.shared.array(64, float32)
            i = cuda.grid(1)
            mirror[i] = values[i]
            cuda.syncthreads()
            values[i] = reverse(mirror, values, i)

    return KernelSource(kernel, types.void(types.CPointer(float32)), 64)


def shared_arrays(kernel):
    return re.findall(r"\.shared .* (\w+)\[256\]", kernel.ptx)


def test_shared_arrays_have_their_names(monkeypatch):
    kernel = compile_kernel(make_shared, Config(3))
    assert shared_arrays(kernel) == ["shared_mirror", "shared_scaled"]
    # The one of a device function has no name of the kernel's, so that none has.
    assert sorted(shared_arrays(compile_kernel(make_shared, Config(0)))) == ["shared_0", "shared_1"]
    monkeypatch.setattr(compiling.inspect, "getsource", lambda function: "(typed into a prompt)(")
    assert shared_arrays(compile_kernel(make_shared, Config(4))) == ["shared_0", "shared_1"]


def test_a_kernel_is_the_same_whatever_was_compiled_before(monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", os.devnull)
    kernels = []
    for _ in range(2):
        start_again(monkeypatch)
        kernels.append(compile_kernel(make_shared, Config(3)))
    assert kernels[0] is not kernels[1]
    assert kernels[0].ptx == kernels[1].ptx


def test_a_kernel_is_compiled_once(compiled):
    kernel = compile_kernel(make_scale, Config(3))
    assert compile_kernel(make_scale, Config(3)) is kernel
    assert len(compiled) == 1


def test_another_process_does_not_compile(monkeypatch, compiled, directory):
    first = compile_kernel(make_scale, Config(3))
    assert {path.suffix for path in directory.iterdir()} == {".ptx"}
    start_again(monkeypatch)
    second = compile_kernel(make_scale, Config(3))
    assert second is not first
    assert len(compiled) == 1
    assert vars(second) == vars(first)
    assert first.cubin == second.cubin


PROGRAM = """
import sys
from tests.compiler.compile_cases import Config, make_scale
from pagedkv.compiler.compile import compile_kernel
sys.stdout.write(compile_kernel(make_scale, Config(3)).ptx)
"""


def test_processes_that_race_make_the_same_kernel(directory):
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        for _ in range(2)
    ]
    texts = [process.communicate(timeout=120)[0].decode() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert texts[0] == texts[1]
    assert texts[0] == compile_kernel(make_scale, Config(3)).ptx
    assert [path.suffix for path in directory.iterdir()] == [".ptx"]


def test_the_caller_can_be_interrupted_and_finds_the_kernel_later(monkeypatch, compiled):
    go = threading.Event()
    link = compiling.load_or_link
    make_ptx = compiling._make_ptx
    monkeypatch.setattr(compiling, "_make_ptx", lambda *args: go.wait(30) and make_ptx(*args))
    monkeypatch.setattr(compiling, "load_or_link", lambda *args: go.wait(30) and link(*args))

    def interrupted(work):
        go.clear()
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            work()
        timer.join()
        go.set()

    interrupted(lambda: compile_kernel(make_scale, Config(3)))
    kernel = compile_kernel(make_scale, Config(3))
    interrupted(lambda: kernel.linked)
    assert kernel.linked is kernel.linked
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda patch: compile_kernel(make_scale, Config(4)),
        lambda patch: compile_kernel(make_scale, Config(3), (8, 0)),
        lambda patch: compile_kernel(make_scale, Config(3), lineinfo=True),
        lambda patch: (patch.setattr(compiling, "SOURCES", b"edited"), compile_kernel(make_scale, Config(3))),
        lambda patch: (patch.setattr(compiling, "versions", lambda: ("9",)), compile_kernel(make_scale, Config(3))),
        lambda patch: (patch.setenv("NUMBA_OPT", "0"), compile_kernel(make_scale, Config(3))),
    ],
    ids=["config", "capability", "lineinfo", "sources", "versions", "settings"],
)
def test_what_differs_is_compiled_separately(monkeypatch, compiled, other):
    compile_kernel(make_scale, Config(3))
    start_again(monkeypatch)
    other(monkeypatch)
    assert len(compiled) == 2


def test_the_versions_name_all_that_compiles():
    assert compiling.versions()[0] == sys.version
    assert all(compiling.versions()[1:5])


def test_a_compiler_of_a_toolkit_counts_by_its_file(monkeypatch, tmp_path):
    """It has no distribution, and does not say its version: NVVM 13.0 and 13.5 both say 2.0."""
    version, found = importlib.metadata.version, tmp_path / "libnvvm.so"

    def version_of_what_is_no_toolkit(name):
        if name == "nvidia-nvvm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of_what_is_no_toolkit)
    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=str(found)))
    keys = []
    for content in ("13.0", "13.5.1"):
        found.write_text(content)
        keys.append(compiling.versions.__wrapped__())
    assert keys[0] != keys[1]
    assert len(keys[0]) == 1 + len(TOOLS)


# Each process is forked from one that has imported the compiler, which takes longer than all the rest.
THREE_TIMES = """
import os, pathlib, sys
import numba.cuda, numpy as np
package, directory = map(pathlib.Path, sys.argv[1:])
for number in range(3):
    if (child := os.fork()) == 0:
        import pagedkv
        cache = np.zeros((2, 8, 1, 8), np.float32)
        pagedkv.copy_blocks(cache, cache.copy(), np.array([[0, 1]]), backend="emulator")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(len([*directory.glob("*.ptx")]))
    if number == 1:
        with (package / "kernels" / "split" / "lanes.py").open("a") as file:
            file.write("# edited\\n")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX")
def test_an_edit_in_any_room_of_the_kernels_is_compiled_again(tmp_path, directory):
    package = tmp_path / "src" / "pagedkv"
    shutil.copytree(Path(pagedkv.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", THREE_TIMES, str(package), str(directory)]
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["1", "1", "2"]


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"#!/bin/sh\n" * 9])
def test_a_damaged_file_is_compiled_again(monkeypatch, compiled, directory, damage):
    whole = compile_kernel(make_scale, Config(3))
    whole_cubin = whole.cubin
    for path in directory.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    start_again(monkeypatch)
    again = compile_kernel(make_scale, Config(3))
    assert len(compiled) == 2
    assert again.ptx == whole.ptx
    assert len(again.cubin) == len(whole_cubin)


@pytest.mark.parametrize("content", [b"", b"{}\nptx", b"[]\nptx", b"\xff\xfe", b'{"num_threads": "many"}\nptx', b"{"])
def test_a_file_of_another_form_is_compiled_again(monkeypatch, compiled, content):
    monkeypatch.setattr(compiling.Store, "load", lambda self, key: content)
    assert compile_kernel(make_scale, Config(3)).num_threads == 64
    assert len(compiled) == 1


def test_a_directory_that_cannot_be_written_costs_nothing_but_time(monkeypatch, compiled, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(blocked))
    assert compile_kernel(make_scale, Config(3)).cubin
    start_again(monkeypatch)
    compile_kernel(make_scale, Config(3))
    assert len(compiled) == 2


def make_scale_specific(config):
    return dataclasses.replace(make_scale(config), is_specific=True)


def test_a_kernel_for_one_capability_alone(directory):
    kernel = compile_kernel(make_scale_specific, Config(3))
    assert ".target sm_90a\n" in kernel.ptx
    assert kernel.linked.resources().stack_bytes == 0


def test_nothing_on_disk_is_a_pickle(directory):
    compile_kernel(make_scale, Config(3)).linked  # noqa: B018
    for path in directory.iterdir():
        header = json.loads(path.read_bytes()[32:].split(b"\n", 1)[0])
        assert set(header) == ({"name", "num_threads"} if path.suffix == ".ptx" else {"log"})


def make_printing(config):
    factor = config.factor

    def kernel(values):
        t = cuda.threadIdx.x
        if t < 2:
            print("value", values[t], factor * t, float32(0.5))

    return KernelSource(kernel, types.void(types.CPointer(types.int64)), 32)


@pytest.mark.parametrize("lineinfo", [True, False])
def test_a_kernel_may_print(capsys, lineinfo):
    """vprintf is no function of the module: every driver has it, and so has the emulator."""
    kernel = compile_kernel(make_printing, Config(3), lineinfo=lineinfo)
    with EmulatorDevice() as device:
        device.launch(kernel, (2, 1, 1), [device.address("values", np.array([1 << 40, -5]))])
    where = "thread block ({}, 0, 0), thread ({}, 0, 0): value "
    text = [(where + "1099511627776 0 0.500000", 0), (where + "-5 3 0.500000", 1)]
    assert capsys.readouterr().out.splitlines() == [line.format(b, t) for b in range(2) for line, t in text]
    assert b"vprintf" in kernel.cubin


def make_calling(config):
    nobody = cuda.declare_device("nobody", types.int64(types.int64))

    def kernel(values):
        values[0] = nobody(values[1])

    return KernelSource(kernel, types.void(types.CPointer(types.int64)), 32)


def test_a_kernel_with_an_external_call_is_refused():
    with pytest.raises(TypeError, match="pagedkv_calling calls nobody, which no device has"):
        compile_kernel(make_calling, Config(3))


def test_lines_are_named_on_request_and_change_no_machine_code(compiled):
    lined, plain = (compile_for(device, make_squares, Config(3)) for device in (EmulatorDevice(), RecordingDevice()))
    lines = [{int(line) for line in re.findall(r"^\s*\.loc\s+\d+ (\d+)", x.ptx, re.MULTILINE)} for x in (lined, plain)]
    code, first = inspect.getsourcelines(make_squares)
    (square,) = (first + i for i, line in enumerate(code) if "return x * x" in line)
    assert square in lines[0]
    assert lines[1] == set()
    assert len({code_of(x.cubin, x.entry) for x in (lined, plain)}) == 1


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), (None, False)])
def test_an_environment_variable_asks_for_lines(monkeypatch, value, wanted):
    monkeypatch.delenv("PAGEDKV_LINEINFO", raising=False)
    if value is not None:
        monkeypatch.setenv("PAGEDKV_LINEINFO", value)
    assert wants_lineinfo() == wanted


def test_a_terminal_shows_what_is_compiled(monkeypatch):
    told = []
    monkeypatch.setattr(compiling, "showing_progress", lambda what: told.append(what) or contextlib.nullcontext())
    monkeypatch.setattr(compiling, "_compile", lambda *args: ("", 64))
    compile_kernel(make_scale, Config(11), (9, 0))
    assert told == ["the kernel scale for 9.0"]
