"""Random structured programs: nested branches and data-dependent loops, compared with a per-thread Python evaluation.

This exercises divergence, reconvergence and the liveness-based masking under lock-step and random schedules.
"""

import random

import numpy as np
import pytest

from ...support.strategies import long
from ..ptx_harness import run_ptx

M = 0xFFFFFFFF
REGS = 6
SLOTS = 4


class Program:
    """Statements are ("op", ...), ("if", reg, bit, then, else), ("loop", reg, body), ("store"/"load", reg, slot)."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.labels = 0
        self.body = self.block(0)

    def block(self, depth):
        r = self.rng
        out = []
        for _ in range(r.randint(2, 5)):
            kind = r.random()
            a, b, d = (r.randrange(REGS) for _ in range(3))
            if kind < 0.45 or depth > 3:
                out.append(
                    ("op", r.choice(["add", "xor", "mul", "shr", "sel", "pmov"]), d, a, b, r.randrange(1, 1 << 16))
                )
            elif kind < 0.55:
                out.append(("store", a, r.randrange(SLOTS)))
            elif kind < 0.65:
                out.append(("load", d, r.randrange(SLOTS)))
            elif kind < 0.85:
                out.append(
                    ("if", a, r.randrange(8), self.block(depth + 1), self.block(depth + 1) if r.random() < 0.6 else [])
                )
            elif kind < 0.97:
                out.append(("loop", a, self.block(depth + 1)))
            else:
                out.append(("exit", a))
        return out

    # -- as PTX
    def emit(self, body, lines):
        for s in body:
            if s[0] == "op":
                _, op, d, a, b, k = s
                lines.append(
                    {
                        "add": f"add.u32 %r{d}, %r{a}, %r{b};",
                        "xor": f"xor.b32 %r{d}, %r{a}, {k};",
                        "mul": f"mad.lo.u32 %r{d}, %r{a}, {k}, %r{b};",
                        "shr": f"shr.u32 %r{d}, %r{a}, {k % 31 + 1};",
                        "sel": f"setp.lt.u32 %p1, %r{a}, %r{b}; selp.b32 %r{d}, %r{a}, {k}, %p1;",
                        "pmov": f"and.b32 %r30, %r{a}, 1; setp.eq.u32 %p2, %r30, 1; @%p2 mov.u32 %r{d}, %r{b};",
                    }[op]
                )
            elif s[0] == "store":
                lines.append(f"st.local.u32 [%rd30+{4 * s[2]}], %r{s[1]};")
            elif s[0] == "load":
                lines.append(f"ld.local.u32 %r{s[1]}, [%rd30+{4 * s[2]}];")
            elif s[0] == "exit":
                lines.append(f"and.b32 %r30, %r{s[1]}, 15; setp.eq.u32 %p3, %r30, 15; @%p3 bra $end;")
            elif s[0] == "if":
                self.labels += 1
                n = self.labels
                lines.append(
                    f"shr.u32 %r30, %r{s[1]}, {s[2]}; and.b32 %r30, %r30, 1; setp.eq.u32 %p4, %r30, 0; "
                    f"@%p4 bra $else{n};"
                )
                self.emit(s[3], lines)
                lines.append(f"bra $end{n};\n$else{n}:")
                self.emit(s[4], lines)
                lines.append(f"$end{n}:")
            else:
                self.labels += 1
                n = self.labels
                lines.append(f"{{ .reg .b32 count; and.b32 count, %r{s[1]}, 3;\n$loop{n}:")
                self.emit(s[2], lines)
                lines.append(
                    f"setp.eq.u32 %p5, count, 0; @%p5 bra $out{n}; sub.u32 count, count, 1; bra $loop{n};\n$out{n}: }}"
                )

    def ptx(self):
        lines = [
            f"mov.u32 %r{i}, %i{i % 2};" if i < 2 else f"mad.lo.u32 %r{i}, %gid, {2654435761 * i & M}, %i0;"
            for i in range(REGS)
        ]
        lines.append(".local .align 8 .b8 depot[16]; mov.u64 %rd30, depot;")
        lines += [f"st.local.u32 [%rd30+{4 * i}], %r{i};" for i in range(SLOTS)]
        self.emit(self.body, lines)
        lines.append("$end: mov.u32 %o0, 0;" + "".join(f"mad.lo.u32 %o0, %o0, 31, %r{i};" for i in range(REGS)))
        return "\n".join(lines)

    # -- in Python
    def run(self, body, r, mem):
        for s in body:
            if s[0] == "op":
                _, op, d, a, b, k = s
                x, y = r[a], r[b]
                if op == "pmov":
                    r[d] = y if x & 1 else r[d]
                else:
                    r[d] = {
                        "add": x + y,
                        "xor": x ^ k,
                        "mul": x * k + y,
                        "shr": x >> k % 31 + 1,
                        "sel": x if x < y else k,
                    }[op] & M
            elif s[0] == "store":
                mem[s[2]] = r[s[1]]
            elif s[0] == "load":
                r[s[1]] = mem[s[2]]
            elif s[0] == "exit":
                if r[s[1]] & 15 == 15:
                    return True
            elif s[0] == "if":
                if self.run(s[3] if r[s[1]] >> s[2] & 1 else s[4], r, mem):
                    return True
            else:
                for _ in range((r[s[1]] & 3) + 1):
                    if self.run(s[2], r, mem):
                        return True
        return False

    def reference(self, gid, i0, i1):
        r = [i0, i1] + [(gid * (2654435761 * i & M) + i0) & M for i in range(2, REGS)]
        self.run(self.body, r, list(r[:SLOTS]))
        out = 0
        for x in r:
            out = (out * 31 + x) & M
        return out


@pytest.mark.parametrize("seed", [*range(20), *long(range(20, 100))])
def test_random_program(seed):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 1 << 32, 96, dtype=np.uint64).astype("u4") for _ in range(2))
    p = Program(seed)
    body = p.ptx()
    want = np.array([p.reference(g, int(x), int(y)) for g, (x, y) in enumerate(zip(a, b, strict=False))], "u4")
    for kw in ({}, {"seed": seed, "batch_threads": 48}, {"grid": 2, "seed": seed + 1}):
        np.testing.assert_array_equal(run_ptx(body, [a, b], ["u4"], **kw)[0], want)
