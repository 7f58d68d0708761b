"""What the prefill kernels take of a multiprocessor, in code for every GPU."""

from itertools import product

import pytest

from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.occupancy import occupancy, shared_kib
from pagedkv.kernels.prefill.config import FEW_ROWS, CoresConfig, TensorConfig
from pagedkv.kernels.prefill.cuda_cores import kernel as cuda_cores
from pagedkv.kernels.prefill.cuda_cores.kernel import make_prefill_on_cuda_cores
from pagedkv.kernels.prefill.cuda_cores.shape import CoresShape
from pagedkv.kernels.prefill.tensor_cores.kernel import make_prefill
from pagedkv.kernels.prefill.tensor_cores.parts.kernel import make_prefill_split
from pagedkv.kernels.prefill.tensor_cores.parts.shape import PartShape
from pagedkv.kernels.prefill.tensor_cores.tile import TileShape

from ...machine_code.sass import code_of, products_of
from ...support.strategies import long

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
PLAIN = [64, 128, 256]
SYSTEM_BYTES = 1024


def tensor_kernel(head_dim, capability, make=make_prefill, **fields):
    fields = {"group_size": 4, "q_kind": "float16", "kv_kind": "float16"} | fields
    config = TensorConfig(head_dim, block_size=16, shared_kib=shared_kib(capability), **fields)
    return config, compile_kernel(make, config, capability)


def check_registers(kernel):
    resources = kernel.linked.resources()
    assert ".extern .func" not in kernel.ptx
    assert resources.stack_bytes == resources.spill_bytes == 0
    return resources


@pytest.mark.parametrize(
    ("head_dim", "capability"),
    [(64, (9, 0)), *long(x for x in product(PLAIN, CAPABILITIES) if x != (64, (9, 0)))],
)
def test_the_plain_loop_has_everything_in_registers_and_few_instructions(head_dim, capability):
    config, kernel = tensor_kernel(head_dim, capability)
    resources = check_registers(kernel)
    if capability in ((8, 0), (9, 0), (10, 0)):
        blocks = occupancy(capability, resources.registers, 128, TileShape(config).nbytes)
        assert blocks == (1 if (head_dim, capability) == (256, (8, 0)) else 2)
        loop = products_of(code_of(kernel.cubin, kernel.entry), capability)
        most = {64: 3.3, 128: 2.0, 256: 1.8}[head_dim] + (0 if capability == (9, 0) else 0.1)
        assert (loop.instructions - loop.mma) / loop.mma <= most
        assert loop.load_matrices / loop.mma <= (0.57 if head_dim == 256 else 0.32)


OPTIONS = [
    (128, (9, 0), {"modified": True}),
    (128, (9, 0), {"q_kind": "bfloat16", "kv_kind": "fp8_e4m3"}),
    (128, (9, 0), {"wide": True, "group_size": 5}),
    (72, (9, 0), {}),
    (120, (9, 0), {"q_kind": "bfloat16", "kv_kind": "bfloat16"}),
    (128, (8, 0), {"modified": True}),
    (128, (8, 0), {"kv_kind": "fp8_e4m3", "hardware_fp8": False}),
    (128, (8, 9), {"kv_kind": "fp8_e5m2"}),
    (256, (9, 0), {"kv_kind": "fp8_e4m3"}),
    (128, (10, 0), {"modified": True}),
]


@pytest.mark.parametrize(("head_dim", "capability", "fields"), long(OPTIONS), ids=str)
def test_options_have_everything_in_registers(head_dim, capability, fields):
    _, kernel = tensor_kernel(head_dim, capability, **fields)
    check_registers(kernel)


