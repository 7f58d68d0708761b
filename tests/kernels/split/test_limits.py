"""Usual variants spill nothing, share a multiprocessor and have enough in flight, with the ptxas that is installed.

How many thread blocks fit is found at link time: another ptxas may change all three numbers, and these tests say so.
"""

import pytest

from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.occupancy import occupancy
from pagedkv.kernels.split.config import NUM_THREADS, SplitConfig
from pagedkv.kernels.split.kernel import dynamic_bytes, make_split
from pagedkv.kernels.split.shape import TensorShape

from ...machine_code.measure import loads_by_column
from ...machine_code.sass import code_of
from ...support.strategies import long

HALF, WIDENED, ROWS = ("float16", "float16"), ("bfloat16", "fp8_e4m3"), ("bfloat16", "int8")
# Compute capability, D, G, dtypes of q and cache, whether logits are modified.
SHORT = [
    ((8, 0), 128, 8, *HALF, False),
    ((8, 0), 256, 8, *HALF, True),
    ((9, 0), 64, 16, *WIDENED, True),
    ((9, 0), 128, 8, *HALF, True),
    ((10, 0), 128, 16, *HALF, True),
    ((10, 0), 256, 4, *WIDENED, True),
]
LONG = [
    ((8, 0), 64, 8, *WIDENED, False),
    ((8, 0), 80, 16, *WIDENED, True),
    ((8, 0), 96, 5, *HALF, True),
    ((8, 0), 128, 16, "float16", "fp8_e5m2", True),
    ((9, 0), 64, 1, *HALF, False),
    ((9, 0), 80, 16, *WIDENED, True),
    ((9, 0), 96, 5, "float16", "fp8_e4m3", True),
    ((9, 0), 128, 16, "bfloat16", "bfloat16", False),
    ((9, 0), 256, 8, *WIDENED, False),
    ((9, 0), 256, 16, *HALF, True),
    ((10, 0), 64, 8, *WIDENED, True),
    ((10, 0), 80, 8, *HALF, False),
    ((10, 0), 96, 12, *WIDENED, True),
    ((10, 0), 128, 16, *WIDENED, True),
    ((10, 0), 256, 16, *HALF, True),
    ((8, 0), 64, 8, *ROWS, True),
    ((9, 0), 128, 8, *ROWS, True),
    ((10, 0), 256, 16, *ROWS, True),
]


def thread_blocks(config, kernel, capability):
    """How many fit on a multiprocessor, of a kernel that spills nothing."""
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    shared_bytes = resources.shared_bytes + dynamic_bytes(config)
    return occupancy(capability, resources.registers, NUM_THREADS, shared_bytes)


@pytest.mark.parametrize(
    ("capability", "head_dim", "group_size", "q_kind", "kv_kind", "modified"), [*SHORT, *long(LONG)], ids=str
)
def test_usual_variants_fit_twice_and_have_48_kib_in_flight(
    capability, head_dim, group_size, q_kind, kv_kind, modified
):
    config = SplitConfig(
        *(head_dim, group_size, 16, q_kind, kv_kind, modified),
        hardware_fp8=kv_kind != "fp8_e4m3" or capability >= (9, 0),
        architecture=capability[0],
    )
    kernel = compile_kernel(make_split, config, capability)
    blocks = thread_blocks(config, kernel, capability)
    assert blocks >= 2
    [(_, in_flight)] = loads_by_column(code_of(kernel.cubin, kernel.entry), ("KV",), capability)
    assert blocks * NUM_THREADS * in_flight >= 48 * 1024


@pytest.mark.parametrize(
    ("group_size", "q_kind", "kv_kind"),
    [
        (4, *WIDENED),
        *long([(1, *WIDENED), (8, *WIDENED), (4, "float16", "fp8_e5m2"), (4, "bfloat16", "bfloat16"), (8, *HALF)]),
        *long([(4, *ROWS), (8, *ROWS)]),
    ],
    ids=str,
)
def test_three_thread_blocks_of_128_dims_fit_on_a_hopper_multiprocessor(group_size, q_kind, kv_kind):
    config = SplitConfig(128, group_size, 16, q_kind, kv_kind)
    assert thread_blocks(config, compile_kernel(make_split, config), (9, 0)) == TensorShape(config).min_blocks == 3
