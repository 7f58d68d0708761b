"""Every argument of every drop-in call, replaced by what does not belong there: pagedkv raises, not torch or NumPy."""

import linecache
import traceback

import pytest
import torch

from pagedkv.compat import flash_attn, flashinfer, vllm
from pagedkv.compat.paged_minimal import CacheManager

D = 16


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def contiguous():
    """Every argument of a call on caches of rows."""
    caches = dict(zip(("k_cache", "v_cache"), torch.randn(2, 2, 16, 2, D), strict=True))
    new = dict(zip(("k", "v"), torch.randn(2, 2, 3, 2, D), strict=True))
    angles = dict(zip(("rotary_cos", "rotary_sin"), torch.rand(2, 20, 8), strict=True))
    options = {"causal": True, "window_size": (5, 0), "softcap": 3.0, "softmax_scale": 0.3, "return_softmax_lse": True}
    options |= {"rotary_interleaved": True, "alibi_slopes": torch.rand(4)}
    where = {"cache_seqlens": ints(5, 9), "cache_batch_idx": ints(1, 0), "cache_leftpad": ints(0, 2)}
    return {"q": torch.randn(2, 3, 4, D), **caches, **new, **angles, **where, **options}


def paged():
    """A call on blocks of fp8."""
    caches = dict(zip(("k_cache", "v_cache"), torch.randn(2, 6, 4, 2, D).to(torch.float8_e4m3fn), strict=True))
    new = dict(zip(("k", "v"), torch.randn(2, 2, 1, 2, D), strict=True))
    scales = {"k_descale": torch.ones(2, 2), "v_descale": torch.ones(2)}
    where = {"cache_seqlens": ints(5, 9), "block_table": torch.arange(6).int().view(2, 3)}
    return {"q": torch.randn(2, 1, 4, D), **caches, **new, **scales, **where}


def ragged():
    starts = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 9), "seqused_k": ints(3, 4)}
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (-1, -1), "softcap": 0.0, "return_attn_probs": True}
    keys = dict(zip(("k", "v"), torch.randn(2, 9, 2, D), strict=True))
    return {"q": torch.randn(5, 4, D), **keys, **starts, **options, "dropout_p": 0.0, "alibi_slopes": torch.rand(4)}


def ragged_over_pages():
    keys = dict(zip(("k", "v"), torch.randn(2, 6, 4, 2, D), strict=True))
    where = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 9), "block_table": ints(*range(6)).view(2, 3)}
    return {"q": torch.randn(5, 4, D), **keys, **where}


def decode_of_vllm():
    caches = {"key_cache": torch.randn(4, 2, D // 4, 8, 4), "value_cache": torch.randn(4, 2, D, 8)}
    sizes = {"num_kv_heads": 2, "scale": 0.3, "block_size": 8, "max_seq_len": 9}
    where = {"block_tables": ints(*range(4)).view(2, 2), "seq_lens": ints(5, 9)}
    rest = {"alibi_slopes": torch.rand(4), "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
    return {"out": torch.zeros(2, 4, D), "query": torch.randn(2, 4, D), **caches, **sizes, **where, **rest}


def decode_of_vllm_in_fp8():
    caches = {"key_cache": torch.zeros(4, 2, 1, 8, 16).byte(), "value_cache": torch.zeros(4, 2, D, 8).byte()}
    return {**decode_of_vllm(), **caches, "kv_cache_dtype": "fp8"}


def tokens_of_vllm():
    caches = {"key_cache": torch.zeros(4, 2, 1, 8, 16).byte(), "value_cache": torch.zeros(4, 2, D, 8).byte()}
    new = dict(zip(("key", "value"), torch.randn(2, 2, 2, D), strict=True))
    rest = {"slot_mapping": torch.tensor([3, 9]), "kv_cache_dtype": "fp8", "k_scale": 1.0, "v_scale": 1.0}
    return {**new, **caches, **rest}


def flat_tokens_of_vllm():
    caches = dict(zip(("key_cache", "value_cache"), torch.zeros(2, 4, 8, 2, D), strict=True))
    return {**tokens_of_vllm(), **caches, "kv_cache_dtype": "auto"}


def decode(**arguments):
    run = {name: arguments.pop(name) for name in ("q", "paged_kv_cache", *RUN)}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16))
    wrapper.plan(**arguments)
    wrapper.run(**run)


def prefill(**arguments):
    run = {name: arguments.pop(name) for name in ("q", "paged_kv_cache", *RUN)}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16))
    wrapper.plan(**arguments)
    wrapper.run(**run)


