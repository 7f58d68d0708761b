"""onnxruntime's GroupQueryAttention: one operator of a model that is made here."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reasons import Refused
from .problem import HEAD_DIM, NUM_KV_HEADS, Problem


def make_group_query_attention(problem: Problem, num_threads: int) -> Any:
    """The operator on contiguous K and V, which are shared by what is read and what is written, so that none is copied.

    Each call stores the keys and values of the last token once more, and attends to all of them.
    """
    import onnxruntime
    from onnx import TensorProto, helper

    types = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
    if problem.dtype not in types:
        raise Refused("float32 and float16 only, on the CPU")
    element, num_heads = types[problem.dtype], problem.q.shape[1]
    inputs = ["query", "key", "value", "past_key", "past_value"]
    outputs = ["output", "present_key", "present_value"]
    lengths = ["seqlens_k", "total_sequence_length"]
    node = helper.make_node(
        "GroupQueryAttention",
        [*inputs, *lengths],
        outputs,
        domain="com.microsoft",
        num_heads=num_heads,
        kv_num_heads=NUM_KV_HEADS,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, element, None) for name in inputs]
        + [helper.make_tensor_value_info(name, TensorProto.INT32, None) for name in lengths],
        [helper.make_tensor_value_info(name, element, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    tokens = [problem.tokens(i) for i in range(problem.num_seqs)]
    caches = [np.ascontiguousarray(np.stack([pair[i] for pair in tokens]).swapaxes(1, 2)) for i in (0, 1)]
    last = [np.ascontiguousarray(cache[:, :, -1]).reshape(problem.num_seqs, 1, -1) for cache in caches]
    arrays = {
        "query": problem.q.reshape(problem.num_seqs, 1, num_heads * HEAD_DIM),
        "key": last[0],
        "value": last[1],
        "seqlens_k": problem.seq_lens - 1,
        "total_sequence_length": np.array(problem.length, np.int32),
    }
    binding = session.io_binding()
    for name, x in arrays.items():
        binding.bind_cpu_input(name, x)
    for name, cache in zip(("key", "value"), caches, strict=True):
        shared = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(f"past_{name}", shared)
        binding.bind_ortvalue_output(f"present_{name}", shared)
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(arrays["query"]))
    binding.bind_ortvalue_output("output", out)

    def call() -> Any:
        session.run_with_iobinding(binding)
        return out

    return call
