"""Errors for wrong arguments of the operations on caches, after which nothing has changed."""

import numpy as np
import pytest

from ..support.wrong_arguments import (
    BF16,
    HKV,
    NHD,
    Change,
    D,
    N,
    OnDevice,
    P,
    at,
    call,
    change,
    check_on_every_side,
    fp8,
    int8,
    misaligned,
    on_every_side,
    read_only,
    spread,
)

KV = "(num_tokens, num_kv_heads, head_dim)"


def combined_overlap():
    both = np.zeros((N, P, 2 * HKV, D), np.float32)
    return {"k_cache": both[:, :, :HKV], "v_cache": both[:, :, HKV - 1 : 2 * HKV - 1]}


WRITE = [
    ({"k": (1, 2)}, TypeError, "k must be an array (NumPy, CuPy or torch), got tuple"),
    (
        {"slots": OnDevice()},
        ValueError,
        "all arrays of a call must be on one side, got slots on a device and k on the host",
    ),
    (change("k", lambda x: x[0]), ValueError, f"k must have shape {KV}, got (2, 16)"),
    (change("k", lambda x: x[:, :1]), ValueError, f"k must have shape {KV} = (3, 2, 16), got (3, 1, 16)"),
    (
        {"layout": "HND"},
        ValueError,
        f'k must have shape {KV} = (3, 4, 16), got (3, 2, 16): these shapes fit layout="NHD"',
    ),
    (change("v", lambda x: x[:2]), ValueError, f"v must have shape {KV} = (3, 2, 16), got (2, 2, 16)"),
    (change("slots", lambda x: x[:2]), ValueError, "slots must have shape (num_tokens,) = (3,), got (2,)"),
    (change("k_cache", lambda x: x[0]), ValueError, f"k_cache must have shape {NHD} in layout NHD, got (4, 2, 16)"),
    (change("v", np.float16), TypeError, "v must have dtype float32, that of the cache, got float16"),
    (
        {name: np.zeros((N, P, HKV, D), BF16) for name in ("k_cache", "v_cache")} | change("k", np.float16),
        TypeError,
        "k must have dtype bfloat16, that of the cache, or float32, got float16",
    ),
    (
        {**fp8(), "kv_dtype": "fp8_e4m3", **change("k", np.float64)},
        TypeError,
        "k must have dtype float32, float16 or bfloat16, got float64",
    ),
    (
        fp8(),
        TypeError,
        "k_cache must have dtype float32, float16 or bfloat16, got uint8; a cache in 8 bits needs kv_dtype",
    ),
    (change("slots", np.int32), TypeError, "slots must have dtype int64, got int32"),
    (change("k", spread), ValueError, "k must be contiguous along its last axis, got strides (256, 128, 8) in bytes"),
    (change("k_cache", misaligned), ValueError, "k_cache must be aligned to its item size of 4 bytes"),
    (change("k_cache", read_only), ValueError, "k_cache must be writable, got a read-only array"),
    (change("v_cache", read_only), ValueError, "v_cache must be writable, got a read-only array"),
    (
        change("v_cache", lambda x: np.lib.stride_tricks.as_strided(x[0], x.shape, (0, *x.strides[1:]))),
        ValueError,
        "v_cache must not repeat an element, got shape (8, 4, 2, 16) with strides (0, 128, 64, 4)",
    ),
    ({"v_cache": Change("k_cache", lambda x: x)}, ValueError, "k_cache must not overlap v_cache"),
    (combined_overlap(), ValueError, "k_cache must not overlap v_cache"),
    ({"k": Change("v_cache", lambda x: x[0, 1:])}, ValueError, "v_cache must not overlap k"),
    ({"layout": "NCHW"}, ValueError, 'layout must be "NHD", "HND" or "vllm", got \'NCHW\''),
    ({"check": "yes"}, TypeError, "check must be None, True or False, got 'yes'"),
    ({"k_scale": 2.0}, ValueError, "k_scale needs an fp8 cache, got a cache of float32"),
    (at("slots", 2, 32), IndexError, "slots must be below num_blocks * block_size = 32, got 32 for token 2"),
    (at("slots", 1, 2**62), IndexError, f"slots must be below num_blocks * block_size = 32, got {2**62} for token 1"),
    ({"slots": np.array([0, 5, 5])}, ValueError, "slots must name a slot once, got 5 for tokens 1 and 2"),
    (at("slots", 2, 31), ValueError, "slots must name a slot once, got 31 for tokens 0 and 2"),
]

TABLE = "(max_positions, rotary_dim / 2)"


def rotating(**changes):
    """Tables for the three tokens, the second of which is skipped and has no position, but for the changes."""
    tables = {name: np.ones((32, 8), np.float32) for name in ("cos", "sin")} | {"positions": np.array([31, 99, 5])}
    return tables | changes


