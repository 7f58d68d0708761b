"""Errors for wrong arrays of attention on host and device, after which nothing has changed."""

import ml_dtypes
import numpy as np
import pytest
import torch

import pagedkv

from ..support.wrong_arguments import (
    BF16,
    HKV,
    HQ,
    NHD,
    OPERATIONS,
    B,
    Change,
    D,
    N,
    OnCuda,
    OnDevice,
    OnMps,
    P,
    at,
    attention_arguments,
    call,
    change,
    check_on_every_side,
    fp8,
    misaligned,
    on_every_side,
    read_only,
    spread,
    vllm,
)


def out_overlapping_q():
    buffer = np.zeros((2 * B, HQ, D), np.float32)
    return {"q": buffer[:B], "out": buffer[B - 1 : 2 * B - 1]}


Q = "(num_seqs, num_heads, head_dim)"

DECODE = [
    # not an array
    ({"q": [[1.0]]}, TypeError, "q must be an array (NumPy, CuPy or torch), got list"),
    ({"q": None}, TypeError, "q must be an array (NumPy, CuPy or torch), got NoneType"),
    ({"seq_lens": np.int32(1)}, TypeError, "seq_lens must be an array (NumPy, CuPy or torch), got numpy.int32"),
    ({"out": 1}, TypeError, "out must be an array (NumPy, CuPy or torch), got int"),
    ({"sinks": [0.0] * HQ}, TypeError, "sinks must be an array (NumPy, CuPy or torch), got list"),
    ({"q": OnDevice}, TypeError, "q must be an array (NumPy, CuPy or torch), got type"),
    ({"q": torch.zeros(1, device="meta")}, TypeError, "q must be an array with data, got a torch meta tensor"),
    (
        {"q": torch.zeros(2, 2).to_sparse()},
        TypeError,
        "q must be a dense array, got a torch tensor of layout sparse_coo",
    ),
    # sides
    (
        {"backend": "cuda"},
        ValueError,
        'backend "cuda" needs arrays on a CUDA device, got host arrays; move them or use backend "cpu"',
    ),
    ({"backend": "gpu"}, ValueError, 'backend must be "auto", "cpu", "cuda" or "emulator", got \'gpu\''),
    ({"backend": None}, ValueError, 'backend must be "auto", "cpu", "cuda" or "emulator", got None'),
    (
        {"k_cache": OnDevice()},
        ValueError,
        "all arrays of a call must be on one side, got k_cache on a device and q on the host",
    ),
    (
        {"sinks": OnCuda()},
        ValueError,
        "all arrays of a call must be on one side, got sinks on a device and q on the host",
    ),
    ({"q": OnMps()}, ValueError, "q must be on the host or on a CUDA device, got a torch tensor on mps:0"),
    # shapes
    (change("q", lambda x: x[0]), ValueError, f"q must have shape {Q}, got (4, 16)"),
    (change("q", lambda x: x[..., :8]), ValueError, f"q must have shape {Q} = (3, 4, 16), got (3, 4, 8)"),
    (
        {"q": np.zeros((B, 3, D), np.float32)},
        ValueError,
        "num_heads must be a positive multiple of num_kv_heads, got 3 heads of q and 2 of k_cache",
    ),
    (
        {"q": np.zeros((B, 0, D), np.float32)},
        ValueError,
        "num_heads must be a positive multiple of num_kv_heads, got 0 heads of q and 2 of k_cache",
    ),
    (
        {"q": np.zeros((B, HKV, D), np.float32), "layout": "HND"},
        ValueError,
        "num_heads must be a positive multiple of num_kv_heads, got 2 heads of q and 4 of k_cache: "
        'these shapes fit layout="NHD"',
    ),
    (
        vllm() | {"layout": "NHD"},
        ValueError,
        f'k_cache must have shape {NHD} in layout NHD, got (8, 2, 4, 8, 4): these shapes fit layout="vllm"',
    ),
    (change("k_cache", lambda x: x[0]), ValueError, f"k_cache must have shape {NHD} in layout NHD, got (4, 2, 16)"),
    (
        change("k_cache", lambda x: x[0], layout="HND"),
        ValueError,
        "k_cache must have shape (num_blocks, num_kv_heads, block_size, head_dim) in layout HND, got (4, 2, 16)",
    ),
    (
        change("v_cache", lambda x: x[:7]),
        ValueError,
        f"v_cache must have shape {NHD} = (8, 4, 2, 16), that of k_cache, got (7, 4, 2, 16)",
    ),
    (
        {"layout": "vllm"},
        ValueError,
        "k_cache must have shape (num_blocks, num_kv_heads, head_dim / 4, block_size, 4) in layout vllm, "
        'got (8, 4, 2, 16): these shapes fit layout="NHD" or layout="HND"',
    ),
    (
        vllm(x=8),
        ValueError,
        "k_cache must have shape (num_blocks, num_kv_heads, head_dim / 4, block_size, 4) in layout vllm, "
        "got (8, 2, 2, 8, 8)",
    ),
    (
        vllm(v_shape=(N, HKV, 8, D)),
        ValueError,
        "v_cache must have shape (num_blocks, num_kv_heads, head_dim, block_size) = (8, 2, 16, 8) to go with k_cache, "
        "got (8, 2, 8, 16)",
    ),
    (vllm(p=4), ValueError, "block_size must be a power of two from 8 to 256 in layout vllm, got 4"),
    (vllm(p=24), ValueError, "block_size must be a power of two from 8 to 256 in layout vllm, got 24"),
    (vllm(p=512), ValueError, "block_size must be a power of two from 8 to 256 in layout vllm, got 512"),
    (fp8((N, 0, HKV, D)), ValueError, "block_size must be at least 1, got 0"),
    (fp8((N, P, 0, D)), ValueError, "num_kv_heads must be at least 1, got 0"),
    (fp8((N, P, HKV, 12)), ValueError, "head_dim must be a multiple of 8 from 8 to 512, got 12"),
    (fp8((N, P, HKV, 0)), ValueError, "head_dim must be a multiple of 8 from 8 to 512, got 0"),
    (fp8((N, P, HKV, 520)), ValueError, "head_dim must be a multiple of 8 from 8 to 512, got 520"),
    (
        change("block_tables", lambda x: x[0]),
        ValueError,
        "block_tables must have shape (num_seqs, max_blocks), got (3,)",
    ),
    (
        change("block_tables", lambda x: x[:2]),
        ValueError,
        "block_tables must have shape (num_seqs, max_blocks) = (3, 3), got (2, 3)",
    ),
    (change("seq_lens", lambda x: x[:2]), ValueError, "seq_lens must have shape (num_seqs,) = (3,), got (2,)"),
    (
        {"alibi_slopes": np.zeros(HKV, np.float32)},
        ValueError,
        "alibi_slopes must have shape (num_heads,) = (4,), got (2,)",
    ),
    ({"sinks": np.zeros((1, HQ), np.float32)}, ValueError, "sinks must have shape (num_heads,) = (4,), got (1, 4)"),
    (
        {"k_scale": np.ones(HQ, np.float32), "kv_dtype": "fp8_e4m3", **fp8()},
        ValueError,
        "k_scale must have shape (num_kv_heads,) = (2,), got (4,)",
    ),
    ({"out": np.zeros((2, HQ, D), np.float32)}, ValueError, f"out must have shape {Q} = (3, 4, 16), got (2, 4, 16)"),
    # dtypes
    (change("q", lambda x: x.astype(">f4")), TypeError, "q must have dtype float32, float16 or bfloat16, got >f4"),
    (change("q", np.float64), TypeError, "q must have dtype float32, float16 or bfloat16, got float64"),
    (
        change("q", lambda x: x.astype(np.float16)),
        TypeError,
        "k_cache must have dtype float16, that of q, or be in 8 bits, got float32",
    ),
    (change("k_cache", np.float64), TypeError, "k_cache must have dtype float32, float16 or bfloat16, got float64"),
    (change("v_cache", np.float16), TypeError, "v_cache must have dtype float32, that of k_cache, got float16"),
    (
        fp8(),
        TypeError,
        "k_cache must have dtype float32, float16 or bfloat16, got uint8; a cache in 8 bits needs kv_dtype",
    ),
    (
        {name: x.view(ml_dtypes.float8_e4m3fn) for name, x in fp8().items()},
        TypeError,
        "k_cache must have dtype float32, float16 or bfloat16, got float8_e4m3fn; "
        "a cache in 8 bits needs kv_dtype: pass k_cache.view(torch.uint8)",
    ),
    (
        {"kv_dtype": "fp8_e5m2"} | {name: x.view(ml_dtypes.float8_e5m2) for name, x in fp8().items()},
        TypeError,
        "k_cache must have dtype uint8 for kv_dtype 'fp8_e5m2', got float8_e5m2: pass k_cache.view(torch.uint8)",
    ),
    ({"kv_dtype": "fp8_e5m2"}, TypeError, "k_cache must have dtype uint8 for kv_dtype 'fp8_e5m2', got float32"),
    (
        {"kv_dtype": "fp8_e5m2", "k_cache": fp8()["k_cache"]},
        TypeError,
        "v_cache must have dtype uint8 for kv_dtype 'fp8_e5m2', got float32",
    ),
    (change("block_tables", np.int64), TypeError, "block_tables must have dtype int32, got int64"),
    (change("seq_lens", np.uint32), TypeError, "seq_lens must have dtype int32, got uint32"),
    (change("seq_lens", np.bool_), TypeError, "seq_lens must have dtype int32, got bool"),
    ({"alibi_slopes": np.zeros(HQ)}, TypeError, "alibi_slopes must have dtype float32, got float64"),
    ({"sinks": np.zeros(HQ, BF16)}, TypeError, "sinks must have dtype float32, got bfloat16"),
    (
        {"k_scale": np.ones(HKV), "kv_dtype": "fp8_e4m3", **fp8()},
        TypeError,
        "k_scale must have dtype float32, got float64",
    ),
    ({"out": np.zeros((B, HQ, D))}, TypeError, "out must have dtype float32, that of q, got float64"),
    # strides and alignment
    (change("q", spread), ValueError, "q must be contiguous along its last axis, got strides (512, 128, 8) in bytes"),
    (
        change("k_cache", lambda x: x[..., ::-1]),
        ValueError,
        "k_cache must be contiguous along its last axis, got strides (512, 128, 64, -4) in bytes",
    ),
    (
        change("block_tables", lambda x: np.asfortranarray(x)),
        ValueError,
        "block_tables must be contiguous along its last axis, got strides (4, 12) in bytes",
    ),
    (
        change("seq_lens", spread),
        ValueError,
        "seq_lens must be contiguous along its last axis, got strides (8,) in bytes",
    ),
    (change("v_cache", misaligned), ValueError, "v_cache must be aligned to its item size of 4 bytes"),
    # out
    ({"out": read_only(np.zeros((B, HQ, D), np.float32))}, ValueError, "out must be writable, got a read-only array"),
    (
        {"out": np.lib.stride_tricks.as_strided(np.zeros((HQ, D), np.float32), (B, HQ, D), (0, 64, 4))},
        ValueError,
        "out must not repeat an element, got shape (3, 4, 16) with strides (0, 64, 4)",
    ),
    (
        {"out": np.lib.stride_tricks.as_strided(np.zeros(1000, np.float32), (B, HQ, D), (128, 32, 4))},
        ValueError,
        "out must not repeat an element, got shape (3, 4, 16) with strides (128, 32, 4)",
    ),
    ({"out": Change("q", lambda x: x)}, ValueError, "out must not overlap q"),
    (out_overlapping_q(), ValueError, "out must not overlap q"),
    (
        {"out": Change("v_cache", lambda x: x.reshape(-1)[: B * HQ * D].reshape(B, HQ, D))},
        ValueError,
        "out must not overlap v_cache",
    ),
    # values
    (
        at("seq_lens", 1, -1),
        ValueError,
        "seq_lens must be in 0..max_blocks * block_size = 0..12, got -1 for sequence 1",
    ),
    (
        at("seq_lens", 2, 13),
        ValueError,
        "seq_lens must be in 0..max_blocks * block_size = 0..12, got 13 for sequence 2",
    ),
    ({"max_seq_len": 11}, ValueError, "seq_lens must be in 0..max_seq_len = 0..11, got 12 for sequence 0"),
    ({"max_seq_len": 0}, ValueError, "seq_lens must be in 0..max_seq_len = 0..0, got 12 for sequence 0"),
    (
        at("seq_lens", 1, -1, max_seq_len=12),
        ValueError,
        "seq_lens must be in 0..max_blocks * block_size = 0..12, got -1 for sequence 1",
    ),
    (
        at("seq_lens", 2, 13, max_seq_len=100),
        ValueError,
        "seq_lens must be in 0..max_blocks * block_size = 0..12, got 13 for sequence 2",
    ),
    (
        at("block_tables", (1, 1), -1),
        IndexError,
        "block_tables must hold block ids in 0..num_blocks-1 = 0..7, got -1 for sequence 1, column 1",
    ),
    (
        at("block_tables", (0, 2), N),
        IndexError,
        "block_tables must hold block ids in 0..num_blocks-1 = 0..7, got 8 for sequence 0, column 2",
    ),
    (
        {"block_tables": np.array([[0, 1, 2], [3, N, 0], [0, 0, 0]], np.int32)},
        IndexError,
        "block_tables must hold block ids in 0..num_blocks-1 = 0..7, got 8 for sequence 1, column 1",
    ),
    (
        at("block_tables", (1, 0), 2**31 - 1),
        IndexError,
        "block_tables must hold block ids in 0..num_blocks-1 = 0..7, got 2147483647 for sequence 1, column 0",
    ),
]

