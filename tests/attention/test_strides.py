"""Arrays lie anywhere: strides of q, `out`, tables and caches, caches past 4 GiB; results without an LSE."""

import numpy as np
import torch

import pagedkv

from ..kernels.block_cases import SparseDevice
from ..support.problems import as_torch, move_blocks
from .kernels import (
    CPU,
    DECODE,
    FEW_ROWS,
    LONG,
    ON_DEVICE,
    PREFILL,
    PREFILL_CORES,
    PREFILL_FP8,
    PREFILL_INT8,
    QUICK,
    SLOW,
    SPLIT_FP8,
    SPLIT_INT8,
    WGMMA,
    assert_same_bits,
    each_emulated,
    each_kernel,
    new_results,
)

VIEWS = {
    "heads backwards": lambda q: np.ascontiguousarray(q[:, ::-1])[:, ::-1],
    "rows and heads backwards": lambda q: np.ascontiguousarray(q[::-1, ::-1])[::-1, ::-1],
    "heads first": lambda q: q.swapaxes(0, 1).copy().swapaxes(0, 1),
    "repeated heads": lambda q: np.broadcast_to(q[:, :1], q.shape),
    "repeated rows": lambda q: np.broadcast_to(q[:1], q.shape),
}


@each_kernel(*QUICK, long=(*SLOW, *LONG))
def test_q_has_strides_of_its_own(kernel, open_device):
    problem = kernel.build()
    q = np.array(problem.q)
    for view in VIEWS.values() if kernel in CPU else [VIEWS["heads backwards"]]:
        problem.q = view(q)
        strided = kernel.attend(problem, open_device)
        problem.q = np.ascontiguousarray(problem.q)
        assert_same_bits(kernel.attend(problem, open_device), strided)


@each_kernel(*(kernel for kernel in ON_DEVICE if kernel not in SLOW), long=(*SLOW, *LONG))
def test_tables_are_columns_of_wider_ones_and_nobody_asks_for_the_lse(kernel, open_device):
    """A device's tables are read where they are, a host's are copied."""
    problem = kernel.build()
    expected, _ = kernel.attend(problem, open_device)
    for check in (False, True):
        call, (out, _) = kernel.call(problem, check), new_results(problem)
        wide = np.full((len(call.block_tables), call.block_tables.shape[1] + 3), -1, np.int32)
        wide[:, :-3] = call.block_tables
        with open_device() as device:
            kernel.launch(device, call._replace(block_tables=wide[:, :-3]), out, None)
        assert_same_bits((out,), (expected,))


@each_kernel(*CPU, *DECODE, SPLIT_FP8, PREFILL_CORES, long=(PREFILL, FEW_ROWS, WGMMA, *LONG))
def test_caches_lie_backwards_and_with_gaps(kernel, open_device):
    """Offsets of 64 bits, which negative strides need, are another compile of each kernel."""
    problem = kernel.build(strides="own")
    expected = kernel.attend(problem, open_device)
    for name in ("k_cache", "v_cache"):
        setattr(problem, name, np.ascontiguousarray(getattr(problem, name)[::-1])[::-1])
    assert_same_bits(kernel.attend(problem, open_device), expected)
    # Strides inside of a block, and rows that are not whole vectors, are other kernels.
    if kernel.spec.layout != "vllm" and not kernel.spec.kv_format.coded:
        for layout in ("NHD", "HND"):
            strided = kernel.attend(kernel.build(strides="strided", layout=layout), open_device)
            assert_same_bits(strided, expected)


class LargeCaches(SparseDevice):
    """Holds the last blocks of caches past 4 GiB, and nothing of the rest."""

    def __init__(self, num_blocks):
        super().__init__()
        self.num_blocks = num_blocks

    def address(self, name, array):
        is_new = name not in self.large
        where = super().address(name, array)
        if is_new and name in self.large:
            used = slice(len(array) - self.num_blocks, None)
            self.large[name].view()[used] = array[used]
            self.large[name].mark(True, used)
        return where


@each_emulated(*DECODE, SPLIT_FP8, SPLIT_INT8, PREFILL_CORES, long=(PREFILL, PREFILL_FP8, PREFILL_INT8, WGMMA))
def test_caches_of_more_than_4_gib(kernel):
    batch = {"seq_lens": (70, 3), "query_lens": (20, 3) if kernel.is_prefill else None}
    problem = kernel.build(**batch)
    expected, num_blocks = kernel.attend(kernel.build(**batch)), len(problem.k_cache)
    move_blocks(problem, 2**32 // problem.k_cache[0].nbytes + 1)
    assert_same_bits(kernel.attend(problem, device=LargeCaches(num_blocks)), expected)


@each_kernel(*(kernel for kernel in CPU if kernel.spec.kv_format.coded))
def test_caches_of_more_than_2_31_elements(kernel, open_device):
    problem = kernel.build(block_size=256, num_kv_heads=4, strides="own")
    expected = kernel.attend(problem)
    move_blocks(problem, 2**31 // problem.k_cache[0].size + 1)
    assert_same_bits(kernel.attend(problem), expected)


@each_kernel(*CPU)
def test_frameworks_and_outputs_of_the_caller_change_no_bit(kernel, open_device):
    """Torch tensors in, torch tensors out; `out` given or not, backwards; inputs that are read-only."""
    problem = kernel.build(kv_scales="per head" if kernel.spec.is_fp8 else None, sinks=True)
    expected = kernel.attend(problem)
    operation = pagedkv.prefill_attention if kernel.is_prefill else pagedkv.decode_attention
    for array in (*problem.args, *problem.options.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    out, lse = operation(*problem.args, **problem.options, return_lse=True)
    assert_same_bits((out, lse), expected)
    backwards = np.full_like(out, np.nan)[::-1, ::-1]
    assert operation(*problem.args, **problem.options, out=backwards) is backwards
    assert_same_bits((np.ascontiguousarray(backwards),), expected[:1])
    args = [as_torch(x) for x in problem.args]
    options = {name: as_torch(x) if isinstance(x, np.ndarray) else x for name, x in problem.options.items()}
    out, lse = operation(*args, **options, return_lse=True)
    assert torch.equal(out, as_torch(expected[0]))
    assert torch.equal(lse, as_torch(expected[1]))
    given = torch.full_like(out, float("nan"))
    assert operation(*args, **options, out=given) is given
    assert torch.equal(given, out)
