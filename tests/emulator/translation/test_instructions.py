"""Instruction semantics, one PTX snippet each, against NumPy / Python integers."""

import ml_dtypes
import numpy as np
import pytest

from pagedkv.emulator import Module, UnsupportedInstructionError

from ..ptx_harness import kernel_text, launch_ptx, run_ptx

N = 64
RNG = np.random.default_rng(7)
U = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32)
V = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32)
W = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32)
U[:4], V[:4] = (0, 1, 0xFFFFFFFF, 0x80000000), (0xFFFFFFFF, 3, 0xFFFFFFFF, 1)
Q = RNG.integers(0, 1 << 63, N, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
R = RNG.integers(0, 1 << 63, N, dtype=np.uint64)
F = RNG.standard_normal(N).astype("f4")
G = RNG.standard_normal(N).astype("f4")
H = RNG.standard_normal(2 * N).astype("f2")
K = RNG.standard_normal(2 * N).astype("f2")
BF = RNG.standard_normal(2 * N).astype(ml_dtypes.bfloat16)
BG = RNG.standard_normal(2 * N).astype(ml_dtypes.bfloat16)
M32 = (1 << 32) - 1


def ints(a, signed=False):
    return [int(x) for x in (a.view(f"i{a.itemsize}") if signed else a)]


def one(body, inputs, dtype, **kw):
    return run_ptx(body, inputs, [dtype], **kw)[0]


INT_CASES = {
    "mul.hi.u32": ("mul.hi.u32 %o0, %i0, %i1;", lambda a, b: a * b >> 32, False),
    "mul.hi.s32": ("mul.hi.s32 %o0, %i0, %i1;", lambda a, b: a * b >> 32, True),
    "mad.lo": ("mad.lo.s32 %o0, %i0, %i1, %i0;", lambda a, b: a * b + a, True),
    "mad.hi": ("mad.hi.u32 %o0, %i0, %i1, %i0;", lambda a, b: (a * b >> 32) + a, False),
    "sub": ("sub.u32 %o0, %i0, %i1;", lambda a, b: a - b, False),
    "min.s32": ("min.s32 %o0, %i0, %i1;", min, True),
    "max.u32": ("max.u32 %o0, %i0, %i1;", max, False),
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
def test_integer(name):
    body, ref, signed = INT_CASES[name]
    got = one("mov.u32 %r0, 0x1234;\n" + body, [U, V], "u4")
    want = np.array([ref(a, b) & M32 for a, b in zip(ints(U, signed), ints(V, signed), strict=False)], np.uint32)
    np.testing.assert_array_equal(got, want)


def test_wide_integer():
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


def test_float_arithmetic():
    np.testing.assert_array_equal(
        one("fma.rn.f32 %o0, %i0, %i1, %i0;", [F, G], "f4"), (F.astype("f8") * G + F).astype("f4")
    )
    x = np.array([np.nan, 1, -0.0, np.inf] * 16, "f4")
    np.testing.assert_array_equal(one("max.f32 %o0, %i0, %i1;", [x, G], "f4"), np.fmax(x, G))
    np.testing.assert_array_equal(one("max.NaN.f32 %o0, %i0, %i1;", [x, G], "f4"), np.maximum(x, G))
    got = one("add.f32.rz.sat %o0, %i0, %i1;".replace("f32.rz.sat", "sat.f32"), [F, G], "f4")
    np.testing.assert_array_equal(got, np.clip(F + G, 0, 1))
    exact = F.astype("f8") * G
    down, up = (one(f"mul.{m}.f32 %o0, %i0, %i1;", [F, G], "f4").astype("f8") for m in ("rm", "rp"))
    assert (down <= exact).all()
    assert (up >= exact).all()
    assert (np.nextafter(down.astype("f4"), np.float32(9)) >= up).all()
    np.testing.assert_array_equal(
        one("fma.rn.f64 %fd0, %i0, %i1, %i0; mov.f64 %o0, %fd0;", [F.astype("f8"), G.astype("f8")], "f8"),
        F.astype("f8") * G + F,
    )
    for op, ref in (
        ("ex2.approx.f32", np.exp2),
        ("lg2.approx.f32", lambda v: np.log2(v)),
        ("rcp.approx.f32", lambda v: 1 / v),
        ("rsqrt.approx.f32", lambda v: 1 / np.sqrt(v)),
        ("sqrt.approx.f32", np.sqrt),
        ("tanh.approx.f32", np.tanh),
        ("sin.approx.f32", np.sin),
        ("cos.approx.f32", np.cos),
    ):
        np.testing.assert_allclose(one(f"{op} %o0, %i0;", [np.abs(F)], "f4"), ref(np.abs(F).astype("f8")), rtol=1e-6)


def test_nan_comparisons():
    x = np.array([np.nan, 1, 2, np.nan] * 16, "f4")
    y = np.array([1, 1, np.nan, np.nan] * 16, "f4")
    nan = np.isnan(x) | np.isnan(y)
    for cmp, want in (
        ("eq", x == y),
        ("ne", (x != y) & ~nan),
        ("equ", (x == y) | nan),
        ("neu", x != y),
        ("ltu", (x < y) | nan),
        ("ge", x >= y),
        ("nan", nan),
        ("num", ~nan),
    ):
        got = one(f"setp.{cmp}.f32 %p1, %i0, %i1; selp.b32 %o0, 1, 0, %p1;", [x, y], "u4")
        np.testing.assert_array_equal(got, want, err_msg=cmp)


def test_flush_to_zero():
    tiny = np.array([1e-40, -1e-40, 2e-38, 1.0] * 16, "f4")
    got = one("mul.ftz.f32 %o0, %i0, %i1;", [tiny, np.full(N, 0.5, "f4")], "f4")
    np.testing.assert_array_equal(got, np.array([0, -0.0, 0, 0.5] * 16, "f4"))
    assert np.signbit(got[1])
    got = one("mul.ftz.f32 %o0, %i0, %i1;", [tiny, np.full(N, 1e20, "f4")], "f4")  # inputs are flushed too
    np.testing.assert_array_equal(got[:2], [0, 0])
    got = one("mul.f32 %o0, %i0, %i1;", [tiny, np.full(N, 0.5, "f4")], "f4")
    np.testing.assert_array_equal(got, tiny * np.float32(0.5))
    got = one("ex2.approx.ftz.f32 %o0, %i0;", [np.full(N, -130, "f4")], "f4")
    np.testing.assert_array_equal(got, 0)
    got = one(
        "setp.eq.f32 %p1, %i1, 0f3F800000; mov.f32 %o0, %i0; @%p1 add.ftz.f32 %o0, %i0, %i0;",
        [tiny, np.array([0, 1] * 32, "f4")],
        "f4",
    )  # masked lanes keep subnormals
    np.testing.assert_array_equal(got, np.where(np.arange(N) % 2, np.array([0, 0, 0, 2] * 16, "f4"), tiny))


def test_float_to_int():
    x = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf, 0.49] * 8, "f4")
    for mode, f in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        want = np.clip(
            np.nan_to_num(f(x.astype("f8")), nan=0, posinf=2**31, neginf=-(2**31)), -(2**31), 2**31 - 1
        ).astype("i8")
        np.testing.assert_array_equal(one(f"cvt.{mode}.s32.f32 %o0, %i0;", [x], "i4"), want)
    np.testing.assert_array_equal(one("cvt.rmi.f32.f32 %o0, %i0;", [x], "f4"), np.floor(x))
    np.testing.assert_array_equal(one("cvt.rn.f32.s32 %o0, %i0;", [U], "f4"), U.view("i4").astype("f4"))
    np.testing.assert_array_equal(
        one("cvt.rn.f32.f64 %o0, %i0;", [F.astype("f8") * 1.1], "f4"), (F.astype("f8") * 1.1).astype("f4")
    )


