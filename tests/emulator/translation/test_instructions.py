"""Integer instructions, memory, control: one PTX snippet each, against NumPy and Python's integers."""

from operator import eq, ge, gt, ne

import numpy as np
import pytest

from pagedkv.emulator import Module, UnsupportedInstructionError

from ..ptx_harness import SHARED, kernel_text, run_ptx, stats_of

N = 64
RNG = np.random.default_rng(7)
U = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32)
V = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32)
W = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32)
U[:4], V[:4] = (0, 1, 0xFFFFFFFF, 0x80000000), (0xFFFFFFFF, 3, 0xFFFFFFFF, 1)
Q = RNG.integers(0, 1 << 63, N, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
R = RNG.integers(0, 1 << 63, N, dtype=np.uint64)
M32 = (1 << 32) - 1


def ints(a, signed=False):
    return [int(x) for x in (a.view(f"i{a.itemsize}") if signed else a)]


SHORTS = "cvt.u16.u32 %h1, %i0; cvt.u16.u32 %h2, %i1;"
INT_CASES = {
    "mul.hi.u32": ("mul.hi.u32 %o0, %i0, %i1;", lambda a, b: a * b >> 32, False),
    "mul.hi.s32": ("mul.hi.s32 %o0, %i0, %i1;", lambda a, b: a * b >> 32, True),
    "mad.lo": ("mad.lo.s32 %o0, %i0, %i1, %i0;", lambda a, b: a * b + a, True),
    "mad.hi": ("mad.hi.u32 %o0, %i0, %i1, %i0;", lambda a, b: (a * b >> 32) + a, False),
    "sub": ("sub.u32 %o0, %i0, %i1;", lambda a, b: a - b, False),
    "min.s32": ("min.s32 %o0, %i0, %i1;", min, True),
    "max.u32": ("max.u32 %o0, %i0, %i1;", max, False),
    "min.u32": ("min.u32 %o0, %i0, %i1;", min, False),
    "rem.u32": ("rem.u32 %o0, %i0, %i1;", lambda a, b: a % b, False),
    "add.sat": ("add.sat.s32 %o0, %i0, %i1;", lambda a, b: max(-(2**31), min(2**31 - 1, a + b)), True),
    "sub.sat": ("sub.sat.s32 %o0, %i0, %i1;", lambda a, b: max(-(2**31), min(2**31 - 1, a - b)), True),
    "sad": ("sad.s32 %o0, %i0, %i1, 5;", lambda a, b: abs(a - b) + 5, True),
    "shl": ("and.b32 %r1, %i1, 63; shl.b32 %o0, %i0, %r1;", lambda a, b: a << (b & 63), False),
    "shr.u32": ("and.b32 %r1, %i1, 63; shr.u32 %o0, %i0, %r1;", lambda a, b: a >> (b & 63), False),
    "shr.s32": ("and.b32 %r1, %i1, 31; shr.s32 %o0, %i0, %r1;", lambda a, b: a >> (b & 31), True),
    "shf.l.wrap": ("shf.l.wrap.b32 %o0, %i0, %i1, 13;", lambda a, b: ((b << 32 | a) << 13) >> 32, False),
    "shf.r.wrap": ("shf.r.wrap.b32 %o0, %i0, %i1, %i0;", lambda a, b: (b << 32 | a) >> (a & 31), False),
    "shf.r.clamp": ("shf.r.clamp.b32 %o0, %i0, %i1, 40;", lambda a, b: b, False),
    "lop3.xor3": ("lop3.b32 %o0, %i0, %i1, %r0, 0x96;", lambda a, b: a ^ b ^ 0x1234, False),
    "lop3.0xE2": (
        "lop3.b32 %o0, %i0, %i1, %r0, 0xE2;",
        lambda a, b: sum(
            ((0xE2 >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (0x1234 >> i & 1))) & 1) << i for i in range(32)
        ),
        False,
    ),
    "prmt.const": ("prmt.b32 %o0, %i0, %i1, 0x5410;", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16, False),
    "prmt.hi": ("prmt.b32 %o0, %i0, %i1, 0x7632;", lambda a, b: (a >> 16) | (b & 0xFFFF0000), False),
    "prmt.reg": (
        "mov.u32 %r1, 0x9216; prmt.b32 %o0, %i0, %i1, %r1;",
        lambda a, b: (b >> 16 & 255) | (a >> 8 & 255) << 8 | (a >> 16 & 255) << 16 | (255 if a >> 15 & 1 else 0) << 24,
        False,
    ),
    "bfe.u32": ("bfe.u32 %o0, %i0, 5, 9;", lambda a, b: a >> 5 & 511, False),
    "bfe.s32": ("bfe.s32 %o0, %i0, 5, 9;", lambda a, b: ((a >> 5 & 511) ^ 256) - 256, True),
    "bfi": ("bfi.b32 %o0, %i0, %i1, 8, 12;", lambda a, b: (b & ~(4095 << 8)) | (a & 4095) << 8, False),
    "popc": ("popc.b32 %o0, %i0;", lambda a, b: bin(a).count("1"), False),
    "clz": ("clz.b32 %o0, %i0;", lambda a, b: 32 - a.bit_length(), False),
    "brev": ("brev.b32 %o0, %i0;", lambda a, b: int(f"{a:032b}"[::-1], 2), False),
    "bfind.u32": ("bfind.u32 %o0, %i0;", lambda a, b: a.bit_length() - 1, False),
    "bfind.s32": ("bfind.s32 %o0, %i0;", lambda a, b: (~a if a < 0 else a).bit_length() - 1, True),
    "bfind.shiftamt": ("bfind.shiftamt.u32 %o0, %i0;", lambda a, b: 32 - a.bit_length() if a else -1, False),
    "dp4a": (
        "dp4a.u32.u32 %o0, %i0, %i1, %i0;",
        lambda a, b: a + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4)),
        False,
    ),
    "not": ("not.b32 %o0, %i0;", lambda a, b: ~a, False),
    "neg": ("neg.s32 %o0, %i0;", lambda a, b: -a, True),
    "abs": ("abs.s32 %o0, %i0;", lambda a, b: abs(a), True),
    "selp": ("setp.gt.s32 %p1, %i0, %i1; selp.b32 %o0, %i0, %i1, %p1;", max, True),
    "setp.and": (
        "setp.gt.s32 %p1, %i0, 0; setp.lt.and.s32 %p2, %i1, 0, %p1; selp.b32 %o0, 1, 0, %p2;",
        lambda a, b: int(a > 0 and b < 0),
        True,
    ),
    "setp.pq": ("setp.lt.u32 %p1|%p2, %i0, %i1; selp.b32 %o0, 1, 2, %p2;", lambda a, b: 2 if a < b else 1, False),
    "setp.lo": ("setp.lo.u32 %p1, %i0, %i1; selp.b32 %o0, 1, 2, %p1;", lambda a, b: 1 if a < b else 2, False),
    "setp.le.u32": ("setp.le.u32 %p1, %i0, %i1; selp.b32 %o0, 1, 2, %p1;", lambda a, b: 1 if a <= b else 2, False),
    "predicates": (
        "setp.gt.s32 %p1, %i0, 0; setp.lt.s32 %p2, %i1, 0; and.pred %p3, %p1, %p2; not.pred %p4, %p3;"
        "or.pred %p5, %p4, %p2; xor.pred %p6, %p5, %p1; mov.pred %p7, %p6; selp.b32 %o0, 1, 2, %p7;",
        lambda a, b: 1 if (not (a > 0 and b < 0) or b < 0) != (a > 0) else 2,
        True,
    ),
    "16 bits": (
        f"{SHORTS} mul.lo.s16 %h3, %h1, %h2; add.s16 %h3, %h3, %h1; sub.s16 %h3, %h3, 77; and.b16 %h4, %h3, %h1;"
        "shl.b16 %h4, %h4, 3; shr.u16 %h5, %h3, 5; or.b16 %h4, %h4, %h5; mov.u16 %h6, %h4; cvt.u32.u16 %o0, %h6;"
        "setp.ne.s16 %p1, %h2, 3; @%p1 add.u32 %o0, %o0, 7;",
        lambda a, b: (((c := a * b + a - 77 & 0xFFFF) & a) << 3 & 0xFFFF | c >> 5) + 7 * (b & 0xFFFF != 3),
        False,
    ),
    "mul.hi.u16": (
        f"{SHORTS} mul.hi.u16 %h3, %h1, %h2; xor.b16 %h3, %h3, %h1; cvt.u32.u16 %o0, %h3;",
        lambda a, b: ((a & 0xFFFF) * (b & 0xFFFF) >> 16) ^ a & 0xFFFF,
        False,
    ),
    "mul.wide.u16": (f"{SHORTS} mul.wide.u16 %o0, %h1, %h2;", lambda a, b: (a & 0xFFFF) * (b & 0xFFFF), False),
    "setp.u16": (
        f"{SHORTS} setp.lt.u16 %p1, %h1, %h2; setp.gt.u16 %p2, %h1, 999;"
        "selp.b32 %r1, 4, 0, %p1; selp.b32 %o0, %r1, 1, %p2;",
        lambda a, b: 1 if a & 0xFFFF <= 999 else 4 if a & 0xFFFF < b & 0xFFFF else 0,
        False,
    ),
    "cvt.u8": ("cvt.u32.u8 %o0, %i0;", lambda a, b: a & 255, False),
    "set": ("set.ge.u32.s32 %o0, %i0, %i1;", lambda a, b: -1 if a >= b else 0, True),
    "carry": ("add.cc.u32 %r1, %i0, %i1; addc.u32 %o0, 0, 0;", lambda a, b: (a + b) >> 32, False),
    "borrow": ("sub.cc.u32 %r1, %i0, %i1; subc.u32 %o0, 7, 0;", lambda a, b: 7 - (a < b), False),
    "madc": ("mad.lo.cc.u32 %r1, %i0, %i1, %i0; madc.hi.u32 %o0, %i0, %i1, 0;", lambda a, b: (a * b + a) >> 32, False),
    "cvt.s8": ("cvt.s32.s8 %o0, %i0;", lambda a, b: ((a & 255) ^ 128) - 128, False),
    "cvt.sat": ("cvt.sat.u8.s32 %r1, %i0; mov.b32 %o0, %r1;", lambda a, b: max(0, min(255, a)), True),
    "packed": ("mov.b32 {%h1, %h2}, %i0; mov.b32 %o0, {%h2, %h1};", lambda a, b: (a >> 16) | (a & 0xFFFF) << 16, False),
    "add.u16x2": (
        "add.u16x2 %o0, %i0, %i1;",
        lambda a, b: ((a + b) & 0xFFFF) | (((a >> 16) + (b >> 16)) & 0xFFFF) << 16,
        False,
    ),
}


