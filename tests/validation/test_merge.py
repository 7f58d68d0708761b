"""Errors for wrong arguments of merge_states on host and device, after which nothing has changed."""

import numpy as np
import pytest

from ..support.wrong_arguments import BF16, change, check_on_every_side, on_every_side, spread

ROWS = "(rows, num_heads, head_dim)"
MERGE = [
    ({"outs": 3.0}, TypeError, "outs must be an array (NumPy, CuPy or torch), got float"),
    (
        change("outs", lambda x: [x[0], None]),
        TypeError,
        "outs[1] must be an array (NumPy, CuPy or torch), got NoneType",
    ),
    (
        change("outs", lambda x: x[:1]),
        ValueError,
        "outs and lses must hold the same number of states, at least 1, got 1 and 2",
    ),
    (
        {"outs": [], "lses": []},
        ValueError,
        "outs and lses must hold the same number of states, at least 1, got 0 and 0",
    ),
    (
        {"outs": np.array(1.0)},
        ValueError,
        "outs must be a list of states or stacked along the first axis, got shape ()",
    ),
    (
        change("outs", lambda x: x[0]),
        ValueError,
        "outs and lses must hold the same number of states, at least 1, got 3 and 2",
    ),
    (change("outs", lambda x: x[:, 0]), ValueError, f"outs[0] must have shape {ROWS}, got (4, 16)"),
    (
        change("outs", lambda x: [x[0], x[1, :2]]),
        ValueError,
        f"outs[1] must have shape {ROWS} = (3, 4, 16), got (2, 4, 16)",
    ),
    (
        change("lses", lambda x: x[..., :2]),
        ValueError,
        "lses[0] must have shape (rows, num_heads) = (3, 4), got (3, 2)",
    ),
    (change("outs", np.int32), TypeError, "outs[0] must have dtype float32, float16 or bfloat16, got int32"),
    (
        change("outs", lambda x: [x[0], x[1].astype(BF16)]),
        TypeError,
        "outs[1] must have dtype float32, that of outs[0], got bfloat16",
    ),
    (change("lses", np.float64), TypeError, "lses[0] must have dtype float32, got float64"),
    (
        change("lses", spread),
        ValueError,
        "lses[0] must be contiguous along its last axis, got strides (32, 8) in bytes",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message", "side"), on_every_side(MERGE))
def test_wrong_argument(changes, error, message, side):
    check_on_every_side("merge_states", changes, error, message, side)
