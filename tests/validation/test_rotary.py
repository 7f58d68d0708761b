"""Errors for wrong arguments of apply_rotary on host and device."""

import numpy as np
import pytest

from ..support.wrong_arguments import (
    HKV,
    HQ,
    B,
    D,
    at,
    change,
    check_on_every_side,
    misaligned,
    on_every_side,
    read_only,
    spread,
    with_value,
)

ROWS = "(num_tokens, num_heads, head_dim)"
KV_ROWS = "(num_tokens, num_kv_heads, head_dim)"
PAIR = "out must be a pair of arrays for q and k, such as (q, k) to rotate in place, got "


def outs(dtype=np.float32):
    return np.zeros((B, HQ, D), dtype), np.zeros((B, HKV, D), dtype)


def one_token_on():
    """Outputs of which the one for q begins a token after q."""
    memory = np.zeros((B + 1, HQ, D), np.float32)
    return {"q": memory[:B], "out": (memory[1:], outs()[1])}


ONE = np.zeros((B, HQ + HKV, D), np.float32)
WRONG = [
    ({"q": 3.0}, TypeError, "q must be an array (NumPy, CuPy or torch), got float"),
    ({"cos": None}, TypeError, "cos must be an array (NumPy, CuPy or torch), got NoneType"),
    (change("q", lambda q: q[:, 0]), ValueError, f"q must have shape {ROWS}, got (3, 16)"),
    (change("q", lambda q: q[..., :12]), ValueError, "head_dim must be a multiple of 8 from 8 to 512, got 12"),
    (change("k", lambda k: k[0]), ValueError, f"k must have shape {KV_ROWS}, got (2, 16)"),
    (change("k", lambda k: k[:2]), ValueError, f"k must have shape {KV_ROWS} = (3, 2, 16), got (2, 2, 16)"),
    (change("k", lambda k: k[..., :8]), ValueError, f"k must have shape {KV_ROWS} = (3, 2, 16), got (3, 2, 8)"),
    (change("cos", lambda x: x[0]), ValueError, "cos must have shape (max_positions, rotary_dim / 2), got (8,)"),
    (
        change("cos", lambda x: np.concatenate([x, x], axis=1)),
        ValueError,
        "cos must have one column for each pair of dims, from 1 to head_dim / 2 = 8, got 16; of a table that has them "
        "twice, pass the first half",
    ),
    (
        change("cos", lambda x: x[:, :0]),
        ValueError,
        "cos must have one column for each pair of dims, from 1 to head_dim / 2 = 8, got 0; of a table that has them "
        "twice, pass the first half",
    ),
    (
        change("sin", lambda x: x[:5]),
        ValueError,
        "sin must have shape (max_positions, rotary_dim / 2) = (32, 8), got (5, 8)",
    ),
    (change("positions", lambda x: x[:2]), ValueError, "positions must have shape (num_tokens,) = (3,), got (2,)"),
    ({"out": outs()[::-1]}, ValueError, f"out[0] must have shape {ROWS} = (3, 4, 16), got (3, 2, 16)"),
    (change("q", np.float64), TypeError, "q must have dtype float32, float16 or bfloat16, got float64"),
    (change("k", np.float16), TypeError, "k must have dtype float32, that of q, got float16"),
    ({"out": outs(np.float16)}, TypeError, "out[0] must have dtype float32, that of q, got float16"),
    (change("cos", np.float16), TypeError, "cos must have dtype float32, got float16"),
    (
        {"q": np.ones((B, HQ, D), np.float16), "k": None} | change("cos", np.float64),
        TypeError,
        "cos must have dtype float32 or float16, that of q, got float64",
    ),
    (change("sin", np.float64), TypeError, "sin must have dtype float32, that of cos, got float64"),
    (change("positions", np.int16), TypeError, "positions must have dtype int32 or int64, got int16"),
    (change("positions", np.uint32), TypeError, "positions must have dtype int32 or int64, got uint32"),
    (change("cos", spread), ValueError, "cos must be contiguous along its last axis, got strides (64, 8) in bytes"),
    (change("k", misaligned), ValueError, "k must be aligned to its item size of 4 bytes"),
    ({"interleaved": 1}, TypeError, "interleaved must be True or False, got 1"),
    ({"rotary_dim": 8.0}, TypeError, "rotary_dim must be an int, got float"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim must be even, from 2 to head_dim = 16, got 3"),
    ({"rotary_dim": 18}, ValueError, "rotary_dim must be even, from 2 to head_dim = 16, got 18"),
    ({"rotary_dim": 12}, ValueError, "cos must have rotary_dim / 2 = 6 columns, one for each pair of dims, got 8"),
    (
        {"rotary_dim": 8},
        ValueError,
        "cos must have rotary_dim / 2 = 4 columns, one for each pair of dims, got 8; of tables that have each column "
        "twice, as those of transformers, pass cos[:, :4] and sin[:, :4]",
    ),
    (
        change("cos", lambda x: x[None]),
        ValueError,
        "cos must have shape (max_positions, rotary_dim / 2), got (1, 32, 8); what a model of transformers makes has a "
        "row for each token, and each column twice: pass cos.flatten(0, 1)[:, :4], sin alike, and 0, 1, 2, ... as "
        "positions, one for each token",
    ),
    ({"check": "yes"}, TypeError, "check must be None, True or False, got 'yes'"),
    ({"out": 3}, TypeError, PAIR + "int"),
    ({"out": outs()[:1]}, TypeError, PAIR + "1 items"),
    ({"out": (outs()[0], None)}, TypeError, "out[1] must be an array (NumPy, CuPy or torch), got NoneType"),
    ({"k": None, "out": (outs()[0], 3)}, TypeError, "out[1] must be None where k is None, got int"),
    ({"out": (outs()[0], read_only(outs()[1]))}, ValueError, "out[1] must be writable, got a read-only array"),
    (one_token_on(), ValueError, "out[0] must not overlap q"),
    ({"k": ONE[:, HQ:], "out": (ONE[:, 1 : HQ + 1], outs()[1])}, ValueError, "out[0] must not overlap k"),
    ({"out": (ONE[:, :HQ], ONE[:, :HKV])}, ValueError, "out[0] must not overlap out[1]"),
    (at("positions", 2, 32), IndexError, "positions must be in 0..max_positions-1 = 0..31, got 32 for token 2"),
    (
        change("positions", lambda x: with_value(x, 1, -1).astype(np.int32)),
        IndexError,
        "positions must be in 0..max_positions-1 = 0..31, got -1 for token 1",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message", "side"), on_every_side(WRONG))
def test_wrong_argument(changes, error, message, side):
    check_on_every_side("apply_rotary", changes, error, message, side)
