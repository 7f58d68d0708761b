"""Device functions of one or a few instructions for warps, tensor cores and memory that thread blocks share.

Addresses and types are as in thread.py: int64 for global memory, uint32 for shared memory and for words. A function
that a whole warp must call says so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from llvmlite import ir

from ..language import types
from .declare import (
    F32,
    FLOATS_2,
    FLOATS_4,
    I32,
    VOID,
    WORDS_2,
    WORDS_4,
    declare,
    emit_asm,
    float32,
    int64,
    parts_of,
    uint32,
)
from .thread import element, make_load, make_store

I1 = ir.IntType(1)
WHOLE_WARP = "0xffffffff"


def warp_wide(builder: Any, result: Any, text: str, constraints: str, args: list[Any]) -> Any:
    """Emit assembly that LLVM must neither move nor duplicate across branches."""
    call = emit_asm(builder, result, text, constraints, args, side_effect=True)
    call.attributes.add("convergent")
    return call


# ---- memory


def _stream(count: int) -> Any:
    """A load from a cache, which is read once: it bypasses L1, and is volatile so that LLVM keeps program order."""
    result = I32 if count == 1 else ir.LiteralStructType([I32] * count)
    registers = ",".join(f"${i}" for i in range(count))
    vector = "u32 $0" if count == 1 else f"v{count}.u32 {{{registers}}}"
    text = f"ld.global.nc.L1::no_allocate.L2::128B.{vector}, [${count}];"

    def emit(builder: Any, where: Any) -> Any:
        value = emit_asm(builder, result, text, "=r," * count + "l", [where], side_effect=True)
        return [value] if count == 1 else parts_of(builder, value, count)

    doc = f"{4 * count} bytes of global memory that no thread writes during the launch and that are read once."
    return declare(f"stream_{4 * count}", doc, types.UniTuple(uint32, count), [int64], emit)


stream_16, stream_8, stream_4 = _stream(4), _stream(2), _stream(1)


def _copy(nbytes: int) -> Any:
    past_l1 = "cg" if nbytes == 16 else "ca"
    # A predicate, not a branch: with one, NVVM left jumps to a block that it had removed, named "$L__BB0_-1", and
    # failed ("Symbol name with unsupported characters").
    text = (
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; "
        f"@p cp.async.{past_l1}.shared.global.L2::128B [$0], [$1], {nbytes}, $2; }}"
    )

    def emit(builder: Any, target: Any, source: Any, count: Any, is_wanted: Any) -> Any:
        args = [target, source, count, builder.zext(is_wanted, I32)]
        return emit_asm(builder, VOID, text, "r,l,r,r,~{memory}", args, side_effect=True)

    doc = f"""Start an asynchronous copy from global to shared memory if wanted: (target, source, count, is_wanted).

    It writes {nbytes} bytes: the first `count` of the source, then zeros. The rest of the source need not exist.
    """
    return declare(f"copy_{nbytes}", doc, types.void, [uint32, int64, uint32, types.boolean], emit)


copy_16, copy_8, copy_4 = _copy(16), _copy(8), _copy(4)

copy_vector = declare(
    "copy_vector",
    "Start an asynchronous copy of 16 bytes from global to shared memory: (target, source).",
    types.void,
    [uint32, int64],
    lambda builder, target, source: emit_asm(
        builder,
        VOID,
        "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;",
        "r,l,~{memory}",
        [target, source],
        side_effect=True,
    ),
)

end_group = declare(
    "end_group",
    "Commit the copies that this thread has started since the last call as a group, which may be empty.",
    types.void,
    [],
    lambda builder: emit_asm(builder, VOID, "cp.async.commit_group;", "~{memory}", [], side_effect=True),
)


@lru_cache
def wait_but(count: int) -> Any:
    """The device function that waits for all but the last `count` of this thread's groups of copies."""
    text = f"cp.async.wait_group {count};"

    def emit(builder: Any) -> Any:
        return emit_asm(builder, VOID, text, "~{memory}", [], side_effect=True)

    return declare(f"wait_but_{count}", f"Wait for all groups but the last {count}.", types.void, [], emit)


