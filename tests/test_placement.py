"""Placement: every combination of arrays and backends, and the errors for wrong ones."""

import sys

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.arrays import Shadow
from pagedkv.placement import place

from .support.device_fakes import NO_DRIVER, InterfaceArray, fake_cupy, fake_torch, no_driver
from .support.wrong_arguments import OPERATIONS, OnCuda, OnDevice, call

HOST = np.zeros((2, 8), np.float32)


@pytest.mark.parametrize("x", [HOST, torch.zeros(2, 8)], ids=["numpy", "torch"])
@pytest.mark.parametrize(("backend", "expected"), [("auto", "cpu"), ("cpu", "cpu"), ("emulator", "emulator")])
def test_arrays_on_the_host(x, backend, expected):
    placement, (view,) = place(backend, [("x", x)])
    assert placement[:3] == (expected, 0, 0)
    assert placement.beside.array is x
    assert placement.on_host
    assert type(view) is np.ndarray


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_arrays_on_a_device(backend):
    x, y = InterfaceArray(HOST, stream=5), InterfaceArray(HOST, stream=6)
    placement, (view, other) = place(backend, [("x", x), ("y", y)])
    assert placement[:3] == ("cuda", 0, 5), "the first array says which stream"
    assert placement.beside.array is x
    assert not placement.on_host
    assert type(view) is type(other) is Shadow


def test_frameworks_may_mix_on_one_device(monkeypatch):
    cupy, torch_ = fake_cupy(), fake_torch()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", torch_)
    cupy.streams, torch_.streams = {1: 33}, {1: 44}
    x, y = cupy.ndarray(HOST, device=1), torch_.Tensor(HOST, device=1)
    assert place("auto", [("x", x), ("y", y)])[0][:3] == ("cuda", 1, 33)
    assert place("auto", [("y", y), ("x", x)])[0][:3] == ("cuda", 1, 44)
    other = cupy.ndarray(HOST, device=0)
    with pytest.raises(
        ValueError, match=r"^all arrays of a call must be on one device, got y on device 1 and z on device 0$"
    ):
        place("auto", [("y", y), ("x", x), ("z", other)])


def test_an_array_without_elements_is_on_any_device(monkeypatch):
    cupy = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x, nothing = cupy.ndarray(HOST, device=1), InterfaceArray(HOST[:0])
    assert place("auto", [("nothing", nothing), ("x", x)])[0].ordinal == 1
    assert place("auto", [("x", x), ("nothing", nothing)])[0].ordinal == 1


def test_only_calls_across_sides_mix_host_and_device():
    named = [("x", HOST), ("y", InterfaceArray(HOST)), ("z", torch.zeros(2))]
    with pytest.raises(
        ValueError, match=r"^all arrays of a call must be on one side, got y on a device and x on the host$"
    ):
        place("auto", named)
    placement, views = place("auto", named, across=True)
    assert placement.backend == "cuda"
    assert [type(view) for view in views] == [np.ndarray, Shadow, np.ndarray]
    assert place("auto", [("x", HOST)], across=True)[0].backend == "cpu"
    for backend in ("cpu", "emulator"):
        with pytest.raises(ValueError, match=f'^backend "{backend}" needs arrays on the host, got y on a device$'):
            place(backend, named, across=True)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("on_device", [OnDevice, OnCuda])
@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_device_arrays_for_a_backend_of_the_host(operation, on_device, backend):
    arguments = OPERATIONS[operation]()
    changes = {name: on_device() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(ValueError, match=f'^backend "{backend}" needs arrays on the host, got .* on a device$'):
        call(operation, changes | {"backend": backend})


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("side", ["host", "emulator", "device"])
def test_arrays_on_host_and_device_are_refused(operation, side):
    """swap_blocks goes across; all other operations say which array is where."""
    for name, x in OPERATIONS[operation]().items():
        if isinstance(x, np.ndarray) and operation != "swap_blocks":
            moved = torch.from_numpy(x) if side == "device" else InterfaceArray(x)
            with pytest.raises(ValueError, match=r"^all arrays of a call must be on one side, got .* on the host$"):
                call(operation, {name: moved}, side)


@pytest.mark.parametrize("moved", [("source",), ("destination",), ("source", "destination")])
def test_swap_blocks_goes_across(moved):
    arguments = OPERATIONS["swap_blocks"]()
    given = arguments | {name: InterfaceArray(arguments[name]) for name in moved}
    with pytest.raises(pagedkv.BackendUnavailableError, match=NO_DRIVER), no_driver():
        pagedkv.swap_blocks(**given)
    given["pairs"] = InterfaceArray(arguments["pairs"])
    if len(moved) == 2:
        with pytest.raises(pagedkv.BackendUnavailableError, match=NO_DRIVER), no_driver():
            pagedkv.swap_blocks(**given)
    else:
        with pytest.raises(ValueError, match=r"^pairs must be on the host where blocks move from the host or to it"):
            pagedkv.swap_blocks(**given)


def test_a_machine_without_a_driver():
    """On machines without a driver this checks the real message."""
    k_cache, v_cache = (InterfaceArray(x) for x in np.zeros((2, 8, 4, 2, 16), np.float32))
    try:
        from cuda.bindings import driver

        driver.cuDriverGetVersion()
    except RuntimeError:
        with pytest.raises(pagedkv.BackendUnavailableError, match=r"no CUDA driver \(.*\) was found: install"):
            pagedkv.copy_blocks(k_cache, v_cache, InterfaceArray(np.zeros((1, 2), np.int64)))
    else:
        pytest.skip("there is a CUDA driver here")
