"""Metadata of device arrays of every framework, whose memory is never touched."""

import copy
import ctypes
import pickle
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.arrays import Shadow, identify, interface
from pagedkv.arrays.shadow import address_of, make_shadow

from ..support.device_fakes import ELSEWHERE, InterfaceArray, fake_cupy, fake_torch


def metadata(name, x, stream):
    return identify(name, x).metadata(stream)


def current_stream(x, name="x"):
    return identify(name, x).stream()


BF16 = np.dtype(ml_dtypes.bfloat16)
ADDRESS = 0x7F0000000000
DTYPES = ["float32", "float16", BF16, "uint8", "int32", "int64", ml_dtypes.float8_e4m3fn, "bool", ">f4", "float64"]


@pytest.fixture(params=["cupy", "torch"])
def framework(request, monkeypatch):
    """A module like CuPy or torch, a function that converts NumPy arrays to its kind, and its name."""
    module = fake_cupy() if request.param == "cupy" else fake_torch()
    monkeypatch.setitem(sys.modules, request.param, module)
    kind = module.ndarray if request.param == "cupy" else module.Tensor
    return SimpleNamespace(name=request.param, module=module, array=kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_shadow_has_all_metadata(dtype, read_only):
    dtype = np.dtype(dtype)
    shadow = make_shadow(ADDRESS, (3, 4, 8), (-4096, 64 * dtype.itemsize, dtype.itemsize), dtype, read_only)
    assert (shadow.shape, shadow.dtype, shadow.ctypes.data) == ((3, 4, 8), dtype, ADDRESS)
    assert shadow.strides == (-4096, 64 * dtype.itemsize, dtype.itemsize)
    assert shadow.flags.writeable is not read_only
    assert shadow.flags.aligned
    assert make_shadow(ADDRESS + 1, (3,), None, np.dtype(np.float32), False).flags.aligned is False
    assert make_shadow(ADDRESS, (3, 8), None, dtype, False).flags.c_contiguous
    empty = make_shadow(0, (3, 0, 2), None, dtype, False)
    assert empty.shape == (3, 0, 2)
    assert address_of(empty) == address_of(make_shadow(0, (3, 0, 2), None, dtype, False))  # no memory of NumPy's


def test_shadows_overlap_where_their_addresses_do():
    x = make_shadow(ADDRESS, (4, 8), (64, 4), np.dtype(np.float32), False)
    beside = make_shadow(ADDRESS + 32, (4, 8), (64, 4), np.dtype(np.float32), False)
    across = make_shadow(ADDRESS + 16, (4, 8), (64, 4), np.dtype(np.float32), False)
    assert np.may_share_memory(x, beside)
    assert not np.shares_memory(x, beside)
    assert np.shares_memory(x, across)
    assert np.shares_memory(x, x[1:])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x + 1,
        lambda x: x.max(),
        lambda x: x.view(np.uint32).max(),
        lambda x: x == 1,
        lambda x: np.sort(x),
        lambda x: np.zeros(4) + x,
        lambda x: np.copyto(np.zeros(4), x),
        lambda x: np.array_equal(x, x),
        lambda x: np.any(x),
        pickle.dumps,
        copy.deepcopy,
    ],
)
def test_a_shadow_is_not_read_by_mistake(read):
    with pytest.raises(TypeError, match=r"ufunc|memory of a GPU"):
        read(make_shadow(ADDRESS, (4,), None, np.dtype(np.float32), False))


def test_a_shadow_can_be_printed():
    shadow = make_shadow(ADDRESS, (4, 2), None, BF16, False)
    for text in (repr(shadow), str(shadow), f"{shadow}", f"{[shadow]}"):
        assert "<Shadow at 0x7f0000000000, shape (4, 2), strides (4, 2), dtype bfloat16>" in text


def view(dtype=np.float32):
    """An array with gaps, not C-contiguous."""
    return np.zeros((4, 3, 16), dtype)[1:, ::2, :8]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.uint8, np.int32, np.int64], ids=str)
def test_arrays_of_a_framework(framework, dtype):
    x = view(dtype)
    array = framework.array(x, device=3)
    assert identify("x", array).on_device
    shadow, ordinal = metadata("x", array, 0)
    assert type(shadow) is Shadow
    assert ordinal == 3
    assert (shadow.shape, shadow.strides, shadow.dtype) == (x.shape, x.strides, x.dtype)
    assert shadow.ctypes.data == x.ctypes.data + ELSEWHERE
    assert shadow.flags.writeable


def test_the_stream_is_the_current_one_of_the_framework(framework):
    framework.module.streams = {0: 77, 2: 99}
    assert current_stream(framework.array(view())) == 77
    assert current_stream(framework.array(view(), device=1)) == 0
    assert current_stream(framework.array(view(), device=2)) == 99


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
def test_new_arrays_are_on_the_device_of_the_first(framework, dtype):
    like = framework.array(view(), device=2)
    new = identify("like", like).empty("out", (5, 8), np.dtype(dtype), "")
    assert type(new) is framework.array
    shadow, ordinal = metadata("out", new, 0)
    assert ordinal == 2
    assert (shadow.shape, shadow.dtype) == ((5, 8), dtype)
    assert shadow.flags.c_contiguous
    if framework.name == "cupy":
        assert not framework.module.device_stack