def _load_l2(count: int) -> Any:
    struct = ir.LiteralStructType([F32] * count)
    registers = ",".join(f"${i}" for i in range(count))
    text, constraints = f"ld.global.cg.v{count}.f32 {{{registers}}}, [${count}];", "=f," * count + "l,~{memory}"

    def emit(builder: Any, where: Any) -> Any:
        return parts_of(builder, emit_asm(builder, struct, text, constraints, [where], side_effect=True), count)

    doc = f"Load {count} float32 that other thread blocks wrote in this launch: from L2, not a stale line of L1."
    return declare(f"load_l2_{count}", doc, FLOATS_4 if count == 4 else FLOATS_2, [int64], emit)


load_l2_2, load_l2_4 = _load_l2(2), _load_l2(4)

load_shared_2 = make_load("load_shared_2", "Load two float32 at a shared address.", FLOATS_2, uint32, F32)
store_shared_2 = make_store("store_shared_2", "Store two float32 at a shared address.", uint32, float32, 2, F32)
store_shared_4 = make_store("store_shared_4", "Store four float32 at a shared address.", uint32, float32, 4, F32)
load_shared_word = make_load("load_shared_word", "Load a word at a shared address.", uint32, uint32, I32)
load_shared_pair = make_load("load_shared_pair", "Load two words at a shared address.", WORDS_2, uint32, I32)
store_shared_word = make_store("store_shared_word", "Store a word at a shared address.", uint32, uint32, 1, I32)
load_shared_words = make_load("load_shared_words", "Load four words at a shared address.", WORDS_4, uint32, I32)
store_shared_words = make_store("store_shared_words", "Store four words at a shared address.", uint32, uint32, 4, I32)

fence = declare(
    "fence",
    "Make earlier writes of this thread visible to all threads of the device before its later ones.",
    types.void,
    [],
    lambda builder: _fence(builder),
)


def _fence(builder: Any) -> None:
    emit_asm(builder, ir.VoidType(), "fence.acq_rel.gpu;", "~{memory}", [], side_effect=True)


prefetch_l2 = declare(
    "prefetch_l2",
    "Bring the line at a global address into L2, and wait for nothing. An address that is not mapped is no fault.",
    types.void,
    [int64],
    lambda builder, where: emit_asm(builder, VOID, "prefetch.global.L2 [$0];", "l", [where], side_effect=True),
)


def _count_up(name: str, order: str, doc: str) -> Any:
    def emit(builder: Any, where: Any, last: Any) -> Any:
        text = f"atom.{order}.gpu.global.inc.u32 $0, [$1], $2;"
        return emit_asm(builder, I32, text, "=r,l,r,~{memory}", [where, last], side_effect=True)

    return declare(name, doc, uint32, [int64, uint32], emit)


count_up = _count_up(
    "count_up",
    "relaxed",
    "Atomically increment the uint32 at a global address, from `last` to 0; its old value: (address, last).",
)
count_up_and_acquire = _count_up(
    "count_up_and_acquire",
    "acquire",
    "As count_up, and what other threads had published when they counted is visible from here on. It empties L1.",
)

thread_number = declare(
    "thread_number",
    "threadIdx.x by a volatile read: a register holds it from here on, and not from the first use in the kernel.",
    uint32,
    [],
    lambda builder: emit_asm(builder, I32, "mov.u32 $0, %tid.x;", "=r", [], side_effect=True),
)

# ---- warps

sync_warp = declare(
    "sync_warp",
    "Make earlier writes of each lane visible to its warp. The whole warp calls it.",
    types.void,
    [],
    lambda builder: _sync_warp(builder),
)


def _sync_warp(builder: Any) -> None:
    warp_wide(builder, ir.VoidType(), f"bar.warp.sync {WHOLE_WARP};", "~{memory}", [])


barrier_of_warp = declare(
    "barrier_of_warp",
    "As sync_warp, at the thread block's barrier of this number, 1 to 15, a warp's own. The whole warp calls it.",
    types.void,
    [uint32],
    lambda builder, number: warp_wide(builder, VOID, "bar.sync $0, 32;", "r,~{memory}", [number]),
)

