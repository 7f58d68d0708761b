"""Device functions of a warpgroup, which is four warps: asynchronous products (wgmma) of compute capability 9.0.

A kernel that uses them `is_specific`. All threads of the warpgroup call them, with the same descriptors. A descriptor
is an int64 that says where a matrix lies in shared memory, in rows of 128 bytes whose chunks of 16 bytes are swizzled:
chunk c of row r lies at ``c ^ (r & 7)``, and every 8 rows begin at a multiple of 1024 bytes (PTX ISA, "Matrix
Descriptor Format").

Accumulators pass through the assembly that waits for them, or LLVM would read them earlier. A chain of products is one
piece of assembly, so that nothing comes between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir

from ..language import types
from .declare import F32, I64, VOID, declare, emit_asm, float32, int64, parts_of, uint32
from .thread import element
from .warp import warp_wide

ROW, GROUP = 128, 1024  # bytes of a row, and of 8 of them
UNIT = 16  # bytes: descriptors count in these
_SWIZZLE_128 = 1 << 62


def descriptor_bits(leading: int, stride: int) -> int:
    """A descriptor without its start.

    Parameters
    ----------
    leading : int
        For matrices whose rows run along k (MN-major): bytes to the next 64 elements. Otherwise it has no meaning.
    stride : int
        Bytes to the next 8 rows.
    """
    return _SWIZZLE_128 | stride // UNIT << 32 | leading // UNIT << 16


@lru_cache
def descriptor(bits: int) -> Any:
    """The device function (address) -> the descriptor that starts at a shared address, a multiple of 16."""

    def emit(builder: Any, where: Any) -> Any:
        start = builder.and_(builder.lshr(where, ir.IntType(32)(4)), ir.IntType(32)(0x3FFF))
        return builder.or_(builder.zext(start, I64), I64(bits))

    return declare("descriptor", "The descriptor of a matrix at a shared address.", int64, [uint32], emit)


fence_proxy = declare(
    "fence_proxy",
    "Make what this thread has stored in shared memory visible to products, after a barrier to those of all threads.",
    types.void,
    [],
    lambda builder: emit_asm(builder, VOID, "fence.proxy.async.shared::cta;", "~{memory}", [], side_effect=True),
)


def _barrier(name: str, doc: str, instruction: str, num_threads: int) -> Any:
    def emit(builder: Any, number: Any) -> None:
        warp_wide(builder, VOID, f"{instruction} $0, {num_threads};", "r,~{memory}", [number])

    return declare(name, doc, types.void, [uint32], emit)


@lru_cache
def wait_at(num_threads: int) -> Any:
    """The device function ``wait_at(number)``: wait at the thread block's barrier of this number, 1 to 15.

    It opens when `num_threads` threads have come there, those that arrive and do not wait among them.
    """
    return _barrier("wait_at", "Wait at a barrier.", "bar.sync", num_threads)


@lru_cache
def arrive_at(num_threads: int) -> Any:
    """The device function ``arrive_at(number)``: as `wait_at`, but the thread goes on at once."""
    return _barrier("arrive_at", "Arrive at a barrier.", "bar.arrive", num_threads)


def _chain(kind: str, n: int, products: Sequence[str]) -> str:
    """The assembly of products, each given with its operands from B on; "yes" and "no" say whether it adds."""
    lines = ["{", ".reg .b64 a, b;", ".reg .pred yes, no;", "setp.eq.b32 yes, 0, 0;", "setp.ne.b32 no, 0, 0;"]
    d = ",".join(f"${i}" for i in range(n // 2))
    lines.append("wgmma.fence.sync.aligned;")
    for product in products:
        before, operands = product.split("|")
        lines.append(before)
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{d}}}, {operands};")
    return "\n\t".join([*lines, "wgmma.commit_group.sync.aligned;", "}"])


def _store(builder: Any, array: Any, struct: Any, count: int) -> None:
    for i, value in enumerate(parts_of(builder, struct, count)):
        builder.store(value, element(builder, array, I64(0), i))


def _load(builder: Any, array: Any, count: int) -> list[Any]:
    return [builder.load(element(builder, array, I64(0), i)) for i in range(count)]


@lru_cache
def begin_product(kind: str, n: int, a_steps: tuple[int, ...], b_steps: tuple[int, ...]) -> Any:
    """The device function ``begin_product(d, a, b)``: start D = A B, of 64 rows and n columns.

    Both A and B are in shared memory.

    Parameters
    ----------
    kind : str
        "f16" or "bf16".
    n : int
    a_steps, b_steps : tuple of int
        Bytes from the matrices that the descriptors name to those of each step of 16 along k. Rows of both run along k.
    """
    count = n // 2
    struct = ir.LiteralStructType([F32] * count)
    text = _chain(
        kind,
        n,
        [
            f"add.s64 a, ${count}, {x // UNIT}; add.s64 b, ${count + 1}, {y // UNIT};"
            f"|a, b, {'yes' if i else 'no'}, 1, 1, 0, 0"
            for i, (x, y) in enumerate(zip(a_steps, b_steps, strict=True))
        ],
    )

    def emit(builder: Any, d: Any, a: Any, b: Any) -> None:
        _store(builder, d, warp_wide(builder, struct, text, "=f," * count + "l,l,~{memory}", [a, b]), count)

    return declare("begin_product", "Start D = A B.", types.void, [types.CPointer(float32), int64, int64], emit)


@lru_cache
def begin_sum(kind: str, n: int, b_steps: tuple[int, ...]) -> Any:
    """The device function ``begin_sum(d, a, b)``: start D += A B, with A in registers: 4 words for each step.

    As `begin_product`, but rows of B run along n: the matrix is transposed.
    """
    count, words = n // 2, 4 * len(b_steps)
    struct = ir.LiteralStructType([F32] * count)
    first = 2 * count  # after the accumulators, and after those that they were
    fragments = [",".join(f"${first + 4 * i + j}" for j in range(4)) for i in range(len(b_steps))]
    text = _chain(
        kind,
        n,
        [
            f"add.s64 b, ${first + words}, {y // UNIT};|{{{a}}}, b, yes, 1, 1, 1"
            for a, y in zip(fragments, b_steps, strict=True)
        ],
    )
    constraints = "=f," * count + "".join(f"{i}," for i in range(count)) + "r," * words + "l,~{memory}"

    def emit(builder: Any, d: Any, a: Any, b: Any) -> None:
        operands = [*_load(builder, d, count), *_load(builder, a, words), b]
        _store(builder, d, warp_wide(builder, struct, text, constraints, operands), count)

    arguments = [types.CPointer(float32), types.CPointer(uint32), int64]
    return declare("begin_sum", "Start D += A B.", types.void, arguments, emit)


@lru_cache
def wait_for(n: int, keep: int) -> Any:
    """The device function ``wait_for(d)``: wait until all but the last `keep` products have ended, D's among them."""
    count = n // 2
    struct = ir.LiteralStructType([F32] * count)
    constraints = "=f," * count + "".join(f"{i}," for i in range(count)) + "~{memory}"
    text = f"wgmma.wait_group.sync.aligned {keep};"

    def emit(builder: Any, d: Any) -> None:
        _store(builder, d, warp_wide(builder, struct, text, constraints, _load(builder, d, count)), count)

    return declare("wait_for", "Wait for a product.", types.void, [types.CPointer(float32)], emit)
