"""Widening against NumPy: every code of every 8- and 16-bit format, by tables and without."""

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from pagedkv.cpu.attention.steps import widen
from pagedkv.cpu.attention.steps.code import LANES, STEP
from pagedkv.cpu.attention.steps.widen import CHUNK_DIMS, PAIR, dim_places

from .stepper import rows_at, stepper

FORMATS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@pytest.fixture(params=[True, False], ids=["tables", "arithmetic"])
def has_byte_permutes(request, monkeypatch):
    if request.param and not widen.has_byte_permutes():
        pytest.skip("this processor has no byte permutes")
    monkeypatch.setattr(widen, "has_byte_permutes", lambda: request.param)


def _rows(kind, head_dim):
    """Rows of every code, as many as a whole number of steps has."""
    dtype = FORMATS[kind]
    if kind == "float32":
        return np.random.default_rng(0).standard_normal((STEP, head_dim), np.float32)
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    rows = -(-codes.size // (head_dim * STEP)) * STEP
    return np.resize(codes, (rows, head_dim)).view(dtype)


def assert_widened(widened, rows, kind):
    expected = rows.astype(np.float32)
    found = widened[:, dim_places(kind, max(8, rows.shape[1]))[: rows.shape[1]]]
    np.testing.assert_array_equal(found, expected)
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(found[zeros]), np.signbit(expected[zeros]))


@pytest.mark.usefixtures("has_byte_permutes")
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_every_code_and_size(kind):
    function = widen.make_widen(kind)

    @njit
    def call(target, stride, addresses, head_dim):
        function(target, stride, addresses, 0, head_dim)

    for head_dim in (8, 16, 24, 40, 64, 72, 120, 128, 200, 504):
        rows = _rows(kind, head_dim)
        stride = -(-head_dim // LANES) * LANES
        widened = np.full((len(rows), stride), -7, np.float32)
        for first in range(0, len(rows), STEP):
            addresses = rows.ctypes.data + np.arange(first, first + STEP) * rows.strides[0]
            call(widened[first:].ctypes.data, widened.strides[0], addresses.ctypes.data, head_dim)
        assert_widened(widened, rows, kind)
        assert (widened[:, head_dim:] == -7).all()


CODES = np.arange(-128, 128, dtype=np.int8)
INT8_DIMS = (8, 24, 32, 72, 128)


def test_rows_of_int8_become_int16_in_order():
    widen_rows, widen_piece = stepper(widen.make_widen("int8")), stepper(widen.make_widen_piece("int8"))
    for head_dim in INT8_DIMS:
        rows = np.resize(CODES, (STEP, head_dim))
        widened = np.full((STEP, head_dim + 8), -7, np.int16)
        widen_rows(widened, widened.strides[0], rows_at(rows), 0, head_dim)
        np.testing.assert_array_equal(widened[:, :head_dim], rows)
        assert (widened[:, head_dim:] == -7).all()
    for piece in CODES.reshape(-1, 16):
        widened = np.empty(16, np.int16)
        widen_piece(widened, 0, piece)
        np.testing.assert_array_equal(widened, piece)


def test_values_of_int8_become_pairs_of_tokens():
    widen_pairs = stepper(widen.make_widen_pairs())
    for head_dim in INT8_DIMS:
        rows = np.resize(CODES, (STEP, head_dim))
        pairs = np.full((PAIR, head_dim + 8, 2), -7, np.int16)
        widen_pairs(pairs, pairs.strides[0], rows_at(rows), 0, head_dim)
        found = pairs[:, dim_places("int8", head_dim)]
        np.testing.assert_array_equal(found, np.stack([rows[:PAIR], rows[PAIR:]], axis=-1))
        assert (pairs[:, head_dim:] == -7).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_pieces_of_every_code(kind):
    """As the vllm layout has them."""
    function, dtype = widen.make_widen_piece(kind), FORMATS[kind]
    dims = 16 // dtype.itemsize

    @njit
    def call(target, apart, address):
        function(target, apart, address)

    pieces = _rows(kind, dims)
    for n, piece in enumerate(pieces):
        widened = np.empty((1, dims), np.float32)
        call(widened.ctypes.data, LANES, pieces.ctypes.data + n * 16)
        assert_widened(widened, piece[None], kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_single_elements_of_every_code(kind):
    load = widen.make_load(kind)

    @njit
    def call(address):
        return load(address)

    values = _rows(kind, 8).reshape(-1)
    found = np.array([call(values.ctypes.data + i * values.itemsize) for i in range(0, values.size, 17)], np.float32)
    np.testing.assert_array_equal(found, values[::17].astype(np.float32))


@pytest.mark.parametrize("kind", [*FORMATS, "int8"])
def test_every_dim_has_a_place_of_its_own(kind):
    for head_dim in range(8, 520, 8):
        found = dim_places(kind, head_dim)
        assert sorted(found) == list(range(head_dim))
        whole = head_dim // CHUNK_DIMS[kind] * CHUNK_DIMS[kind]
        assert sorted(found[:whole]) == list(range(whole))  # so a longer row begins as a shorter one