shuffle = declare(
    "shuffle",
    "The word of another lane: (word, lane). The whole warp calls it.",
    uint32,
    [uint32, uint32],
    lambda builder, x, lane: warp_wide(
        builder, I32, f"shfl.sync.idx.b32 $0, $1, $2, 0x1f, {WHOLE_WARP};", "=r,r,r", [x, lane]
    ),
)


@lru_cache
def shuffle_among(num_lanes: int) -> Any:
    """The device function (word, i): the word of lane i of each num_lanes neighbours, a power of two.

    The whole warp calls it. A constant i takes neither a register nor an instruction.
    """
    text = f"shfl.sync.idx.b32 $0, $1, $2, {(32 - num_lanes) << 8 | 31:#x}, {WHOLE_WARP};"

    def emit(builder: Any, x: Any, i: Any) -> Any:
        return warp_wide(builder, I32, text, "=r,r,r", [x, i])

    return declare(f"shuffle_among_{num_lanes}", "As shuffle, among neighbours.", uint32, [uint32, uint32], emit)


shuffle_float = declare(
    "shuffle_float",
    "The float32 of another lane: (x, lane). The whole warp calls it.",
    float32,
    [float32, uint32],
    lambda builder, x, lane: warp_wide(
        builder, F32, f"shfl.sync.idx.b32 $0, $1, $2, 0x1f, {WHOLE_WARP};", "=f,f,r", [x, lane]
    ),
)

exchange = declare(
    "exchange",
    "The float32 of the lane whose number differs in the bits of `mask`: (x, mask). The whole warp calls it.",
    float32,
    [float32, uint32],
    lambda builder, x, mask: warp_wide(
        builder, F32, f"shfl.sync.bfly.b32 $0, $1, $2, 0x1f, {WHOLE_WARP};", "=f,f,r", [x, mask]
    ),
)


def _vote(builder: Any, condition: Any, name: str, result: Any) -> Any:
    kind = ir.FunctionType(result, [I32, I1])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(
        function, [I32(0xFFFFFFFF), builder.trunc(condition, I1) if condition.type != I1 else condition]
    )


or_of_warp = declare(
    "or_of_warp",
    "The bitwise or of a word of all lanes (redux.sync). The whole warp calls it.",
    uint32,
    [uint32],
    lambda builder, x: warp_wide(builder, I32, f"redux.sync.or.b32 $0, $1, {WHOLE_WARP};", "=r,r", [x]),
)

any_lane = declare(
    "any_lane",
    "Whether the condition holds in a lane of the warp. The whole warp calls it.",
    types.boolean,
    [types.boolean],
    lambda builder, condition: _vote(builder, condition, "llvm.nvvm.vote.any.sync", I1),
)

ballot = declare(
    "ballot",
    "The word whose bit i says whether the condition holds in lane i. The whole warp calls it.",
    uint32,
    [types.boolean],
    lambda builder, condition: _vote(builder, condition, "llvm.nvvm.vote.ballot.sync", I32),
)

# ---- tensor cores


def _mma(kind: str) -> Any:
    struct = ir.LiteralStructType([F32] * 4)
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"

    def emit(builder: Any, array: Any, at: Any, a: Any, *b: Any) -> None:
        c = [element(builder, array, at, i) for i in range(4)]
        operands = [*parts_of(builder, a, 4), *b, *map(builder.load, c)]
        d = parts_of(builder, warp_wide(builder, struct, text, constraints, operands), 4)
        for where, value in zip(c, d, strict=True):
            builder.store(value, where)

    doc = f"""C += A B of {kind} matrices of 16 x 16 and 16 x 8: (c, at, a, b0, b1). The whole warp calls it.

    C is c[at : at + 4] of a local array, and A a tuple of four words.
    """
    return declare(f"mma_{kind}", doc, types.void, [types.CPointer(float32), int64, WORDS_4, uint32, uint32], emit)


mma_float16, mma_bfloat16 = _mma("f16"), _mma("bf16")


def mma_of(kind: str) -> Any:
    """`mma_bfloat16` for "bfloat16", else `mma_float16`."""
    return mma_bfloat16 if kind == "bfloat16" else mma_float16