HALF2 = {
    "fma.rn": ("fma.rn.{t}x2 %o0, %i0, %i1, %i0;", lambda a, b: a * b + a),
    "add": ("add.{t}x2 %o0, %i0, %i1;", lambda a, b: a + b),
    "sub": ("sub.{t}x2 %o0, %i0, %i1;", lambda a, b: a - b),
    "mul": ("mul.{t}x2 %o0, %i0, %i1;", lambda a, b: a * b),
    "min": ("min.{t}x2 %o0, %i0, %i1;", np.fmin),
    "max": ("max.{t}x2 %o0, %i0, %i1;", np.fmax),
    "neg": ("neg.{t}x2 %o0, %i0;", lambda a, b: -a),
    "abs": ("abs.{t}x2 %o0, %i0;", lambda a, b: abs(a)),
    "relu": ("fma.rn.relu.{t}x2 %o0, %i0, %i1, %i0;", lambda a, b: np.maximum(a * b + a, 0)),
}


@pytest.mark.parametrize("name", HALF2)
@pytest.mark.parametrize("ty", ["f16", "bf16"])
def test_packed_halves(name, ty):
    body, ref = HALF2[name]
    a, b = (H, K) if ty == "f16" else (BF, BG)
    got = one(body.format(t=ty), [a.view("u4"), b.view("u4")], "u4").view(a.dtype)
    want = ref(a.astype("f8"), b.astype("f8")).astype(a.dtype)
    np.testing.assert_array_equal(got.view("u2"), want.view("u2"))


