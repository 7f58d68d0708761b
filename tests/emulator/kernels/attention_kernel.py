"""A small paged-attention decode kernel with raw pointer arguments, kept as text so that tests can mutate it."""

import math

import numpy as np
from numba import cuda, types

from pagedkv.emulator import Device

from .. import ptx_intrinsics as X
from ..ptx_harness import build_source

SOURCE = """
def paged(q, k, v, table, lens, out, scale, heads, kv_heads, max_blocks):
    # one thread block per (sequence, head); a half-warp handles one token, each lane 8 dimensions (16 bytes)
    acc_s = cuda.shared.array((GROUPS, HD), f32)
    max_s = cuda.shared.array(GROUPS, f32)
    sum_s = cuda.shared.array(GROUPS, f32)
    tid = cuda.threadIdx.x
    seq = cuda.blockIdx.x
    head = cuda.blockIdx.y
    kv_head = head // (heads // kv_heads)
    group = tid // 16
    lane = tid % 16
    length = lens[seq]
    qr = cuda.local.array(8, f32)
    acc = cuda.local.array(8, f32)
    for i in range(8):
        qr[i] = q[(i64(seq) * heads + head) * HD + lane * 8 + i] * scale
        acc[i] = f32(0)
    m = f32(-1e30)
    s = f32(0)
    steps = (length + GROUPS - 1) // GROUPS
    for step in range(steps):
        t = step * GROUPS + group
        x = f32(0)
        off = i64(0)
        if t < length:
            block = i64(table[seq * max_blocks + t // BS])
            off = (((block * kv_heads + kv_head) * BS + t % BS) * HD + lane * 8) * 2
            w = X.load_global_16(k, off)
            for i in range(4):
                p = X.unpack_f16x2(w[i])
                x += qr[2 * i] * p[0] + qr[2 * i + 1] * p[1]
        x += cuda.shfl_xor_sync(0xffffffff, x, 8)
        x += cuda.shfl_xor_sync(0xffffffff, x, 4)
        x += cuda.shfl_xor_sync(0xffffffff, x, 2)
        x += cuda.shfl_xor_sync(0xffffffff, x, 1)
        if t < length:
            new = max(m, x)
            corr = math.exp(m - new)
            e = math.exp(x - new)
            s = s * corr + e
            m = new
            w = X.load_global_16(v, off)
            for i in range(4):
                p = X.unpack_f16x2(w[i])
                acc[2 * i] = acc[2 * i] * corr + e * p[0]
                acc[2 * i + 1] = acc[2 * i + 1] * corr + e * p[1]
    for i in range(8):
        acc_s[group, lane * 8 + i] = acc[i]
    if lane == 0:
        max_s[group] = m
        sum_s[group] = s
    cuda.syncthreads()
    top = f32(-1e30)
    for g in range(GROUPS):
        top = max(top, max_s[g])
    num = f32(0)
    den = f32(0)
    for g in range(GROUPS):
        c = math.exp(max_s[g] - top)
        num += c * acc_s[g, tid]
        den += c * sum_s[g]
    out[(i64(seq) * heads + head) * HD + tid] = num / den if den > f32(0) else f32(0)
"""
HD, BS, GROUPS = 128, 16, 8
P = types.CPointer
SIGNATURE = (
    P(types.float32),
    P(types.uint8),
    P(types.uint8),
    P(types.int32),
    P(types.int32),
    P(types.float32),
    types.float32,
    types.int32,
    types.int32,
    types.int32,
)


def build(source=SOURCE, cc=(9, 0), fastmath=False):
    scope = {"cuda": cuda, "X": X, "math": math, "f32": types.float32, "i64": types.int64}
    scope |= {"HD": HD, "BS": BS, "GROUPS": GROUPS}
    return build_source(source, "paged", scope, *SIGNATURE, cc=cc, fastmath=fastmath, lineinfo=True)


class Problem:
    """Random cache; the used slots are the only initialised bytes of K and V."""

    def __init__(self, lens=(37, 1, 100), heads=4, kv_heads=2, blocks=24, seed=0, max_blocks=None):
        rng = np.random.default_rng(seed)
        self.lens = np.array(lens, "i4")
        self.heads, self.kv_heads, self.blocks = heads, kv_heads, blocks
        self.max_blocks = max_blocks or max(1, -(-max(lens) // BS))
        self.q = rng.standard_normal((len(lens), heads, HD)).astype("f4")
        self.k, self.v = (rng.standard_normal((blocks, kv_heads, BS, HD)).astype("f2") for _ in range(2))
        self.table = np.full((len(lens), self.max_blocks), -1, "i4")
        perm, p = rng.permutation(blocks), 0
        for s, n in enumerate(lens):
            nb = -(-n // BS)
            self.table[s, :nb] = perm[p : p + nb]
            p += nb
        self.used = np.zeros((blocks, BS), bool)
        for s, n in enumerate(lens):
            for t in range(n):
                self.used[self.table[s, t // BS], t % BS] = True

    def run(self, entry, memory=16 << 20, **options):
        dev = Device(memory)
        bufs = {n: dev.upload(getattr(self, n), n) for n in ("q", "k", "v", "table", "lens")}
        for n in ("k", "v"):
            bufs[n].mark(False, np.broadcast_to(~self.used[:, None, :, None], self.k.shape))
        out = dev.alloc(self.q.shape, "f4", "out")
        self.stats = dev.launch(
            entry,
            (len(self.lens), self.heads),
            128,
            [*bufs.values(), out, np.float32(HD**-0.5), self.heads, self.kv_heads, self.max_blocks],
            **options,
        )
        assert out.initialised().all(), "output element never written"
        return out.get()

    def reference(self):
        o = np.zeros(self.q.shape)
        for s, n in enumerate(self.lens):
            for h in range(self.heads):
                g = h // (self.heads // self.kv_heads)
                k = self.k[self.table[s], g].reshape(-1, HD)[:n].astype("f8")
                v = self.v[self.table[s], g].reshape(-1, HD)[:n].astype("f8")
                x = k @ self.q[s, h] * HD**-0.5
                p = np.exp(x - x.max()) if n else x
                o[s, h] = p / p.sum() @ v if n else 0
        return o
