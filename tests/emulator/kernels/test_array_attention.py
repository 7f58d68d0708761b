"""A paged-attention kernel with numba array arguments and several barriers, and its mutants; fast-math corner cases."""

import math

import numpy as np
import pytest
from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

from pagedkv.emulator import Device, EmulatorError, MemoryFault

from ...support.strategies import long
from ..ptx_harness import array_arguments, build_source, run_arrays
from ..ptx_intrinsics import unpack_f16x2

f32, f16, i32, i64 = types.float32, types.float16, types.int32, types.int64
HD, BS, NT = 128, 16, 128


@intrinsic
def load16(typingctx, array, index):
    """16 bytes from element `index` of a C-contiguous array."""
    if not (isinstance(array, types.Array) and array.layout == "C"):
        return None
    sig = types.UniTuple(types.uint32, 4)(array, types.int64)

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        v4 = ir.VectorType(ir.IntType(32), 4)
        load = builder.load(builder.bitcast(builder.gep(data, [args[1]]), v4.as_pointer()))
        load.align = 16
        parts = [builder.extract_element(load, ir.Constant(ir.IntType(32), i)) for i in range(4)]
        return context.make_tuple(builder, sig.return_type, parts)

    return sig, codegen


@cuda.jit(device=True)
def warp_sum(x):
    for d in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(0xFFFFFFFF, x, d)
    return x


@cuda.jit(device=True)
def warp_max(x):
    for d in (16, 8, 4, 2, 1):
        x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, d))
    return x


SOURCE = """
def kernel(q, kc, vc, table, lens, out, scale, kv_heads):
    sq = cuda.shared.array(HD, f32)
    logits = cuda.shared.array(0, f32)
    red = cuda.shared.array(8, f32)
    tid = cuda.threadIdx.x
    seq = cuda.blockIdx.x
    head = cuda.blockIdx.y
    H = q.shape[1]
    HKV = i64(kv_heads)
    kvh = head // (H // HKV)
    L = lens[seq]
    sq[tid] = q[seq, head, tid] * scale
    cuda.syncthreads()
    g = tid // 16
    l = tid % 16
    mx = f32(-3.0e38)
    t0 = i32(0)
    while t0 < L:
        t = t0 + g
        s = f32(0.)
        if t < L:
            blk = i64(table[seq, t // BS])
            off = ((blk * HKV + kvh) * BS + (t % BS)) * HD + l * 8
            v = load16(kc, off)
            for j in range(4):
                p = unpack_f16x2(v[j])
                s += sq[l * 8 + 2 * j] * p[0] + sq[l * 8 + 2 * j + 1] * p[1]
        s += cuda.shfl_xor_sync(0xffffffff, s, 8)
        s += cuda.shfl_xor_sync(0xffffffff, s, 4)
        s += cuda.shfl_xor_sync(0xffffffff, s, 2)
        s += cuda.shfl_xor_sync(0xffffffff, s, 1)
        if t < L:
            if l == 0:
                logits[t] = s
            mx = max(mx, s)
        t0 += 8
    mx = warp_max(mx)
    if tid % 32 == 0:
        red[tid // 32] = mx
    cuda.syncthreads()
    mx = max(max(red[0], red[1]), max(red[2], red[3]))
    sm = f32(0.)
    t = i32(tid)
    while t < L:
        e = math.exp(logits[t] - mx)
        logits[t] = e
        sm += e
        t += NT
    sm = warp_sum(sm)
    if tid % 32 == 0:
        red[4 + tid // 32] = sm
    cuda.syncthreads()
    sm = red[4] + red[5] + red[6] + red[7]
    a = f32(0.)
    for t in range(L):
        blk = i64(table[seq, t // BS])
        off = ((blk * HKV + kvh) * BS + (t % BS)) * HD + tid
        a += logits[t] * f32(vc[off])
    out[seq, head, tid] = a / sm
"""
SIG = (f32[:, :, ::1], f16[::1], f16[::1], i32[:, ::1], i32[::1], f32[:, :, ::1], f32, i32)


def build(source=SOURCE, fastmath=True):
    return build_source(source, "kernel", globals(), *SIG, fastmath=fastmath)


@pytest.fixture(scope="module")
def entry():
    return build()


