"""Settings for all tests: Hypothesis, threads, bytecode, the garbage collector, and tests that need a GPU."""

import functools
import gc
import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The oracle's products are small: threads would spend their time waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# torch's threads would spin meanwhile, on the cores that the other workers of xdist compute on.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

settings.register_profile(
    "default",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config):
    """Keep bytecode for as long as the tests run, where none may be written beside the sources and none is there.

    Else each process that they start compiles numba and torch from their sources, for seconds.
    """
    if not sys.dont_write_bytecode or Path(importlib.util.cache_from_source(pytest.__file__)).exists():
        return
    folder = tempfile.TemporaryDirectory(prefix="pagedkv-bytecode-")
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(lambda: setattr(sys, "dont_write_bytecode", True))
    sys.pycache_prefix, sys.dont_write_bytecode = folder.name, False
    os.environ["PYTHONPYCACHEPREFIX"] = folder.name
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# A shell that starts something in the background has it, and what it starts, ignore Ctrl-C: some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def why_no_gpu():
    """The driver's error if there is no GPU, otherwise an empty string."""
    from pagedkv import BackendUnavailableError
    from pagedkv.cuda import driver

    try:
        driver.capabilities()
    except BackendUnavailableError as error:
        return f"no CUDA GPU: {error}"
    return ""


@pytest.fixture
def without_lines(monkeypatch):
    """Backend "emulator" runs the kernels that a GPU gets, without lines: other tests have compiled most of them."""
    from pagedkv.emulator import EmulatorDevice

    monkeypatch.setattr(EmulatorDevice, "lineinfo", False)


@pytest.fixture
def restore_threads():
    """The CPU backend has as many threads afterwards as before."""
    import pagedkv

    before = pagedkv.get_num_threads()
    yield
    pagedkv.set_num_threads(before)


# Of a module: pytest would run what asks for one of a session before all that does not, and xdist share out the tests
# of one kernel, which each worker would compile.
@pytest.fixture(scope="module", params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def open_device(request):
    """A function of the checks of the emulator that makes a Device on NumPy arrays, for a `with` statement."""
    from pagedkv.cuda import driver

    from .support.devices import CopyingDevice, emulator

    if request.param == "emulator":
        return emulator
    device = driver.cuda_device(0, 0)
    return lambda **checks: CopyingDevice(device)


def pytest_collection_modifyitems(items):
    """Run tests that may hang on a GPU last."""
    items.sort(key=lambda item: bool(item.get_closest_marker("gpu") and item.get_closest_marker("late")))


ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "torch")]


def _framework(request):
    from .support.frameworks import FRAMES

    return FRAMES[request.param]()


framework = pytest.fixture(_framework, params=["host", *ON_A_GPU], name="framework")
gpu_framework = pytest.fixture(_framework, params=ON_A_GPU, name="gpu_framework")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests without the collector, which would traverse what they import again and again."""
    gc.disable()
    gc.set_threshold(10_000, 20)  # compiling makes more objects than the usual 700 at a time, and keeps most of them
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_poisoned():
    """Whether a CUDA error sticks: then every later call of this process fails with it, at once."""
    from pagedkv.cuda import driver

    for gpu in driver._gpus.values():
        try:
            with gpu.current():
                gpu.call(gpu.driver.cuCtxSynchronize)
        except RuntimeError:
            return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End a worker of xdist that is poisoned; set aside what outlives a module: compilers, torch, compiled kernels.

    A poisoned worker would be the fastest of all, and steal the tests of the others to fail them; xdist starts another.
    A full collection would traverse millions of objects, for a second or two. Some tests, and each call of
    transformers' generate_batch, ask for several.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") and item.get_closest_marker("gpu") and is_poisoned():
        os._exit(3)  # the report of the test has been sent
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_runtest_setup(item):
    # Here and not in a fixture: all of them are one line of pytest's summary.
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