def test_packed_float32():
    a, b = RNG.standard_normal(2 * N).astype("f4"), RNG.standard_normal(2 * N).astype("f4")
    for op, want in (
        ("fma.rn.f32x2 %o0, %i0, %i1, %i0;", (a.astype("f8") * b + a).astype("f4")),
        ("add.rn.f32x2 %o0, %i0, %i1;", a + b),
        ("mul.rn.f32x2 %o0, %i0, %i1;", a * b),
    ):
        np.testing.assert_array_equal(one(op, [a.view("u8"), b.view("u8")], "u8").view("f4"), want)


def test_scalar_halves():
    h, k = H[:N], K[:N]
    np.testing.assert_array_equal(
        one("fma.rn.f16 %o0, %i0, %i1, %i0;", [h, k], "f2"), (h.astype("f8") * k + h).astype("f2")
    )
    np.testing.assert_array_equal(one("cvt.f32.f16 %o0, %i0;", [h], "f4"), h.astype("f4"))
    np.testing.assert_array_equal(one("cvt.rn.f16.f32 %o0, %i0;", [F], "f2"), F.astype("f2"))
    np.testing.assert_array_equal(one("cvt.f32.bf16 %o0, %i0;", [BF[:N].view("u2")], "f4"), BF[:N].astype("f4"))
    np.testing.assert_array_equal(one("cvt.rn.bf16.f32 %o0, %i0;", [F], "u2"), F.astype(ml_dtypes.bfloat16).view("u2"))
    np.testing.assert_array_equal(one("setp.gt.f16 %p1, %i0, %i1; selp.b32 %o0, 1, 0, %p1;", [h, k], "u4"), h > k)
    np.testing.assert_array_equal(
        one("mul.bf16 %o0, %i0, %i1;", [BF[:N].view("u2"), BG[:N].view("u2")], "u2"), (BF[:N] * BG[:N]).view("u2")
    )


def test_pack_conversions():
    special = F.copy()
    special[:6] = (np.inf, -np.inf, np.nan, 70000, 1e-8, -0.0)
    for ty, dt in (("f16", np.dtype("f2")), ("bf16", np.dtype(ml_dtypes.bfloat16))):
        got = one(f"cvt.rn.{ty}x2.f32 %o0, %i0, %i1;", [special, G], "u4").view(dt).reshape(-1, 2)
        with np.errstate(over="ignore"):
            overflown = special.astype(dt)
        np.testing.assert_array_equal(got[:, 0].astype("f4"), G.astype(dt).astype("f4"))
        np.testing.assert_array_equal(got[:, 1].astype("f4"), overflown.astype("f4"))
    np.testing.assert_array_equal(
        one("cvt.rz.bf16x2.f32 %o0, %i0, %i1;", [F, G], "u4"), (F.view("u4") & 0xFFFF0000) | (G.view("u4") >> 16)
    )
    np.testing.assert_array_equal(one("cvt.rna.tf32.f32 %o0, %i0;", [F], "u4"), (F.view("u4") + 0x1000) & 0xFFFFE000)