def test_a_lazily_negated_tensor_is_refused(monkeypatch):
    module = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    tensor = module.Tensor(view())
    tensor.negated = True
    with pytest.raises(TypeError, match="q must be an array as it is in memory, got a torch tensor with lazy negation"):
        metadata("q", tensor, 0)
    tensor = module.Tensor(view())
    tensor.dtype = torch.quint8
    with pytest.raises(TypeError, match=r"q must be an array that NumPy knows the dtype of, got torch\.quint8"):
        metadata("q", tensor, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.uint8, ml_dtypes.float8_e5m2], ids=str)
@pytest.mark.parametrize("version", [2, 3])
def test_what_an_array_interface_says_of_an_array(dtype, version):
    x = view(dtype)
    shadow, ordinal = metadata("x", InterfaceArray(x, version=version), 0)
    assert ordinal == 0
    assert (shadow.shape, shadow.strides, shadow.dtype) == (x.shape, x.strides, x.dtype)
    assert shadow.ctypes.data == x.ctypes.data + ELSEWHERE
    contiguous = np.zeros((4, 3), dtype)
    contiguous.flags.writeable = False
    shadow, _ = metadata("x", InterfaceArray(contiguous, strides=None), 0)
    assert shadow.flags.c_contiguous
    assert not shadow.flags.writeable


def test_interface_without_elements():
    shadow, ordinal = metadata("x", InterfaceArray(np.zeros((0, 4), np.float32), data=(0, False)), 0)
    assert shadow.shape == (0, 4)
    assert ordinal is None
    assert metadata("x", InterfaceArray(np.zeros((0, 4)), data=(None, False)), 0).shadow.size == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"mask": 1},
            TypeError,
            "x must be an array without a mask, got a tests.support.device_fakes.InterfaceArray with one",
        ),
        ({"data": (0, False)}, ValueError, r"x must have memory, got the address 0 with shape \(4, 3\)"),
        ({"data": None}, TypeError, r"x must have .* with data as \(address, read-only flag\), got None"),
        ({"data": (16,)}, TypeError, r"x must have .* with data as \(address, read-only flag\), got \(16,\)"),
        ({"data": (16.0, False)}, TypeError, r"x must have .* with data as \(address, read-only flag\), got \(16.0, "),
        ({"data": (-16, False)}, ValueError, r"x must have .* with an address in 0..2\*\*64-1, got -16"),
        ({"typestr": "<f3"}, TypeError, "x must have .* with a typestr such as \"<f4\", got '<f3'"),
        ({"typestr": None}, TypeError, 'x must have .* with a typestr such as "<f4", got None'),
        ({"typestr": "<f4,<f4"}, TypeError, 'x must have .* with a typestr such as "<f4", got'),
        ({"shape": 4}, TypeError, "x must have a __cuda_array_interface__ with shape as a tuple of int, got 4"),
        ({"shape": (4, 3.0)}, TypeError, r"x must have .* with shape as a tuple of int, got \(4, 3.0\)"),
        ({"shape": (4, -3)}, ValueError, r"x must have .* with a shape without negative numbers, got \(4, -3\)"),
        ({"shape": (2**40, 2**40)}, ValueError, "x must be an array that NumPy can describe: "),
        ({"shape": (2**80, 3)}, ValueError, "x must have .* with numbers that fit in 64 bits, got {"),
        ({"strides": (4,)}, ValueError, r"x must have .* with a stride for each of 2 axes, got \(4,\)"),
        ({"strides": "ab"}, TypeError, "x must have .* with strides as a tuple of int, got 'ab'"),
        ({"typestr": "|O8"}, TypeError, "x must be an array of numbers, got dtype object"),
        ({"typestr": "|V0"}, TypeError, "x must be an array of numbers, got dtype"),
    ],
)
def test_interfaces_with_wrong_values_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        metadata("x", InterfaceArray(np.zeros((4, 3), np.float32), **changes), 0)


def remove(array, key):
    array.interface.pop(key, None)
    array.changes.pop(key, None)


@pytest.mark.parametrize("key", ["shape", "typestr", "data"])
def test_incomplete_interfaces_are_refused(key):
    array = InterfaceArray(np.zeros((4, 3), np.float32))
    remove(array, key)
    with pytest.raises(TypeError, match=f"x must have a __cuda_array_interface__ with shape, .* data, got no {key}"):
        metadata("x", array, 0)


_NUMBERS = st.integers() | st.sampled_from([-1, 0, 3, 2**31, 2**62, 2**63, 2**64, True, 1.0, np.int64(4)])
_ANYTHING = st.recursive(
    st.none() | _NUMBERS | st.text("<>|=biufcV0123456789,?", max_size=6) | st.floats() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.lists(inner, max_size=3) | st.just({}),
    max_leaves=6,
)


