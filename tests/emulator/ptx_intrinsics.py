"""Instructions that numba has no name for, as inline assembly for the emulator's test kernels."""

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _asm(builder, result, text, constraints, args, side_effect=False, convergent=False):
    kind = ir.FunctionType(result, [arg.type for arg in args])
    code = ir.InlineAsm(kind, text, constraints, side_effect=side_effect)
    return builder.call(code, args, attrs=("convergent",) if convergent else ())


def _tuple(context, builder, sig, struct, n):
    return context.make_tuple(builder, sig.return_type, [builder.extract_value(struct, i) for i in range(n)])


def _address(builder, pointer, byte_offset):
    return builder.add(builder.ptrtoint(pointer, I64), byte_offset)


@intrinsic
def load_global_16(typingctx, pointer, byte_offset):
    """16 bytes through the read-only path, as four uint32."""
    if not isinstance(pointer, types.CPointer):
        return None
    sig = types.UniTuple(types.uint32, 4)(pointer, types.int64)

    def codegen(context, builder, sig, args):
        text, result = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", ir.LiteralStructType([I32] * 4)
        struct = _asm(builder, result, text, "=r,=r,=r,=r,l", [_address(builder, *args)])
        return _tuple(context, builder, sig, struct, 4)

    return sig, codegen


@intrinsic
def store_global_16(typingctx, pointer, byte_offset, a, b, c, d):
    """Store four uint32."""
    sig = types.void(pointer, types.int64, *[types.uint32] * 4)

    def codegen(context, builder, sig, args):
        text, args = "st.global.v4.u32 [$0], {$1, $2, $3, $4};", [_address(builder, *args[:2]), *args[2:]]
        _asm(builder, ir.VoidType(), text, "l,r,r,r,r,~{memory}", args, side_effect=True)
        return context.get_dummy_value()

    return sig, codegen


def _make_unpack(text, constraint, source):
    @intrinsic
    def unpack(typingctx, packed):
        sig = types.UniTuple(types.float32, 2)(source)

        def codegen(context, builder, sig, args):
            struct = _asm(builder, ir.LiteralStructType([F32, F32]), text, f"=f,=f,{constraint}", args)
            return _tuple(context, builder, sig, struct, 2)

        return sig, codegen

    return unpack


_HALVES = "mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
_FP8 = "{ .reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.%s t, $2; " + _HALVES.replace("$2", "t")
_BF16 = "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }"
unpack_f16x2 = _make_unpack("{ .reg .b16 a, b; " + _HALVES, "r", types.uint32)
unpack_bf16x2 = _make_unpack(_BF16, "r", types.uint32)
unpack_e4m3x2 = _make_unpack(_FP8 % "e4m3x2", "h", types.uint16)
unpack_e5m2x2 = _make_unpack(_FP8 % "e5m2x2", "h", types.uint16)


def _make_pack(instruction, result, constraint, llvm_type):
    @intrinsic
    def pack(typingctx, low, high):
        sig = result(types.float32, types.float32)

        def codegen(context, builder, sig, args):  # the first source operand becomes the upper half
            return _asm(builder, llvm_type, f"{instruction} $0, $2, $1;", f"={constraint},f,f", args)

        return sig, codegen

    return pack


pack_f16x2 = _make_pack("cvt.rn.f16x2.f32", types.uint32, "r", I32)
pack_bf16x2 = _make_pack("cvt.rn.bf16x2.f32", types.uint32, "r", I32)
pack_e4m3x2 = _make_pack("cvt.rn.satfinite.e4m3x2.f32", types.uint16, "h", I16)


@intrinsic
def shared_address(typingctx, array):
    """32-bit shared address of element 0 of a cuda.shared.array."""
    if not isinstance(array, types.Array):
        return None
    sig = types.uint32(array)

    def codegen(context, builder, sig, args):
        data = builder.ptrtoint(context.make_array(sig.args[0])(context, builder, args[0]).data, I64)
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return _asm(builder, I32, text, "=r,l", [data])

    return sig, codegen


def _copy(text, constraints, sig):
    def codegen(context, builder, sig, args):
        args = [args[0], _address(builder, args[1], args[2]), *args[3:]]
        _asm(builder, ir.VoidType(), text, constraints, args, side_effect=True)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def cp_async_16(typingctx, shared, pointer, byte_offset):
    """Start a copy of 16 bytes."""
    sig = types.void(types.uint32, pointer, types.int64)
    return _copy("cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", sig)


@intrinsic
def cp_async_16_zfill(typingctx, shared, pointer, byte_offset, valid_bytes):
    """Start a copy of `valid_bytes` bytes; zeros fill the rest of 16."""
    sig = types.void(types.uint32, pointer, types.int64, types.uint32)
    return _copy("cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r,~{memory}", sig)


def _make_statement(text):
    @intrinsic
    def statement(typingctx):
        def codegen(context, builder, sig, args):
            _asm(builder, ir.VoidType(), text, "~{memory}", [], side_effect=True)
            return context.get_dummy_value()

        return types.void(), codegen

    return statement


cp_async_commit = _make_statement("cp.async.commit_group;")
cp_async_wait_0 = _make_statement("cp.async.wait_group 0;")
cp_async_wait_1 = _make_statement("cp.async.wait_group 1;")
cp_async_wait_all = _make_statement("cp.async.wait_all;")


def _make_ldmatrix(n, trans):
    registers = ", ".join(f"${i}" for i in range(n))
    text = f"ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{registers}}}, [${n}];"

    @intrinsic
    def ldmatrix(typingctx, shared):
        sig = types.UniTuple(types.uint32, n)(types.uint32)

        def codegen(context, builder, sig, args):
            kind = I32 if n == 1 else ir.LiteralStructType([I32] * n)
            got = _asm(builder, kind, text, "=r," * n + "r,~{memory}", args, side_effect=True, convergent=True)
            if n == 1:
                return context.make_tuple(builder, sig.return_type, [got])
            return _tuple(context, builder, sig, got, n)

        return sig, codegen

    return ldmatrix


ldmatrix_x1, ldmatrix_x2, ldmatrix_x4 = (_make_ldmatrix(n, "") for n in (1, 2, 4))
ldmatrix_x1_trans, ldmatrix_x2_trans, ldmatrix_x4_trans = (_make_ldmatrix(n, ".trans") for n in (1, 2, 4))


def _make_mma(k, kind):
    sizes = (4, k // 4, k // 8)  # registers of D (and C), A, B
    starts = (0, 4, 4 + sizes[1])
    d, a, b = (", ".join(f"${i}" for i in range(start, start + n)) for start, n in zip(starts, sizes, strict=True))
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{d}}};"
    constraints = ",".join(["=f"] * 4 + ["r"] * (sizes[1] + sizes[2]) + ["0", "1", "2", "3"])

    @intrinsic
    def mma(typingctx, a, b, c):
        words = [types.UniTuple(types.uint32, n) for n in sizes[1:]]
        sig = types.UniTuple(types.float32, 4)(*words, types.UniTuple(types.float32, 4))

        def codegen(context, builder, sig, args):
            counts = (*sizes[1:], 4)
            flat = [builder.extract_value(arg, i) for arg, n in zip(args, counts, strict=True) for i in range(n)]
            result = ir.LiteralStructType([F32] * 4)
            struct = _asm(builder, result, text, constraints, flat, side_effect=True, convergent=True)
            return _tuple(context, builder, sig, struct, 4)

        return sig, codegen

    return mma


mma_16816_f16, mma_16816_bf16, mma_1688_f16, mma_1688_bf16 = (
    _make_mma(k, kind) for k in (16, 8) for kind in ("f16", "bf16")
)