TOGETHER = "cos, sin and positions must be given together, to rotate k, or not at all, got "
ROTATE = [
    (rotating(positions=None), ValueError, TOGETHER + "cos and sin without positions"),
    (rotating(cos=None, sin=None), ValueError, TOGETHER + "positions without cos and sin"),
    (
        {"interleaved": True},
        ValueError,
        "interleaved says which dims are rotated together, and needs cos, sin and positions",
    ),
    (rotating(interleaved=1), TypeError, "interleaved must be True or False, got 1"),
    ({"rotary_dim": 8}, ValueError, "rotary_dim says how many dims are rotated, and needs cos, sin and positions"),
    (rotating(rotary_dim=12), ValueError, "cos must have rotary_dim / 2 = 6 columns, one for each pair of dims, got 8"),
    (rotating(sin=3.0), TypeError, "sin must be an array (NumPy, CuPy or torch), got float"),
    (rotating(cos=np.ones(8, np.float32)), ValueError, f"cos must have shape {TABLE}, got (8,)"),
    (
        rotating(cos=np.ones((32, 16), np.float32)),
        ValueError,
        "cos must have one column for each pair of dims, from 1 to head_dim / 2 = 8, got 16; of a table that has them "
        "twice, pass the first half",
    ),
    (rotating(sin=np.ones((31, 8), np.float32)), ValueError, f"sin must have shape {TABLE} = (32, 8), got (31, 8)"),
    (rotating(positions=np.arange(2)), ValueError, "positions must have shape (num_tokens,) = (3,), got (2,)"),
    (rotating(cos=np.ones((32, 8), np.float16)), TypeError, "cos must have dtype float32, got float16"),
    (
        rotating(**fp8(), kv_dtype="fp8_e4m3", cos=np.ones((32, 8))) | change("k", np.float16),
        TypeError,
        "cos must have dtype float32 or float16, that of k, got float64",
    ),
    (rotating(sin=np.ones((32, 8))), TypeError, "sin must have dtype float32, that of cos, got float64"),
    (rotating(positions=np.arange(3.0)), TypeError, "positions must have dtype int32 or int64, got float64"),
    (
        rotating(cos=spread(np.ones((32, 8), np.float32))),
        ValueError,
        "cos must be contiguous along its last axis, got strides (64, 8) in bytes",
    ),
    (
        rotating(sin=misaligned(np.ones((32, 8), np.float32))),
        ValueError,
        "sin must be aligned to its item size of 4 bytes",
    ),
    (
        {name: Change("v_cache", lambda x: x[:, 0, 0, :8]) for name in ("cos", "sin")} | {"positions": np.arange(3)},
        ValueError,
        "v_cache must not overlap cos",
    ),
    (
        rotating(positions=np.array([31, 0, 32])),
        IndexError,
        "positions must be in 0..max_positions-1 = 0..31, got 32 for token 2",
    ),
    (
        rotating(positions=np.array([-1, 0, 31], np.int32)),
        IndexError,
        "positions must be in 0..max_positions-1 = 0..31, got -1 for token 0",
    ),
]

GATHER = [
    ({"block_table": [3, 4]}, TypeError, "block_table must be an array (NumPy, CuPy or torch), got list"),
    (change("block_table", lambda x: x[None]), ValueError, "block_table must have shape (max_blocks,), got (1, 3)"),
    (change("block_table", np.int64), TypeError, "block_table must have dtype int32, got int64"),
    (
        change("block_table", spread),
        ValueError,
        "block_table must be contiguous along its last axis, got strides (8,) in bytes",
    ),
    ({"seq_len": 2.0}, TypeError, "seq_len must be an int, got float"),
    ({"seq_len": True}, TypeError, "seq_len must be an int, got bool"),
    ({"seq_len": int}, TypeError, "seq_len must be an int, got type"),
    ({"seq_len": -1}, ValueError, "seq_len must be in 0..max_blocks * block_size = 0..12, got -1"),
    ({"seq_len": 13}, ValueError, "seq_len must be in 0..max_blocks * block_size = 0..12, got 13"),
    ({"seq_len": 9}, IndexError, "block_table must hold block ids in 0..num_blocks-1 = 0..7, got -1 at column 2"),
    ({"k_scale": 2.0}, ValueError, "k_scale needs an fp8 cache, got a cache of float32"),
    ({"kv_dtype": "fp8_e4m3"}, TypeError, "k_cache must have dtype uint8 for kv_dtype 'fp8_e4m3', got float32"),
    (change("v_cache", np.float16), TypeError, "v_cache must have dtype float32, that of k_cache, got float16"),
]

