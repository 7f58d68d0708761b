"""Device functions that are one instruction or a few; this file and tensor_intrinsics.py alone know llvmlite.

Global memory is named by an int64 address in bytes, shared memory by a uint32 one. An access of n bytes needs an
address that is a multiple of n. Elements of a cache travel as the 32-bit words that hold them and become float32 in
registers: `unpack(kind)` widens a word, `narrow(kind)` rounds one value. Every function takes arguments of exactly
the types that it names (or integer literals) and is a TypingError for others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()
GLOBAL, SHARED = 1, 3  # address spaces of NVVM

uint8, uint16, uint32 = types.uint8, types.uint16, types.uint32
int64, float32 = types.int64, types.float32
WORDS_2, WORDS_4 = types.UniTuple(uint32, 2), types.UniTuple(uint32, 4)
FLOATS_2, FLOATS_4 = types.UniTuple(float32, 2), types.UniTuple(float32, 4)

ELEMENT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8}


def declare(name: str, doc: str, result: Any, arguments: list[Any], emit: Callable[..., Any]) -> Any:
    """A device function of exactly these types; ``emit(builder, *values)`` gives its LLVM value, or a list of them."""

    def typing(typingctx: Any, *given: Any) -> Any:
        if len(given) != len(arguments) or not all(map(_suits, given, arguments)):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            if isinstance(signature.return_type, types.UniTuple):
                return context.make_tuple(builder, signature.return_type, value)
            return context.get_dummy_value() if value is None else value

        return result(*arguments), codegen

    typing.__name__ = typing.__qualname__ = name
    typing.__doc__ = doc
    # numba reads the names of the arguments here, and knows no *args.
    names = ["typingctx", *(f"argument_{i}" for i in range(len(arguments)))]
    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in names]
    typing.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typing)


def _suits(given: Any, expected: Any) -> bool:
    return given == expected or (isinstance(given, types.IntegerLiteral) and isinstance(expected, types.Integer))


def emit_asm(
    builder: Any, result: Any, text: str, constraints: str, args: list[Any], *, side_effect: bool = False
) -> Any:
    return builder.asm(ir.FunctionType(result, [arg.type for arg in args]), text, constraints, args, side_effect)


def parts_of(builder: Any, struct: Any, count: int) -> list[Any]:
    return [builder.extract_value(struct, i) for i in range(count)]


# ---- control


@intrinsic
def for_each(typingctx: Any, body: Any, count: Any, args: Any) -> Any:
    """Call the device function ``body(i, *args)`` for i from 0 to count - 1, a constant, without a loop.

    A local array is in registers only where every index into it is a constant, and LLVM unrolls a loop only up to some
    size of the result.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(args, types.BaseTuple):
        return None
    call = body.get_call_type(typingctx, (int64, *args.types), {})

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = context.get_function(body, call)
        items = parts_of(builder, values[2], len(args.types))
        for i in range(count.literal_value):
            function(builder, [I64(i), *items])
        return context.get_dummy_value()

    return types.void(body, count, args), codegen


opaque = declare(
    "opaque",
    "The same number, unknown to the compiler: a loop up to it is not unrolled.",
    int64,
    [int64],
    lambda builder, x: emit_asm(builder, I64, "mov.b64 $0, $1;", "=l,l", [x]),
)

# ---- memory


