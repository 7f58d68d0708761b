"""Elements as unsigned integers: `==` tells apart what is equal as numbers, and finds NaN equal."""

import numpy as np


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")