RUN = ("q_scale", "k_scale", "v_scale", "out", "lse", "return_lse", "sinks")


def arguments_of_run(num_tokens):
    scales = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.5, "return_lse": True, "sinks": torch.rand(4)}
    results = {"out": torch.zeros(num_tokens, 4, D), "lse": torch.zeros(num_tokens, 4)}
    return {"q": torch.randn(num_tokens, 4, D), "paged_kv_cache": torch.randn(4, 2, 8, 2, D), **scales, **results}


OPTIONS = {"pos_encoding_mode": "NONE", "window_left": -1, "logits_soft_cap": 3.0, "sm_scale": 0.3}
TYPES = {"q_data_type": torch.float32, "kv_data_type": torch.float32, "o_data_type": torch.float32}


def arguments_of_decode():
    table = {"indptr": ints(0, 2, 3), "indices": ints(2, 3, 0), "last_page_len": ints(2, 4)}
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": D, "page_size": 8, "q_len_per_req": 1}
    return {**table, **sizes, **OPTIONS, **TYPES, "window_right": 0, **arguments_of_run(2)}


def arguments_of_prefill():
    table = {"indptr": ints(0, 2, 3), "indices": ints(2, 3, 0), "last_page_len": ints(2, 4)}
    table = {"qo_indptr": ints(0, 2, 5)} | {f"paged_kv_{name}": x for name, x in table.items()}
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": D, "page_size": 8, "head_dim_vo": D, "causal": True}
    return {**table, **sizes, **OPTIONS, **TYPES, **arguments_of_run(5)}


def appended():
    new = dict(zip(("append_key", "append_value"), torch.randn(2, 2, 2, D), strict=True))
    table = {"kv_indices": ints(2, 3, 0), "kv_indptr": ints(0, 2, 3), "kv_last_page_len": ints(2, 4)}
    where = {"batch_indices": ints(0, 1), "positions": ints(9, 3), **table, "kv_layout": "NHD"}
    return {**new, "paged_kv_cache": torch.zeros(4, 2, 8, 2, D), **where}