def _load_matrices(name: str, modifier: str, doc: str) -> Any:
    struct = ir.LiteralStructType([I32] * 4)
    text = f"ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{$0,$1,$2,$3}}, [$4];"

    def emit(builder: Any, where: Any) -> Any:
        # Memory counts as written: never above the barrier or the wait that makes the rows visible.
        return parts_of(builder, warp_wide(builder, struct, text, "=r,=r,=r,=r,r,~{memory}", [where]), 4)

    return declare(name, doc, WORDS_4, [uint32], emit)


load_matrices = _load_matrices(
    "load_matrices",
    "",
    """Load four 8 x 8 matrices of 16 bits (ldmatrix): lane (g, t) gets elements 2t and 2t + 1 of row g of each.

    Lane 8 i + r names the shared address of row r of matrix i. The whole warp calls it.
    """,
)
load_transposed = _load_matrices(
    "load_transposed",
    ".trans",
    "As `load_matrices`, but lane (g, t) gets elements g of rows 2t and 2t + 1 of each matrix.",
)

# ---- bits and conversions

permute = declare(
    "permute",
    "Four bytes of two words, which the low nibbles of a selector choose: (x, y, selector) (prmt).",
    uint32,
    [uint32, uint32, uint32],
    lambda builder, x, y, selector: emit_asm(builder, I32, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector]),
)


def _of_halves(name: str, result: str, instruction: str) -> Any:
    def emit(builder: Any, x: Any, y: Any) -> Any:
        return emit_asm(builder, I32, f"{instruction}.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y])

    doc = f"The {result} of two words of float16 halves, rounded ({instruction}.f16x2)."
    return declare(name, doc, uint32, [uint32, uint32], emit)


subtract_halves = _of_halves("subtract_halves", "difference", "sub")
multiply_halves = _of_halves("multiply_halves", "product", "mul")


def _pack(kind: str) -> Any:
    def emit(builder: Any, low: Any, high: Any) -> Any:
        # The first source operand is the upper half of the pair.
        return emit_asm(builder, I32, f"cvt.rn.{kind}x2.f32 $0, $1, $2;", "=r,f,f", [high, low])

    doc = f"Two float32, rounded to nearest even, as the {kind} halves of a word: (low, high)."
    return declare(f"pack_{kind}", doc, uint32, [float32, float32], emit)


pack_float16, pack_bfloat16 = _pack("f16"), _pack("bf16")


def pack_of(kind: str) -> Any:
    """`pack_bfloat16` for "bfloat16", else `pack_float16`."""
    return pack_bfloat16 if kind == "bfloat16" else pack_float16


def _halves_of_e4m3(upper: bool) -> Any:
    def emit(builder: Any, word: Any) -> Any:
        half = "b" if upper else "a"
        text = f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}"
        return emit_asm(builder, I32, text, "=r,r", [word])

    which = "upper" if upper else "lower"
    doc = f"The two {which} e4m3 of a word as float16 halves; needs compute capability 8.9."
    return declare(f"halves_of_{which}_e4m3", doc, uint32, [uint32], emit)


halves_of_lower_e4m3, halves_of_upper_e4m3 = _halves_of_e4m3(False), _halves_of_e4m3(True)

reciprocal = declare(
    "reciprocal",
    "1 / x of a float32, to one unit in the last place (rcp.approx.ftz), without the branch of an exact division.",
    float32,
    [float32],
    lambda builder, x: emit_asm(builder, F32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x]),
)

log2 = declare(
    "log2",
    "The logarithm to base 2 of a float32, to an error of about 2**-22 (lg2.approx.ftz).",
    float32,
    [float32],
    lambda builder, x: emit_asm(builder, F32, "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x]),
)

low_bits = declare(
    "low_bits",
    "A word with its lowest `count` bits set, all from 32 on.",
    uint32,
    [uint32],
    lambda builder, count: emit_asm(
        builder, I32, "{ .reg .b32 n; shl.b32 n, 1, $1; sub.u32 $0, n, 1; }", "=r,r", [count]
    ),
)