@pytest.mark.parametrize("name", INT_CASES)
def test_integer(name, one):
    body, ref, signed = INT_CASES[name]
    got = one("mov.u32 %r0, 0x1234;\n" + body, [U, V], target="sm_90" if name == "add.u16x2" else "sm_80")
    want = np.array([ref(a, b) & M32 for a, b in zip(ints(U, signed), ints(V, signed), strict=False)], np.uint32)
    np.testing.assert_array_equal(got, want)


LONG_CASES = {
    "mad.lo.s64": ("mad.lo.s64 %o0, %i0, %i1, %i0;", lambda a, b: a * b + a, True),
    "div.u64": ("div.u64 %o0, %i0, %i1;", lambda a, b: a // b, False),
    "min.u64": ("min.u64 %o0, %i0, %i1;", min, False),
    "bfi.b64": (
        "bfi.b64 %o0, %i0, %i1, 24, 33;",
        lambda a, b: b & ~((1 << 33) - 1 << 24) | (a & (1 << 33) - 1) << 24,
        False,
    ),
    "cvt.u64.u16": ("cvt.u16.u64 %h1, %i0; cvt.u64.u16 %o0, %h1;", lambda a, b: a & 0xFFFF, False),
    "selp.s64": ("setp.le.s64 %p1, %i0, %i1; selp.s64 %o0, %i1, %i0, %p1;", max, True),
    **{
        f"setp.{name}": (
            f"setp.{name} %p1, %i0, %i1; selp.b64 %o0, 1, 2, %p1;",
            lambda a, b, f=f: 1 if f(a, b) else 2,
            False,
        )
        for name, f in (("ge.u64", ge), ("gt.u64", gt), ("eq.b64", eq), ("ne.b64", ne))
    },
}


@pytest.mark.parametrize("name", LONG_CASES)
def test_long_integer(name, one):
    body, ref, signed = LONG_CASES[name]
    others = np.where(np.arange(N) % 5 == 0, Q, R)  # some are equal
    got = one(body, [Q, others], "u8")
    pairs = zip(ints(Q, signed), ints(others, signed), strict=True)
    np.testing.assert_array_equal(got, np.array([ref(a, b) % 2**64 for a, b in pairs], np.uint64))


def test_wide_integer(one):
    got = one("mul.wide.u32 %o0, %i0, %i1;", [U, V], "u8")
    np.testing.assert_array_equal(got, U.astype("u8") * V)
    got = one("mad.wide.s32 %o0, %i0, %i1, %i2;", [U, V, Q], "u8")
    want = (U.view("i4").astype("i8") * V.view("i4") + Q.view("i8")).view("u8")
    np.testing.assert_array_equal(got, want)
    got = one("mul.hi.u64 %o0, %i0, %i1;", [Q, R], "u8")
    np.testing.assert_array_equal(got, np.array([int(a) * int(b) >> 64 for a, b in zip(Q, R, strict=False)], "u8"))
    got = one("mul.hi.s64 %o0, %i0, %i1;", [Q, R], "i8")
    np.testing.assert_array_equal(
        got, np.array([int(a) * int(b) >> 64 for a, b in zip(Q.view("i8"), R.view("i8"), strict=False)], "i8")
    )
    got = one("div.s64 %o0, %i0, %i1;", [Q, R], "i8")
    np.testing.assert_array_equal(
        got,
        np.array(
            [
                int(int(a) / 1) // int(b) if a >= 0 else -(-int(a) // int(b))
                for a, b in zip(Q.view("i8"), R.view("i8"), strict=False)
            ],
            "i8",
        ),
    )
    got = one("clz.b64 %r1, %i0; bfind.u64 %r2, %i0; add.u32 %o0, %r1, %r2;", [Q >> np.uint64(9)], "u4")
    np.testing.assert_array_equal(got, np.full(N, 63))
    got = one("mov.b64 {%r1, %r2}, %i0; mov.b64 %o0, {%r2, %r1};", [Q], "u8")
    np.testing.assert_array_equal(got, (Q >> np.uint64(32)) | (Q << np.uint64(32)))


def test_vector_memory_and_hints(one):
    body = """
    ld.param.u64 %rd1, [p0]; and.b64 %rd2, %gid64, 31; shl.b64 %rd2, %rd2, 4; add.u64 %rd1, %rd1, %rd2;
    ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
    ld.global.L1::evict_first.v2.b64 {%rd5, %rd6}, [%rd1];
    xor.b32 %r5, %r1, %r2; xor.b32 %r6, %r3, %r4; xor.b32 %r5, %r5, %r6;
    xor.b64 %rd5, %rd5, %rd6; mov.b64 {%r7, %r8}, %rd5; xor.b32 %r7, %r7, %r8; sub.u32 %r9, %r7, %r5;
    add.u32 %o0, %r5, %r9;"""
    a = RNG.integers(0, 1 << 32, 128, dtype=np.uint64).astype("u4")
    got = one(body, [a], n=32)
    np.testing.assert_array_equal(got, np.bitwise_xor.reduce(a.reshape(32, 4), 1))
    got = one("ld.param.u64 %rd1, [p0]; add.u64 %rd1, %rd1, %gid64; ld.global.s8 %o0, [%rd1];", [a], "i4", n=64)
    np.testing.assert_array_equal(got, a.view("i1")[:64])
    for form in ("ld.volatile.global.u32", "ld.relaxed.gpu.global.u32", "ld.acquire.sys.global.u32"):
        got = one(
            f"ld.param.u64 %rd1, [p0]; {form} %r1, [%rd1]; st.release.gpu.global.u32 [%rd1], %r1; fence.acq_rel.gpu;"
            " membar.gl; mov.u32 %o0, %r1;",
            [a],
            "u4",
            n=32,
        )
        assert (got == a[0]).all()


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *(("b16", "u2"), ("b32", "u4"), ("s32", "i4"), ("f32", "f4"), ("u64", "u8"), ("v2.b32", "u4")),
        *(("v2.f32", "f4"), ("v2.b64", "u8"), ("v4.b32", "u4"), ("v4.f32", "f4")),
    ],
)
def test_loads_and_stores(form, dtype, run):
    """From global to shared memory, to another thread, to global memory and back."""
    count, size = int(form[1]) if form[0] == "v" else 1, np.dtype(dtype).itemsize
    registers = [", ".join(f"%{name}{i}" for i in range(count)) for name in ({2: "h", 4: "r", 8: "rd"}[size], "o")]
    values, results = (f"{{{x}}}" if count > 1 else x for x in registers)
    body = f"""mul.lo.u32 %r20, %lid, {count * size}; xor.b32 %r21, %r20, {count * size}; mov.u32 %r22, buf;
    add.u32 %r20, %r20, %r22; add.u32 %r21, %r21, %r22; mul.wide.u32 %rd20, %lid, {count * size};
    ld.param.u64 %rd21, [p0]; add.u64 %rd21, %rd21, %rd20; ld.param.u64 %rd22, [p1]; add.u64 %rd22, %rd22, %rd20;
    ld.global.nc.{form} {values}, [%rd21]; st.shared.{form} [%r20], {values}; bar.sync 0;
    ld.shared.{form} {values}, [%r21]; st.global.{form} [%rd22], {values}; ld.global.{form} {results}, [%rd22];"""
    a = np.arange(1, 32 * count + 1).astype(dtype)
    got = run(body, [a, np.zeros_like(a)], [dtype] * count, n=32, **SHARED)
    np.testing.assert_array_equal(np.stack(got, 1), a.reshape(32, count)[np.arange(32) ^ 1])


