"""Which lane has what in the split kernel, for draw_split.py: read off the kernel's own steps, on the emulator.

A probe calls the device functions that fill fragments, on rows whose every element says where it is from.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagedkv.compiler.compile import compile_kernel
from pagedkv.emulator import Device, Module
from pagedkv.emulator.machine.matrix import _fragments
from pagedkv.kernels.device.intrinsics.thread import address, local_array, shared_address
from pagedkv.kernels.device.intrinsics.warp import load_shared_words
from pagedkv.kernels.device.language import cuda, types, uint32
from pagedkv.kernels.device.sizes import WARP_SIZE
from pagedkv.kernels.device.source import KernelSource, device_function
from pagedkv.kernels.split.arguments import SplitQuery
from pagedkv.kernels.split.config import SplitConfig
from pagedkv.kernels.split.lanes import make_lanes, make_row_lookup
from pagedkv.kernels.split.shape import TILE, TensorShape
from pagedkv.kernels.split.tensor_cores.fragments import key_token, make_products, make_rows
from pagedkv.kernels.split.tensor_cores.query import make_stage_query

CONFIG = SplitConfig(head_dim=128, group_size=8, block_size=16, q_kind="float16", kv_kind="float16")
SHAPE = TensorShape(CONFIG)
Element = tuple[int, int]  # (token or head, dim)


class Probe(NamedTuple):
    """What tells one version of this file from another, where compiled kernels are kept."""

    version: str


def make_probe(_config: Probe) -> KernelSource:
    """A kernel of one warp: fragments of vector 0 of a tile, as 16 words of V, 8 of K and 4 of Q for each lane."""
    WORDS, STEPS, ROW_VECTORS = SHAPE.v_vector // 4, SHAPE.k_steps, CONFIG.row_bytes // 16
    NUM_BUFFERED, NUM_Q, NUM_WORDS = SHAPE.buffer, SHAPE.q_bytes // 4, 16 + 8 + 4
    GROUP_SIZE, ROW_BYTES, V_VECTOR = CONFIG.group_size, CONFIG.row_bytes, SHAPE.v_vector
    row_address, products = make_row_lookup(CONFIG, make_lanes(CONFIG).fetch).row_address, make_products(SHAPE)
    rows, stage_query = make_rows(SHAPE, row_address), make_stage_query(SHAPE)

    @device_function
    def put(out, at, word):
        out[at] = word

    def probe(q, k, v, out):
        lane = uint32(cuda.threadIdx.x)
        g, t = uint32(lane >> 2), uint32(lane & 3)
        at, offset = lane * NUM_WORDS, uint32((lane & (TILE - 1)) * ROW_VECTORS)
        buffer, factors = local_array(NUM_BUFFERED, types.uint32), local_array(1, types.float32)
        q_shared = uint32(shared_address(cuda.shared.array(NUM_Q, types.uint32, alignment=16)) + lane * 16)
        v_first = g * V_VECTOR
        rows.load_values(0, buffer, 0, address(v) + v_first, offset, ROW_BYTES - v_first, t)
        for j in range(WORDS):
            a = products.value_fragment(buffer[j], buffer[j + WORDS], buffer[j + 2 * WORDS], buffer[j + 3 * WORDS], 0)
            for i in range(4):
                put(out, at + 4 * j + i, a[i])
        rows.load_keys(0, buffer, 0, address(k) + t * 16, offset, key_token(g), t)
        for n in range(2):
            for step in range(STEPS):
                b = products.key_fragment(buffer, 4 * n, step)
                put(out, at + 16 + 4 * n + 2 * step, b[0])
                put(out, at + 16 + 4 * n + 2 * step + 1, b[1])
        query = SplitQuery(address(q), ROW_BYTES, uint32(GROUP_SIZE), uint32(0))
        stage_query(q_shared, factors, query, g, t, uint32(0), False)
        a = load_shared_words(q_shared)  # what this lane has stored
        for i in range(4):
            put(out, at + 24 + i, a[i])

    pointers = (types.CPointer(types.uint8),) * 3
    return KernelSource(probe, types.void(*pointers, types.CPointer(types.uint32)), WARP_SIZE)


@functools.cache
def fragments() -> np.ndarray:
    """(32 lanes, 28 words, 2 halves, 2): the (row, dim) that each half of a word holds."""
    elements = np.arange(TILE * CONFIG.head_dim, dtype=np.float16)  # exact below 2048
    kernel = compile_kernel(make_probe, Probe(hashlib.sha256(Path(__file__).read_bytes()).hexdigest()))
    device = Device()
    rows = [device.upload(elements, name) for name in "qkv"]
    out = device.alloc((WARP_SIZE, 28), np.uint32, "out")
    device.launch(Module(kernel.ptx).entry(), 1, kernel.num_threads, [*rows, out])
    codes = out.get().view(np.float16).astype(int).reshape(WARP_SIZE, 28, 2)
    return np.stack(np.divmod(codes, CONFIG.head_dim), -1)


def value(lane: int, j: int, register: int) -> list[Element]:
    """Both halves of register a0..a3 of V's fragment j."""
    return [(int(row), int(dim)) for row, dim in fragments()[lane, 4 * j + register]]


def key(lane: int, n: int, step: int, register: int) -> list[Element]:
    """Both halves of register b0 or b1 of K: of the lane's first row (n = 0) or second, in a k16 step."""
    return [(int(row), int(dim)) for row, dim in fragments()[lane, 16 + 4 * n + 2 * step + register]]


def query(lane: int, register: int) -> list[Element]:
    """Both halves of register a0..a3 of Q's first fragment."""
    return [(int(row), int(dim)) for row, dim in fragments()[lane, 24 + register]]


def place_in_a(lane: int, register: int) -> tuple[int, list[int]]:
    """Row of an mma's first operand, and the two columns, that register a0..a3 of a lane has."""
    at_a, _, _ = _fragments(16, 2)
    (row, first), (_, second) = np.argwhere(at_a // 2 == register * WARP_SIZE + lane).tolist()
    return row, [first, second]


def place_in_c(lane: int, register: int) -> tuple[int, int]:
    """Row and column of an mma's result that accumulator c0..c3 of a lane has, as PTX lays them down."""
    _, _, at_c = _fragments(16, 2)
    return divmod(int(np.flatnonzero(at_c == register * WARP_SIZE + lane)[0]), 8)


def columns_of_keys(n: int) -> list[int]:
    """The tokens that columns 0..7 of a product of S stand for."""
    return [key(4 * column, n, 0, 0)[0][0] for column in range(8)]


def logits_of(lane: int) -> list[Element]:
    """(head, token) of the logits of a lane, in the order of its accumulators: c0, c1 of both products."""
    places = [(n, *place_in_c(lane, register)) for n in range(2) for register in range(2)]
    return [(row, columns_of_keys(n)[column]) for n, row, column in places]


def rows_of_values(j: int) -> list[int]:
    """The dims that rows 0..15 of a product of O^T stand for."""
    return [value(4 * (row % 8), j, row // 8)[0][1] for row in range(16)]
