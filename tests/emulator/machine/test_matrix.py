"""mma and ldmatrix, written in numba through inline assembly and in PTX, compared with NumPy."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, Module, SyncFault

from .. import ptx_intrinsics as X
from ..ptx_harness import build, compile_ptx, filled, run_ptx

u8p, u32p, f32p = (types.CPointer(t) for t in (types.uint8, types.uint32, types.float32))
RNG = np.random.default_rng(3)


def products(a, b, c=0):
    """a @ b + c, and the sums of the magnitudes."""
    a, b = a.astype("f8"), b.astype("f8")
    return a @ b + c, np.abs(a) @ np.abs(b) + np.abs(c)


def pairs(m):
    """Rows of 16-bit pairs as uint32."""
    return np.ascontiguousarray(m).view("u4")


@pytest.mark.parametrize(
    ("k", "kind", "mma"),
    [
        (16, "f16", X.mma_16816_f16),
        (16, "bf16", X.mma_16816_bf16),
        (8, "f16", X.mma_1688_f16),
        (8, "bf16", X.mma_1688_bf16),
    ],
)
@pytest.mark.parametrize("cc", [(8, 0), (10, 0)])
def test_mma_fragments(k, kind, mma, cc, launch, assert_sums):
    """Fragments are filled by hand from the documented layout: thread 4g+t."""
    K2 = k // 2
    if k == 16:

        def kernel(a, b, c, d):
            t = cuda.threadIdx.x % 4
            g = cuda.threadIdx.x % 32 // 4
            A = (a[g * K2 + t], a[(g + 8) * K2 + t], a[g * K2 + t + 4], a[(g + 8) * K2 + t + 4])
            B = (b[g * K2 + t], b[g * K2 + t + 4])  # b holds B transposed: row n, pairs along k
            C = (c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1])
            D = mma(A, B, C)
            if cuda.threadIdx.x < 32:
                d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1] = D[0], D[1]
                d[(g + 8) * 8 + 2 * t], d[(g + 8) * 8 + 2 * t + 1] = D[2], D[3]
    else:

        def kernel(a, b, c, d):
            t = cuda.threadIdx.x % 4
            g = cuda.threadIdx.x % 32 // 4
            A = (a[g * K2 + t], a[(g + 8) * K2 + t])
            B = (b[g * K2 + t],)
            C = (c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1])
            D = mma(A, B, C)
            if cuda.threadIdx.x < 32:
                d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1] = D[0], D[1]
                d[(g + 8) * 8 + 2 * t], d[(g + 8) * 8 + 2 * t + 1] = D[2], D[3]

    dt = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    a, b = RNG.standard_normal((16, k)).astype(dt), RNG.standard_normal((k, 8)).astype(dt)
    c = RNG.standard_normal((16, 8)).astype("f4")
    d = filled((16, 8), "f4")
    launch(compile_ptx(kernel, u32p, u32p, f32p, f32p, cc=cc), [pairs(a), pairs(b.T), c, d], block=64)
    assert_sums(d, *products(a, b, c), k)


@pytest.mark.parametrize(
    ("n", "trans", "ld"),
    [
        (1, False, X.ldmatrix_x1),
        (2, False, X.ldmatrix_x2),
        (4, False, X.ldmatrix_x4),
        (1, True, X.ldmatrix_x1_trans),
        (2, True, X.ldmatrix_x2_trans),
        (4, True, X.ldmatrix_x4_trans),
    ],
)
def test_ldmatrix(n, trans, ld, launch):
    def kernel(src, out):
        s = cuda.shared.array(512, types.uint32, alignment=16)
        t = cuda.threadIdx.x
        for i in range(t, 512, cuda.blockDim.x):
            s[i] = src[i]
        cuda.syncthreads()
        lane, w = t % 32, t // 32
        row = X.shared_address(s) + types.uint32(w * 512 + lane * 16)
        r = ld(row)
        for i in range(n):
            out[t * n + i] = r[i]

    m = RNG.integers(0, 1 << 16, (2, 4, 8, 8)).astype("u2")
    out, src = filled(64 * n, "u4"), np.zeros(512, "u4")
    src[:256] = m.reshape(-1).view("u4")
    text = compile_ptx(kernel, u32p, u32p, cc=(8, 0))
    launch(text, [src, out], block=64)
    want = m[:, :n]
    want = np.swapaxes(want, 2, 3) if trans else want
    want = np.moveaxis(np.ascontiguousarray(want).view("u4").reshape(2, n, 32), 1, 2)
    np.testing.assert_array_equal(out.reshape(2, 32, n), want)
    dev = Device(1 << 20)
    stats = dev.launch(Module(text).entry(), 1, 64, [dev.upload(src), dev.alloc(64 * n, "u4")], stats=True)
    assert stats.warp_instructions["shared_load"] == 2


def test_gemm_with_cp_async_ldmatrix_mma(launch, assert_sums):
    """16x8 = 16x64 @ 64x8 per warp; A by ldmatrix.x4, B by ldmatrix.x2.trans, operands brought in by cp.async."""
    KK = 64

    def kernel(a, b, d):
        sa = cuda.shared.array(16 * 64, types.float16, alignment=16)
        sb = cuda.shared.array(64 * 8, types.float16, alignment=16)
        t = cuda.threadIdx.x
        pa, pb = X.shared_address(sa), X.shared_address(sb)
        base = types.int64(cuda.blockIdx.x) * (16 * 64 * 2)
        for i in range(t, 128, 32):
            X.cp_async_16(pa + types.uint32(i * 16), a, base + i * 16)
        for i in range(t, 64, 32):
            X.cp_async_16(pb + types.uint32(i * 16), b, types.int64(i * 16))
        X.cp_async_commit()
        X.cp_async_wait_0()
        cuda.syncwarp()
        c = (types.float32(0), types.float32(0), types.float32(0), types.float32(0))
        for k in range(0, KK, 16):
            A = X.ldmatrix_x4(pa + types.uint32((t % 16) * 128 + (k + t // 16 * 8) * 2))
            B = X.ldmatrix_x2_trans(pb + types.uint32((k + t % 16) * 16))
            c = X.mma_16816_f16(A, B, c)
        g, q = t // 4, t % 4
        o = types.int64(cuda.blockIdx.x) * 128
        d[o + g * 8 + 2 * q], d[o + g * 8 + 2 * q + 1] = c[0], c[1]
        d[o + (g + 8) * 8 + 2 * q], d[o + (g + 8) * 8 + 2 * q + 1] = c[2], c[3]

    a, b = RNG.standard_normal((5, 16, KK)).astype("f2"), RNG.standard_normal((KK, 8)).astype("f2")
    d, text = filled((5, 16, 8), "f4"), compile_ptx(kernel, u8p, u8p, f32p, cc=(8, 0))
    launch(text, [a, b, d], block=32, grid=5, global_race=True)
    assert_sums(d, *products(a, b), KK, tolerance=1e-5)
    dev = Device(1 << 20)
    arguments = [dev.upload(a, "a"), dev.upload(b, "b"), dev.alloc((5, 16, 8), "f4")]
    stats = dev.launch(Module(text).entry(), 5, 32, arguments, stats=True)
    assert stats.warp_instructions["mma"] == 5 * 4
    assert stats.buffers["a"].bytes_read == a.nbytes
    assert stats.buffers["b"].bytes_read == 5 * b.nbytes


def test_mma_in_divergent_code_is_a_fault():
    def kernel(a, d):
        t = cuda.threadIdx.x
        if t < 16:
            r = X.mma_1688_f16(
                (a[t], a[t]), (a[t],), (types.float32(0), types.float32(0), types.float32(0), types.float32(0))
            )
            d[t] = r[0]

    dev = Device(1 << 20)
    with pytest.raises(SyncFault):
        dev.launch(build(kernel, u32p, f32p), 1, 32, [dev.upload(np.zeros(32, "u4")), dev.alloc(32, "f4")])


HALVES = [("f16", np.float16, (8, 0)), ("bf16", ml_dtypes.bfloat16, (8, 0))]
FP8 = [("e4m3", ml_dtypes.float8_e4m3fn, (8, 9)), ("e5m2", ml_dtypes.float8_e5m2, (8, 9))]


@pytest.mark.parametrize(("name", "dt", "cc"), HALVES + FP8)
def test_unpack_intrinsics(name, dt, cc, launch):
    unpack = getattr(X, f"unpack_{name}x2")
    word = types.uint32 if name.endswith("16") else types.uint16

    def kernel(src, out):
        t = cuda.threadIdx.x
        p = unpack(src[t])
        out[2 * t], out[2 * t + 1] = p[0], p[1]

    x, out = RNG.standard_normal(64).astype(dt), filled(64, "f4")
    launch(compile_ptx(kernel, types.CPointer(word), f32p, cc=cc), [x, out], block=32)
    np.testing.assert_array_equal(out, x.astype("f4"))


@pytest.mark.parametrize(("name", "dt", "cc"), HALVES + FP8[:1])
def test_pack_intrinsics(name, dt, cc, launch):
    pack = getattr(X, f"pack_{name}x2")
    word = types.uint32 if name.endswith("16") else types.uint16

    def kernel(src, out):
        t = cuda.threadIdx.x
        out[t] = pack(src[2 * t], src[2 * t + 1])

    x, out = RNG.standard_normal(64).astype("f4"), filled(64, dt)
    launch(compile_ptx(kernel, f32p, types.CPointer(word), cc=cc), [x, out], block=32)
    np.testing.assert_array_equal(out.astype("f4"), x.astype(dt).astype("f4"))


def test_load_store_16(launch):
    def kernel(src, dst):
        t = types.int64(cuda.threadIdx.x)
        v = X.load_global_16(src, t * 16)
        X.store_global_16(dst, t * 16, v[3], v[2], v[1], v[0])

    a, out = RNG.integers(0, 1 << 32, (32, 4), dtype=np.uint64).astype("u4"), filled((32, 4), "u4")
    ptx = compile_ptx(kernel, u8p, u8p, cc=(8, 0))
    assert "ld.global.nc.v4.u32" in ptx
    launch(ptx, [a, out], block=32)
    np.testing.assert_array_equal(out, a[:, ::-1])
    dev = Device(1 << 20)
    stats = dev.launch(Module(ptx).entry(), 1, 32, [dev.upload(a), dev.alloc((32, 4), "u4")], stats=True)
    assert stats.global_sectors == stats.global_sectors_min == 32


# ---- further matrix shapes, in raw PTX
def _mma_ptx(k, kind, acc, na, nb):
    load = [f"ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %lid, {4 * na}; add.u64 %rd1, %rd1, %rd2;"]
    load += [f"ld.global.u32 %r{i}, [%rd1+{4 * i}];" for i in range(na)]
    load += [f"ld.param.u64 %rd1, [p1]; mul.wide.u32 %rd2, %lid, {4 * nb}; add.u64 %rd1, %rd1, %rd2;"]
    load += [f"ld.global.u32 %r{10 + i}, [%rd1+{4 * i}];" for i in range(nb)]

    def regs(b, n):
        return "{" + ", ".join(f"%r{b + i}" for i in range(n)) + "}"

    f = acc == "f32"
    d = "{%f0, %f1, %f2, %f3}" if f else regs(20, 4)
    zero = "".join(f"mov.f32 %f{i}, 0f3F000000;" if f else f"mov.u32 %r{20 + i}, 5;" for i in range(4))
    code = f"mma.sync.aligned.m16n8k{k}.row.col.{acc}.{kind}.{kind}.{acc} {d}, {regs(0, na)}, {regs(10, nb)}, {d};"
    store = "".join(f"mov.b32 %o{i}, {'%f' if f else '%r2'}{i};" for i in range(4))
    return "\n".join([*load, zero, code, store])


@pytest.mark.parametrize(
    ("k", "kind", "acc", "dt", "target"),
    [
        (8, "tf32", "f32", "f4", "sm_80"),
        (4, "tf32", "f32", "f4", "sm_80"),
        (32, "e4m3", "f32", ml_dtypes.float8_e4m3fn, "sm_89"),
        (32, "e5m2", "f32", ml_dtypes.float8_e5m2, "sm_89"),
        (32, "s8", "s32", "i1", "sm_80"),
        (16, "u8", "s32", "u1", "sm_80"),
    ],
)
def test_mma_other_types(k, kind, acc, dt, target, run, assert_sums):
    dt = np.dtype(dt)
    per = 4 // dt.itemsize
    if dt.kind in "iu":
        a, b = RNG.integers(-100, 100, (16, k)).astype(dt), RNG.integers(-100, 100, (k, 8)).astype(dt)
    else:
        a, b = RNG.standard_normal((16, k)).astype(dt), RNG.standard_normal((k, 8)).astype(dt)
        if kind == "tf32":
            a, b = (np.ascontiguousarray(x).view("u4") & 0xFFFFE000 for x in (a, b))
            a, b = a.view("f4"), b.view("f4")
    g, t = np.arange(32) // 4, np.arange(32) % 4
    na, nb = 16 * k // 32 // per, k * 8 // 32 // per
    A, B = np.zeros((32, na, per), dt), np.zeros((32, nb, per), dt)
    for r in range(na):
        for e in range(per):
            A[:, r, e] = a[g + 8 * (r % 2), t * per + e + 4 * per * (r // 2)]
    for r in range(nb):
        for e in range(per):
            B[:, r, e] = b[t * per + e + 4 * per * r, g]
    words = [x.reshape(-1).view("u4") for x in (A, B)]
    text = _mma_ptx(k, kind, acc, na, nb)
    D = run(text, words, ["f4" if acc == "f32" else "i4"] * 4, n=32, target=target)
    got = np.zeros((16, 8))
    for i in range(4):
        got[g + 8 * (i // 2), 2 * t + i % 2] = D[i]
    if acc == "s32":
        np.testing.assert_array_equal(got, products(a, b, 5)[0])
    else:  # of products of fp8, Hopper keeps 14 bits: DeepSeek-V3 Technical Report, 3.5.2
        assert_sums(got, *products(a, b, 0.5), k, bits=13 if dt.itemsize == 1 else 23, tolerance=1e-5)


def test_mma_half_accumulator(run, assert_sums):
    g, t = np.arange(32) // 4, np.arange(32) % 4
    a, b = RNG.standard_normal((16, 8)).astype("f2"), RNG.standard_normal((8, 8)).astype("f2")

    def pair(x):
        return np.ascontiguousarray(x).view("u4").reshape(-1)

    A0, A1, B0 = (pair(np.stack([m[r, 2 * t], m[r, 2 * t + 1]], 1)) for m, r in ((a, g), (a, g + 8), (b.T, g)))
    out = run(
        "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%o0, %o1}, {%i0, %i1}, {%i2}, {%i3, %i3};",
        [A0, A1, B0, np.full(32, 0x3C003C00, "u4")],
        ["u4", "u4"],
    )
    want, magnitudes = (x.astype("f2") for x in products(a, b, 1))
    for o, r in zip(out, (g, g + 8), strict=False):
        pick = np.stack([r, r], 1), np.stack([2 * t, 2 * t + 1], 1)
        assert_sums(o.view("f2").reshape(32, 2), want[pick], magnitudes[pick], 8, bits=10, tolerance=0)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_and_movmatrix(trans, run):
    m = RNG.integers(0, 1 << 32, 64, dtype=np.uint64).astype("u4")
    shared = ".shared .align 16 .b8 buf[256];"
    body = f"""ld.param.u64 %rd1, [p0]; shl.b64 %rd2, %gid64, 2; add.u64 %rd1, %rd1, %rd2;
    ld.global.u32 %r2, [%rd1+128];
    mov.u32 %r1, buf; and.b32 %r3, %lid, 15; shl.b32 %r3, %r3, 4; add.u32 %r3, %r1, %r3;
    stmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 [%r3], {{%i0, %r2}}; bar.warp.sync -1;
    shl.b32 %r4, %lid, 2; add.u32 %r4, %r1, %r4; ld.shared.u32 %o0, [%r4]; ld.shared.u32 %o1, [%r4+128];
    movmatrix.sync.aligned.m8n8.trans.b16 %o2, %i0;"""
    out = run(body, [m], ["u4"] * 3, n=32, block=32, shared=shared, target="sm_90")
    mats = m.view("u2").reshape(2, 8, 8)
    want = np.swapaxes(mats, 1, 2) if trans else mats
    np.testing.assert_array_equal(np.stack(out[:2]).view("u2").reshape(2, 8, 8), want)
    np.testing.assert_array_equal(out[2].view("u2").reshape(8, 8), mats[0].T)


def test_matrix_instructions_need_a_whole_warp():
    zero = np.zeros(48, "u4")
    body = "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%o0, %r1}, {%i0, %i0}, {%i0}, {%i0, %i0};"
    assert not run_ptx(body, [zero[:32]], ["u4"])[0].any()
    with pytest.raises(SyncFault, match="matrix instruction with 16 of 32 lanes"):
        run_ptx(body, [zero], ["u4"], block=48)