def test_32_byte_loads(one):
    body = """ld.param.u64 %rd1, [p0]; shl.b64 %rd2, %gid64, 5; add.u64 %rd1, %rd1, %rd2;
    ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];
    ld.global.nc.v4.b64 {%rd3, %rd4, %rd5, %rd6}, [%rd1];
    xor.b32 %r1, %r1, %r8; cvt.u32.u64 %r9, %rd6; add.u32 %o0, %r1, %r9;"""
    a = RNG.integers(0, 1 << 32, (32, 8), dtype=np.uint64).astype("u4")
    got = one(body, [a.reshape(-1)], n=32, target="sm_100")
    np.testing.assert_array_equal(got, (a[:, 0] ^ a[:, 7]) + a[:, 6])
    assert stats_of(body, [a.reshape(-1)], ["u4"], n=32).buffers["in0"].sectors_read == 64 + 4


def test_no_ops_and_special_registers(one):
    got = one(
        "nanosleep.u32 100; ld.param.u64 %rd0, [p0]; prefetch.global.L2 [%rd0]; mov.u32 %r1, %lanemask_lt;"
        "popc.b32 %r2, %r1; mov.u32 %r3, %laneid; sub.u32 %o0, %r2, %r3;",
        [U],
    )
    np.testing.assert_array_equal(got, 0)
    assert (one("griddepcontrol.wait; mov.u32 %o0, 3;", [U], target="sm_90") == 3).all()


