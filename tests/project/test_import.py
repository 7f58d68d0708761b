"""What importing the package does, and what it offers."""

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import inspect
import pkgutil
import subprocess
import sys

import pytest

import pagedkv
import pagedkv.memory

MODULES = sorted(module.name for module in pkgutil.walk_packages(pagedkv.__path__, "pagedkv."))
# Modules that are imported where a package is installed that pagedkv does not ask for.
OPTIONAL = {"pagedkv.bench.gpu.triton_decode": "triton", "pagedkv.integrations.kv_events": "zmq"}
HEAVY = {
    *("numba", "llvmlite", "torch", "cupy", "cuda", "scipy", "matplotlib", "jax", "transformers", "triton"),
    *("zmq", "msgspec", "starlette", "uvicorn"),
}


def test_import_is_light():
    code = "import sys, pagedkv; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "numpy" in loaded
    assert not HEAVY & set(loaded)


def test_submodules_are_there_when_they_are_looked_up():
    code = """
import sys, pagedkv
assert not {"pagedkv.reference", "pagedkv.emulator", "pagedkv.stores", "pagedkv.trace"} & set(sys.modules)
print(pagedkv.reference.decode_attention.__name__, pagedkv.emulator.EmulatorDevice.__name__)
print(pagedkv.trace.simulate.__name__)
assert not hasattr(pagedkv, "references")
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "decode_attention EmulatorDevice\nsimulate\n"


def test_processes_that_tests_start_find_bytecode():
    code = "import os, numpy; print(os.path.exists(numpy.__cached__))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "True\n"


def test_the_version_is_that_of_the_installation():
    assert pagedkv.__version__ == importlib.metadata.version("pagedkv")


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_module_can_be_imported(name):
    package = OPTIONAL.get(name)
    if package and importlib.util.find_spec(package) is None:
        with pytest.raises(ModuleNotFoundError, match=package):
            importlib.import_module(name)
        return
    assert importlib.import_module(name).__doc__


def test_the_list_of_modules_is_not_empty():
    """Tests over an empty list would pass without a check."""
    assert {"pagedkv.operations.attention", "pagedkv.memory.pool", "pagedkv.cpu.blocks"} <= set(MODULES)


def test_types_are_shipped():
    assert importlib.resources.files("pagedkv").joinpath("py.typed").is_file()


def test_public_names():
    assert set(pagedkv.__all__) <= set(dir(pagedkv))
    assert sorted(pagedkv.__all__) == pagedkv.__all__
    public = {name for name, x in vars(pagedkv).items() if not name.startswith("_") and not inspect.ismodule(x)}
    assert public == set(pagedkv.__all__)


FUNCTIONS = [name for name in pagedkv.__all__ if inspect.isfunction(getattr(pagedkv, name))]


@pytest.mark.parametrize("name", pagedkv.__all__)
def test_docstrings(name):
    doc = inspect.getdoc(getattr(pagedkv, name))
    assert doc
    if name in FUNCTIONS and inspect.signature(getattr(pagedkv, name)).parameters:
        assert "\nParameters\n----------\n" in doc
        assert "\nRaises\n------\n" in doc


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_described(name):
    function = getattr(pagedkv, name)
    doc = inspect.getdoc(function)
    parameters = inspect.signature(function).parameters
    if parameters:
        section = doc.split("\nParameters\n----------\n")[1].split("\n\nR")[0]
        named = {
            word.strip(" *")
            for line in section.splitlines()
            if not line.startswith(" ")
            for word in line.partition(" :")[0].split(",")
        }
        assert named == set(parameters)
