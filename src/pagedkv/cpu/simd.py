"""Vectors of float32 as values inside numba functions: the only file of the CPU backend that builds LLVM IR.

A `Vector(lanes)` lives in SIMD registers. LLVM splits a vector that is wider than the machine's registers, so the
same kernel runs on SSE, AVX2, AVX-512 and NEON, and the order of every sum is the same on all of them.

Memory is named by an address (an integer, in bytes) and loaded without bounds checks: the kernels own their bounds.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
LOG2E = 1.4426950408889634
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


class Vector(types.Type):
    """The numba type of `lanes` float32 values held in registers."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Vector({lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(FLOAT, fe_type.lanes))


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(pointee))


def _constant(lanes: int, element: Any, value: float) -> Any:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT32(0))
    mask = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call the LLVM intrinsic `name` on vectors, overloaded on the result's type."""
    overloaded = f"{name}.v{result.count}f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [arg.type for arg in args]), overloaded
    )
    return builder.call(function, args)


def _lanes(literal: Any) -> int | None:
    return literal.literal_value if isinstance(literal, types.IntegerLiteral) else None


def _widen_bfloat16(builder: Any, raw: Any, lanes: int) -> Any:
    bits = builder.shl(builder.zext(raw, ir.VectorType(INT32, lanes)), _constant(lanes, INT32, 16))
    return builder.bitcast(bits, ir.VectorType(FLOAT, lanes))


def _widen_half(builder: Any, raw: Any, lanes: int) -> Any:
    half = builder.bitcast(raw, ir.VectorType(ir.HalfType(), lanes))
    return builder.fpext(half, ir.VectorType(FLOAT, lanes))


def _widen_e5m2(builder: Any, raw: Any, lanes: int) -> Any:
    short = ir.IntType(16)
    bits = builder.shl(builder.zext(raw, ir.VectorType(short, lanes)), _constant(lanes, short, 8))
    return _widen_half(builder, bits, lanes)


def _widen_e4m3(builder: Any, raw: Any, lanes: int) -> Any:
    # A float16 with the exponent and mantissa of a code is 2**-8 times its value, subnormals included. Sign extension
    # and a shift move sign and magnitude into place; the mask clears the extra copy of the sign.
    byte, short = ir.IntType(8), ir.IntType(16)
    magnitude = builder.and_(raw, _constant(lanes, byte, 0x7F))
    is_nan = builder.icmp_unsigned("==", magnitude, _constant(lanes, byte, 0x7F))
    shifted = builder.shl(builder.sext(raw, ir.VectorType(short, lanes)), _constant(lanes, short, 7))
    bits = builder.and_(shifted, _constant(lanes, short, 0xBFFF))
    bits = builder.select(is_nan, _constant(lanes, short, 0x7E00), bits)
    return builder.fmul(_widen_half(builder, bits, lanes), _constant(lanes, FLOAT, 256.0))


ELEMENT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8}
_WIDEN: dict[str, Callable[[Any, Any, int], Any]] = {
    "float16": _widen_half,
    "bfloat16": _widen_bfloat16,
    "fp8_e4m3": _widen_e4m3,
    "fp8_e5m2": _widen_e5m2,
}


@intrinsic(prefer_literal=True)
def load(typingctx: Any, address: Any, kind: Any, lanes: Any) -> Any:
    """Load `lanes` consecutive elements of a cache dtype, widened to a Vector of float32."""
    count = _lanes(lanes)
    if count is None or not isinstance(kind, types.StringLiteral):  # type: ignore[attr-defined]
        return None
    name = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ELEMENT_BITS[name]
        element = FLOAT if name == "float32" else ir.IntType(bits)
        pointer = _pointer(builder, args[0], ir.VectorType(element, count))
        raw = builder.load(pointer, align=bits // 8)
        return raw if name == "float32" else _WIDEN[name](builder, raw, count)

    return Vector(count)(types.intp, kind, lanes), codegen


@intrinsic
def store(typingctx: Any, address: Any, vector: Any) -> Any:
    """Store a Vector as consecutive float32 values."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], args[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), codegen


@intrinsic(prefer_literal=True)
def splat(typingctx: Any, value: Any, lanes: Any) -> Any:
    """A Vector with `value` in every lane."""
    count = _lanes(lanes)
    if count is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], count)

    return Vector(count)(types.float32, lanes), codegen


@intrinsic(prefer_literal=True)
def broadcast(typingctx: Any, address: Any, lanes: Any) -> Any:
    """A Vector with the float32 at `address` in every lane."""
    count = _lanes(lanes)
    if count is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, builder.load(_pointer(builder, args[0], FLOAT), align=4), count)

    return Vector(count)(types.intp, lanes), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.fma", args[0].type, list(args))

    return a(a, b, c), codegen


@intrinsic
def multiply(typingctx: Any, a: Any, b: Any) -> Any:
    """a * b"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(args[0], args[1])

    return a(a, b), codegen


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    """a + b"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1])

    return a(a, b), codegen


def _halve(builder: Any, value: Any, combine: Callable[[Any, Any], Any], lanes: int) -> Any:
    """Combine the lower and the upper half of `value` until `lanes` lanes are left."""
    while value.type.count > lanes:
        half = value.type.count // 2
        mask = ir.VectorType(INT32, half)
        lower, upper = (
            builder.shuffle_vector(value, value, ir.Constant(mask, list(range(start, start + half))))
            for start in (0, half)
        )
        value = combine(lower, upper)
    return value


@intrinsic
def total(typingctx: Any, vector: Any) -> Any:
    """The sum of all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_halve(builder, args[0], builder.fadd, 1), INT32(0))

    return types.float32(vector), codegen