def test_predicated_code_and_scoped_registers(one):
    body = """
    setp.lt.u32 %p1, %gid, 10; mov.u32 %o0, 5;
    @%p1 mov.u32 %o0, %gid;
    { .reg .b32 tmp; mov.u32 tmp, 7; @!%p1 add.u32 %o0, %o0, tmp; }
    { .reg .b64 tmp; mov.u64 tmp, 1; cvt.u32.u64 %r1, tmp; add.u32 %o0, %o0, %r1; }"""
    np.testing.assert_array_equal(one(body, [U], "u4"), np.where(np.arange(N) < 10, np.arange(N), 12) + 1)


def test_lanes_that_leave_a_loop_early_keep_their_registers(one):
    body = """and.b32 %r1, %lid, 7; ld.param.u64 %rd1, [p0]; mov.u32 %r2, 0; mov.u32 %r3, 100;
    $loop: add.u64 %rd1, %rd1, 4; add.u32 %r3, %r3, 3; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r1; @%p1 bra $loop;
    ld.global.u32 %r4, [%rd1+16]; add.u32 %o0, %r4, %r3;"""
    turns = np.maximum(np.arange(N) % 8, 1)
    for seed in (None, 1):
        np.testing.assert_array_equal(one(body, [U], "u4", seed=seed), (U[turns + 4] + 100 + 3 * turns).astype("u4"))