# Two that test_parts.py runs in the emulator; with calls in its loop, the second one spills.
SPLIT_CASES = [(64, (9, 0), {}), (120, (8, 0), {"kv_kind": "fp8_e4m3", "hardware_fp8": False})]
MORE_SPLIT_CASES = [
    *((d, cc, {}) for d in PLAIN for cc in CAPABILITIES if (cc >= (9, 0) or d <= 128) and (d, cc) != (64, (9, 0))),
    (128, (9, 0), {"modified": True}),
    (256, (10, 0), {"modified": True}),
    (128, (9, 0), {"q_kind": "bfloat16", "kv_kind": "fp8_e4m3"}),
    (256, (9, 0), {"kv_kind": "fp8_e5m2"}),
    (128, (9, 0), {"wide": True, "group_size": 5}),
    (72, (9, 0), {}),
    (120, (12, 0), {"q_kind": "bfloat16", "kv_kind": "bfloat16"}),
    (128, (8, 0), {"modified": True}),
    (128, (8, 0), {"wide": True, "group_size": 5}),
    (128, (8, 0), {"kv_kind": "fp8_e4m3", "hardware_fp8": False}),
    (128, (8, 0), {"kv_kind": "fp8_e4m3", "hardware_fp8": False, "modified": True}),
    (128, (8, 0), {"q_kind": "bfloat16", "kv_kind": "fp8_e5m2", "hardware_fp8": False}),
    (128, (8, 9), {"kv_kind": "fp8_e5m2"}),
]


@pytest.mark.parametrize(
    ("head_dim", "capability", "fields"),
    [*SPLIT_CASES, *long(MORE_SPLIT_CASES)],
    ids=str,
)
def test_split_keys_leave_room_in_registers(head_dim, capability, fields):
    _, kernel = tensor_kernel(head_dim, capability, make=make_prefill_split, architecture=capability[0], **fields)
    check_registers(kernel)
    if head_dim <= 128 and capability == (9, 0) and not fields:
        loop = products_of(code_of(kernel.cubin, kernel.entry), capability)
        assert loop.instructions / loop.copies <= 18


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_shared_memory_is_enough_for_every_gpu_where_keys_are_split(head_dim):
    kinds = [("float16", "float16"), ("bfloat16", "fp8_e5m2"), ("float16", "int8")]
    for kib, modified, (q_kind, kv_kind) in product((100, 164, 228), (False, True), kinds):
        for architecture, wide in product((8, 9), (False, True)):
            fields = {"modified": modified, "shared_kib": kib, "architecture": architecture, "wide": wide}
            shape = PartShape(TensorConfig(head_dim, 4, 16, q_kind, kv_kind, **fields))
            assert shape.nbytes <= kib * 1024 - SYSTEM_BYTES
            assert shape.rows * shape.tiles_of_sequence == FEW_ROWS
            assert shape.rows_at_once * shape.rows_of_thread * shape.pieces == shape.keys
            assert shape.rows % shape.q_rows_at_once == 0
            assert shape.warp_rows_at_once * shape.rows_of_thread == 32
            assert shape.chunks <= shape.lanes <= 32


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_shared_memory_is_enough_for_every_gpu(head_dim):
    kinds = [("float16", "float16"), ("bfloat16", "fp8_e5m2")]
    for kib, modified, (q_kind, kv_kind) in product((100, 164, 228), (False, True), kinds):
        config = TensorConfig(head_dim, 4, 16, q_kind, kv_kind, modified=modified, shared_kib=kib)
        shape = TileShape(config)
        blocks = 1 if head_dim > 128 or (kib == 100 and head_dim > 64 and config.is_coded) else 2
        room = kib * 1024 // blocks - SYSTEM_BYTES
        assert shape.nbytes <= room
        assert shape.rows_at_once * shape.rows_of_thread == shape.keys
        assert shape.warp_rows_at_once * shape.rows_of_thread <= 32
        assert shape.chunks <= shape.q_lanes <= 32
        assert shape.pieces_of_row <= shape.lanes <= 32
        if shape.in_pairs:
            assert shape.rows_of_thread <= 4  # that four lanes look up
            assert shape.rows_at_once % 8 == 0  # a chunk keeps its place in the rows of a thread


@pytest.mark.parametrize(
    ("head_dim", "capability", "fields"),
    [(64, (9, 0), {}), *long([(512, (8, 0), {"is_vllm": True}), (256, (10, 0), {}), (512, (12, 0), {})])],
    ids=str,
)
def test_cuda_cores_have_everything_in_registers(head_dim, capability, fields):
    config = CoresConfig(head_dim, "float32", "float32", **fields)
    check_registers(compile_kernel(make_prefill_on_cuda_cores, config, capability))
    places = 2 * 8 * CoresShape(config).rows
    assert cuda_cores.dynamic_bytes(config) + places + 4 * 6 + SYSTEM_BYTES <= 100 * 1024