@pytest.mark.parametrize(("kind", "dt"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_fp8(kind, dt):
    codes = np.arange(256, dtype="u1").view("u2")  # every code
    got = one(f"cvt.rn.f16x2.{kind}x2 %o0, %i0;", [codes], "u4").view("f2")
    np.testing.assert_array_equal(got, codes.view(dt).astype("f2"))
    x = np.concatenate(
        [
            RNG.standard_normal(40) * 10.0 ** RNG.integers(-4, 3, 40),
            [0, -0.0, 448, 449, 464, 1e9, -1e9, 57344, 2**-9, 2**-10, 2**-16, 2**-17, 3 * 2**-11],
        ]
    ).astype("f4")
    x = np.resize(x, N)
    limit = float(ml_dtypes.finfo(dt).max)
    got = one(f"cvt.rn.satfinite.{kind}x2.f32 %o0, %i0, %i1;", [x, -x], "u2").view(dt).reshape(-1, 2)
    want = np.clip(x, -limit, limit).astype(dt)
    np.testing.assert_array_equal(got[:, 1].view("u1"), want.view("u1"))
    np.testing.assert_array_equal(got[:, 0].view("u1"), np.clip(-x, -limit, limit).astype(dt).view("u1"))
    got = one(f"cvt.rn.satfinite.{kind}x2.f16x2 %o0, %i0;", [H.view("u4")], "u2").view(dt)
    np.testing.assert_array_equal(got.view("u1"), H.astype(dt).view("u1"))
    assert one(f"cvt.rn.satfinite.{kind}x2.f32 %o0, %i0, %i0;", [np.full(N, np.nan, "f4")], "u2")[0] == 0x7F7F


def test_vector_memory_and_hints():
    body = """
    ld.param.u64 %rd1, [p0]; and.b64 %rd2, %gid64, 31; shl.b64 %rd2, %rd2, 4; add.u64 %rd1, %rd1, %rd2;
    ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
    ld.global.L1::evict_first.v2.b64 {%rd5, %rd6}, [%rd1];
    xor.b32 %r5, %r1, %r2; xor.b32 %r6, %r3, %r4; xor.b32 %r5, %r5, %r6;
    xor.b64 %rd5, %rd5, %rd6; mov.b64 {%r7, %r8}, %rd5; xor.b32 %r7, %r7, %r8; sub.u32 %r9, %r7, %r5;
    add.u32 %o0, %r5, %r9;"""
    a = RNG.integers(0, 1 << 32, 128, dtype=np.uint64).astype("u4")
    got = run_ptx(body, [a], ["u4"], n=32)[0]
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


def test_32_byte_loads():
    body = """ld.param.u64 %rd1, [p0]; shl.b64 %rd2, %gid64, 5; add.u64 %rd1, %rd1, %rd2;
    ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];
    ld.global.nc.v4.b64 {%rd3, %rd4, %rd5, %rd6}, [%rd1];
    xor.b32 %r1, %r1, %r8; cvt.u32.u64 %r9, %rd6; add.u32 %o0, %r1, %r9;"""
    a = RNG.integers(0, 1 << 32, (32, 8), dtype=np.uint64).astype("u4")
    (got,), stats = launch_ptx(body, [a.reshape(-1)], ["u4"], n=32, stats=True)  # needs sm_100
    np.testing.assert_array_equal(got, (a[:, 0] ^ a[:, 7]) + a[:, 6])
    assert stats.buffers["in0"].sectors_read == 64 + 4


def test_no_ops_and_special_registers():
    got = one(
        "nanosleep.u32 100; griddepcontrol.wait; setmaxnreg.inc.sync.aligned.u32 64; prefetch.global.L2 [%rd0];"
        "mov.u32 %r1, %lanemask_lt; popc.b32 %r2, %r1; mov.u32 %r3, %laneid; sub.u32 %o0, %r2, %r3;",
        [U],
        "u4",
    )
    np.testing.assert_array_equal(got, 0)


def test_predicated_code_and_scoped_registers():
    body = """
    setp.lt.u32 %p1, %gid, 10; mov.u32 %o0, 5;
    @%p1 mov.u32 %o0, %gid;
    { .reg .b32 tmp; mov.u32 tmp, 7; @!%p1 add.u32 %o0, %o0, tmp; }
    { .reg .b64 tmp; mov.u64 tmp, 1; cvt.u32.u64 %r1, tmp; add.u32 %o0, %o0, %r1; }"""
    np.testing.assert_array_equal(one(body, [U], "u4"), np.where(np.arange(N) < 10, np.arange(N), 12) + 1)


def test_lanes_that_leave_a_loop_early_keep_their_registers():
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


def test_function_calls():
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
        one("mov.u64 %rd1, 3;" + missing, [U], "u4")


def test_unsupported_instruction_names_line():
    with pytest.raises(UnsupportedInstructionError, match=r"line \d+: txq"):
        one("txq.width.b32 %o0, [%rd0];", [U], "u4")
    got = one("bra $over; txq.width.b32 %o0, [%rd0];\n$over: mov.u32 %o0, 3;", [U], "u4")  # never executed: fine
    assert (got == 3).all()
    entry = Module(kernel_text("txq.width.b32 %o0, [%rd0];", [], [4])).entry()
    assert [t.split()[0] for t in entry.unsupported_instructions().values()] == ["txq.width.b32"]


@pytest.mark.parametrize(
    "text", ["st.async.weak.u32 [%rd0], %gid, [%rd1];", "red.async.relaxed.cta.add.u32 [%rd0], %gid;"]
)
def test_asynchronous_stores_are_not_plain_ones(text):
    with pytest.raises(UnsupportedInstructionError, match=r"line \d+: (st|red)\.async"):
        one(f"{text} mov.u32 %o0, 0;", [U], "u4")
