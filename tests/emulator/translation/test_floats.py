"""Floating-point instructions, one PTX snippet each, against NumPy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

N = 64
RNG = np.random.default_rng(7)
U = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32)
F = RNG.standard_normal(N).astype("f4")
G = RNG.standard_normal(N).astype("f4")
H = RNG.standard_normal(2 * N).astype("f2")
K = RNG.standard_normal(2 * N).astype("f2")
BF = RNG.standard_normal(2 * N).astype(ml_dtypes.bfloat16)
BG = RNG.standard_normal(2 * N).astype(ml_dtypes.bfloat16)


def test_float_arithmetic(one):
    np.testing.assert_array_equal(
        one("fma.rn.f32 %o0, %i0, %i1, %i0;", [F, G], "f4"), (F.astype("f8") * G + F).astype("f4")
    )
    x = np.array([np.nan, 1, -0.0, np.inf] * 16, "f4")
    np.testing.assert_array_equal(one("max.f32 %o0, %i0, %i1;", [x, G], "f4"), np.fmax(x, G))
    np.testing.assert_array_equal(one("max.NaN.f32 %o0, %i0, %i1;", [x, G], "f4"), np.maximum(x, G))
    got = one("add.sat.f32 %o0, %i0, %i1;", [F, G], "f4")
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


# What they may be wrong by, of the result and in itself: PTX ISA 9.1, "Floating Point Instructions"; 2 ulp are of the
# result that is rounded to nearest.
APPROXIMATE = {
    "ex2.approx.f32": (np.exp2, 2.5 * 2**-23, 0),
    "lg2.approx.f32": (np.log2, 2**-22, 2**-22),
    "rcp.approx.f32": (np.reciprocal, 2**-23, 0),
    "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(x), 2**-22.9, 0),
    "sqrt.approx.f32": (np.sqrt, 2**-23, 0),
    "tanh.approx.f32": (np.tanh, 2**-11, 0),
    "sin.approx.f32": (np.sin, 0, 2**-20.5),
    "cos.approx.f32": (np.cos, 0, 2**-20.5),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations(name, one, assert_near):
    function, rtol, atol = APPROXIMATE[name]
    x = np.abs(F)
    assert_near(one(f"{name} %o0, %i0;", [x], "f4"), function(x.astype("f8")), rtol, atol)


ROUNDED_ONCE = {
    "sub.f32 %o0, %i0, %i1;": F - G,
    "div.rn.f32 %o0, %i0, %i1;": F / G,
    "rcp.rn.f32 %o0, %i0;": 1 / F,
    "abs.f32 %o0, %i0;": np.abs(F),
    "neg.f32 %o0, %i0;": -F,
    "copysign.f32 %o0, %i0, %i1;": np.copysign(G, F),
    "cvt.sat.f32.f32 %o0, %i0;": np.clip(F, 0, 1),
}


@pytest.mark.parametrize("body", ROUNDED_ONCE)
def test_what_is_rounded_once_or_never(body, one):
    np.testing.assert_array_equal(one(body, [F, G], "f4"), ROUNDED_ONCE[body])


def test_nan_comparisons(one):
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
        ("gt", (x > y) & ~nan),
        ("geu", (x >= y) | nan),
        ("leu", (x <= y) | nan),
        ("nan", nan),
        ("num", ~nan),
    ):
        got = one(f"setp.{cmp}.f32 %p1, %i0, %i1; selp.b32 %o0, 1, 0, %p1;", [x, y], "u4")
        np.testing.assert_array_equal(got, want, err_msg=cmp)


def test_flush_to_zero(one):
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


def test_float_to_int(one):
    x = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf, 0.49] * 8, "f4")
    for mode, f in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        want = np.clip(
            np.nan_to_num(f(x.astype("f8")), nan=0, posinf=2**31, neginf=-(2**31)), -(2**31), 2**31 - 1
        ).astype("i8")
        np.testing.assert_array_equal(one(f"cvt.{mode}.s32.f32 %o0, %i0;", [x], "i4"), want)
    np.testing.assert_array_equal(one("cvt.rmi.f32.f32 %o0, %i0;", [x], "f4"), np.floor(x))
    np.testing.assert_array_equal(one("cvt.rn.f32.s32 %o0, %i0;", [U], "f4"), U.view("i4").astype("f4"))
    long = np.arange(N, dtype="i8") * 0x0123456789ABCD - 2**55
    np.testing.assert_array_equal(one("cvt.rn.f32.s64 %o0, %i0;", [long], "f4"), long.astype("f4"))
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
def test_packed_halves(name, ty, one):
    body, ref = HALF2[name]
    a, b = (H, K) if ty == "f16" else (BF, BG)
    target = "sm_90" if ty == "bf16" and name in ("add", "sub", "mul") else "sm_80"
    got = one(body.format(t=ty), [a.view("u4"), b.view("u4")], "u4", target=target).view(a.dtype)
    want = ref(a.astype("f8"), b.astype("f8")).astype(a.dtype)
    np.testing.assert_array_equal(got.view("u2"), want.view("u2"))


def test_packed_float32(one):
    a, b = RNG.standard_normal(2 * N).astype("f4"), RNG.standard_normal(2 * N).astype("f4")
    for op, want in (
        ("fma.rn.f32x2 %o0, %i0, %i1, %i0;", (a.astype("f8") * b + a).astype("f4")),
        ("add.rn.f32x2 %o0, %i0, %i1;", a + b),
        ("mul.rn.f32x2 %o0, %i0, %i1;", a * b),
    ):
        np.testing.assert_array_equal(one(op, [a.view("u8"), b.view("u8")], "u8", target="sm_100").view("f4"), want)


def test_scalar_halves(one):
    h, k = H[:N], K[:N]
    np.testing.assert_array_equal(
        one("fma.rn.f16 %o0, %i0, %i1, %i0;", [h, k], "f2"), (h.astype("f8") * k + h).astype("f2")
    )
    np.testing.assert_array_equal(one("cvt.f32.f16 %o0, %i0;", [h], "f4"), h.astype("f4"))
    np.testing.assert_array_equal(one("cvt.rn.f16.f32 %o0, %i0;", [F], "f2"), F.astype("f2"))
    np.testing.assert_array_equal(one("cvt.f32.bf16 %o0, %i0;", [BF[:N].view("u2")], "f4"), BF[:N].astype("f4"))
    np.testing.assert_array_equal(one("cvt.rn.bf16.f32 %o0, %i0;", [F], "u2"), F.astype(ml_dtypes.bfloat16).view("u2"))
    np.testing.assert_array_equal(one("setp.gt.f16 %p1, %i0, %i1; selp.b32 %o0, 1, 0, %p1;", [h, k], "u4"), h > k)


def test_scalar_bfloat16(one):
    got = one("mul.bf16 %o0, %i0, %i1;", [BF[:N].view("u2"), BG[:N].view("u2")], "u2", target="sm_90")
    np.testing.assert_array_equal(got, (BF[:N] * BG[:N]).view("u2"))


def test_pack_conversions(one):
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
def test_fp8(kind, dt, one):
    codes = np.arange(256, dtype="u1").view("u2")  # every code
    got = one(f"cvt.rn.f16x2.{kind}x2 %o0, %i0;", [codes], "u4", target="sm_89").view("f2")
    np.testing.assert_array_equal(got, codes.view(dt).astype("f2"))
    x = np.concatenate(
        [
            RNG.standard_normal(40) * 10.0 ** RNG.integers(-4, 3, 40),
            [0, -0.0, 448, 449, 464, 1e9, -1e9, 57344, 2**-9, 2**-10, 2**-16, 2**-17, 3 * 2**-11],
        ]
    ).astype("f4")
    x = np.resize(x, N)
    limit = float(ml_dtypes.finfo(dt).max)
    got = one(f"cvt.rn.satfinite.{kind}x2.f32 %o0, %i0, %i1;", [x, -x], "u2", target="sm_89").view(dt).reshape(-1, 2)
    want = np.clip(x, -limit, limit).astype(dt)
    np.testing.assert_array_equal(got[:, 1].view("u1"), want.view("u1"))
    np.testing.assert_array_equal(got[:, 0].view("u1"), np.clip(-x, -limit, limit).astype(dt).view("u1"))
    got = one(f"cvt.rn.satfinite.{kind}x2.f16x2 %o0, %i0;", [H.view("u4")], "u2", target="sm_89").view(dt)
    np.testing.assert_array_equal(got.view("u1"), H.astype(dt).view("u1"))
    assert (
        one(f"cvt.rn.satfinite.{kind}x2.f32 %o0, %i0, %i0;", [np.full(N, np.nan, "f4")], "u2", target="sm_89")[0]
        == 0x7F7F
    )
