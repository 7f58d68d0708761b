"""Elements as unsigned integers: `==` tells apart what is equal as numbers, and finds NaN equal."""

import numpy as np

from pagedkv.reference import FP8_DTYPES


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def assert_same_bits_but_of_nan(result, expected, kind=None):
    """The same bits, but for those of a NaN, which are each machine's own; `kind` is that of fp8 codes."""
    is_nan = _is_nan(expected, kind)
    np.testing.assert_array_equal(_is_nan(result, kind), is_nan)
    np.testing.assert_array_equal(bits(result)[~is_nan], bits(expected)[~is_nan])


def _is_nan(array, kind):
    return np.isnan((array.view(FP8_DTYPES[kind]) if array.dtype == np.uint8 else array).astype(np.float32))