def go(entry, lens=(37, 1, 100), edit=None, dynamic=None, **options):
    rng = np.random.default_rng(0)
    blocks, heads, kv_heads, cols = 24, 4, 2, 7
    lens = np.array(lens, "i4")
    k, v = (rng.standard_normal((blocks, kv_heads, BS, HD)).astype("f2") for _ in range(2))
    q = rng.standard_normal((len(lens), heads, HD)).astype("f4")
    table = np.zeros((len(lens), cols), "i4")
    perm, p = rng.permutation(blocks), 0
    used = np.zeros((blocks, BS), bool)
    for s, n in enumerate(lens):
        nb = max(-(-int(n) // BS), 0)
        table[s, :nb] = perm[p : p + nb]
        p += nb
        for t in range(n):
            used[table[s, t // BS], t % BS] = True
    want = np.zeros_like(q, dtype="f8")
    for s, n in enumerate(lens):
        for h in range(heads):
            kk, vv = (x[table[s], h // (heads // kv_heads)].reshape(-1, HD)[:n].astype("f8") for x in (k, v))
            e = kk @ q[s, h] * HD**-0.5
            w = np.exp(e - e.max())
            want[s, h] = w / w.sum() @ vv
    if edit:
        edit(table, lens)
    dev = Device(8 << 20)
    bufs = [
        dev.upload(x, n) for x, n in ((q, "q"), (k.ravel(), "k"), (v.ravel(), "v"), (table, "table"), (lens, "lens"))
    ]
    unused = np.broadcast_to(~used[:, None, :, None], k.shape).reshape(-1)
    bufs[1].mark(False, unused)
    bufs[2].mark(False, unused)
    out = dev.alloc(q.shape, "f4", "out")
    args = [x for b in (*bufs, out) for x in array_arguments(b)] + [np.float32(HD**-0.5), kv_heads]
    dev.launch(entry, (len(lens), heads), NT, args, dynamic or 4 * max(int(lens.max()), 1), **options)
    assert out.initialised().all()
    return np.abs(out.get() - want).max()


def test_valid_input_reads_only_used_slots(entry):
    assert go(entry) < 2e-6
    assert go(entry, seed=3, global_race=True) < 2e-6


@pytest.mark.parametrize(
    ("name", "edit", "dynamic"),
    [
        ("id == blocks", lambda t, n: t.__setitem__((2, 3), 24), None),
        ("id -1", lambda t, n: t.__setitem__((2, 3), -1), None),
        ("id 2**31-1", lambda t, n: t.__setitem__((2, 3), 2**31 - 1), None),
        ("length > table", lambda t, n: n.__setitem__(2, 130), 800),
        ("length > dynamic shared", None, 256),
    ],
)
def test_bad_input(entry, name, edit, dynamic):
    with pytest.raises(MemoryFault):
        go(entry, edit=edit, dynamic=dynamic)


PARTS = SOURCE.split("cuda.syncthreads()")
MUTANTS = {
    f"barrier {i + 1} removed": "cuda.syncthreads()".join(PARTS[: i + 1])
    + "pass"
    + "cuda.syncthreads()".join(PARTS[i + 1 :])
    for i in range(3)
}
MUTANTS["K tail off by one"] = SOURCE.replace(
    "        if t < L:\n            blk", "        if t <= L:\n            blk"
)
MUTANTS["V reads one more"] = SOURCE.replace("for t in range(L):", "for t in range(L + 1):")
MUTANTS["shuffle dropped"] = SOURCE.replace("        s += cuda.shfl_xor_sync(0xffffffff, s, 8)\n", "")
MUTANTS["head map"] = SOURCE.replace("kvh = head // (H // HKV)", "kvh = head % HKV")


OF_THE_OTHER_KERNEL = ["shuffle dropped", "head map"]  # too: see test_paged_attention.py


@pytest.mark.parametrize(
    "name", [*(name for name in MUTANTS if name not in OF_THE_OTHER_KERNEL), *long(OF_THE_OTHER_KERNEL)]
)
def test_mutant_is_caught(name):
    assert MUTANTS[name] != SOURCE
    entry = build(MUTANTS[name])
    try:
        error = go(entry)
    except EmulatorError:
        return
    assert error > 1e-4


@pytest.mark.parametrize("fastmath", [False, True, {"contract"}])
def test_infinities(fastmath):
    def kernel(a, o, n):
        t = cuda.threadIdx.x
        m = f32(-math.inf)
        for i in range(n):
            m = max(m, a[t * 4 + i])
        s = f32(0.0)
        for i in range(n):
            s += math.exp(a[t * 4 + i] - m)
        o[t] = f32(-7.0) if m == -math.inf else s

    o = np.zeros(32, "f4")
    for n in (0, 4):
        run_arrays(kernel, 1, 32, np.full(128, -np.inf, "f4"), o, n, fastmath=fastmath)
        assert (o == -7).all()


def test_maximum_ignores_nan():
    def kernel(a, b, o):
        t = cuda.threadIdx.x
        o[t] = max(a[t], b[t])

    x, o = np.array([np.nan, 0, 2, np.nan] * 8, "f4"), np.zeros(32, "f4")
    run_arrays(kernel, 1, 32, x, np.ones(32, "f4"), o)
    np.testing.assert_array_equal(o, [1, 1, 2, 1] * 8)


def test_misused_array_load():
    """Reading the wrong element type with a 16-byte load: too far, so it faults at the end of the buffer."""

    def kernel(a, o):
        t = cuda.threadIdx.x
        o[t] = unpack_f16x2(load16(a, i64(t) * 8)[0])[0]

    o = np.zeros(32, "f4")
    run_arrays(kernel, 1, 32, np.arange(256, dtype="f2"), o)
    np.testing.assert_array_equal(o, np.arange(0, 256, 8))
    with pytest.raises(MemoryFault):
        run_arrays(kernel, 1, 32, np.arange(128, dtype="f4"), o)
