"""Warp-wide operations, atomics and barriers in raw PTX."""

import numpy as np
import pytest

from pagedkv.emulator import MemoryFault, RaceFault, SyncFault

from ..ptx_harness import run_ptx

N = 64
RNG = np.random.default_rng(5)
U = RNG.integers(0, 1 << 32, N, dtype=np.uint64).astype("u4")
SMALL = RNG.integers(0, 5, N).astype("u4")
F = RNG.standard_normal(N).astype("f4")
T = np.arange(N)
L = T % 32
WARP = T - L


def emulated(body, inputs, **options):
    """Of `one`, for faults, and for what hardware does not promise."""
    return run_ptx(body, inputs, ["u4"], **options)[0]


def by_warp(a, f):
    return np.repeat([f(w) for w in a.reshape(-1, 32)], 32)


@pytest.mark.parametrize(
    ("mode", "b", "c", "src", "ok"),
    [
        ("bfly", 5, 31, L ^ 5, np.ones(N, bool)),
        ("up", 3, 0, np.where(L >= 3, L - 3, L), L >= 3),
        ("down", 4, 31, np.where(L + 4 < 32, L + 4, L), L + 4 < 32),
        ("idx", 9, 31, np.full(N, 9), np.ones(N, bool)),
        ("idx", 3, 0x181F, L // 8 * 8 + 3, np.ones(N, bool)),  # width 8
        ("down", 3, 0x181F, np.where(L % 8 + 3 < 8, L + 3, L), L % 8 + 3 < 8),
        ("up", 3, 0x1800, np.where(L % 8 >= 3, L - 3, L), L % 8 >= 3),
    ],
)
def test_shuffle(mode, b, c, src, ok, run):
    got, flag = run(f"shfl.sync.{mode}.b32 %o0|%p1, %i0, {b}, {c}, -1; selp.b32 %o1, 1, 0, %p1;", [U], ["u4", "u4"])
    np.testing.assert_array_equal(got, U[WARP + src])
    np.testing.assert_array_equal(flag, ok)


def test_votes(one):
    odd = (U & 1).astype(bool)
    pre = "and.b32 %r1, %i0, 1; setp.eq.u32 %p1, %r1, 1;"
    bits = by_warp(odd, lambda w: sum(1 << i for i in range(32) if w[i]))
    np.testing.assert_array_equal(one(pre + "vote.sync.ballot.b32 %o0, %p1, 0xffffffff;", [U]), bits)
    for mode, f in (("any", np.any), ("all", np.all)):
        got = one(pre + f"vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %o0, 1, 0, %p2;", [U])
        np.testing.assert_array_equal(got, by_warp(odd, f))
    got = one("setp.ge.u32 %p1, %lid, 32; vote.sync.uni.pred %p2, %p1, -1; selp.b32 %o0, 1, 0, %p2;", [U])
    np.testing.assert_array_equal(got, 1)
    # Hardware does not promise which lanes are together.
    got = emulated("mov.u32 %o0, 0; setp.lt.u32 %p1, %i0, 2; @!%p1 bra $end; activemask.b32 %o0;\n$end:", [SMALL])
    np.testing.assert_array_equal(
        got, np.where(SMALL < 2, by_warp(SMALL < 2, lambda w: sum(1 << i for i in range(32) if w[i])), 0)
    )


def test_match_redux_elect(one):
    want = np.array([sum(1 << k for k in range(32) if SMALL[WARP[i] + k] == SMALL[i]) for i in range(N)])
    np.testing.assert_array_equal(one("match.any.sync.b32 %o0, %i0, -1;", [SMALL]), want)
    got = one(
        "shr.u32 %r1, %lid, 5; add.u32 %r1, %r1, %i0; match.all.sync.b32 %o0|%p1, %r1, -1;",
        [np.where(T == 40, 1, 0).astype("u4")],
    )
    np.testing.assert_array_equal(got, np.where(T < 32, 0xFFFFFFFF, 0))
    for op, f in (("add", lambda w: w.sum(dtype="u8") & 0xFFFFFFFF), ("min", np.min), ("max", np.max)):
        np.testing.assert_array_equal(one(f"redux.sync.{op}.u32 %o0, %i0, -1;", [U]), by_warp(U, f))
    for op, f in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        np.testing.assert_array_equal(one(f"redux.sync.{op}.b32 %o0, %i0, -1;", [U]), by_warp(U, f.reduce))
    # Which lane it elects is the emulator's own choice.
    got = emulated("elect.sync %r1|%p1, -1; selp.b32 %o0, 1, 0, %p1; add.u32 %o0, %o0, %r1;", [U])
    np.testing.assert_array_equal(got, L == 0)


SHARED = ".shared .align 16 .b8 buf[1024];"
ATOM_INIT = "mov.u32 %r20, buf; shl.b32 %r21, %lid, 2; add.u32 %r22, %r20, %r21; st.shared.u32 [%r22], 0; bar.sync 0;"


@pytest.mark.parametrize("space", ["shared", "global"])
def test_atomics(space, run):
    if space == "shared":
        pre, addr, read = ATOM_INIT, "[%r20+{}]", "bar.sync 0; ld.shared.u32 %o0, [%r22];"
        kw = {"shared": SHARED}
    else:
        pre, addr, read = (
            "ld.param.u64 %rd20, [p0]; shl.b64 %rd21, %gid64, 2; add.u64 %rd22, %rd20, %rd21;",
            "[%rd20+{}]",
            "bar.sync 0; ld.global.u32 %o0, [%rd22];",
        )
        kw = {}
    zero = np.zeros(N, "u4")

    def a(i):
        return addr.format(4 * i)

    body = (
        pre
        + f"""
    atom.{space}.add.u32 %r1, {a(0)}, 2; atom.{space}.max.s32 %r2, {a(1)}, %lid; atom.{space}.or.b32 %r3, {a(2)}, %lid;
    atom.{space}.cas.b32 %r4, {a(3)}, 0, 77; atom.{space}.exch.b32 %r5, {a(4)}, 9; atom.{space}.inc.u32 %r6, {a(5)}, 9;
    red.{space}.xor.b32 {a(6)}, %lid; red.{space}.add.f32 {a(7)}, 0f3FC00000; sub.u32 %r7, 0, %lid;
    red.{space}.min.s32 {a(8)}, %r7;
    atom.{space}.dec.u32 %r8, {a(9)}, 5; red.{space}.and.b32 {a(10)}, 0;
    atom.{space}.add.f32 %f1, {a(11)}, 0f3F800000; mov.b32 %r9, %f1; mov.u32 %r10, %r1;
    {read}"""
    )
    (old,) = run(body + "mov.u32 %o0, %r10;", [zero], ["u4"], **kw)
    assert sorted(old) == list(range(0, 128, 2))
    (got,) = run(body, [zero], ["u4"], **kw)
    assert list(got[:7]) == [128, 63, 63, 77, 9, 64 % 10, 0]
    assert got[7:8].view("f4")[0] == 96
    assert got[8:9].view("i4")[0] == -63
    assert got[9] == [0, 5, 4, 3, 2, 1][64 % 6]
    assert got[10] == 0
    assert got[11:12].view("f4")[0] == 64


def test_atomic_64(one):
    body = """ld.param.u64 %rd1, [p0]; cvt.u64.u32 %rd2, %lid; atom.global.add.u64 %rd3, [%rd1], %rd2;
    atom.global.max.u64 %rd4, [%rd1+8], %rd2; atom.global.cas.b64 %rd5, [%rd1+16], 0, 12345678901; bar.sync 0;
    shl.b64 %rd6, %gid64, 3; add.u64 %rd6, %rd6, %rd1; ld.global.u64 %o0, [%rd6];"""
    got = one(body, [np.zeros(N, "u8")], "u8")
    assert list(got[:3]) == [2016, 63, 12345678901]


def test_atomic_f16_and_f64(run):
    body = """ld.param.u64 %rd1, [p0]; cvt.rn.f16.u32 %h1, 1; atom.global.add.noftz.f16 %h2, [%rd1], %h1; bar.sync 0;
    mov.f64 %fd1, 0d3FE0000000000000; red.global.add.f64 [%rd1+64], %fd1; bar.sync 0; ld.global.b16 %h3, [%rd1];
    cvt.f32.f16 %f1, %h3; cvt.f32.f16 %f2, %h2; ld.global.f64 %fd2, [%rd1+64]; cvt.rn.f32.f64 %f3, %fd2;
    add.f32 %f1, %f1, %f3;
    mov.b32 %o0, %f1; mov.b32 %o1, %f2;"""
    total, old = run(body, [np.zeros(N, "u4")], ["f4", "f4"])
    assert (total == 64 + 32).all()
    assert sorted(old) == list(range(64))


def test_bar_red(one):
    pre = "and.b32 %r1, %i0, 1; setp.eq.u32 %p1, %r1, 1;"
    odd = (U & 1).astype(bool)
    assert (one(pre + "bar.red.popc.u32 %o0, 0, %p1;", [U]) == odd.sum()).all()
    assert (one(pre + "bar.red.popc.u32 %o0, 0, !%p1;", [U]) == (~odd).sum()).all()
    assert (one(pre + "bar.red.or.pred %p2, 0, %p1; selp.b32 %o0, 1, 0, %p2;", [U]) == 1).all()
    assert (one(pre + "bar.red.and.pred %p2, 0, %p1; selp.b32 %o0, 1, 0, %p2;", [U], seed=1) == 0).all()
    assert (one(pre + "bar.red.popc.u32 %o0, 0, %p1;", [U], seed=3) == odd.sum()).all()


def named(consumer_wait, producer_wait=True):
    """Warp 0 fills a buffer, warp 1 reads it, through named barriers 1 (full) and 2 (empty)."""
    return f"""
    mov.u32 %r20, buf; and.b32 %r21, %lid, 31; shl.b32 %r22, %r21, 2; add.u32 %r22, %r20, %r22; mov.u32 %o0, 0;
    mov.u32 %r1, 0; setp.ge.u32 %p1, %lid, 32; @%p1 bra $consumer;
    $p: {"bar.sync 2, 64;" if producer_wait else ""}
    add.u32 %r2, %r1, %r21; st.shared.u32 [%r22], %r2; bar.arrive 1, 64;
    add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 3; @%p2 bra $p; bra $done;
    $consumer: {"bar.arrive 2, 64;" if producer_wait else ""}
    $c: {"bar.sync 1, 64;" if consumer_wait else ""}
    xor.b32 %r3, %r22, 4; ld.shared.u32 %r4, [%r3]; add.u32 %o0, %o0, %r4;
    add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 3;
    {"setp.lt.u32 %p3, %r1, 3; @!%p3 bra $done; bar.arrive 2, 64;" if producer_wait else ""} @%p2 bra $c;
    $done:"""


def test_named_barriers(one):
    want = np.where(T < 32, 0, 3 * (L ^ 1) + 3)
    for seed in (None, 1, 2, 3):
        np.testing.assert_array_equal(one(named(True), [U], shared=SHARED, seed=seed), want)
    with pytest.raises((RaceFault, SyncFault)):
        emulated(named(True, producer_wait=False), [U], shared=SHARED)


def test_a_reader_that_has_told_a_writer_may_have_read_before_another_reader(one):
    """Warp 0 reads and tells warp 1, which reads the same words later, waits for that, and stores."""
    text = """mov.u32 %r20, buf; and.b32 %r21, %lid, 31; shl.b32 %r22, %r21, 2; add.u32 %r22, %r20, %r22;
    setp.lt.u32 %p1, %lid, 32; @!%p1 bra $read; st.shared.u32 [%r22], 7; $read: bar.sync 0, 64; @!%p1 bra $writer;
    ld.shared.u32 %o0, [%r22]; bar.arrive 1, 64; bra $done;
    $writer: ld.shared.u32 %o0, [%r22]; WAIT st.shared.u32 [%r22], 8; $done:"""
    for seed in (None, 1, 2, 3):
        assert (one(text.replace("WAIT", "bar.sync 1, 64;"), [U], shared=SHARED, seed=seed) == 7).all()
    with pytest.raises(RaceFault, match="store of a location read by"):
        emulated(text.replace("WAIT", ""), [U], shared=SHARED)


def test_barrier_counts(one):
    groups = """shr.u32 %r1, %lid, 5; add.u32 %r1, %r1, 1; mov.u32 %r20, buf; shl.b32 %r21, %lid, 2;
    add.u32 %r22, %r20, %r21;
    st.shared.u32 [%r22], %lid; bar.sync %r1, 32; xor.b32 %r23, %r22, 12; ld.shared.u32 %o0, [%r23];"""
    np.testing.assert_array_equal(one(groups, [U], shared=SHARED), T ^ 3)
    with pytest.raises(RaceFault):
        emulated(
            groups.replace("xor.b32 %r23, %r22, 12", "xor.b32 %r23, %r22, 128"), [U], shared=SHARED
        )  # other group's data
    with pytest.raises(SyncFault, match="barrier never completes"):
        emulated("bar.sync 1, 96; mov.u32 %o0, 0;", [U])
    with pytest.raises(SyncFault, match="expects 32 threads, 64 arrived"):
        emulated("bar.sync 1, 32; mov.u32 %o0, 0;", [U])


@pytest.mark.parametrize("arrive", [False, True])
def test_a_named_barrier_of_half_warps(arrive):
    """Halves of two warps make 32 threads, which must not pass for both warps; halves of one may arrive apart."""
    halves = "and.b32 %r1, %lid, 31; setp.lt.u32 %p1, %r1, 16; setp.ge.u32 %p2, %lid, 64; mov.u32 %o0, 0;"
    first = "bar.arrive 1, 64;" if arrive else "bar.sync 1, 64;"
    body = f"{halves} @%p2 bra $last; @%p1 {first} bra $end;\n$last: bar.sync 1, 64;\n$end:"
    inputs = [np.zeros(96, "u4")]
    with pytest.raises(SyncFault, match="barrier completed by part of a warp"):
        emulated(body, inputs)
    if arrive:
        body = (
            f"{halves} @%p2 bra $last; setp.ge.u32 %p3, %lid, 32; @%p3 bra $end; @%p1 {first} @!%p1 {first} bra $end;"
        )
        assert (emulated(body + "\n$last: bar.sync 1, 64;\n$end:", inputs) == 0).all()


def test_partial_last_warp(one):
    u = U[:48]
    got = one("shfl.sync.bfly.b32 %o0, %i0, 1, 31, -1;", [u], block=48)
    np.testing.assert_array_equal(got, u[np.arange(48) ^ 1])
    with pytest.raises(SyncFault, match="does not take part"):
        emulated("shfl.sync.bfly.b32 %o0, %i0, 16, 31, -1;", [u], block=48)
    assert (one("setp.lt.u32 %p1, %lid, 40; bar.red.popc.u32 %o0, 0, %p1;", [u], block=48) == 40).all()


BRANCHES = """mov.u32 %r20, buf; shl.b32 %r21, %lid, 2; add.u32 %r22, %r20, %r21; xor.b32 %r23, %r22, 64;
and.b32 %r1, %lid, 31; setp.lt.u32 %p1, %r1, 16; mov.u32 %r30, 0x0000ffff; @%p1 bra $low;
add.u32 %r2, %lid, 100; st.shared.u32 [%r22], %r2; HIGH ld.shared.u32 %o0, [%r23]; bra $end;
$low: st.shared.u32 [%r22], %lid; LOW ld.shared.u32 %o0, [%r23];
$end:"""


@pytest.mark.late  # do syncs at different instructions meet?
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_full_sync_in_both_branches(seed, one):
    """Halves of a warp meet at two instructions, once and several times, and exchange words."""
    zero = [np.zeros(N, "u4")]
    want = np.where(L < 16, T + 116, T - 16)
    for low, high in (
        ("", ""),
        ("bar.warp.sync -1;", "bar.warp.sync -1;"),
        ("bar.warp.sync %r31;", "bar.warp.sync -1;"),
    ):
        text = BRANCHES.replace("HIGH", f"bar.warp.sync -1; {high}").replace(
            "LOW", f"mov.u32 %r31, -1; bar.warp.sync -1; {low}"
        )
        np.testing.assert_array_equal(one(text, zero, shared=SHARED, seed=seed), want)
    part = """setp.lt.u32 %p1, %lid, 40; @%p1 bra $a; bar.warp.sync -1; bra $end; $a: bar.warp.sync -1;
    $end: mov.u32 %o0, 5;"""
    assert (one(part, [np.zeros(48, "u4")], block=48, seed=seed) == 5).all()
    for low, high in ((2, 1), (1, 2)):
        low, high = ("bar.warp.sync -1;" * count for count in (low, high))
        with pytest.raises(SyncFault):
            emulated(BRANCHES.replace("LOW", low).replace("HIGH", high), zero, shared=SHARED, seed=seed)
    halves = BRANCHES.replace("LOW", "bar.warp.sync 0x0000ffff;").replace("HIGH", "bar.warp.sync 0xffff0000;")
    with pytest.raises((RaceFault, MemoryFault)):
        emulated(halves, zero, shared=SHARED, seed=seed)
    with pytest.raises(SyncFault, match="members of a warp operation never arrive"):  # their masks differ
        emulated(
            BRANCHES.replace("LOW", "bar.warp.sync -1;").replace("HIGH", "bar.warp.sync 0xfffffff0;"),
            zero,
            shared=SHARED,
        )


@pytest.mark.late  # do syncs at different instructions meet?
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_syncs_in_loops_that_the_halves_of_a_warp_run_apart(seed, one):
    """Both count rounds and store them; in each, a lane loads what its neighbour in the other half has stored."""
    body = """mov.u32 %r20, buf; shl.b32 %r21, %lid, 2; add.u32 %r22, %r20, %r21; xor.b32 %r23, %r22, 64;
    mov.u32 %r3, 0; mov.u32 %o0, 0; and.b32 %r1, %lid, 31; setp.lt.u32 %p1, %r1, 16; @%p1 bra $low;
    $high: st.shared.u32 [%r22], %r3; bar.warp.sync -1; ld.shared.u32 %r4, [%r23]; bar.warp.sync -1;
    add.u32 %o0, %o0, %r4; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 5; @%p2 bra $high; bra $end;
    $low: shl.b32 %r5, %r3, 4; st.shared.u32 [%r22], %r5; bar.warp.sync -1;
    ld.shared.u32 %r4, [%r23]; add.u32 %o0, %o0, %r4; SECOND
    add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 5; @%p2 bra $low;
    $end:"""
    got = one(body.replace("SECOND", "bar.warp.sync -1;"), [U], shared=SHARED, seed=seed)
    np.testing.assert_array_equal(got, np.where(L < 16, 10, 160))
    with pytest.raises((RaceFault, SyncFault)):
        emulated(body.replace("SECOND", ""), [U], shared=SHARED, seed=seed)


def test_a_predicated_warp_sync(one):
    """Lanes whose predicate does not hold pass by; those that it holds for wait for the ones they name."""
    body = "and.b32 %r1, %lid, 31; setp.lt.u32 %p1, %r1, 4; @{}%p1 bar.warp.sync {}; mov.u32 %o0, 5;"
    assert (one(body.format("", "0xf"), [U]) == 5).all()
    assert (one(body.format("!", "0xfffffff0"), [U]) == 5).all()
    with pytest.raises(SyncFault):
        emulated(body.format("", "0x1f"), [U])


@pytest.mark.parametrize(
    "operation",
    [
        "bar.warp.sync MASK;",
        "vote.sync.ballot.b32 %o0, %p1, MASK;",
        "match.any.sync.b32 %o0, %i0, MASK;",
        "redux.sync.or.b32 %o0, %i0, MASK;",
        "elect.sync %r1|%p1, MASK;",
    ],
)
@pytest.mark.parametrize("mask", ["0xf", "%r2"])
def test_a_lane_that_its_mask_leaves_out(operation, mask):
    low = "mov.u32 %r2, 15; and.b32 %r3, %lid, 31; setp.lt.u32 %p2, %r3, 4;"
    with pytest.raises(
        SyncFault, match=rf"member mask 0xf of {operation.split()[0]} leaves out the lane that names it"
    ):
        emulated(low + operation.replace("MASK", mask), [U])
    emulated(f"{low} @!%p2 bra $end; {operation.replace('MASK', mask)}\n$end:", [U])


def test_redux_of_a_part_of_a_warp_waits_for_it(one):
    low = "mov.u32 %o0, 0; and.b32 %r1, %lid, 31; setp.lt.u32 %p1, %r1, 20; @!%p1 bra $end;"
    body = low + " redux.sync.or.b32 %o0, %i0, MASK;\n$end:"
    expected = np.where(L < 20, by_warp(U, lambda w: np.bitwise_or.reduce(w[:20])), 0)
    np.testing.assert_array_equal(one(body.replace("MASK", "0xfffff"), [U]), expected)
    for mask in ("0x1fffff", "-1"):
        with pytest.raises(SyncFault, match="names lanes that have exited"):
            emulated(body.replace("MASK", mask), [U])