@intrinsic
def maximum(typingctx: Any, vector: Any) -> Any:
    """The largest lane that is not NaN (NaN when all are)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return _call(builder, "llvm.maxnum", a.type, [a, b])

        return builder.extract_element(_halve(builder, args[0], larger, 1), INT32(0))

    return types.float32(vector), codegen


@intrinsic
def keep(typingctx: Any, vector: Any, start: Any, stop: Any, otherwise: Any) -> Any:
    """The lanes start .. stop of a Vector, and `otherwise` in the others."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = vector.lanes
        positions = ir.Constant(ir.VectorType(INT32, lanes), list(range(lanes)))
        first, last = (_splat(builder, builder.trunc(bound, INT32), lanes) for bound in args[1:3])
        inside = builder.and_(builder.icmp_signed(">=", positions, first), builder.icmp_signed("<", positions, last))
        return builder.select(inside, args[0], _splat(builder, args[3], lanes))

    return vector(vector, types.int64, types.int64, types.float32), codegen


@intrinsic
def totals(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """The sums of the lanes of eight Vectors, as a Vector of eight.

    Neighbouring lanes are added until each vector is one lane: four times the work of one `total`, not eight.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = a.lanes
        even, odd = (ir.Constant(ir.VectorType(INT32, lanes), list(range(parity, 2 * lanes, 2))) for parity in (0, 1))
        vectors = list(args)
        while len(vectors) > 1:
            vectors = [
                builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd))
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        (result,) = vectors
        while result.type.count > len(args):
            half = result.type.count // 2
            even, odd = (ir.Constant(ir.VectorType(INT32, half), list(range(parity, 2 * half, 2))) for parity in (0, 1))
            result = builder.fadd(
                builder.shuffle_vector(result, result, even), builder.shuffle_vector(result, result, odd)
            )
        return result

    return Vector(8)(a, b, c, d, e, f, g, h), codegen


@intrinsic(prefer_literal=True)
def part(typingctx: Any, vector: Any, first: Any, lanes: Any) -> Any:
    """The `lanes` lanes of a Vector from lane `first` on."""
    begin, count = _lanes(first), _lanes(lanes)
    if begin is None or count is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = ir.Constant(ir.VectorType(INT32, count), list(range(begin, begin + count)))
        return builder.shuffle_vector(args[0], args[0], mask)

    return Vector(count)(vector, first, lanes), codegen


@intrinsic
def exp(typingctx: Any, vector: Any) -> Any:
    """exp(x) for x <= 0 to about one unit in the last place; below -87.3 exactly 0, NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, lanes = args[0], vector.lanes
        floats, ints = x.type, ir.VectorType(INT32, lanes)

        def number(value: float) -> Any:
            return _constant(lanes, FLOAT, value)

        normal = builder.fcmp_ordered(">", x, number(-87.3))
        clamped = builder.select(normal, x, number(-87.3))
        n = _call(builder, "llvm.rint", floats, [builder.fmul(clamped, number(LOG2E))])
        r = _call(builder, "llvm.fma", floats, [n, number(-LN2_HIGH), clamped])
        r = _call(builder, "llvm.fma", floats, [n, number(-LN2_LOW), r])
        y = number(EXP_POLYNOMIAL[0])
        for coefficient in EXP_POLYNOMIAL[1:]:
            y = _call(builder, "llvm.fma", floats, [y, r, number(coefficient)])
        exponent = builder.shl(
            builder.add(builder.fptosi(n, ints), _constant(lanes, INT32, 127)), _constant(lanes, INT32, 23)
        )
        y = builder.fmul(y, builder.bitcast(exponent, floats))
        y = builder.select(normal, y, number(0.0))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, y)

    return vector(vector), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at `address`; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.PointerType(ir.IntType(8))
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32]), "llvm.prefetch.p0"
        )
        read, keep, data = INT32(0), INT32(3), INT32(1)
        builder.call(function, [builder.inttoptr(args[0], byte), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


def _scalar_access(element: Any, numba_type: Any) -> tuple[Any, Any]:
    """The functions ``get(address)`` and ``put(address, value)`` of one scalar type."""

    @intrinsic
    def get(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], element))

        return numba_type(types.intp), codegen

    @intrinsic
    def put(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0], element))
            return context.get_dummy_value()

        return types.void(types.intp, numba_type), codegen

    return get, put


get_float, put_float = _scalar_access(FLOAT, types.float32)
get_int32, _ = _scalar_access(INT32, types.int32)
get_int, put_int = _scalar_access(ir.IntType(64), types.int64)


@intrinsic
def fetch_add(typingctx: Any, address: Any) -> Any:
    """Atomically add one to the int64 at `address` and return its old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int64 = ir.IntType(64)
        return builder.atomic_rmw("add", _pointer(builder, args[0], int64), int64(1), "acq_rel")

    return types.int64(types.intp), codegen
