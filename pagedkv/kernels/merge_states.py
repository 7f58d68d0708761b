"""merge_states: attention over disjoint sets of keys becomes attention over all of them.

Grid. x over (row, group of elements), y over heads.

Who owns what. A thread merges the same few elements of up to MAX_STATES states by the formula of device/merging.py.
More states take several launches: each but the last stores a float32 state, which is the first one of the next launch.

Shared memory. None.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device.intrinsics.thread import address, bits_float, larger, load_4
from .device.language import cuda, float32, int64, types, uint64
from .device.merging import lse_of_lses, make_add, weight_of_lse
from .device.sizes import ELEMENT_BITS
from .device.source import KernelSource
from .device.vectors import make_load, make_store

NUM_THREADS = 128
MAX_STATES = 8


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """The compile-time constants of merge_states.

    Attributes
    ----------
    first_kind, kind, out_kind : str
        Elements of the first state, of the others, and of the result: "float32", "float16" or "bfloat16".
    num_states : int
        1 to MAX_STATES.
    head_dim : int
        D.
    elements : int
        Elements that a thread merges: a power of two that divides head_dim and keeps every address aligned.
    """

    first_kind: str
    kind: str
    out_kind: str
    num_states: int
    head_dim: int
    elements: int


def make_merge_states(config: MergeConfig) -> KernelSource:
    """The kernel of a config.

    Its parameters are MAX_STATES outputs and MAX_STATES LSEs (unused ones may be anything), out and lse
    (C-contiguous), num_rows, num_heads, and MAX_STATES times, in bytes, the row and head stride of an output and the
    row stride of an LSE, whose heads are contiguous.
    """
    load_first, load_other = make_load(config.first_kind, config.elements), make_load(config.kind, config.elements)
    store, add = make_store(config.out_kind, config.elements), make_add(config.elements, may_be_empty=True)
    num_states, num_elements = config.num_states, config.elements
    num_vectors, head_dim = uint64(config.head_dim // config.elements), int64(config.head_dim)
    out_bytes, num_threads = int64(ELEMENT_BITS[config.out_kind] // 8), uint64(NUM_THREADS)
    max_states = MAX_STATES

    def merge_states(
        out_0, out_1, out_2, out_3, out_4, out_5, out_6, out_7,
        lse_0, lse_1, lse_2, lse_3, lse_4, lse_5, lse_6, lse_7,
        out, lse, num_rows, num_heads,
        row_0, head_0, lse_row_0, row_1, head_1, lse_row_1, row_2, head_2, lse_row_2, row_3, head_3, lse_row_3,
        row_4, head_4, lse_row_4, row_5, head_5, lse_row_5, row_6, head_6, lse_row_6, row_7, head_7, lse_row_7,
    ):  # fmt: skip
        item = uint64(uint64(cuda.blockIdx.x) * num_threads + uint64(cuda.threadIdx.x))
        row, vector = int64(item // num_vectors), int64(item % num_vectors)
        if row >= num_rows:
            return
        states = cuda.local.array(max_states, int64)
        states[0], states[1] = address(out_0) + row * row_0, address(out_1) + row * row_1
        states[2], states[3] = address(out_2) + row * row_2, address(out_3) + row * row_3
        states[4], states[5] = address(out_4) + row * row_4, address(out_5) + row * row_5
        states[6], states[7] = address(out_6) + row * row_6, address(out_7) + row * row_7
        heads = cuda.local.array(max_states, int64)
        heads[0], heads[1], heads[2], heads[3] = head_0, head_1, head_2, head_3
        heads[4], heads[5], heads[6], heads[7] = head_4, head_5, head_6, head_7
        state_lses = cuda.local.array(max_states, int64)
        state_lses[0], state_lses[1] = address(lse_0) + row * lse_row_0, address(lse_1) + row * lse_row_1
        state_lses[2], state_lses[3] = address(lse_2) + row * lse_row_2, address(lse_3) + row * lse_row_3
        state_lses[4], state_lses[5] = address(lse_4) + row * lse_row_4, address(lse_5) + row * lse_row_5
        state_lses[6], state_lses[7] = address(lse_6) + row * lse_row_6, address(lse_7) + row * lse_row_7
        lses = cuda.local.array(max_states, float32)
        merged = cuda.local.array(num_elements, float32)
        values = cuda.local.array(num_elements, float32)
        head = int64(cuda.blockIdx.y)
        while head < num_heads:
            for i in range(num_states):
                lses[i] = bits_float(load_4(state_lses[i] + 4 * head))
            top = lses[0]
            for i in range(1, num_states):
                top = larger(top, lses[i])
            total = float32(0)
            for j in range(num_elements):
                merged[j] = float32(0)
            for i in range(num_states):
                weight = weight_of_lse(lses[i], top)
                total = float32(total + weight)
                if i == 0:
                    load_first(values, states[i] + head * heads[i], vector)
                else:
                    load_other(values, states[i] + head * heads[i], vector)
                add(merged, weight, values, int64(0))
            at = row * num_heads + head
            if vector == 0:
                lse[at] = lse_of_lses(top, total)
            divisor = float32(1) if total == float32(0) else total
            for j in range(num_elements):
                values[j] = float32(merged[j] / divisor)
            store(address(out) + (at * head_dim + vector * num_elements) * out_bytes, values)
            head += int64(cuda.gridDim.y)

    bytes_, floats = types.CPointer(types.uint8), types.CPointer(float32)
    parameters = [bytes_] * MAX_STATES + [floats] * MAX_STATES + [bytes_, floats] + [int64] * (2 + 3 * MAX_STATES)
    return KernelSource(merge_states, types.void(*parameters), NUM_THREADS)