COPY = [
    ({"k_cache": "cache"}, TypeError, "k_cache must be an array (NumPy, CuPy or torch), got str"),
    (
        {"k_cache": [np.zeros((N, P, HKV, D)), 3], "v_cache": [np.zeros((N, P, HKV, D))] * 2},
        TypeError,
        "k_cache[1] must be an array (NumPy, CuPy or torch), got int",
    ),
    (change("k_cache", lambda x: [x]), TypeError, "k_cache and v_cache must both be arrays or both be lists of arrays"),
    (
        change("k_cache", lambda x: [x]) | change("v_cache", lambda x: [x, x]),
        ValueError,
        "v_cache must have as many layers as k_cache, got 2 and 1",
    ),
    ({"k_cache": [], "v_cache": []}, ValueError, "there must be at least one cache, got none"),
    (
        change("k_cache", lambda x: x[0]),
        ValueError,
        "k_cache must have shape (num_blocks, ...) with 4 or 5 axes, got (4, 2, 16)",
    ),
    (change("v_cache", lambda x: x[1:]), ValueError, "v_cache must have num_blocks = 8, that of k_cache, got 7"),
    ({"pairs": np.array([0, 1])}, ValueError, "pairs must have shape (num_pairs, 2) = (2, 2), got (2,)"),
    (change("pairs", lambda x: x.T), ValueError, "pairs must have shape (num_pairs, 2) = (2, 2), got (2, 3)"),
    (change("pairs", np.int32), TypeError, "pairs must have dtype int64, got int32"),
    (
        change("v_cache", np.float64),
        TypeError,
        "v_cache must have dtype float32, float16, bfloat16, int8 or uint8 (fp8), got float64",
    ),
    (
        change("pairs", np.asfortranarray),
        ValueError,
        "pairs must be contiguous along its last axis, got strides (8, 24) in bytes",
    ),
    (change("v_cache", read_only), ValueError, "v_cache must be writable, got a read-only array"),
    ({"v_cache": Change("k_cache", lambda x: x)}, ValueError, "k_cache must not overlap v_cache"),
    (combined_overlap(), ValueError, "k_cache must not overlap v_cache"),
    (
        at("pairs", (1, 0), -1),
        IndexError,
        "pairs must hold block ids in 0..num_blocks-1 = 0..7, got source -1 in pair 1",
    ),
    (
        at("pairs", (2, 1), 8),
        IndexError,
        "pairs must hold block ids in 0..num_blocks-1 = 0..7, got destination 8 in pair 2",
    ),
    (at("pairs", (2, 1), 1), ValueError, "pairs must name a destination once, got destination 1 twice"),
    (at("pairs", (2, 1), 0), ValueError, "pairs must not use a destination as a source, got block 0 as both"),
    (at("pairs", (2, 1), 3), ValueError, "pairs must not use a destination as a source, got block 3 as both"),
]

SWAP = [
    ({"source": None}, TypeError, "source must be an array (NumPy, CuPy or torch), got NoneType"),
    (
        change("source", lambda x: (x, x)),
        ValueError,
        "source and destination must be built alike: arrays, (k, v) pairs or lists of them",
    ),
    ({"source": [], "destination": []}, ValueError, "there must be at least one cache, got none"),
    (
        change("source", lambda x: x[..., :8]),
        ValueError,
        "destination must have blocks of shape (4, 2, 8), those of source, got (4, 2, 16)",
    ),
    (change("destination", np.float16), TypeError, "destination must have dtype float32, that of source, got float16"),
    (
        change("source", np.float64),
        TypeError,
        "source must have dtype float32, float16, bfloat16, int8 or uint8 (fp8), got float64",
    ),
    (change("destination", read_only), ValueError, "destination must be writable, got a read-only array"),
    ({"source": Change("destination", lambda x: x[1:])}, ValueError, "destination must not overlap source"),
    (at("pairs", (0, 0), 8), IndexError, "pairs must hold block ids in 0..num_blocks-1 = 0..7, got source 8 in pair 0"),
    (
        at("pairs", (2, 1), 16),
        IndexError,
        "pairs must hold block ids in 0..num_blocks-1 = 0..15, got destination 16 in pair 2",
    ),
    (at("pairs", (2, 1), 1), ValueError, "pairs must name a destination once, got destination 1 twice"),
    (
        {"source": Change("destination", lambda x: x)},
        ValueError,
        "pairs must not use a destination as a source, got block 0 as both",
    ),
]