FUNC = """
.func (.param .b32 func_retval0) helper(.param .b32 helper_param_0, .param .b64 helper_param_1)
{
.reg .b32 %r<5>; .reg .b64 %rd<3>; .reg .pred %p<2>; .local .align 4 .b8 depot[16]; .reg .b64 %SP;
ld.param.u32 %r1, [helper_param_0]; ld.param.u64 %rd1, [helper_param_1];
mov.u64 %SP, depot; st.local.u32 [%SP+4], %r1;
setp.gt.u32 %p1, %r1, 40;
@%p1 bra $big;
cvt.u32.u64 %r2, %rd1; ld.local.u32 %r4, [%SP+4]; add.u32 %r3, %r4, %r2;
st.param.b32 [func_retval0+0], %r3;
ret;
$big:
st.param.b32 [func_retval0+0], 1000;
ret;
}
"""


def test_function_calls(one):
    call = """{{ .param .b32 param0; st.param.b32 [param0+0], {a}; .param .b64 param1; st.param.b64 [param1+0], %rd1;
    .param .b32 retval0; {p} call.uni (retval0), helper, (param0, param1); ld.param.b32 {d}, [retval0+0]; }}"""
    body = (
        "mov.u64 %rd1, 3; mov.u32 %r9, 0;\n"
        + call.format(a="%gid", d="%r9", p="")
        + call.format(a="%r9", d="%o0", p="")
    )
    g = np.arange(N)

    def f(x):
        return np.where(x > 40, 1000, x + 3)

    np.testing.assert_array_equal(one(body, [U], "u4", extra=FUNC), f(f(g)))
    missing = call.replace("helper", "elsewhere").format(a="%gid", d="%o0", p="")
    with pytest.raises(UnsupportedInstructionError, match=r"elsewhere.*PTX line"):
        run_ptx("mov.u64 %rd1, 3;" + missing, [U], ["u4"])