T = "(num_tokens, num_heads, head_dim)"
PREFILL = [
    ({"query_starts": None}, TypeError, "query_starts must be an array (NumPy, CuPy or torch), got NoneType"),
    (change("q", lambda x: x[0]), ValueError, f"q must have shape {T}, got (4, 16)"),
    (change("q", lambda x: x[..., :8]), ValueError, f"q must have shape {T} = (9, 4, 16), got (9, 4, 8)"),
    (
        change("query_starts", lambda x: x[:3]),
        ValueError,
        "query_starts must have shape (num_seqs + 1,) = (4,), got (3,)",
    ),
    (change("seq_lens", lambda x: x[:2]), ValueError, "seq_lens must have shape (num_seqs,) = (3,), got (2,)"),
    ({"out": np.zeros((8, HQ, D), np.float32)}, ValueError, f"out must have shape {T} = (9, 4, 16), got (8, 4, 16)"),
    (change("query_starts", np.int64), TypeError, "query_starts must have dtype int32, got int64"),
    (at("query_starts", 0, 1), ValueError, "query_starts must begin with 0, got 1"),
    (at("query_starts", 1, 8), ValueError, "query_starts must never decrease, got 8 and then 7 for sequence 1"),
    (
        {"query_starts": np.array([0, -(2**31), 2**31 - 1, 2**31 - 1], np.int32)},
        ValueError,
        "query_starts must never decrease, got 0 and then -2147483648 for sequence 0",
    ),
    (
        {"query_starts": np.array([0, 2**31 - 1, -(2**31), -1], np.int32)},
        ValueError,
        "query_starts must never decrease, got 2147483647 and then -2147483648 for sequence 1",
    ),
    (at("query_starts", 3, 10), ValueError, "query_starts must end at or before num_tokens = 9, got 10"),
    (
        at("query_starts", 3, 8),
        ValueError,
        "query_starts must give no sequence more tokens than its seq_len, got 1 tokens for sequence 2 of length 0",
    ),
    (
        at("seq_lens", 1, 13),
        ValueError,
        "seq_lens must be in 0..max_blocks * block_size = 0..12, got 13 for sequence 1",
    ),
    ({"max_seq_len": 11}, ValueError, "seq_lens must be in 0..max_seq_len = 0..11, got 12 for sequence 0"),
    ({"window_right": 1}, ValueError, "window_right needs causal=False: a causal query sees no later key"),
    ({"window_right": -1, "causal": False}, ValueError, "window_right must be at least 0, got -1"),
    ({"window_right": 1.0, "causal": False}, TypeError, "window_right must be an int, got float"),
    ({"leftpad": np.zeros(2, np.int32)}, ValueError, "leftpad must have shape (num_seqs,) = (3,), got (2,)"),
    ({"leftpad": np.zeros(3)}, TypeError, "leftpad must have dtype int32, got float64"),
    (
        {"leftpad": np.array([12, -1, 0], np.int32)},
        ValueError,
        "leftpad must be in 0..seq_len, got -1 for sequence 1 of length 5",
    ),
    (
        {"leftpad": np.array([12, 5, 1], np.int32)},
        ValueError,
        "leftpad must be in 0..seq_len, got 1 for sequence 2 of length 0",
    ),
    ({"mask": np.ones(70, np.int8)}, TypeError, "mask must have dtype bool, or uint8 for bits, got int8"),
    (
        {"mask": np.ones((1, 70), bool)},
        ValueError,
        "mask must have shape (n,), the rows one after the other as ravel() gives them, got (1, 70)",
    ),
    (
        {"mask": np.ones(69, bool)},
        ValueError,
        "mask must have shape (70,), query_len * seq_len booleans for each sequence, got (69,)",
    ),
    (
        {"mask": np.ones(11, np.uint8)},
        ValueError,
        "mask must have shape (10,), query_len * seq_len bits, in whole bytes, for each sequence, got (11,)",
    ),
    (
        {"alibi_slopes": np.ones((2, HQ), np.float32)},
        ValueError,
        "alibi_slopes must have shape (num_seqs, num_heads) = (3, 4), got (2, 4)",
    ),
    (
        at("block_tables", (0, 2), -5),
        IndexError,
        "block_tables must hold block ids in 0..num_blocks-1 = 0..7, got -5 for sequence 0, column 2",
    ),
]