IN_NHD = "(num_blocks, block_size, num_kv_heads)"
MISSING = 'is missing: kv_dtype "int8" needs the float32 scales of its rows, which write_kv stores,'
OF_INT8 = "k_scales holds the scales of int8 rows, "
OF_ROWS = np.zeros((N, P, HKV), np.float32)
SHARED = dict.fromkeys(("k_scales", "v_scales"), OF_ROWS)
SCALES = [
    (int8(k_scales=None), ValueError, f"k_scales {MISSING} {IN_NHD}"),
    (int8(v_scales=None), ValueError, f"v_scales {MISSING} {IN_NHD}"),
    (
        int8(v_scales=OF_ROWS.reshape(N, HKV, P)),
        ValueError,
        f"v_scales must have shape {IN_NHD} = (8, 4, 2), got (8, 2, 4)",
    ),
    (int8(k_scales=np.zeros((N, P, HKV))), TypeError, "k_scales must have dtype float32, got float64"),
    (
        int8(k_scales=OF_ROWS[::-1]),
        ValueError,
        "k_scales must have positive strides, got (-32, 8, 4) in bytes",
    ),
    (int8(k_scales=misaligned(OF_ROWS)), ValueError, "k_scales must be aligned to its item size of 4 bytes"),
    (
        int8(k_scale=2.0),
        ValueError,
        "k_scale needs an fp8 cache, got a cache of int8, whose rows carry their own scales",
    ),
    ({"k_scales": OF_ROWS}, ValueError, f'{OF_INT8}and needs kv_dtype "int8", got None'),
    (int8(kv_dtype=None), ValueError, f'{OF_INT8}and needs kv_dtype "int8", got None'),
    (
        int8(kv_dtype=None, k_scales=None, v_scales=None),
        TypeError,
        "k_cache must have dtype float32, float16 or bfloat16, got int8; a cache in 8 bits needs kv_dtype",
    ),
    (int8(v_cache=fp8()["v_cache"]), TypeError, "v_cache must have dtype int8 for kv_dtype 'int8', got uint8"),
]
SCALES_WRITTEN = [
    (int8(v_scales=read_only(OF_ROWS)), ValueError, "v_scales must be writable, got a read-only array"),
    (int8(**SHARED), ValueError, "k_scales must not overlap v_scales"),
]
BLOCKS = {name: x for name, x in int8().items() if name != "kv_dtype"}
SCALES_COPIED = [
    (BLOCKS | {"v_scales": None}, ValueError, f"v_scales {MISSING} (num_blocks, ...)"),
    ({"k_scales": OF_ROWS}, ValueError, f"{OF_INT8}got caches of dtype float32"),
    (
        BLOCKS | {"v_scales": OF_ROWS[:, 0]},
        ValueError,
        "v_scales must have shape (num_blocks, ...) with 3 axes, got (8, 2)",
    ),
    (
        BLOCKS | {"k_scales": OF_ROWS[:, :1]},
        ValueError,
        "k_scales must have shape of the rows of k_cache = (8, 4, 2), got (8, 1, 2)",
    ),
    (
        BLOCKS | {"v_scales": OF_ROWS.astype(np.float16)},
        TypeError,
        "v_scales must have dtype float32, got float16",
    ),
    ({"v_cache": int8()["v_cache"]}, ValueError, f"v_scales {MISSING} (num_blocks, ...)"),
    (BLOCKS | SHARED, ValueError, "k_scales must not overlap v_scales"),
    (
        BLOCKS | {"k_scales": [OF_ROWS]},
        TypeError,
        "k_cache and k_scales must both be arrays or both be lists of arrays",
    ),
]

CASES = [
    (operation, *case)
    for operation, cases in (
        ("write_kv", WRITE),
        ("write_kv", ROTATE),
        ("gather_kv", GATHER),
        ("copy_blocks", COPY),
        ("swap_blocks", SWAP),
        *((operation, SCALES) for operation in ("decode_attention", "prefill_attention", "write_kv", "gather_kv")),
        ("write_kv", SCALES_WRITTEN),
        ("copy_blocks", SCALES_COPIED),
    )
    for case in cases
]


@pytest.mark.parametrize(("operation", "changes", "error", "message", "side"), on_every_side(CASES))
def test_wrong_argument(operation, changes, error, message, side):
    check_on_every_side(operation, changes, error, message, side)


def test_layers_that_lie_between_each_other():
    """Halves of one allocation overlap in what they span, and share nothing; two layers of one half do."""
    layers = np.zeros((3, N, 2, P, HKV, D), np.float32)
    halves = {"k_cache": list(layers[:, :, 0]), "v_cache": list(layers[:, :, 1])}
    call("copy_blocks", halves)
    halves["v_cache"][2] = layers[1, :, 0]
    with pytest.raises(ValueError, match=r"^k_cache\[1\] must not overlap v_cache\[2\]$"):
        call("copy_blocks", halves)


def test_overlap_that_takes_too_long_to_rule_out(monkeypatch):
    both = np.zeros((N, 2, P, HKV, D), np.float32)
    halves = {"k_cache": both[:, 0], "v_cache": both[:, 1]}
    call("write_kv", halves)

    def give_up(*arguments, **options):
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", give_up)
    with pytest.raises(ValueError, match="k_cache must not overlap v_cache"):
        call("write_kv", halves)
