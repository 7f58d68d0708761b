"""Views of arrays of any framework on the host, and results in the caller's framework."""

import ml_dtypes
import numpy as np
import pytest
import torch

from pagedkv.arrays import address_of, identify


def host_view(name, x):
    return identify(name, x).view()


def as_kind_of(like, result):
    return identify("like", like).of_numpy(result)


def address(x):
    return x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data


DTYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_view_is_the_same_memory(dtype):
    tensor = torch.zeros(5, 4, 6).to(dtype)[1:, ::2, :4]
    view = host_view("x", tensor)
    assert view.dtype == DTYPES[dtype]
    assert view.shape == (4, 2, 4)
    assert view.strides == tuple(n * view.itemsize for n in tensor.stride())
    assert address(view) == address(tensor)
    view[2, 1, 3] = 1
    assert tensor[2, 1, 3].to(torch.float32) == 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_addresses_of_arrays_in_any_form(dtype):
    whole, read_only = np.zeros((5, 4, 6), dtype), np.zeros(3, dtype)
    read_only.flags.writeable = False
    unaligned = np.zeros(3 * whole.itemsize + 1, np.uint8)[1:].view(dtype)
    broadcast, contiguous = (
        np.broadcast_arrays(x, wider)[0] for x, wider in ((whole[:1], whole), (whole[0], whole[:1]))
    )
    views = (whole[1:], whole[:, 1:], whole[::-1], whole[:0], whole[0, 0, 0:1])
    for x in (whole, *views, read_only, unaligned, broadcast, contiguous):
        assert address_of(x) == x.ctypes.data


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_torch_views_of_nothing(shape):
    for dtype in (torch.float32, torch.bfloat16):
        assert host_view("x", torch.zeros(shape, dtype=dtype)).shape == shape


def test_tensor_that_requires_grad():
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(3, dtype=dtype, requires_grad=True)
        assert address(host_view("x", tensor)) == address(tensor)
        assert tensor.requires_grad


def test_a_subclass_of_ndarray_is_viewed_without_a_copy(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 4))
    view = host_view("x", mapped)
    assert type(view) is np.ndarray
    assert address(view) == address(mapped)


def test_tensor_that_numpy_cannot_show():
    with pytest.raises(
        TypeError, match=r"q must be an array that NumPy can view, got a torch tensor of torch\.complex64"
    ):
        host_view("q", torch.zeros(3, dtype=torch.complex64).conj())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int64])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_results_have_the_framework_of_the_input(dtype, shape):
    result = np.ones(shape, dtype)
    assert as_kind_of(np.zeros(1), result) is result
    tensor = as_kind_of(torch.zeros(1), result)
    assert isinstance(tensor, torch.Tensor)
    assert str(tensor.dtype) == f"torch.{np.dtype(dtype).name}"
    assert tensor.shape == shape
    assert (tensor.float() == 1).all()
    assert not result.size or address(tensor) == address(result)


class DeviceArray:
    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012


def test_arrays_are_on_the_host_or_on_a_device():
    assert not identify("x", np.zeros(1)).on_device
    assert not identify("x", torch.zeros(1)).on_device
    assert identify("x", DeviceArray()).on_device


class Broken:
    """Answers every attribute with a function, as mocks do."""

    def __getattr__(self, name):
        return lambda: None


@pytest.mark.parametrize("x", [None, 1.0, [1.0], "x", np.float32(1), DeviceArray, Broken(), memoryview(b"x")])
def test_not_an_array(x):
    with pytest.raises(TypeError, match=r"x must be an array \(NumPy, CuPy or torch\), got "):
        identify("x", x)


def test_masked_arrays_are_refused():
    """Masked elements would be read like others."""
    for mask in (np.ma.nomask, [True, False, False]):
        with pytest.raises(TypeError) as caught:
            identify("q", np.ma.array(np.zeros(3, np.float32), mask=mask))
        assert str(caught.value) == (
            "q must be an array without a mask, got a numpy.ma.MaskedArray: fill what is masked (x.filled(value)), "
            "or give x.data if nothing is"
        )


def test_arrays_of_other_subclasses_are_arrays(tmp_path):
    mapped = np.memmap(tmp_path / "cache", np.float32, "w+", shape=(2, 3))
    assert address(host_view("x", mapped)) == address(mapped)
    assert type(host_view("x", mapped)) is np.ndarray