def make_load(name: str, doc: str, result: Any, address: Any, element: Any, *, readonly: bool = False) -> Any:
    count = result.count if isinstance(result, types.UniTuple) else 1
    space = GLOBAL if address == int64 else SHARED

    def emit(builder: Any, where: Any) -> Any:
        kind = element if count == 1 else ir.VectorType(element, count)
        value = builder.load(builder.inttoptr(where, kind.as_pointer(space)))
        value.align = count * (4 if element == F32 else element.width // 8)
        if readonly:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value if count == 1 else [builder.extract_element(value, I32(i)) for i in range(count)]

    return declare(name, doc, result, [address], emit)


def make_store(name: str, doc: str, address: Any, value: Any, count: int, element: Any) -> Any:
    space = GLOBAL if address == int64 else SHARED

    def emit(builder: Any, where: Any, *values: Any) -> None:
        kind = element if count == 1 else ir.VectorType(element, count)
        stored = values[0]
        if count > 1:
            stored = ir.Constant(kind, ir.Undefined)
            for i in range(count):
                stored = builder.insert_element(stored, values[i], I32(i))
        store = builder.store(stored, builder.inttoptr(where, kind.as_pointer(space)))
        store.align = count * (4 if element == F32 else element.width // 8)

    return declare(name, doc, types.void, [address] + [value] * count, emit)


_LOADED = {1: (uint8, I8), 2: (uint16, I16), 4: (uint32, I32), 8: (WORDS_2, I32), 16: (WORDS_4, I32)}


def _load(nbytes: int) -> Any:
    doc = f"{nbytes} bytes of global memory that no thread writes during the launch (ld.global.nc)."
    return make_load(f"load_{nbytes}", doc, _LOADED[nbytes][0], int64, _LOADED[nbytes][1], readonly=True)


def _load_written(nbytes: int) -> Any:
    doc = f"{nbytes} bytes of global memory that this launch may write, too."
    return make_load(f"load_written_{nbytes}", doc, _LOADED[nbytes][0], int64, _LOADED[nbytes][1])


def _store(nbytes: int) -> Any:
    value, element = {1: (uint8, I8), 2: (uint16, I16)}.get(nbytes, (uint32, I32))
    doc = f"Store {nbytes} bytes, as one value or as 32-bit words, at a global address."
    return make_store(f"store_{nbytes}", doc, int64, value, max(1, nbytes // 4), element)


load_1, load_2, load_4, load_8, load_16 = (_load(n) for n in (1, 2, 4, 8, 16))
load_written_1, load_written_2, load_written_4, load_written_8, load_written_16 = (
    _load_written(n) for n in (1, 2, 4, 8, 16)
)
store_1, store_2, store_4, store_8, store_16 = (_store(n) for n in (1, 2, 4, 8, 16))


@lru_cache
def load_shared(count: int) -> Any:
    """The device function of a shared address, a multiple of 16: a tuple of `count` float32, a multiple of 4."""

    def emit(builder: Any, where: Any) -> list[Any]:
        values = []
        for start in range(0, count, 4):
            pointer = builder.inttoptr(builder.add(where, I32(4 * start)), ir.VectorType(F32, 4).as_pointer(SHARED))
            four = builder.load(pointer)
            four.align = 16
            values += [builder.extract_element(four, I32(i)) for i in range(4)]
        return values

    return declare("load_shared", f"{count} float32 in shared memory.", types.UniTuple(float32, count), [uint32], emit)


@lru_cache
def store_shared(count: int) -> Any:
    """The device function (address, values) of a tuple of `count` float32, a multiple of 4, stored as `load_shared`."""

    def emit(builder: Any, where: Any, values: Any) -> None:
        parts = parts_of(builder, values, count)
        for start in range(0, count, 4):
            four = ir.Constant(ir.VectorType(F32, 4), ir.Undefined)
            for i in range(4):
                four = builder.insert_element(four, parts[start + i], I32(i))
            pointer = builder.inttoptr(builder.add(where, I32(4 * start)), four.type.as_pointer(SHARED))
            builder.store(four, pointer).align = 16

    arguments = [uint32, types.UniTuple(float32, count)]
    return declare("store_shared", f"Store {count} float32 in shared memory.", types.void, arguments, emit)


@intrinsic
def address(typingctx: Any, pointer: Any) -> Any:
    """The int64 address of a pointer argument."""
    if not isinstance(pointer, types.CPointer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], I64)

    return int64(pointer), codegen


@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """The uint32 shared address of element 0 of a ``cuda.shared.array``."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        data = builder.bitcast(data, I8.as_pointer(data.type.addrspace))
        return builder.ptrtoint(builder.addrspacecast(data, I8.as_pointer(SHARED)), I32)

    return uint32(array), codegen


compare_and_swap = declare(
    "compare_and_swap",
    "The int64 at a global address, replaced by `new` if it was `old`, in one atomic step: (address, old, new).",
    int64,
    [int64, int64, int64],
    lambda builder, where, old, new: emit_asm(
        builder, I64, "atom.global.cas.b64 $0, [$1], $2, $3;", "=l,l,l,l,~{memory}", [where, old, new], side_effect=True
    ),
)

# ---- float32

float_bits = declare("float_bits", "The bits of a float32.", uint32, [float32], lambda b, x: b.bitcast(x, I32))
bits_float = declare("bits_float", "The float32 of these bits.", float32, [uint32], lambda b, x: b.bitcast(x, F32))

exp2 = declare(
    "exp2",
    """2 to the power of a float32, to about 2 units in the last place (ex2.approx.ftz).

    exp2(-inf) is +0, exp2(inf) is inf, NaN stays; a subnormal argument counts as 0 and a subnormal result is 0.
    """,
    float32,
    [float32],
    lambda builder, x: emit_asm(builder, F32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x]),
)

larger = declare(
    "larger",
    "The larger of two float32; a number wins over a NaN (max.f32).",
    float32,
    [float32, float32],
    lambda builder, x, y: emit_asm(builder, F32, "max.f32 $0, $1, $2;", "=f,f,f", [x, y]),
)

# ---- conversions

_UNPACK_FLOAT16 = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
_UNPACK_E4M3 = (
    "{ .reg .b16 a, b, c, d; .reg .b32 t, u; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 t, a; cvt.rn.f16x2.e4m3x2 u, b;"
    " mov.b32 {a, b}, t; mov.b32 {c, d}, u; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c;"
    " cvt.f32.f16 $3, d; }"
)


def _floats_of_halves(builder: Any, word: Any) -> list[Any]:
    struct = ir.LiteralStructType([F32, F32])
    return parts_of(builder, emit_asm(builder, struct, _UNPACK_FLOAT16, "=f,=f,r", [word]), 2)


def _floats_of_bfloat16(builder: Any, word: Any) -> list[Any]:
    low, high = builder.shl(word, I32(16)), builder.and_(word, I32(0xFFFF0000))
    return [builder.bitcast(low, F32), builder.bitcast(high, F32)]


def _bytes_on_top(builder: Any, word: Any) -> list[Any]:
    """Two words with bytes 0, 1 and 2, 3 of `word` as the upper bytes of their halves, the lower ones 0."""
    return [
        emit_asm(builder, I32, f"prmt.b32 $0, $1, 0, {selector};", "=r,r", [word]) for selector in ("0x1404", "0x3424")
    ]


def _floats_of_e5m2(builder: Any, word: Any) -> list[Any]:
    # A code is the upper byte of the float16 of the same value.
    return [x for halves in _bytes_on_top(builder, word) for x in _floats_of_halves(builder, halves)]


def _floats_of_e4m3(builder: Any, word: Any) -> list[Any]:
    # One bit to the right a code's exponent and mantissa are those of a float16 of 2**-8 the value, subnormals too.
    floats = []
    for halves in _bytes_on_top(builder, word):
        sign = builder.and_(halves, I32(0x80008000))
        magnitude = builder.lshr(builder.and_(halves, I32(0x7F007F00)), I32(1))
        floats += _floats_of_halves(builder, builder.or_(sign, magnitude))
    return [_e4m3_value(builder, x) for x in floats]


def _e4m3_value(builder: Any, scaled: Any) -> Any:
    # The code of all ones is NaN; as a number it would be 480 = 1.875 * 2**8.
    bits = builder.and_(builder.bitcast(scaled, I32), I32(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned("==", bits, I32(0x3FF00000))
    value = builder.fmul(scaled, ir.Constant(F32, 256.0))
    return builder.select(is_nan, ir.Constant(F32, float("nan")), value)


def _floats_of_e4m3_by_hardware(builder: Any, word: Any) -> list[Any]:
    struct = ir.LiteralStructType([F32] * 4)
    return parts_of(builder, emit_asm(builder, struct, _UNPACK_E4M3, "=f,=f,=f,=f,r", [word]), 4)


@lru_cache
def unpack(kind: str, hardware_fp8: bool = False) -> Any:
    """The device function that widens a word of elements: uint32 -> a tuple of float32, lowest address first.

    Parameters
    ----------
    kind : str
        "float32", "float16", "bfloat16", "fp8_e4m3" or "fp8_e5m2": 1, 2, 2, 4 and 4 elements in a word.
    hardware_fp8 : bool
        Convert e4m3 with the instruction for it, which needs compute capability 8.9.
    """
    doc = f"The {kind} elements of a word as float32, exactly."
    result = types.UniTuple(float32, 32 // ELEMENT_BITS[kind])
    return declare(f"unpack_{kind}", doc, result, [uint32], _widen(kind, hardware_fp8))


def _widen(kind: str, hardware_fp8: bool) -> Callable[[Any, Any], list[Any]]:
    widen: dict[str, Callable[[Any, Any], list[Any]]] = {
        "float32": lambda builder, word: [builder.bitcast(word, F32)],
        "float16": _floats_of_halves,
        "bfloat16": _floats_of_bfloat16,
        "fp8_e4m3": _floats_of_e4m3_by_hardware if hardware_fp8 else _floats_of_e4m3,
        "fp8_e5m2": _floats_of_e5m2,
    }
    return widen[kind]


def _bits_of_half(builder: Any, x: Any) -> Any:
    return builder.zext(builder.bitcast(builder.fptrunc(x, F16), I16), I32)


def _bits_of_bfloat16(builder: Any, x: Any) -> Any:
    return builder.zext(emit_asm(builder, I16, "cvt.rn.bf16.f32 $0, $1;", "=h,f", [x]), I32)


def _code_by_hardware(name: str) -> Callable[[Any, Any], Any]:
    def emit(builder: Any, x: Any) -> Any:
        # The first source operand is the upper half of the pair.
        text = f"cvt.rn.satfinite.{name}x2.f32 $0, $1, $2;"
        code = builder.zext(emit_asm(builder, I16, text, "=h,f,f", [ir.Constant(F32, 0.0), x]), I32)
        # NaN becomes the code of all ones, which is the only one of e4m3.
        return code if name == "e4m3" else builder.select(builder.fcmp_unordered("uno", x, x), I32(0x7E), code)

    return emit


def _code_by_bits(mantissa_bits: int, bias: int, largest: float, nan: int) -> Callable[[Any, Any], Any]:
    """Round a float32 to an fp8 code in integer arithmetic: nearest even, saturating, NaN as the code `nan`."""
    shift = 23 - mantissa_bits
    smallest_normal = 2.0 ** (1 - bias)
    # Adding this number leaves the multiple of the subnormals' step in the lowest bits, rounded by the hardware.
    magic = 2.0 ** (1 - bias - mantissa_bits + 23)

    def emit(builder: Any, x: Any) -> Any:
        bits = builder.bitcast(x, I32)
        sign = builder.and_(builder.lshr(bits, I32(24)), I32(0x80))
        size = builder.bitcast(builder.and_(bits, I32(0x7FFFFFFF)), F32)
        is_nan = builder.fcmp_unordered("uno", x, x)
        size = builder.select(
            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, largest)
        )
        bits = builder.bitcast(size, I32)
        odd = builder.and_(builder.lshr(bits, I32(shift)), I32(1))
        rounded = builder.add(builder.add(bits, I32((1 << (shift - 1)) - 1)), odd)
        normal = builder.sub(builder.lshr(rounded, I32(shift)), I32((127 - bias) << mantissa_bits))
        steps = builder.bitcast(builder.fadd(size, ir.Constant(F32, magic)), I32)
        subnormal = builder.and_(steps, I32(0xFF))
        is_small = builder.fcmp_ordered("<", size, ir.Constant(F32, smallest_normal))
        code = builder.select(is_small, subnormal, normal)
        return builder.or_(sign, builder.select(is_nan, I32(nan), code))

    return emit


@lru_cache
def narrow(kind: str, hardware_fp8: bool = False) -> Any:
    """The device function that rounds a float32 to a kind, nearest even: float32 -> its bits in a uint32.

    fp8 saturates at its largest finite value, infinities too. NaN stays NaN, in fp8 with the code that ml_dtypes writes
    but for its sign, which need not be that of the float32.

    Parameters
    ----------
    kind : str
        As in `unpack`.
    hardware_fp8 : bool
        Use the fp8 instructions, which need compute capability 8.9.
    """
    emit = {
        "float32": lambda builder, x: builder.bitcast(x, I32),
        "float16": _bits_of_half,
        "bfloat16": _bits_of_bfloat16,
        "fp8_e4m3": _code_by_hardware("e4m3") if hardware_fp8 else _code_by_bits(3, 7, 448.0, 0x7F),
        "fp8_e5m2": _code_by_hardware("e5m2") if hardware_fp8 else _code_by_bits(2, 15, 57344.0, 0x7E),
    }[kind]
    return declare(f"narrow_{kind}", f"The bits of a float32 rounded to {kind}.", uint32, [float32], emit)


# ---- vectors


@lru_cache
def multiply_add(kind: str, num_words: int, hardware_fp8: bool = False) -> Any:
    """The device function (sum, words, weights) -> sum + the products of a vector's elements and their weights.

    `words` is a tuple of num_words uint32 that hold elements of `kind`, `weights` one of as many float32 as they hold;
    the sum goes from the lowest address up.
    """
    widen, weights = _widen(kind, hardware_fp8), num_words * 32 // ELEMENT_BITS[kind]

    def emit(builder: Any, total: Any, words: Any, factors: Any) -> Any:
        values = [x for word in parts_of(builder, words, num_words) for x in widen(builder, word)]
        for value, factor in zip(values, parts_of(builder, factors, weights), strict=True):
            total = builder.fadd(total, builder.fmul(value, factor, flags=("contract",)), flags=("contract",))
        return total

    arguments = [float32, types.UniTuple(uint32, num_words), types.UniTuple(float32, weights)]
    return declare(f"multiply_add_{kind}", "The sum with one vector's products added.", float32, arguments, emit)


@lru_cache
def masked(num_words: int) -> Any:
    """The device function (words, masks): a tuple of words, each without the bits that are not in its mask."""
    words = types.UniTuple(uint32, num_words)

    def emit(builder: Any, values: Any, masks: Any) -> list[Any]:
        pairs = zip(parts_of(builder, values, num_words), parts_of(builder, masks, num_words), strict=True)
        return [builder.and_(value, mask) for value, mask in pairs]

    return declare("masked", "The words without the bits that are not in the masks.", words, [words, words], emit)


_LOW_BITS = "{ .reg .b32 n; max.s32 n, $1, 0; shl.b32 n, 1, n; sub.u32 $0, n, 1; }"  # shl makes 0 of 1 << 32


@lru_cache
def bit_masks(num_words: int) -> Any:
    """The device function (first, last): words in which the bits first..last-1 are set, from the lowest address up.

    Both numbers may lie outside of the words, by less than 2**31.
    """

    def low_bits(builder: Any, count: Any, word: int) -> Any:
        count = builder.sub(builder.trunc(count, I32), I32(32 * word))
        return emit_asm(builder, I32, _LOW_BITS, "=r,r", [count])

    def emit(builder: Any, first: Any, last: Any) -> list[Any]:
        return [
            builder.and_(low_bits(builder, last, w), builder.not_(low_bits(builder, first, w)))
            for w in range(num_words)
        ]

    return declare(
        "bit_masks", "Masks of the bits first..last-1.", types.UniTuple(uint32, num_words), [int64] * 2, emit
    )


@lru_cache
def unpack_words(kind: str, num_words: int, hardware_fp8: bool = False) -> Any:
    """The device function that widens a tuple of words as `unpack` does one."""
    widen, count = _widen(kind, hardware_fp8), num_words * 32 // ELEMENT_BITS[kind]

    def emit(builder: Any, words: Any) -> list[Any]:
        return [x for word in parts_of(builder, words, num_words) for x in widen(builder, word)]

    arguments = [types.UniTuple(uint32, num_words)]
    return declare(f"unpack_words_{kind}", "All elements of a vector.", types.UniTuple(float32, count), arguments, emit)
