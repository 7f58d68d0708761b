"""`info`: right on this machine, on one with a GPU, and if every probe raises."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from pagedkv import BackendUnavailableError
from pagedkv.extras import pip_install
from pagedkv.info import command
from pagedkv.info.driver import Driver

GPU = Driver((12, 8), ["NVIDIA H100, compute capability 9.0, 80.0 GiB"])


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """What is here, and what is missing for each use; nothing but numba is imported for it."""
    monkeypatch.setattr(command, "EXTRAS", {})
    monkeypatch.setattr(command, "find_driver", lambda: None)
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))

    def tables():
        rows = command.run(progress=lambda text: None)
        facts = {row["what"]: row["here"] for row in rows if "what" in row}
        uses = {row["to use"]: row["what is missing"] for row in rows if "to use" in row}
        assert [row["works"] for row in rows if "to use" in row] == ["no" if why else "yes" for why in uses.values()]
        return facts, uses

    return tables


def test_facts_and_uses_of_this_machine(tables, tmp_path):
    (tmp_path / "cpu").mkdir(mode=0o700)
    (tmp_path / "cpu" / "one.kernel").write_bytes(bytes(1_500_000))
    facts, uses = tables()
    assert {"pagedkv", "Python", "threads", "numpy", "numba", "CUDA driver", "CUDA compiler"} <= set(facts)
    assert facts["cpu kernels kept in"] == f"{tmp_path / 'cpu'}, 1 files, 1.5 MB"
    assert facts["cuda kernels kept in"] == f"{tmp_path / 'cuda'}, which the first one makes"
    assert facts["CUDA compiler"].startswith("NVVM ")
    assert uses == {
        "NumPy arrays, on the CPU": "",
        "CuPy and torch arrays, on a GPU": "a GPU with the NVIDIA driver",
        'backend="emulator"': "",
    }


def test_a_gpu_without_packages_names_the_extra_for_its_driver(tables, monkeypatch):
    monkeypatch.setattr(command, "find_driver", lambda: GPU)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    facts, uses = tables()
    assert facts["CUDA driver"] == "for CUDA 12.8"
    assert facts["GPU 0"] == "NVIDIA H100, compute capability 9.0, 80.0 GiB"
    assert uses["CuPy and torch arrays, on a GPU"] == pip_install("cu12")
    assert uses['backend="emulator"'] == pip_install("emulator")


def test_a_driver_without_gpus(tables, monkeypatch):
    monkeypatch.setattr(command, "find_driver", lambda: GPU._replace(gpus=[]))
    assert "CUDA_VISIBLE_DEVICES" in tables()[1]["CuPy and torch arrays, on a GPU"]


def test_a_numpy_that_is_too_new_for_numba_cuda_is_named():
    program = """
import numba, numpy
numpy.__version__ = "2.5.1"
from pagedkv.info import command
command.EXTRAS = {}
for row in command.run(progress=lambda text: None):
    print(*row.values(), sep=": ")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    wrong = f'numba-cuda {version("numba-cuda")} needs NumPy below 2.5, got 2.5.1: pip install "numpy<2.5"\n'
    assert done.stdout.endswith(f'backend="emulator": no: CUDA kernels are compiled by numba-cuda, and {wrong}')
    assert "NumPy arrays, on the CPU: yes" in done.stdout


def test_extras_are_imported_and_not_only_found(tables, monkeypatch):
    monkeypatch.setattr(
        command, "EXTRAS", {"JSON": ("json", "x"), "torch tensors": ("no_such_package", "torch"), "bad": ("bad", "y")}
    )
    monkeypatch.setattr(command, "import_module", failing)
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "no_such_package" else "found")
    uses = tables()[1]
    assert uses["JSON"] == uses["bad"] == "OSError: libcudart.so is missing"
    assert uses["torch tensors"] == pip_install("torch")


def failing(*args):
    raise OSError("libcudart.so is missing")


@pytest.mark.parametrize("error", [BackendUnavailableError("too old"), OSError("broken"), AttributeError("no name")])
def test_an_error_of_a_probe_becomes_its_answer(tables, monkeypatch, error):
    def broken(*args, **kwargs):
        raise error

    for name in ("find_driver", "import_module", "cache_dir", "get_num_threads", "find_spec"):
        monkeypatch.setattr(command, name, broken)
    facts, uses = tables()
    assert all(str(error) in text for text in (*uses.values(), facts["CUDA driver"], facts["threads"]))


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are POSIX")
def test_a_refused_folder_is_logged(tables, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu").chmod(0o777)
    assert "can be written to by others; set PAGEDKV_CACHE_DIR" in tables()[0]["cpu kernels kept in"]


@pytest.mark.parametrize("made", [False, True])
def test_an_unwritable_folder_is_logged(tables, monkeypatch, tmp_path, made):
    if made:
        (tmp_path / "cpu").mkdir(mode=0o700)
    monkeypatch.setattr(command.os, "access", lambda *args: False)
    said = tables()[0]["cpu kernels kept in"]
    assert ("is not writable" if made else f"{tmp_path / 'cpu'} cannot be made in {tmp_path}") in said
    assert said.endswith("set PAGEDKV_CACHE_DIR to a folder of your own")


@pytest.mark.skipif(os.name != "posix", reason="paths are POSIX")
def test_a_path_that_is_no_folder_is_logged(tables, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", os.devnull)
    said = tables()[0]["cpu kernels kept in"]
    assert said == "nowhere: /dev/null/cpu: Not a directory; set PAGEDKV_CACHE_DIR to a folder of your own"