CALLS = {
    "flash_attn_with_kvcache": (flash_attn.flash_attn_with_kvcache, contiguous),
    "the same, paged": (flash_attn.flash_attn_with_kvcache, paged),
    "flash_attn_varlen_func": (flash_attn.flash_attn_varlen_func, ragged),
    "the same over pages": (flash_attn.flash_attn_varlen_func, ragged_over_pages),
    "paged_attention_v1": (vllm.paged_attention_v1, decode_of_vllm),
    "the same in fp8": (vllm.paged_attention_v1, decode_of_vllm_in_fp8),
    "reshape_and_cache": (vllm.reshape_and_cache, tokens_of_vllm),
    "reshape_and_cache_flash": (vllm.reshape_and_cache_flash, flat_tokens_of_vllm),
    "copy_blocks": (
        vllm.copy_blocks,
        lambda: {
            "key_caches": [torch.zeros(4, 1, 2, 8, 4)],
            "value_caches": [torch.zeros(4, 1, 8, 8)],
            "block_mapping": torch.tensor([[0, 3]]),
        },
    ),
    "swap_blocks": (
        vllm.swap_blocks,
        lambda: {
            "src": torch.ones(4, 2, 4, 8),
            "dst": torch.zeros(4, 2, 4, 8),
            "block_mapping": torch.tensor([[0, 3]]),
        },
    ),
    "convert_fp8": (
        vllm.convert_fp8,
        lambda: {"output": torch.zeros(4).byte(), "input": torch.randn(4), "scale": 1.0, "kv_dtype": "fp8"},
    ),
    "merge_state": (
        flashinfer.merge_state,
        lambda: {x: torch.randn(3, 4, D)[..., slice(None) if x[0] == "v" else 0] for x in ("v_a", "s_a", "v_b", "s_b")},
    ),
    "merge_states": (flashinfer.merge_states, lambda: {"v": torch.randn(3, 2, 4, D), "s": torch.randn(3, 2, 4)}),
    "get_seq_lens": (
        flashinfer.get_seq_lens,
        lambda: {"kv_indptr": ints(0, 2, 3), "kv_last_page_len": ints(3, 4), "page_size": 8},
    ),
    "get_batch_indices_positions": (
        flashinfer.get_batch_indices_positions,
        lambda: {"append_indptr": ints(0, 1, 3), "seq_lens": ints(5, 5), "nnz": 3},
    ),
    "append_paged_kv_cache": (flashinfer.append_paged_kv_cache, appended),
    "decode": (decode, arguments_of_decode),
    "prefill": (prefill, arguments_of_prefill),
    "CacheManager": (
        CacheManager,
        lambda: {"tokens": torch.zeros(2, 4), "block_size": 2, "batch_size": 2, "n_kv_heads": 1, "head_dim": 8},
    ),
}


def replacements(x):
    yield from (None, "x", 3.5, -1, 2**40 if not isinstance(x, int) else 0, True, [], {}, object(), (2**63, -(2**63)))
    yield from (torch.tensor(0.5), torch.tensor(1), torch.ones(2), ints(-1, 1), ints(0, 2**31 - 1), ints(2**31 - 1))
    yield from (torch.ones(0), ints(), torch.ones(2).bool(), torch.ones(2, device="meta"), torch.eye(2).to_sparse())
    if isinstance(x, torch.Tensor):
        yield from (x[None], x[0], x[:0], x[:1], x[..., :0], torch.cat([x, x]), x.numpy() if x.dtype != FP8 else x)
        yield from (
            x.to("meta"),
            x.float().to_sparse(),
            x.cfloat(),
            x.transpose(0, -1),
            torch.stack([x, x], -1)[..., 0],
        )
        yield from (x[:1].expand(x.shape), x[..., :1].expand(x.shape), x.float().requires_grad_())
    if isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64):
        for number in (-1, 2**31 - 1, -(2**31)):
            for i in range(min(x.numel(), 3)):
                changed = x.clone()
                changed.view(-1)[i] = number
                yield changed


FP8 = torch.float8_e4m3fn


def error_of(call, arguments):
    try:
        call(**arguments)
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        return error
    return None


def is_raised_by_pagedkv(error):
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "pagedkv" in last.filename and linecache.getline(last.filename, last.lineno).lstrip().startswith("raise ")


def bytes_of(given):
    tensors = [x for value in given.values() for x in (value if isinstance(value, list) else [value])]
    return [x.view(torch.uint8).clone() for x in tensors if isinstance(x, torch.Tensor) and x.is_contiguous()]


@pytest.mark.parametrize("name", CALLS)
def test_pagedkv_refuses_what_does_not_belong_there_and_writes_nothing(name):
    call, make = CALLS[name]
    call(**make())
    for argument in make():
        for wrong in replacements(make()[argument]):
            given = make()
            before = bytes_of(given)
            error = error_of(call, given | {argument: wrong})
            if error is not None:
                assert is_raised_by_pagedkv(error), (argument, wrong, error)
                assert all(map(torch.equal, before, bytes_of(given))), (argument, wrong, error)