def test_unsupported_instruction_names_line():
    with pytest.raises(UnsupportedInstructionError, match=r"line \d+: txq"):
        run_ptx("txq.width.b32 %o0, [%rd0];", [U], ["u4"])
    never = "bra $over; txq.width.b32 %o0, [%rd0];\n$over: mov.u32 %o0, 3;"
    (got,) = run_ptx(never, [U], ["u4"])
    assert (got == 3).all()
    entry = Module(kernel_text("txq.width.b32 %o0, [%rd0];", [], [4])).entry()
    assert [t.split()[0] for t in entry.unsupported_instructions().values()] == ["txq.width.b32"]


def test_registers_do_not_change_hands_unchecked():
    """PTX does not say how many a thread has, so nothing could tell that a thread block takes more than it has."""
    with pytest.raises(UnsupportedInstructionError, match=r"line \d+: setmaxnreg"):
        run_ptx("setmaxnreg.inc.sync.aligned.u32 64; mov.u32 %o0, 3;", [U], ["u4"])


@pytest.mark.parametrize(
    "text", ["st.async.weak.u32 [%rd0], %gid, [%rd1];", "red.async.relaxed.cta.add.u32 [%rd0], %gid;"]
)
def test_asynchronous_stores_are_not_plain_ones(text):
    with pytest.raises(UnsupportedInstructionError, match=r"line \d+: (st|red)\.async"):
        run_ptx(f"{text} mov.u32 %o0, 0;", [U], ["u4"])
