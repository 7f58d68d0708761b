"""LLVM instructions on vectors of float32: what the steps of attention are written in.

A vector lives in SIMD registers. LLVM splits one that is wider than the machine's, so the same code runs on AVX2,
AVX-512 and NEON, and every sum is taken in the same order on all of them. Memory is named by an address, an integer in
bytes. Nothing checks it: kernels stay within their bounds themselves.

What this machine's processor can do, as numba sees it, decides which instructions compute a sum, never in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from ....layouts import FORMATS

Value = Any  # of llvmlite, which has no types

BYTE, SHORT, INT32, INT64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF, FLOAT = ir.HalfType(), ir.FloatType()
TILE = 64  # tokens whose softmax is taken at once
STEP = 8  # tokens whose rows are taken at once
VALUE_STEP = 16  # tokens of int8 values that share the factor of their weights
LANES = 16  # float32 in a vector
FLOAT_BYTES = 4
INT_BYTES = 8
CACHE_LINE = 64

ELEMENT_BYTES = {name: kv_format.stored.itemsize for name, kv_format in FORMATS.items()} | {"int16": 2}
LOG2E = 1.4426950408889634
ROUNDER = 1.5 * 2**23  # x + ROUNDER is an integer for |x| < 2**22
LARGEST_SHORT = 32767
LEAST = 2.0**-110  # of what is rounded to int16 against its largest: LARGEST_SHORT / LEAST is finite
LN2_HIGH = 0.693359375  # ln 2 in two parts, so that n * LN2_HIGH is exact (Cody and Waite)
LN2_LOW = -2.12194440054690583e-4
EXP_POLYNOMIAL = (  # exp(r) on |r| <= ln(2) / 2, highest power first (Cephes expf)
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
    1.0,
    1.0,
)


def _has(feature: str) -> bool:
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{feature}" in features.split(",")


def has_halves() -> bool:
    """Whether one instruction converts float16 and float32: on all of AArch64, and on x86 with F16C."""
    return _has("f16c") or cpu_target.target_context.codegen().magic_tuple()[0].startswith(("aarch64", "arm64"))


def has_byte_permutes() -> bool:
    """Whether one instruction picks any 64 bytes out of 128 (AVX-512 VBMI)."""
    return _has("avx512vbmi")


def prefetches_into_l1() -> bool:
    """Whether prefetching into L1 pays: on AMD's Zen from Zen 5 on, which waits for lines that are in L2 alone.

    Others have too few miss buffers of L1.
    """
    name = cpu_target.target_context.codegen().magic_tuple()[1]
    return name.startswith("znver") and name not in ("znver1", "znver2", "znver3", "znver4")


def num_accumulators() -> int:
    """Vectors of 16 float32 that stay in registers beside the operands: 16 of AVX-512's 32, or 4 elsewhere.

    Each of those 4 takes two registers of AVX2's 16, or four of NEON's 32.
    """
    return 16 if _has("avx512f") else 4


def vector(lanes: int, element: Any = FLOAT) -> Any:
    """The type of a vector."""
    return ir.VectorType(element, lanes)


class Code:
    """Emits instructions with a builder of llvmlite."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    # ---- memory

    def load(self, address: Value, type_: Any, offset: int = 0) -> Value:
        """Load from an address, plus an offset in bytes; aligned to an element."""
        return self.builder.load(self._pointer(address, type_, offset), align=_element_bytes(type_))

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        """Store a value at an address, plus an offset in bytes."""
        self.builder.store(value, self._pointer(address, value.type, offset), align=_element_bytes(value.type))

    def prefetch(self, address: Value, offset: int = 0) -> None:
        """Prefetch the cache line at an address into L1 or L2, whichever the machine has room in; never faults."""
        pointer = self._pointer(address, BYTE, offset)
        read, keep, data = INT32(0), INT32(3 if prefetches_into_l1() else 2), INT32(1)
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, read, keep, data])

    def _pointer(self, address: Value, type_: Any, offset: int) -> Value:
        # A separate offset becomes part of an instruction's operand, where a sum would take an addition in each turn.
        pointer = self.builder.inttoptr(address, ir.PointerType(BYTE))
        if offset:
            pointer = self.builder.gep(pointer, [INT64(offset)], source_etype=BYTE)
        return self.builder.bitcast(pointer, ir.PointerType(type_))

    # ---- integers

    def plus(self, x: Value, number: int) -> Value:
        """x + number."""
        return self.builder.add(x, x.type(number)) if number else x

    def smaller(self, x: Value, y: Value) -> Value:
        """The smaller one of two integers."""
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def greater(self, x: Value, y: Value) -> Value:
        """The greater one of two integers."""
        return self.builder.select(self.builder.icmp_signed(">", x, y), x, y)

    def times(self, x: Value, number: int) -> Value:
        """x * number."""
        return self.builder.mul(x, x.type(number))

    def rows(self, first: Value, stride: Value, count: int) -> list[Value]:
        """`count` addresses, a stride apart."""
        found = [first]
        for _ in range(count - 1):
            found.append(self.builder.add(found[-1], stride))
        return found

    # ---- vectors

    def constant(self, number: float, lanes: int, element: Any = FLOAT) -> Value:
        """A vector with the same number in every lane."""
        return ir.Constant(vector(lanes, element), [number] * lanes)

    def numbers(self, numbers: Sequence[int]) -> Value:
        """A vector of constant int32."""
        return ir.Constant(vector(len(numbers), INT32), list(numbers))

    def splat(self, x: Value, lanes: int) -> Value:
        """A vector with x in every lane."""
        undefined = ir.Constant(vector(lanes, x.type), ir.Undefined)
        return self.shuffle(self.builder.insert_element(undefined, x, INT32(0)), [0] * lanes)

    def pair(self, x: Value, y: Value) -> Value:
        """A vector of two numbers."""
        return self.builder.insert_element(self.splat(x, 2), y, INT32(1))

    def joined(self, vectors: Sequence[Value]) -> Value:
        """Vectors one after the other, a power of two of them, as one vector."""
        while len(vectors) > 1:
            lanes = range(2 * vectors[0].type.count)
            vectors = [self.shuffle(x, lanes, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def lane(self, x: Value, lane: int) -> Value:
        """The number in a lane of x."""
        return self.builder.extract_element(x, INT32(lane))

    def repeat(self, x: Value, lanes: int) -> Value:
        """A vector with the lanes of x again and again."""
        count = x.type.count
        return x if count == lanes else self.shuffle(x, [i % count for i in range(lanes)])

    def shuffle(self, x: Value, lanes: Sequence[int], y: Value | None = None) -> Value:
        """The named lanes of x, or of x followed by y."""
        mask = ir.Constant(vector(len(lanes), INT32), list(lanes))
        return self.builder.shuffle_vector(x, x if y is None else y, mask)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z, rounded once."""
        return self.call(f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])

    def larger(self, x: Value, y: Value) -> Value:
        """The larger one, lane by lane; y where one of them is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def add_products(self, x: Value, y: Value, sums: Value) -> Value:
        """Multiply the two int16 in each int32 of x by those of y, and add both products to an int32 of `sums`.

        All sums are exact, so any instructions give the same bits. LLVM makes one of VNNI of the product and the sum.
        """
        builder, lanes = self.builder, x.type.count
        at_once = 16 if _has("avx512bw") else 8 if _has("avx2") else 0
        halves = [builder.bitcast(value, vector(2 * lanes, SHORT)) for value in (x, y)]
        if not at_once:
            products = builder.mul(*(builder.sext(half, vector(2 * lanes, INT32)) for half in halves))
            pairs = [self.shuffle(products, range(first, 2 * lanes, 2)) for first in (0, 1)]
            return builder.add(sums, builder.add(*pairs))
        at_once = min(at_once, lanes)
        name = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}[at_once]
        parts = [
            self.call(
                f"llvm.x86.{name}",
                vector(at_once, INT32),
                [self.shuffle(half, range(2 * first, 2 * (first + at_once))) for half in halves],
            )
            for first in range(0, lanes, at_once)
        ]
        return builder.add(sums, self.joined(parts))

    def magnitudes(self, x: Value) -> Value:
        """The bits of |x| as int32, which are larger for a larger number, and largest for NaN."""
        lanes = x.type.count
        bits = self.builder.bitcast(x, vector(lanes, INT32))
        return self.builder.and_(bits, self.constant(0x7FFFFFFF, lanes, INT32))

    def shares(self, largest: Value) -> tuple[Value, Value]:
        """What numbers are multiplied by to become int16, and what int16 are multiplied by, by magnitudes.

        Of numbers that are not finite the second one is NaN or infinite.
        """
        builder, lanes = self.builder, largest.type.count
        least = builder.bitcast(self.constant(LEAST, lanes), largest.type)
        most = builder.bitcast(self.greater(largest, least), vector(lanes))
        by, unit = (self.constant(number, lanes) for number in (LARGEST_SHORT, 1 / LARGEST_SHORT))
        return builder.fdiv(by, most), builder.fmul(most, unit)

    def shorts(self, x: Value) -> Value:
        """x rounded to int16, to nearest even, in the lower halves of int32; the upper halves are anything."""
        rounded = self.builder.fadd(x, self.constant(ROUNDER, x.type.count))
        return self.builder.bitcast(rounded, vector(x.type.count, INT32))

    def halve(self, x: Value, combine: Callable[[Value, Value], Value], lanes: int) -> Value:
        """Combine the lower and the upper half of x until `lanes` lanes are left."""
        while (half := x.type.count // 2) >= lanes:
            x = combine(self.shuffle(x, range(half)), self.shuffle(x, range(half, 2 * half)))
        return x

    def exp(self, x: Value) -> Value:
        """exp(x) for x <= 0 to about one unit in the last place; from -87.3 down exactly 0, NaN stays NaN."""
        builder, lanes = self.builder, x.type.count

        def number(value: float) -> Value:
            return self.constant(value, lanes)

        # The addition rounds to an integer, which is then in the lowest bits.
        normal = builder.fcmp_unordered(">", x, number(-87.3))
        clamped = builder.select(normal, x, number(-87.3))
        shifted = builder.fadd(builder.fmul(clamped, number(LOG2E)), number(ROUNDER))
        n = builder.fsub(shifted, number(ROUNDER))
        r = self.fma(n, number(-LN2_LOW), self.fma(n, number(-LN2_HIGH), clamped))
        y = number(EXP_POLYNOMIAL[0])
        for coefficient in EXP_POLYNOMIAL[1:]:
            y = self.fma(y, r, number(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, vector(lanes, INT32)), self.constant(23, lanes, INT32))
        scale = builder.bitcast(builder.add(exponent, self.constant(127 << 23, lanes, INT32)), x.type)
        return builder.select(normal, builder.fmul(y, scale), number(0.0))

    # ---- branches and loops

    def repeatedly(self, count: Value, turn: Callable[[Value], None]) -> None:
        """``turn(i)`` for i = 0 .. count - 1."""

        def without_values(i: Value, _: list[Value]) -> list[Value]:
            turn(i)
            return []

        self.loop(count, [], without_values)

    def loop(
        self, count: Value, values: Sequence[Value], turn: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """The values after ``values = turn(i, values)`` for i = 0 .. count - 1; `count` may be 0."""
        builder, before = self.builder, self.builder.block
        body, after = builder.append_basic_block("turn"), builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed(">", count, count.type(0)), body, after)
        builder.position_at_end(body)
        i, old = builder.phi(count.type), [builder.phi(value.type) for value in values]
        new = turn(i, list(old))
        following, end = builder.add(i, count.type(1)), builder.block
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)
        results = [builder.phi(value.type) for value in values]
        for phi, first, last in zip((i, *old), (count.type(0), *values), (following, *new), strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, end)
        for phi, first, last in zip(results, values, new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, end)
        return results

    def call(self, name: str, result: Any, arguments: list[Value]) -> Value:
        """The result of a function, an intrinsic of LLVM for example."""
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), arguments)


