"""The arithmetic that generated code calls, on arrays with an element for each lane."""

from __future__ import annotations

import numpy as np

from ..ptx.types import VIEW_DTYPE

U32, U64 = np.uint32, np.uint64


# ---- integers
def mulhi(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.itemsize < 8:
        bits = 8 * a.dtype.itemsize
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    x, y = a.view(U64), b.view(U64)
    low, s = U64(0xFFFFFFFF), U64(32)
    al, ah, bl, bh = x & low, x >> s, y & low, y >> s
    u = ah * bl + ((al * bl) >> s)
    hi = ah * bh + (u >> s) + ((al * bh + (u & low)) >> s)
    if a.dtype.kind == "i":
        hi = hi - np.where(a < 0, y, U64(0)) - np.where(b < 0, x, U64(0))
        return hi.view(np.int64)
    return hi


def idiv(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Truncating division; division by zero, which PTX leaves undefined, gives all ones."""
    zero = b == 0
    d = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(zero, ~a.dtype.type(0), a // d)
    q = a // d
    q = q + ((a - q * d != 0) & ((a < 0) != (d < 0)))
    return np.where(zero, -1, q).astype(a.dtype)


def irem(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - idiv(a, b) * b


def add_sat(a: np.ndarray, b: np.ndarray, sub: bool = False) -> np.ndarray:
    w = a.astype(np.int64) - b if sub else a.astype(np.int64) + b
    i = np.iinfo(a.dtype)
    return np.clip(w, i.min, i.max).astype(a.dtype)


def bfe(a: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    u = a.view(f"u{a.dtype.itemsize}")
    t = u.dtype.type
    pos, length = (pos & U32(255)).astype(np.int64), (length & U32(255)).astype(np.int64)
    keep = np.minimum(length, bits)
    mask = np.where(keep >= bits, ~t(0), (np.left_shift(t(1), keep.astype(u.dtype)) - t(1))).astype(u.dtype)
    out = np.right_shift(u, np.minimum(pos, bits).astype(u.dtype)) & mask
    if a.dtype.kind == "u":
        return out
    sign_pos = np.minimum(pos + length - 1, bits - 1)
    sign = (np.right_shift(u, sign_pos.astype(u.dtype)) & t(1)).astype(bool) & (length > 0)
    return np.where(sign, out | ~mask, out).view(a.dtype)


def bfi(a: np.ndarray, b: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    t = a.dtype.type
    bits = a.dtype.itemsize * 8
    pos, length = (pos & U32(255)).astype(a.dtype), (length & U32(255)).astype(a.dtype)
    mask = np.where(length >= bits, ~t(0), np.left_shift(t(1), length) - t(1)).astype(a.dtype)
    mask = np.left_shift(mask, pos)
    return (b & ~mask) | (np.left_shift(a, pos) & mask)


def bit_length(u: np.ndarray) -> np.ndarray:
    """The position of the highest set bit, plus one, in unsigned integers."""
    if u.dtype.itemsize < 8:
        return np.frexp(u.astype(np.float64))[1].astype(np.uint32)
    top = np.frexp((u >> U64(32)).astype(np.float64))[1]
    low = np.frexp((u & U64(0xFFFFFFFF)).astype(np.float64))[1]
    return np.where(top > 0, top + 32, low).astype(np.uint32)


def clz(a: np.ndarray) -> np.ndarray:
    return (a.dtype.itemsize * 8 - bit_length(a.view(f"u{a.dtype.itemsize}"))).astype(np.uint32)


def bfind(a: np.ndarray, shift_amount: bool = False) -> np.ndarray:
    u = a.view(f"u{a.dtype.itemsize}")
    if a.dtype.kind == "i":
        u = np.where(a < 0, ~u, u)
    n = bit_length(u)
    pos = (a.dtype.itemsize * 8 - n if shift_amount else n - U32(1)).astype(np.uint32)
    return np.where(n == 0, U32(0xFFFFFFFF), pos)


def brev(a: np.ndarray) -> np.ndarray:
    x = a.copy()
    bits = x.dtype.itemsize * 8
    t = x.dtype.type
    for sh, m in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        m = t(m & ((1 << bits) - 1))
        x = ((x >> t(sh)) & m) | ((x & m) << t(sh))
    return x.byteswap()


def prmt(a: np.ndarray, b: np.ndarray, sel: np.ndarray) -> np.ndarray:
    chosen = sel[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    source = np.stack([a, b], 1).view(np.uint8)
    out = np.take_along_axis(source, chosen & U32(7), 1)
    sign = chosen & U32(8) != 0
    if sign.any():
        out[sign] = np.where(out[sign] >= 128, 255, 0)
    return out.view(U32).reshape(-1)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, lut: int) -> np.ndarray:
    """Any boolean function of three inputs, as a sum of minterms."""
    invert = bin(lut & 255).count("1") > 4
    table = (~lut if invert else lut) & 255
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return ~out if invert else out


def funnel(a: np.ndarray, b: np.ndarray, c: np.ndarray, left: bool, clamp: bool) -> np.ndarray:
    """shf: shift the 64 bits {b, a}, and keep the upper half (left) or the lower one (right)."""
    n = (np.minimum(c, U32(32)) if clamp else c & U32(31)).astype(U64)
    w = (b.astype(U64) << U64(32)) | a
    return ((w << n) >> U64(32) if left else w >> n).astype(U32)


def dp4a(a: np.ndarray, b: np.ndarray, c: np.ndarray, sa: bool, sb: bool) -> np.ndarray:
    x = a.view(np.int8 if sa else np.uint8).reshape(-1, 4).astype(np.int64)
    y = b.view(np.int8 if sb else np.uint8).reshape(-1, 4).astype(np.int64)
    return ((x * y).sum(1) + c.view(np.int32 if sa or sb else np.uint32)).astype(np.int64).astype(U32)


# ---- float rounding
def saturate(x: np.ndarray) -> np.ndarray:
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b + c  # The product is exact; the sum is rounded twice.


def round32(x64: np.ndarray, mode: str) -> np.ndarray:
    """Round float64 to float32 in direction rz, rm or rp."""
    f = x64.astype(np.float32)
    back = f.astype(np.float64)
    inf = np.float32(np.inf)
    if mode == "rm":
        return np.where(back > x64, np.nextafter(f, -inf), f)
    if mode == "rp":
        return np.where(back < x64, np.nextafter(f, inf), f)
    return np.where(np.abs(back) > np.abs(x64), np.nextafter(f, np.float32(0)), f)


def flush(x: np.ndarray) -> np.ndarray:
    """Flush float32 subnormals to zeros of their sign, in place; returns x."""
    t = np.bitwise_and(x.view(U32), U32(0x7FFFFFFF))
    np.subtract(t, U32(1), t)
    sub = np.less(t, U32(0x7FFFFF))
    if np.count_nonzero(sub):
        np.multiply(x, np.float32(0), x, where=sub)
    return x


def flushed(x: np.ndarray) -> np.ndarray:
    """As `flush`, but not in place: it copies x if there is a subnormal."""
    t = np.bitwise_and(x.view(U32), U32(0x7FFFFFFF))
    np.subtract(t, U32(1), t)
    sub = np.less(t, U32(0x7FFFFF))
    return np.where(sub, x * np.float32(0), x) if np.count_nonzero(sub) else x


def to_int(x: np.ndarray, ty: str) -> np.ndarray:
    """Convert floats of integer value, saturating; NaN becomes 0."""
    dt = VIEW_DTYPE[ty]
    i = np.iinfo(dt)
    y = np.where(np.isnan(x), 0, x).astype(np.float64)
    out = np.clip(y, float(i.min), float(i.max)).astype(dt)
    return np.where(y >= float(i.max), dt.type(i.max), out)


def bf16_bits(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Round float32 or float64 to the bits of bfloat16."""
    if x.dtype != np.float32:
        f = x.astype(np.float32)
        odd = f.astype(np.float64) != x  # round to odd first, since two roundings to nearest could go wrong
        u = f.view(U32) - ((np.abs(f) > np.abs(x)) & odd).astype(U32)
        u = np.where(odd & np.isfinite(f), u | U32(1), u)
    else:
        u = x.view(U32)
    if mode != "rz":
        u = u + (U32(0x7FFF) + ((u >> U32(16)) & U32(1)))
    return np.where(np.isnan(x), U32(0x7FFF), u >> U32(16)).astype(np.uint16)


def load_narrow(bits: np.ndarray, ty: str) -> np.ndarray:
    """Widen f16, bf16 or packed bits to float32, the low half of a packed register first."""
    if ty == "f32x2":
        return bits.view(np.float32)
    if ty[0] == "f":
        return bits.view(np.float16).astype(np.float32)
    return (bits.view(np.uint16).astype(U32) << U32(16)).view(np.float32)


def store_narrow(val: np.ndarray, ty: str, mode: str = "rn") -> np.ndarray:
    if ty == "f32x2":
        return val.astype(np.float32).view(U64)
    if ty[0] == "f":
        h = val.astype(np.float16)
        if mode == "rz":
            big = np.abs(h.astype(np.float64)) > np.abs(val)
            h = np.where(big, h.view(np.uint16) - np.uint16(1), h.view(np.uint16))
        out = h.view(np.uint16)
    else:
        out = bf16_bits(val, mode)
    return out.view(U32) if ty.endswith("x2") else out


def pack_narrow(hi: np.ndarray, lo: np.ndarray, ty: str, mode: str = "rn", relu: bool = False) -> np.ndarray:
    """cvt.*x2.f32 d, hi, lo"""
    if relu:
        hi, lo = np.fmax(hi, np.float32(0)), np.fmax(lo, np.float32(0))
    return store_narrow(np.stack([lo, hi], 1).reshape(-1), ty, mode)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """cvt.rna.tf32: round to nearest, ties away from zero."""
    return (x.view(U32) + U32(0x1000)) & U32(0xFFFFE000)


# ---- fp8
def _fp8_table(exp_bits: int, man_bits: int) -> np.ndarray:
    code = np.arange(256)
    bias = (1 << (exp_bits - 1)) - 1
    e, m = (code >> man_bits) & ((1 << exp_bits) - 1), code & ((1 << man_bits) - 1)
    val = np.where(e == 0, m * 2.0 ** (1 - bias - man_bits), (1 + m / (1 << man_bits)) * 2.0 ** (e - bias))
    if exp_bits == 4:
        val[(code & 0x7F) == 0x7F] = np.nan
    else:
        val[(code & 0x7F) == 0x7C] = np.inf
        val[(code & 0x7F) > 0x7C] = np.nan
    return np.where(code & 0x80, -val, val).astype(np.float32)


FP8_VALUES = {"e4m3": _fp8_table(4, 3), "e5m2": _fp8_table(5, 2)}


def fp8_encode(x: np.ndarray, kind: str) -> np.ndarray:
    """Round to the nearest fp8 code, ties to even, saturating at the largest finite value."""
    man, bias, top_code = (3, 7, 0x7E) if kind == "e4m3" else (2, 15, 0x7B)
    table = FP8_VALUES[kind][: top_code + 1].astype(np.float64)
    a = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    quantum = 2.0 ** (np.maximum(np.frexp(a)[1] - 1, 1 - bias) - man)
    q = np.minimum(np.rint(np.where(np.isnan(a), 0, a) / quantum) * quantum, table[-1])
    code = np.searchsorted(table, q).astype(np.uint8)
    code = np.where(np.isnan(x), np.uint8(0x7F), code | (np.signbit(x).astype(np.uint8) << np.uint8(7)))
    return code


def fp8x2_unpack(bits: np.ndarray, kind: str, ty: str) -> np.ndarray:
    """cvt.rn.f16x2.e4m3x2"""
    return store_narrow(FP8_VALUES[kind][bits.view(np.uint8)], ty)


def fp8x2_pack(hi: np.ndarray, lo: np.ndarray, kind: str) -> np.ndarray:
    """cvt.rn.satfinite.e4m3x2.f32 d, hi, lo"""
    return (fp8_encode(hi, kind).astype(np.uint16) << np.uint16(8)) | fp8_encode(lo, kind)
