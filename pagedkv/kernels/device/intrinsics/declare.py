"""Declarations of device functions of one or a few instructions, and the types that they name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir

from ..language import intrinsic, types

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()
GLOBAL, SHARED = 1, 3  # address spaces of NVVM

uint8, uint16, uint32 = types.uint8, types.uint16, types.uint32
int64, float32 = types.int64, types.float32
WORDS_2, WORDS_4 = types.UniTuple(uint32, 2), types.UniTuple(uint32, 4)
FLOATS_2, FLOATS_4 = types.UniTuple(float32, 2), types.UniTuple(float32, 4)


def declare(name: str, doc: str, result: Any, arguments: list[Any], emit: Callable[..., Any]) -> Any:
    """A device function of exactly these types; ``emit(builder, *values)`` returns its LLVM value or values."""

    def typing(typingctx: Any, *given: Any) -> Any:
        if len(given) != len(arguments) or not all(map(suits, given, arguments)):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            if isinstance(signature.return_type, types.UniTuple):
                return context.make_tuple(builder, signature.return_type, value)
            return context.get_dummy_value() if value is None else value

        return result(*arguments), codegen

    typing.__doc__ = doc
    return named_intrinsic(typing, name, [f"argument_{i}" for i in range(len(arguments))])


def named_intrinsic(typing: Any, name: str, arguments: list[str]) -> Any:
    typing.__name__ = typing.__qualname__ = name
    # numba reads the names of the arguments from here and does not support *args.
    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in ["typingctx", *arguments]]
    typing.__signature__ = Signature(parameters)
    return intrinsic(typing)


def suits(given: Any, expected: Any) -> bool:
    return given == expected or (isinstance(given, types.IntegerLiteral) and isinstance(expected, types.Integer))


def emit_asm(
    builder: Any, result: Any, text: str, constraints: str, args: list[Any], *, side_effect: bool = False
) -> Any:
    return builder.asm(ir.FunctionType(result, [arg.type for arg in args]), text, constraints, args, side_effect)


def parts_of(builder: Any, struct: Any, count: int) -> list[Any]:
    return [builder.extract_value(struct, i) for i in range(count)]
