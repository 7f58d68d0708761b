"""Formats, shapes and dtypes of caches."""

import ml_dtypes
import numpy as np
import pytest
import torch

from pagedkv.layouts import FORMATS, CacheSpec, Geometry, KvFormat, cache_geometry, cache_spec, float_dtype


@pytest.mark.parametrize(
    ("layout", "name", "k_shape", "v_shape"),
    [
        ("NHD", "float32", (9, 16, 2, 64), (9, 16, 2, 64)),
        ("HND", "float32", (9, 2, 16, 64), (9, 2, 16, 64)),
        ("vllm", "float32", (9, 2, 16, 16, 4), (9, 2, 64, 16)),
        ("vllm", "bfloat16", (9, 2, 8, 16, 8), (9, 2, 64, 16)),
        ("vllm", "fp8_e4m3", (9, 2, 4, 16, 16), (9, 2, 64, 16)),
        ("NHD", "int8", (9, 16, 2, 64), (9, 16, 2, 64)),
        ("vllm", "int8", (9, 2, 4, 16, 16), (9, 2, 64, 16)),
    ],
)
def test_caches_have_the_sizes_they_were_made_of(layout, name, k_shape, v_shape):
    kv_format = FORMATS[name]
    parts = kv_format.parts(layout, 9, 16, 2, 64)
    scales = [((9, 2, 16), np.float32)] * 2 if name == "int8" else []
    assert parts == ((k_shape, kv_format.stored), (v_shape, kv_format.stored), *scales)
    assert [part.nbytes for part in parts] == [np.zeros(*part).nbytes for part in parts]
    geometry = cache_geometry(layout, k_shape, v_shape, kv_format.stored.itemsize)
    assert geometry == Geometry(num_blocks=9, block_size=16, num_kv_heads=2, head_dim=64)
    assert cache_spec(layout, kv_format, geometry) == CacheSpec(layout, kv_format, 9, 16, 2, 64)


@pytest.mark.parametrize(("layout", "block_size", "head_dim"), [("NHD", 1, 8), ("HND", 24, 512), ("vllm", 8, 8)])
def test_extreme_sizes_are_fine(layout, block_size, head_dim):
    (k_shape, _), (v_shape, _) = FORMATS["float16"].parts(layout, 0, block_size, 1, head_dim)
    assert cache_geometry(layout, k_shape, v_shape, 2) == (0, block_size, 1, head_dim)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("float32", ("NDH", 4, 16, 2, 64), 'layout must be "NHD", "HND" or "vllm", got \'NDH\''),
        ("float32", ("NHD", -1, 16, 2, 64), "num_blocks must be at least 0, got -1"),
        ("float32", ("NHD", 4, 0, 2, 64), "block_size must be at least 1, got 0"),
        ("float32", ("HND", 4, 16, 0, 64), "num_kv_heads must be at least 1, got 0"),
        ("float32", ("NHD", 4, 16, 2, 4), "head_dim must be a multiple of 8 from 8 to 512, got 4"),
        ("float32", ("NHD", 4, 16, 2, 516), "head_dim must be a multiple of 8 from 8 to 512, got 516"),
        ("float32", ("vllm", 4, 12, 2, 64), "block_size must be a power of two from 8 to 256 in layout vllm, got 12"),
        (
            "fp8_e4m3",
            ("vllm", 4, 16, 2, 40),
            "head_dim must be a multiple of 16 in layout vllm with 1-byte elements, got 40",
        ),
    ],
)
def test_impossible_sizes_are_refused(name, arguments, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        FORMATS[name].parts(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", np.float32),
        (np.float32, np.float32),
        (np.dtype(np.float16), np.float16),
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16),
        (torch.bfloat16, ml_dtypes.bfloat16),
        (torch.float32, np.float32),
    ],
)
def test_fp8_is_stored_as_bytes_and_other_dtypes_as_they_are(dtype, expected):
    assert KvFormat.of(dtype, None).stored == float_dtype(dtype) == np.dtype(expected)
    assert KvFormat.of(dtype, "fp8_e4m3").stored == np.uint8
    assert KvFormat.of(dtype, "fp8_e5m2").stored == np.uint8


@pytest.mark.parametrize("dtype", [np.float64, "int32", np.uint8, torch.float64, None, float, ">f4", np.dtype(">f4")])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="dtype must be float32, float16 or bfloat16, got "):
        KvFormat.of(dtype, None)


def test_other_kv_dtype():
    with pytest.raises(ValueError, match='kv_dtype must be None, "fp8_e4m3", "fp8_e5m2" or "int8", got \'int4\''):
        KvFormat.of(np.float32, "int4")


def test_what_formats_say_of_their_rows():
    """By name: whether rows are codes, the dtype of dense rows, and the dtypes of k, v and q beside them."""
    floats = ["float32", "float16", "bfloat16"]
    said = {
        name: (kv_format.coded, kv_format.dense.name, sorted({dtype.name for dtype in kv_format.takes}))
        for name, kv_format in FORMATS.items()
    }
    assert said == {
        "float32": (False, "float32", ["float32"]),
        "float16": (False, "float16", ["float16", "float32"]),
        "bfloat16": (False, "bfloat16", ["bfloat16", "float32"]),
        "fp8_e4m3": (True, "float32", sorted(floats)),
        "fp8_e5m2": (True, "float32", sorted(floats)),
        "int8": (True, "float32", sorted(floats)),
    }
    assert len({kv_format.wire_word for kv_format in FORMATS.values()}) == len(FORMATS)