@settings(max_examples=300)
@given(
    changes=st.dictionaries(st.sampled_from(["shape", "typestr", "data", "strides", "stream"]), _ANYTHING, max_size=3),
    missing=st.sets(st.sampled_from(["shape", "typestr", "data", "strides", "stream"]), max_size=1),
)
def test_any_interface_is_an_array_or_an_error(changes, missing):
    array = InterfaceArray(np.zeros((4, 3), np.float32), **changes)
    for key in missing:
        remove(array, key)
    message = None
    try:
        stream, shadow = current_stream(array, "x"), metadata("x", array, 0).shadow
    except (TypeError, ValueError) as error:
        message = str(error)
    if message is not None:
        assert message.startswith("x must ")
        return
    interface = array.__cuda_array_interface__
    assert stream == (interface.get("stream") or 0)
    assert shadow.shape == tuple(interface["shape"])
    assert not shadow.size or shadow.ctypes.data == interface["data"][0]


@pytest.mark.parametrize("stream", ["1", -1, 2.0, True])
def test_what_is_no_stream(stream):
    with pytest.raises(
        TypeError, match=f"q must have a __cuda_array_interface__ with a stream that is .* got {stream!r}"
    ):
        current_stream(InterfaceArray(view(), stream=stream), "q")


@pytest.mark.parametrize(("named", "expected"), [(None, 0), (1, 1), (2, 2), (0x55AA, 0x55AA)])
def test_the_stream_that_an_interface_names(named, expected):
    assert current_stream(InterfaceArray(view(), stream=named)) == expected


def test_results_for_an_unknown_framework_need_out():
    kind = r"tests\.support\.device_fakes\.InterfaceArray"
    with pytest.raises(
        ValueError, match=rf"^out can only be made for arrays of CuPy and torch, got a {kind}; give out=$"
    ):
        identify("x", InterfaceArray(view())).empty("out", (3,), np.dtype(np.float32), "give out=")


class Driver:
    """The part of cuda.bindings.driver that finds the device of an address."""

    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)

    def __init__(self, ordinals):
        self.ordinals = ordinals

    def cuPointerGetAttribute(self, attribute, address):
        assert attribute == 9
        return (0, self.ordinals[address]) if address in self.ordinals else (1, None)


def test_the_driver_finds_the_device_of_an_address(monkeypatch):
    driver = Driver({ADDRESS: 1})
    monkeypatch.setattr(interface, "_driver", lambda: driver)
    assert interface.has_several_devices()
    x = np.zeros(4, np.float32)
    assert metadata("x", InterfaceArray(x, data=(ADDRESS, False)), 0).ordinal == 1
    assert metadata("x", InterfaceArray(x), 0).ordinal == 0
    monkeypatch.setattr(interface, "_driver", lambda: None)
    assert metadata("x", InterfaceArray(x, data=(ADDRESS, False)), 0).ordinal == 0
    assert interface.ordinal_of(ADDRESS) == 0


class _Tensor(ctypes.Structure):
    """The struct DLTensor of DLPack, with the fields of DLDevice and DLDataType inlined."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *(("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        ("byte_offset", ctypes.c_uint64),
        *(("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    )


class DlpackArray:
    """An array that supports only DLPack."""

    def __init__(self, code=2, bits=32, device=(2, 1)):
        self.shape, self.strides = (ctypes.c_int64 * 2)(3, 4), (ctypes.c_int64 * 2)(8, 1)
        self.device, self.streams = device, []
        self.tensor = _Tensor(ADDRESS, *device, 2, code, bits, 1, self.shape, self.strides, 0, None, None)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize(
    ("code", "bits", "dtype"), [(2, 32, np.float32), (2, 16, np.float16), (4, 16, BF16), (1, 8, np.uint8)]
)
def test_what_dlpack_says_of_an_array_and_which_stream_it_gets(code, bits, dtype):
    array = DlpackArray(code, bits)
    assert identify("x", array).on_device
    shadow, ordinal = metadata("x", array, 0x77)
    assert (shadow.shape, shadow.dtype, shadow.ctypes.data, ordinal) == ((3, 4), dtype, ADDRESS, 1)
    assert shadow.strides == (8 * bits // 8, bits // 8)
    assert array.streams == [0x77]
    metadata("x", array, 0)
    assert array.streams == [0x77, 1], "the legacy default stream is 1 in DLPack"


def test_dlpack_of_something_else():
    with pytest.raises(TypeError, match="x must be an array that DLPack can show"):
        metadata("x", DlpackArray(code=17, bits=8), 0)
    for device in ((1, 0), (10, 0), None):
        with pytest.raises(TypeError, match=r"x must be an array \(NumPy, CuPy or torch\)"):
            identify("x", DlpackArray(device=device) if device else SimpleNamespace(__dlpack_device__=lambda: 3))


def test_dlpack_without_cuda_core(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core.utils", None)
    from pagedkv.errors import BackendUnavailableError

    with pytest.raises(
        BackendUnavailableError, match=r'x only speaks DLPack, .* cuda-core: pip install .*\[cu13\]" \(or'
    ):
        metadata("x", DlpackArray(), 0)
