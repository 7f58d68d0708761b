"""A fake CUDA driver of ctypes functions, for `info` on machines without one."""

import ctypes

import pytest

from pagedkv.info import driver


class Library:
    """A driver for CUDA 12.8 that sees one H100; functions in `failing` return a code."""

    def __init__(self, failing=None, count=1):
        self.failing, self.count = failing or {}, count

    def __getattr__(self, name):
        return lambda *args: self.failing.get(name) or getattr(self, f"_{name}")(*args) or 0

    def _cuInit(self, flags):
        pass

    def _cuDriverGetVersion(self, version):
        version._obj.value = 12080

    def _cuDeviceGetCount(self, count):
        count._obj.value = self.count

    def _cuDeviceGetName(self, name, size, ordinal):
        name.value = b"NVIDIA H100"

    def _cuDeviceTotalMem_v2(self, num_bytes, ordinal):
        num_bytes._obj.value = 80 << 30

    def _cuDeviceGetAttribute(self, value, attribute, ordinal):
        value._obj.value = {75: 9, 76: 0}[attribute]


def test_the_driver_says_its_version_and_its_gpus(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    found = driver.find_driver()
    assert found == ((12, 8), ["NVIDIA H100, compute capability 9.0, 80.0 GiB"])
    assert found.extra == "cu12"
    assert driver.Driver((13, 0), []).extra == "cu13"


def test_no_driver_is_none(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver.find_driver() is None


@pytest.mark.parametrize("said", ["/opt/libcuda.so.1: file too short", "libdep.so: cannot open: No such file"])
def test_a_driver_that_cannot_be_loaded_is_an_error(monkeypatch, said):
    def broken(name):
        raise OSError(said)

    monkeypatch.setattr(ctypes, "CDLL", broken)
    with pytest.raises(RuntimeError, match=f"cannot be loaded: {said}"):
        driver.find_driver()


def test_a_driver_error_names_the_function(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library({"cuInit": 100}))
    with pytest.raises(RuntimeError, match=r"cuInit of .* failed with code 100: see what nvidia-smi says"):
        driver.find_driver()
