"""Errors for wrong options of attention on host and device, after which nothing has changed."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from ..support.wrong_arguments import HKV, check_on_every_side, fp8, on_every_side, vllm


class Scorer:
    """Can be called like a score_mod, and has no hash."""

    __hash__ = None

    def __call__(self, score, q_pos, k_pos, head, seq):
        return score

    def method(self, score, q_pos, k_pos, head, seq):
        return score


OTHER_PARAMETERS = (
    "score_mod must be a function of (score, q_pos, k_pos, head, seq) without other parameters, got one of "
)
ONCE = "pass the max_seq_len of PagedKVCache.batch, or int(...) once"
FINITE = 3.4028235677973366e38  # rounds to infinity in float32

DECODE = [
    ({"layout": "nhd"}, ValueError, 'layout must be "NHD", "HND" or "vllm", got \'nhd\''),
    ({"layout": None}, ValueError, 'layout must be "NHD", "HND" or "vllm", got None'),
    ({"kv_dtype": "fp8"}, ValueError, 'kv_dtype must be None, "fp8_e4m3", "fp8_e5m2" or "int8", got \'fp8\''),
    ({"kv_dtype": np.uint8}, ValueError, f'kv_dtype must be None, "fp8_e4m3", "fp8_e5m2" or "int8", got {np.uint8!r}'),
    ({"scale": "1"}, TypeError, "scale must be a number, got str"),
    ({"scale": True}, TypeError, "scale must be a number, got bool"),
    ({"scale": np.bool_(True)}, TypeError, "scale must be a number, got bool"),
    ({"scale": 1j}, TypeError, "scale must be a number, got complex"),
    ({"scale": math.nan}, ValueError, "scale must be finite in float32, got nan"),
    ({"scale": -math.inf}, ValueError, "scale must be finite in float32, got -inf"),
    ({"scale": FINITE}, ValueError, f"scale must be finite in float32, got {FINITE}"),
    ({"scale": float}, TypeError, "scale must be a number, got type"),
    ({"scale": 10**400}, ValueError, f"scale must be finite in float32, got {10**400}"),
    ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    ({"window": -3}, ValueError, "window must be at least 1, got -3"),
    ({"window": 2.0}, TypeError, "window must be an int, got float"),
    ({"window": True}, TypeError, "window must be an int, got bool"),
    ({"window": np.array(3)}, TypeError, "window must be an int, got ndarray"),
    ({"window": int}, TypeError, "window must be an int, got type"),
    ({"max_seq_len": -1}, ValueError, "max_seq_len must be at least 0, got -1"),
    ({"max_seq_len": 12.0}, TypeError, f"max_seq_len must be an int, got float: {ONCE}"),
    ({"max_seq_len": True}, TypeError, f"max_seq_len must be an int, got bool: {ONCE}"),
    ({"max_seq_len": torch.tensor(12)}, TypeError, f"max_seq_len must be an int, got Tensor: {ONCE}"),
    ({"max_seq_len": "12"}, TypeError, f"max_seq_len must be an int, got str: {ONCE}"),
    ({"max_seq_len": int}, TypeError, f"max_seq_len must be an int, got type: {ONCE}"),
    ({"softcap": 0}, ValueError, "softcap must be positive and finite in float32, got 0"),
    ({"softcap": -1.5}, ValueError, "softcap must be positive and finite in float32, got -1.5"),
    ({"softcap": math.inf}, ValueError, "softcap must be positive and finite in float32, got inf"),
    ({"softcap": 1e-50}, ValueError, "softcap must be positive and finite in float32, got 1e-50"),
    ({"softcap": False}, TypeError, "softcap must be a number, got bool"),
    ({"score_mod": 3}, TypeError, "score_mod must be a function made by def or lambda, got int"),
    ({"score_mod": Scorer()}, TypeError, "score_mod must be a function made by def or lambda, got Scorer"),
    ({"score_mod": Scorer().method}, TypeError, "score_mod must be a function made by def or lambda, got method"),
    ({"score_mod": partial(Scorer())}, TypeError, "score_mod must be a function made by def or lambda, got partial"),
    (
        {"score_mod": max},
        TypeError,
        "score_mod must be a function made by def or lambda, got builtin_function_or_method",
    ),
    ({"score_mod": lambda score, q_pos: score}, TypeError, OTHER_PARAMETERS + "(score, q_pos)"),
    ({"score_mod": lambda a, b, c, d, e, f=1: a}, TypeError, OTHER_PARAMETERS + "(a, b, c, d, e, f)"),
    ({"score_mod": lambda a, b, c, d, e, *, f=1: a}, TypeError, OTHER_PARAMETERS + "(a, b, c, d, e, f)"),
    ({"score_mod": lambda *numbers: 1.0}, TypeError, OTHER_PARAMETERS + "(numbers)"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
    ({"check": 1}, TypeError, "check must be None, True or False, got 1"),
    ({"kernel": "v3"}, ValueError, 'kernel must be "auto", "v1", "v2" or "split", got \'v3\''),
    ({"kernel": None}, ValueError, 'kernel must be "auto", "v1", "v2" or "split", got None'),
    ({"kernel": "v1"}, ValueError, 'kernel "v1" needs layout vllm, got NHD'),
    ({"kernel": "split", **vllm()}, ValueError, 'kernel "split" needs layout NHD or HND, got vllm'),
    # scales
    ({"k_scale": 1.0}, ValueError, "k_scale needs an fp8 cache, got a cache of float32"),
    ({"v_scale": np.ones(HKV, np.float32)}, ValueError, "v_scale needs an fp8 cache, got a cache of float32"),
    (
        {"kv_dtype": "fp8_e4m3", **fp8(), "k_scale": 0},
        ValueError,
        "k_scale must be positive and finite in float32, got 0",
    ),
    (
        {"kv_dtype": "fp8_e4m3", **fp8(), "v_scale": math.nan},
        ValueError,
        "v_scale must be positive and finite in float32, got nan",
    ),
    ({"kv_dtype": "fp8_e4m3", **fp8(), "v_scale": "a"}, TypeError, "v_scale must be a number, got str"),
    ({"kv_dtype": "fp8_e4m3", **fp8(), "v_scale": True}, TypeError, "v_scale must be a number, got bool"),
    (
        {"kv_dtype": "fp8_e4m3", **fp8(), "v_scale": np.array([1, -1], np.float32)},
        ValueError,
        "v_scale must be positive and finite, got -1.0 for KV head 1",
    ),
    (
        {"kv_dtype": "fp8_e4m3", **fp8(), "k_scale": np.array([np.inf, 1], np.float32)},
        ValueError,
        "k_scale must be positive and finite, got inf for KV head 0",
    ),
]

PREFILL = [
    ({"causal": None}, TypeError, "causal must be True or False, got None"),
    ({"max_seq_len": -1}, ValueError, "max_seq_len must be at least 0, got -1"),
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"exact": 0}, TypeError, "exact must be True or False, got 0"),
]

CASES = [*(("decode_attention", *case) for case in DECODE), *(("prefill_attention", *case) for case in PREFILL)]


@pytest.mark.parametrize(("operation", "changes", "error", "message", "side"), on_every_side(CASES))
def test_wrong_option(operation, changes, error, message, side):
    check_on_every_side(operation, changes, error, message, side)