CASES = [*(("decode_attention", *case) for case in DECODE), *(("prefill_attention", *case) for case in PREFILL)]


@pytest.mark.parametrize(("operation", "changes", "error", "message", "side"), on_every_side(CASES))
def test_wrong_array(operation, changes, error, message, side):
    check_on_every_side(operation, changes, error, message, side)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_shapes_are_checked_before_dtypes(operation):
    arrays = [name for name, x in OPERATIONS[operation]().items() if isinstance(x, np.ndarray)]
    for wrong_dtype in arrays:
        for wrong_shape in arrays:
            if wrong_shape != wrong_dtype:
                changes = change(wrong_dtype, np.complex64) | change(wrong_shape, lambda x: x[None, None])
                with pytest.raises(ValueError, match=r"must have (shape|blocks)|same number of states"):
                    call(operation, changes)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "block_tables", "seq_lens", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("dtype", ["O", "S3", "c16", "V32", np.dtype([]), "m8[s]"])
@pytest.mark.parametrize("layout", ["NHD", "vllm"])
def test_exotic_dtypes_get_clear_errors(name, dtype, layout):
    arguments = attention_arguments()
    arguments |= {"sinks": np.zeros(HQ, np.float32), "alibi_slopes": np.zeros(HQ, np.float32)}
    arguments |= vllm() if layout == "vllm" else {}
    with pytest.raises((TypeError, ValueError), match=r"_?[a-z]+ must have (dtype|shape)"):
        pagedkv.decode_attention(**arguments | {name: np.zeros(arguments[name].shape, dtype)})
