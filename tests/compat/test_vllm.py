"""compat.vllm: vLLM's operations by their positions, against ours."""

import re

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.compat import vllm as ops

from ..support.problems import Spec, as_torch, assert_close, build, run

VLLM = Spec(layout="vllm", block_size=8, alibi=True)
FP8 = VLLM.replace(kv_dtype="fp8_e4m3", kv_scales="scalar")
BLOCK_SPARSE = (0, 0, 0, 64, 0)  # tp_rank, and what the original has by default


def arguments(problem):
    """Those of v1 from the query on, for a problem."""
    q, k_cache, v_cache, tables, lens = map(as_torch, problem.args)
    options, spec = problem.options, problem.spec
    slopes = None if not spec.alibi else as_torch(options["alibi_slopes"])
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    name = "fp8" if spec.is_fp8 else "auto"
    scales = [torch.tensor(options.get(name, 1.0)) for name in ("k_scale", "v_scale")]
    sizes = spec.num_kv_heads, scale, tables, lens, spec.block_size, int(lens.max()), slopes, name
    return [q, k_cache, v_cache, *sizes, *scales]


@pytest.mark.parametrize(
    "spec", [VLLM, VLLM.replace(alibi=False, q_dtype="bfloat16", kv_dtype="bfloat16"), FP8], ids=str
)
@pytest.mark.parametrize("version", [1, 2])
def test_attention_is_that_of_the_oracle(spec, version):
    problem = build(spec)
    args = arguments(problem)
    out = torch.full_like(args[0], torch.nan)
    if version == 1:
        assert ops.paged_attention_v1(out, *args) is None
    else:
        scratch = [torch.full((1,), torch.nan) for _ in range(3)]
        assert ops.paged_attention_v2(out, *scratch, *args, *BLOCK_SPARSE) is None
    expected, lse = run(problem, backend="cpu")
    assert_close(problem, expected, lse)
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("write", [ops.reshape_and_cache, ops.reshape_and_cache_flash])
def test_tokens_are_written_and_padding_is_not(write, name):
    """The key is longer than the slots, one of which is negative; out of range, codes saturate."""
    key, value = torch.randn(2, 5, 2, 32) * 1000
    dtype, x = (torch.float32, 4) if name == "auto" else (torch.uint8, 16)
    shapes = [(4, 8, 2, 32)] * 2
    if write is ops.reshape_and_cache:
        shapes = [(4, 2, 32 // x, 8, x), (4, 2, 32, 8)]
    k_cache, v_cache = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    write(key, value, k_cache, v_cache, torch.tensor([9, -1, 30]), name, 0.5, torch.tensor([2.0]))
    kv_dtype, layout = ops.KV_DTYPES[name], "NHD" if write is ops.reshape_and_cache_flash else "vllm"
    scales = {} if kv_dtype is None else {"kv_dtype": kv_dtype, "k_scale": 0.5, "v_scale": 2.0}
    written = [
        np.concatenate(
            [
                x.astype(np.float32)
                for x in pagedkv.gather_kv(k_cache.numpy(), v_cache.numpy(), table, 8, layout=layout, **scales)
            ],
            axis=2,
        )
        for table in (np.array([1], np.int32), np.array([3], np.int32))
    ]
    most = {"auto": np.inf, "fp8": 448.0, "fp8_e5m2": 57344.0}[name]
    for token, found in ((0, written[0][1]), (2, written[1][6])):
        expected = np.concatenate(
            [x[token].numpy().clip(-most * s, most * s) for x, s in ((key, 0.5), (value, 2.0))], axis=1
        )
        np.testing.assert_allclose(
            found, expected, rtol=0 if name == "auto" else 0.13, atol=0 if name == "auto" else 0.1
        )
    assert (written[0][[0, *range(2, 8)]] == 0).all()


def test_blocks_are_copied_and_swapped():
    key_caches, value_caches = (
        list(torch.arange(4.0).view(1, 4, 1).repeat(2, 1, 8).view(2, 4, 1, 8, 1)) for _ in range(2)
    )
    ops.copy_blocks(key_caches, value_caches, torch.tensor([[0, 2], [1, 3]]))
    assert all(cache[:, 0, 0, 0].tolist() == [0, 1, 0, 1] for cache in key_caches + value_caches)
    target = torch.zeros(4, 1, 8, 1)
    ops.swap_blocks(key_caches[0], target, torch.tensor([[1, 2]]))
    assert target[:, 0, 0, 0].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
def test_a_cache_is_converted_there_and_back(kv_dtype):
    x = torch.tensor([0.0, 1.0, -3.5, 1e6, torch.nan])
    codes, back = torch.empty(5, dtype=torch.uint8), torch.empty(5)
    ops.convert_fp8(codes, x, 0.5, kv_dtype)
    ops.convert_fp8(back, codes, 0.5, kv_dtype)
    most = torch.finfo(torch.float8_e4m3fn if kv_dtype == "fp8" else torch.float8_e5m2).max * 0.5
    torch.testing.assert_close(back, torch.tensor([0.0, 1.0, -3.5, most, torch.nan]), equal_nan=True)


REFUSED = [
    ({"blocksparse_vert_stride": 2}, "pagedkv has no block-sparse attention"),
    ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got 'int8'"),
    ({"block_size": 16}, "num_kv_heads and block_size must be 2 and 8, those of key_cache, got 2 and 16"),
    ({"key_cache": torch.zeros(9, 2, 64, 8)}, "key_cache must have shape"),
    (
        {"key_cache": torch.zeros(9, 2, 16, 8, 4).half()},
        "key_cache must have shape (num_blocks, num_kv_heads, head_dim / 8",
    ),
    ({"query": torch.zeros(2, 4, 32)}, "query must have shape"),
    ({"key_cache": np.zeros((9, 2, 16, 8, 4), np.float32)}, "key_cache must be a torch.Tensor, got ndarray"),
    ({"num_kv_heads": torch.tensor([0, 0, 1, 1])}, "num_kv_heads must be an int, got Tensor"),
    ({"out": None}, "out must be a torch.Tensor, which is written, got NoneType"),
    (
        {"kv_cache_dtype": "fp8", "k_scale": torch.ones(3)},
        "k_scale must have one element, or one for each KV head, got (3,)",
    ),
]
NAMES = [
    *("query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables", "seq_lens", "block_size"),
    *("max_seq_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_what_cannot_be_honoured_is_refused_by_name(changes, message):
    given = dict(zip(NAMES, arguments(build(VLLM)), strict=True))
    given = {"out": torch.empty_like(given["query"])} | given | changes
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ops.paged_attention_v1(**given)


def test_messages_name_arguments_as_vllm_does():
    key, caches = torch.ones(2, 1, 8), torch.zeros(2, 4, 8, 1, 8)
    with pytest.raises(IndexError, match="slot_mapping must be below"):
        ops.reshape_and_cache_flash(key, key, *caches, torch.tensor([1, 99]), "auto", 1.0, 1.0)
    with pytest.raises(ValueError, match="value must have shape"):
        ops.reshape_and_cache_flash(key, key[:1], *caches, torch.tensor([1, 2]), "auto", 1.0, 1.0)
    with pytest.raises(TypeError, match="block_mapping must be an array"):
        ops.copy_blocks([caches[0]], [caches[1]], {0: [1]})
    with pytest.raises(IndexError, match="block_mapping must hold block ids"):
        ops.swap_blocks(*caches, torch.tensor([[0, 9]]))
    assert not caches.any()


def test_scales_of_heads_as_newer_releases_have_them():
    key, scales = torch.tensor([[[1.0] * 16, [8.0] * 16]]), torch.tensor([0.5, 4.0])
    caches = torch.zeros(2, 1, 8, 2, 16, dtype=torch.uint8)
    ops.reshape_and_cache_flash(key, key, *caches, torch.tensor([3]), "fp8", scales, scales)
    assert (caches[:, 0, 3].view(torch.float8_e4m3fn).float() == 2).all()


def test_conversions_that_have_no_value_are_refused():
    codes = torch.zeros(4, dtype=torch.uint8)
    for scale in (0.0, -1.0, torch.nan):
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            ops.convert_fp8(codes, torch.ones(4), scale)
    with pytest.raises(ValueError, match="the other one a float dtype"):
        ops.convert_fp8(codes, torch.ones(4).int())
    assert not codes.any()
