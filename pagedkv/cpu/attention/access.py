"""Loads and stores at addresses, integers in bytes, without checks: kernels stay within their bounds themselves."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .steps.code import BYTE, FLOAT, INT32, INT64, SHORT, Code, step, vector


def _scalar(element: Any, numba_type: Any) -> tuple[Any, Any]:
    """The functions ``get(address)`` and ``put(address, value)`` of one scalar type."""

    @intrinsic
    def get(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return Code(builder).load(arguments[0], element)

        return numba_type(types.intp), codegen

    @intrinsic
    def put(typing: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            Code(builder).store(arguments[1], arguments[0])
            return context.get_dummy_value()

        return types.void(types.intp, numba_type), codegen

    return get, put


get_float, put_float = _scalar(FLOAT, types.float32)
get_int32, put_int32 = _scalar(INT32, types.int32)
get_int, put_int = _scalar(INT64, types.int64)
get_byte, _ = _scalar(BYTE, types.uint8)
_, put_short = _scalar(SHORT, types.int16)

prefetch = step(Code.prefetch)
EIGHT = 8
copy_eight = step(lambda code, target, source: code.store(code.load(source, vector(EIGHT)), target))


@intrinsic
def fetch_add(typing: Any, address: Any) -> Any:
    """Atomically add one to the int64 at `address` and return its old value."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(INT64))
        return builder.atomic_rmw("add", pointer, INT64(1), "acq_rel")

    return types.int64(types.intp), codegen