def _element_bytes(type_: Any) -> int:
    element = type_.element if isinstance(type_, ir.VectorType) else type_
    return {HALF: 2, FLOAT: 4}.get(element) or element.width // 8


def step(emit: Callable[..., None]) -> Any:
    """A function that numba's code calls and that returns nothing; ``emit(code, *arguments)`` emits its instructions.

    An argument is an integer, or a NamedTuple of integers.
    """

    @intrinsic
    def call(typing: Any, *arguments: Any) -> Any:
        kinds = [_int64_like(argument) for argument in arguments]

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(Code(builder), *map(partial(_unpacked, builder), kinds, cgutils.unpack_tuple(builder, values[0])))
            return context.get_dummy_value()

        return types.void(types.containers.BaseTuple.from_types(kinds)), codegen

    return call


def _int64_like(argument: Any) -> Any:
    """The type of an argument of a step when all its integers are int64."""
    if isinstance(argument, types.containers.BaseNamedTuple):
        return types.containers.NamedUniTuple(types.int64, len(argument), argument.instance_class)
    return types.int64


def _unpacked(builder: Any, kind: Any, value: Value) -> Any:
    if isinstance(kind, types.containers.BaseNamedTuple):
        return kind.instance_class(*cgutils.unpack_tuple(builder, value))
    return value
