"""Device functions of one or a few instructions: memory, atomics, arithmetic, arrays of a thread.

Global memory is named by an int64 address in bytes, shared memory by a uint32 one. An access of n bytes needs an
address that is a multiple of n. Elements of a cache are carried as the 32-bit words that hold them; conversions.py
widens those to float32. Arguments must have exactly the types that a function names (or be integer literals): others
are a TypingError. Only this folder and conversions.py build LLVM IR.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any

from llvmlite import ir

from ..language import cgutils, intrinsic, typeof, types
from ..source import MOST_FUNCTIONS, cached, device_function
from .declare import (
    F32,
    GLOBAL,
    I8,
    I16,
    I32,
    I64,
    SHARED,
    WORDS_2,
    WORDS_4,
    declare,
    emit_asm,
    float32,
    int64,
    named_intrinsic,
    parts_of,
    suits,
    uint8,
    uint16,
    uint32,
)

# ---- control


@intrinsic
def for_each(typingctx: Any, body: Any, count: Any, args: Any) -> Any:
    """Call the device function ``body(i, *args)`` for i from 0 to count - 1, a constant, without a loop.

    A local array stays in registers only if every index into it is a constant, and LLVM unrolls loops only up to a
    certain size.
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


def unrolled(count: int) -> Callable[[Callable[..., None]], Any]:
    """Decorate ``body(i, *args)``: kernels call it as ``body(*args)``, which runs it for i from 0 to count - 1.

    There is no loop: a local array stays in registers only if every index into it is a constant, and LLVM unrolls loops
    only up to a certain size.
    """

    return lambda function: cached(_unrolled, device_function(function), count)


@lru_cache(MOST_FUNCTIONS)
def _unrolled(body: Any, count: int) -> Any:
    def typing(typingctx: Any, *given: Any) -> Any:
        kind = typeof(body)
        call = kind.get_call_type(typingctx, (int64, *given), {})

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            run = context.get_function(kind, call)
            for i in range(count):
                run(builder, [I64(i), *args])
            return context.get_dummy_value()

        return types.void(*given), codegen

    return named_intrinsic(typing, body.__name__, list(signature(body.py_func).parameters)[1:])


opaque = declare(
    "opaque",
    "The same number, hidden from the compiler so that it does not unroll a loop up to it.",
    int64,
    [int64],
    lambda builder, x: emit_asm(builder, I64, "mov.b64 $0, $1;", "=l,l", [x]),
)

# ---- integers

divmod_32 = declare(
    "divmod_32",
    "The quotient of two uint32 and what remains.",
    WORDS_2,
    [uint32, uint32],
    lambda builder, x, y: [builder.udiv(x, y), builder.urem(x, y)],
)

# ---- arrays of a thread


@intrinsic
def local_array(typingctx: Any, count: Any, dtype: Any) -> Any:
    """A pointer to `count` numbers of this thread, which stay in registers if every index is a constant.

    `count` is a constant. Unlike a cuda.local.array it is one value in a call, not seven, and an access is one or two
    LLVM instructions, not ten: NVVM compiles the split kernels, which are full of both, in half the time.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(dtype, types.NumberClass):
        return None
    if not isinstance(dtype.dtype, types.Integer | types.Float):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _allocate(context, builder, dtype.dtype, count.literal_value)

    return types.CPointer(dtype.dtype)(count, dtype), codegen


@lru_cache
def local_arrays(kind: Any, **arrays: tuple[int, Any]) -> Any:
    """The device function () that makes a named tuple of this kind, of which each field is a `local_array`.

    Parameters
    ----------
    kind : NamedTuple
    **arrays : (int, numba type)
        Count and dtype of each field.
    """
    fields = [arrays[field] for field in kind._fields]
    result = types.BaseTuple.from_types([types.CPointer(dtype) for _, dtype in fields], kind)

    def typing(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # Allocated in the caller: the arrays of a device function end where it returns.
            pointers = [_allocate(context, builder, dtype, count) for count, dtype in fields]
            return context.make_tuple(builder, result, pointers)

        return result(), codegen

    return intrinsic(typing)


def _allocate(context: Any, builder: Any, dtype: Any, count: int) -> Any:
    array = ir.ArrayType(context.get_data_type(dtype), count)
    return builder.gep(cgutils.alloca_once(builder, array), [I32(0), I32(0)], inbounds=True)


@intrinsic
def assign(typingctx: Any, array: Any, at: Any, values: Any) -> Any:
    """``array[at], array[at + 1], ... = values``: a local array, an int64 and a tuple of numbers like the array's."""
    if not isinstance(array, types.CPointer) or not isinstance(values, types.UniTuple):
        return None
    if values.dtype != array.dtype or not suits(at, int64):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i, value in enumerate(parts_of(builder, args[2], len(values))):
            builder.store(value, element(builder, args[0], args[1], i))
        return context.get_dummy_value()

    return types.void(array, at, values), codegen


@intrinsic
def clear(typingctx: Any, array: Any, count: Any) -> Any:
    """``array[i] = 0`` for i from 0 to count - 1, a constant, without a loop."""
    if not isinstance(array, types.CPointer) or not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i in range(count.literal_value):
            builder.store(context.get_constant(array.dtype, 0), element(builder, args[0], I64(0), i))
        return context.get_dummy_value()

    return types.void(array, count), codegen


def element(builder: Any, array: Any, at: Any, i: int) -> Any:
    """The LLVM pointer to ``array[at + i]``."""
    return builder.gep(array, [builder.add(at, I64(i))])


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
    doc = f"Load {nbytes} bytes of global memory that no thread writes during the launch (ld.global.nc)."
    return make_load(f"load_{nbytes}", doc, _LOADED[nbytes][0], int64, _LOADED[nbytes][1], readonly=True)


def _load_written(nbytes: int) -> Any:
    doc = f"Load {nbytes} bytes of global memory that this launch may also write."
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
    """The device function (address) -> `count` float32 there; address is a multiple of 16, and count of 4."""

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
    """The device function (address, values) that stores a tuple of `count` float32 as `load_shared` loads it."""

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
    "Atomically replace the int64 at an address by `new` if it is `old`, and return what it was: (address, old, new).",
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

multiply_and_add = declare(
    "multiply_and_add",
    "x * y + z of float32, rounded once (fma.rn).",
    float32,
    [float32, float32, float32],
    lambda builder, x, y, z: emit_asm(builder, F32, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z]),
)

multiply_and_add_down = declare(
    "multiply_and_add_down",
    "As multiply_and_add, rounded towards -inf (fma.rm).",
    float32,
    [float32, float32, float32],
    lambda builder, x, y, z: emit_asm(builder, F32, "fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z]),
)

divide = declare(
    "divide",
    "x / y of float32, to two units in the last place (div.full), without the branch of an exact division.",
    float32,
    [float32, float32],
    lambda builder, x, y: emit_asm(builder, F32, "div.full.f32 $0, $1, $2;", "=f,f,f", [x, y]),
)

multiply = declare(
    "multiply",
    "x * y of float32, rounded before anything is added to it (mul.rn): never part of a fused multiply-add.",
    float32,
    [float32, float32],
    lambda builder, x, y: emit_asm(builder, F32, "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y]),
)

larger = declare(
    "larger",
    "The larger of two float32; a number wins over a NaN (max.f32).",
    float32,
    [float32, float32],
    lambda builder, x, y: emit_asm(builder, F32, "max.f32 $0, $1, $2;", "=f,f,f", [x, y]),
)
