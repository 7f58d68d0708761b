"""Races in shared and global memory are detected, and nothing that is synchronised is taken for one."""

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, EmulatorError, RaceFault

from .. import ptx_intrinsics as X
from ..ptx_harness import SHARED, array_arguments, build, run, run_ptx

f32, i64, u8, u16 = types.float32, types.int64, types.uint8, types.uint16
P = types.CPointer

Z = np.zeros(64, "f4")
T = np.arange(64)


def shared_exchange(sync):
    def kernel(o):
        s = cuda.shared.array(64, f32)
        t = cuda.threadIdx.x
        s[t] = t
        if sync:
            cuda.syncthreads()
        o[t] = s[63 - t]

    return kernel


def test_read_after_write_race():
    np.testing.assert_array_equal(run(shared_exchange(True), [P(f32)], [Z])[0], T[::-1])
    with pytest.raises(
        RaceFault,
        match=r"load of a location written by thread .*byte \d+ of 256 in .*thread block \(0, 0, 0\).*PTX line \d+: ld",
    ):
        run(shared_exchange(False), [P(f32)], [Z])


def test_write_after_read_race():
    def kernel(o):
        s = cuda.shared.array(64, f32)
        t = cuda.threadIdx.x
        s[t] = t
        cuda.syncthreads()
        x = s[63 - t]
        s[t] = x + 1
        cuda.syncthreads()
        o[t] = s[t]

    with pytest.raises(RaceFault, match="store of a location read by"):
        run(kernel, [P(f32)], [Z])


def test_broadcast_read_then_write_race():
    def kernel(o):
        s = cuda.shared.array(4, f32)
        t = cuda.threadIdx.x
        if t < 4:
            s[t] = t
        cuda.syncthreads()
        o[t] = s[0]
        if t == 40:
            s[0] = f32(9)

    with pytest.raises(RaceFault, match="read by several threads"):
        run(kernel, [P(f32)], [Z])


def test_same_instruction_write_conflict():
    def kernel(o, same):
        s = cuda.shared.array(4, f32)
        t = cuda.threadIdx.x
        s[0] = f32(1) if same else f32(t)
        cuda.syncthreads()
        o[t] = s[0]

    with pytest.raises(RaceFault):
        run(kernel, [P(f32), types.int32], [Z, 0])
    np.testing.assert_array_equal(run(kernel, [P(f32), types.int32], [Z, 1], block=32)[0][:32], 1)


def test_warp_level_sync():
    def make(sync):
        def kernel(o):
            s = cuda.shared.array(64, f32)
            t = cuda.threadIdx.x
            for i in range(3):
                s[t] = t + i
                if sync:
                    cuda.syncwarp()
                o[t] = s[t ^ 1]
                if sync:
                    cuda.syncwarp()

        return kernel

    np.testing.assert_array_equal(run(make(True), [P(f32)], [Z])[0], (T ^ 1) + 2)
    with pytest.raises(RaceFault):
        run(make(False), [P(f32)], [Z])


def test_halfword_stores_to_one_word_are_not_a_race():
    def kernel(o):
        s = cuda.shared.array(64, u16)
        b = cuda.shared.array(64, u8)
        t = cuda.threadIdx.x
        s[t] = t
        b[t] = 255 - t
        cuda.syncthreads()
        o[t] = s[63 - t] + b[t]

    np.testing.assert_array_equal(run(kernel, [P(f32)], [Z])[0], T[::-1] + 255 - T)


def test_race_between_ctas():
    def kernel(o):
        o[cuda.threadIdx.x] = cuda.blockIdx.x

    run(kernel, [P(f32)], [Z], grid=3)
    with pytest.raises(RaceFault, match="global-memory race: store of a location written by thread block"):
        run(kernel, [P(f32)], [Z], grid=3, global_race=True)

    def reads(o):
        b, t = cuda.blockIdx.x, cuda.threadIdx.x
        o[b * 32 + t] = o[(1 - b) * 32 + t] + 1

    for batch in (8192, 32):
        with pytest.raises(RaceFault, match="global-memory race"):
            run(reads, [P(f32)], [Z], grid=2, block=32, global_race=True, batch_threads=batch)

    def disjoint(o):
        o[cuda.grid(1)] = 1

    run(disjoint, [P(f32)], [Z], grid=2, block=32, global_race=True)


def test_read_only_load_of_written_data():
    def kernel(a, o):
        t = cuda.threadIdx.x
        a[t * 4] = types.uint32(t)
        cuda.syncthreads()
        o[t] = X.load_global_16(a, i64(t) * 16)[0]

    args = [np.zeros(256, "u4"), np.zeros(64, "u4")]
    run(kernel, [P(types.uint32)] * 2, args)
    with pytest.raises(RaceFault, match="read-only"):
        run(kernel, [P(types.uint32)] * 2, args, global_race=True)


STORES = (
    "st.global.u32 [%rd1+1032], 5;",
    "st.volatile.global.u32 [%rd1+1032], 5;",
    "red.global.add.u32 [%rd1+1032], 5;",
)
LOADS = ("", "ld.global.u32 %r5, [%rd1+1032];", "ld.volatile.global.u32 %r5, [%rd1+1032];")
# A thread block loads words, then one stores to a word of these: another one that hears of it, or itself.
LATER_STORE = {
    "another": """ld.param.u64 %rd1, [p0]; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
    setp.eq.u32 %p1, %ct, 1; @%p1 bra $one; LOAD membar.gl; red.global.add.u32 [%rd1+2048], 1; bra $end;
    $one: atom.global.or.b32 %r1, [%rd1+2048], 0; membar.gl; BETWEEN STORE
    $end:""",
    "itself": """ld.param.u64 %rd1, [p0]; mov.u32 %o0, 0; setp.ne.u32 %p1, %ct, 0; @%p1 bra $end;
    LOAD bar.sync 0; BETWEEN bar.sync 0; setp.ne.u32 %p1, %lid, 9; @%p1 bra $end; STORE
    $end:""",
}


@pytest.mark.parametrize("batch_threads", [8192, 32])
@pytest.mark.parametrize("between", LOADS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("who", LATER_STORE)
def test_a_store_after_a_read_only_load(who, store, between, batch_threads):
    """No barrier, flag or other load in between helps: nothing may store to these bytes in the whole launch."""
    text = LATER_STORE[who].replace("STORE", store).replace("BETWEEN", between)
    options = {"n": 64, "grid": 2, "global_race": True, "batch_threads": batch_threads}
    load = "ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+1024];"
    run_ptx(text.replace("LOAD", load.replace(".nc", "")), [np.zeros(1024, "u4")], ["u4"], **options)
    run_ptx(text.replace("LOAD", load.replace("+1024", "+1040")), [np.zeros(1024, "u4")], ["u4"], **options)
    message = r"(store|atomic) of a location read as read-only \(.nc\) by thread block \(0, 0, 0\)"
    for loads in (load, LOADS[1] + load, LOADS[2] + load):
        with pytest.raises(RaceFault, match=message):
            run_ptx(text.replace("LOAD", loads), [np.zeros(1024, "u4")], ["u4"], **options)


@pytest.mark.parametrize("fence", [True, False])
def test_last_cta_pattern(fence):
    """The last thread block to arrive reads what the others wrote: needs a fence before the counter."""

    def make():
        def kernel(part, counter, o):
            b, t = cuda.blockIdx.x, cuda.threadIdx.x
            last = cuda.shared.array(1, types.int32)
            part[b * 32 + t] = f32(b + t)
            if fence:
                cuda.threadfence()
            cuda.syncthreads()
            if t == 0:
                last[0] = cuda.atomic.add(counter, 0, 1)
            cuda.syncthreads()
            if last[0] == 3:
                if fence:
                    cuda.threadfence()
                s = f32(0)
                for i in range(4):
                    s += part[i * 32 + t]
                o[t] = s

        return kernel

    i32a = types.Array(types.int32, 1, "C")
    e = build(make(), P(f32), i32a, P(f32))

    def go(**kw):
        dev = Device(1 << 20)
        part, counter, o = (
            dev.alloc(128, "f4", "part"),
            dev.upload(np.zeros(1, "i4"), "counter"),
            dev.alloc(32, "f4", "o"),
        )
        dev.launch(e, 4, 32, [part, *array_arguments(counter), o], global_race=True, **kw)
        return o.get()

    for kw in ({}, {"seed": 1}, {"seed": 2, "batch_threads": 32}):
        if fence:
            np.testing.assert_array_equal(go(**kw), 4 * T[:32] + 6)
        else:
            with pytest.raises(RaceFault, match="load of a location written by thread block"):
                go(**kw)


def test_schedule_permutation_shows_missing_barrier():
    """Without the race detector, a missing barrier gives different results under different seeds."""
    seen = set()
    for seed in range(6):
        out = run(shared_exchange(False), [P(f32)], [Z], race=False, init_check=False, seed=seed)[0]
        seen.add(out.tobytes())
    assert len(seen) > 1
    seen = {run(shared_exchange(True), [P(f32)], [Z], seed=s)[0].tobytes() for s in range(6)}
    assert len(seen) == 1


def test_waiting_for_another_cta():
    """Thread block 0 spins until 1 has published a value: needs a seeded schedule, lock-step starves block 1."""
    body = """ld.param.u64 %rd1, [p0]; setp.eq.u32 %p1, %ct, 1; @%p1 bra $writer;
    $spin: ld.acquire.gpu.global.u32 %r1, [%rd1+512]; setp.eq.u32 %p2, %r1, 0; @%p2 bra $spin;
    ld.global.u32 %o0, [%rd1+640]; bra $end;
    $writer: mov.u32 %o0, 0; setp.eq.u32 %p3, %lid, 0; @%p3 st.global.u32 [%rd1+640], 42; bar.sync 0;
    @%p3 st.release.gpu.global.u32 [%rd1+512], 1;
    $end:"""
    out = run_ptx(body, [np.zeros(256, "u4")], ["u4"], n=64, grid=2, seed=1, global_race=True, step_limit=100_000)[0]
    assert (out[:32] == 42).all()
    with pytest.raises(RaceFault, match="load of a location written by thread block"):
        run_ptx(
            body.replace("st.release.gpu", "st.relaxed.gpu"),
            [np.zeros(256, "u4")],
            ["u4"],
            n=64,
            grid=2,
            seed=1,
            global_race=True,
            step_limit=100_000,
        )
    with pytest.raises(EmulatorError, match="step limit"):
        run_ptx(body, [np.zeros(256, "u4")], ["u4"], n=64, grid=2, step_limit=2000)


@pytest.mark.parametrize("barrier", ["bar.sync 0;", ""])
def test_readers_that_come_one_after_the_other(barrier):
    """The same load by two warps in turn: a store has to wait for both."""
    body = f"""setp.eq.u32 %p3, %lid, 0; @%p3 st.shared.u32 [buf], 7; bar.sync 0; shr.u32 %r2, %lid, 5; mov.u32 %r1, 0;
    $loop: setp.ne.u32 %p1, %r2, %r1; @%p1 bra $skip; ld.shared.u32 %o0, [buf];
    $skip: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 2; @%p2 bra $loop;
    bar.warp.sync -1; {barrier} @%p3 st.shared.u32 [buf], 9;"""
    if barrier:
        assert (run_ptx(body, [np.zeros(64, "u4")], ["u4"], **SHARED)[0] == 7).all()
    else:
        with pytest.raises(RaceFault, match="store of a location read by several threads"):
            run_ptx(body, [np.zeros(64, "u4")], ["u4"], **SHARED)


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("first", ["plain", "volatile"])
def test_a_plain_read_before_an_atomic(space, first):
    """A thread reads a counter, then one of another warp and block counts it up; a volatile read may meet an atomic."""
    address = "[buf]" if space == "shared" else "[%rd1+1024]"
    writer = "%lid, 40" if space == "shared" else "%ct, 1"
    init = "setp.eq.u32 %p9, %lid, 0; @%p9 st.shared.u32 [buf], 0; bar.sync 0;" if space == "shared" else ""
    body = f"""ld.param.u64 %rd1, [p0]; {init}
    mov.u32 %o0, 0; setp.eq.u32 %p1, {writer}; @%p1 bra $writer;
    ld.{"volatile." * (first == "volatile")}{space}.u32 %o0, {address}; bra $end;
    $writer: atom.{space}.add.u32 %o0, {address}, 1;
    $end:"""
    options = {"n": 128, "grid": 2, "global_race": True, **SHARED}
    if first == "volatile":
        run_ptx(body, [np.zeros(512, "u4")], ["u4"], **options)
    else:
        with pytest.raises(RaceFault, match=f"{space}-memory race: atomic of a location read by"):
            run_ptx(body, [np.zeros(512, "u4")], ["u4"], **options)


def test_a_plain_store_after_a_volatile_read():
    for space, address, writer in (("shared", "[buf]", "%lid, 40"), ("global", "[%rd1+1024]", "%ct, 1")):
        body = f"""ld.param.u64 %rd1, [p0]; setp.eq.u32 %p9, %lid, 0; @%p9 st.shared.u32 [buf], 0; bar.sync 0;
        mov.u32 %o0, 0; setp.eq.u32 %p1, {writer}; @%p1 bra $writer; ld.volatile.{space}.u32 %o0, {address}; bra $end;
        $writer: st.{space}.u32 {address}, 1;
        $end:"""
        with pytest.raises(RaceFault, match=f"{space}-memory race: store of a location read by"):
            run_ptx(body, [np.zeros(512, "u4")], ["u4"], n=128, grid=2, global_race=True, **SHARED)


@pytest.mark.parametrize("batch_threads", [8192, 64])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys"])
def test_atomics_of_the_scope_of_a_thread_block(scope, alike, batch_threads):
    """Those of two thread blocks are not morally strong with each other, those of two warps are."""
    body = f"""ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %ct, 4; add.u64 %rd2, %rd2, %rd1; setp.eq.u32 %p1, %ct, 0;
    @%p1 atom.gpu.global.add.u32 %o0, [ADDRESS+1024], 1; @!%p1 atom.{scope}.global.add.u32 %o0, [ADDRESS+1024], 1;"""
    body = body.replace("gpu", scope) if alike else body
    one, each = body.replace("ADDRESS", "%rd1"), body.replace("ADDRESS", "%rd2")
    options = {"global_race": True, "batch_threads": batch_threads}
    run_ptx(one, [np.zeros(512, "u4")], ["u4"], n=64, **options)
    run_ptx(each, [np.zeros(512, "u4")], ["u4"], n=128, grid=2, **options)
    if scope in ("gpu", "sys"):
        run_ptx(one, [np.zeros(512, "u4")], ["u4"], n=128, grid=2, **options)
    else:
        with pytest.raises(RaceFault, match=r"global-memory race: atomic of a location (read|written) by thread block"):
            run_ptx(one, [np.zeros(512, "u4")], ["u4"], n=128, grid=2, **options)


# Thread blocks 0 and 1 store to a word, each tells block 2, if it tells; block 2 has a weak access to the word.
STORERS = """ld.param.u64 %rd1, [p0]; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
setp.eq.u32 %p1, %ct, 1; @%p1 bra $one; setp.eq.u32 %p2, %ct, 2; @%p2 bra $two; STORE FIRST bra $end;
$one: STORE SECOND bra $end;
$two: atom.global.or.b32 %r1, [%rd1+2048], 0; membar.gl; ACCESS
$end:"""


@pytest.mark.parametrize("access", ["ld.global.u32 %o0, [%rd1+1024];", "st.global.u32 [%rd1+1024], 5;"])
@pytest.mark.parametrize("silent", ["", "FIRST", "SECOND"])
def test_strong_stores_of_two_thread_blocks(silent, access):
    text = STORERS.replace(silent, "") if silent else STORERS
    text = text.replace("FIRST", "SECOND").replace("SECOND", "membar.gl; red.global.add.u32 [%rd1+2048], 1;")
    text = text.replace("STORE", "st.relaxed.gpu.global.u32 [%rd1+1024], 7;").replace("ACCESS", access)
    for batch_threads in (8192, 32):
        options = {"n": 96, "grid": 3, "global_race": True, "batch_threads": batch_threads}
        if silent:
            with pytest.raises(RaceFault, match=r"(load|store) of a location written by thread block"):
                run_ptx(text, [np.zeros(1024, "u4")], ["u4"], **options)
        else:
            run_ptx(text, [np.zeros(1024, "u4")], ["u4"], **options)


@pytest.mark.parametrize("arrive", ["", "bar.arrive 2, 64;"])
def test_strong_stores_of_two_warps(arrive):
    """Warps 0 and 1 store to a word; warp 2 meets 1, and 0 if it arrives, and loads it."""
    body = f"""shr.u32 %r1, %lid, 5; mov.u32 %o0, 0; setp.eq.u32 %p1, %r1, 1; setp.eq.u32 %p2, %r1, 2;
    @%p1 bra $one; @%p2 bra $two; st.volatile.shared.u32 [buf], 7; {arrive} bra $end;
    $one: st.volatile.shared.u32 [buf], 7; bar.arrive 1, 64; bra $end;
    $two: bar.sync 1, 64; {arrive.replace("arrive", "sync")} ld.shared.u32 %o0, [buf];
    $end:"""
    if arrive:
        assert (run_ptx(body, [np.zeros(96, "u4")], ["u4"], **SHARED)[0][64:] == 7).all()
    else:
        with pytest.raises(RaceFault, match=r"load of a location written by thread \(\d+, 0, 0\)"):
            run_ptx(body, [np.zeros(96, "u4")], ["u4"], **SHARED)


@pytest.mark.parametrize("arrive", ["", "bar.arrive 2, 64;"])
def test_a_store_after_readers_that_are_met_at_different_times(arrive):
    """Warp 1 loads a word, and then warp 2; warp 0 meets 1 before 2 loads, and 2 if it arrives, and stores."""
    body = f"""shr.u32 %r1, %lid, 5; mov.u32 %o0, 0; setp.eq.u32 %p1, %r1, 1; setp.eq.u32 %p2, %r1, 2;
    setp.eq.u32 %p3, %lid, 0; @%p3 st.shared.u32 [buf], 7; bar.sync 0; @%p1 bra $one; @%p2 bra $two;
    bar.sync 1, 64; {arrive.replace("arrive", "sync")} @%p3 st.shared.u32 [buf], 8; bra $end;
    $one: ld.shared.u32 %o0, [buf]; bar.arrive 1, 64; bar.arrive 3, 64; bra $end;
    $two: bar.sync 3, 64; ld.shared.u32 %o0, [buf]; {arrive}
    $end:"""
    if arrive:
        assert (run_ptx(body, [np.zeros(96, "u4")], ["u4"], **SHARED)[0][32:] == 7).all()
    else:
        with pytest.raises(RaceFault, match="shared-memory race"):
            run_ptx(body, [np.zeros(96, "u4")], ["u4"], **SHARED)


@pytest.mark.parametrize("space", ["shared", "global"])
def test_a_strong_read_before_a_strong_and_a_weak_store(space):
    """The strong store does not order the read before the weak one."""
    address, writer = ("[buf]", "%lid, 40") if space == "shared" else ("[%rd1+1024]", "%ct, 1")
    body = f"""ld.param.u64 %rd1, [p0]; setp.eq.u32 %p9, %lid, 0; @%p9 st.shared.u32 [buf], 0; bar.sync 0;
    mov.u32 %o0, 0; setp.eq.u32 %p1, {writer}; @%p1 bra $writer; ld.volatile.{space}.u32 %o0, {address}; bra $end;
    $writer: setp.eq.u32 %p2, %lid, 40; @%p2 st.volatile.{space}.u32 {address}, 1; WEAK
    $end:"""
    options = {"n": 128, "grid": 2, "global_race": True, **SHARED}
    run_ptx(body.replace("WEAK", ""), [np.zeros(512, "u4")], ["u4"], **options)
    with pytest.raises(RaceFault, match=f"{space}-memory race: store of a location read by"):
        run_ptx(body.replace("WEAK", f"@%p2 st.{space}.u32 {address}, 2;"), [np.zeros(512, "u4")], ["u4"], **options)


def test_the_last_thread_block_resets_the_counter():
    """An atomic comes after those whose values it has seen, even for a weak store, by observation order."""
    body = """ld.param.u64 %rd1, [p0]; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
    ATOMIC; setp.eq.u32 %p1, %r1, 3; @%p1 st.global.u32 [%rd1+1024], 0;
    $end:"""
    for options in ({}, {"seed": 1}, {"batch_threads": 32}, {"seed": 3, "batch_threads": 32}):
        options = {"n": 128, "grid": 4, "global_race": True, **options}
        text = body.replace("ATOMIC", "atom.global.add.u32 %r1, [%rd1+1024], 1")
        run_ptx(text, [np.zeros(1024, "u4")], ["u4"], **options)
        text = text.replace("setp.eq.u32 %p1, %r1, 3", "setp.eq.u32 %p1, %r1, 1")
        with pytest.raises(RaceFault, match=r"(store|atomic) of a location written by thread block"):
            run_ptx(text, [np.zeros(1024, "u4")], ["u4"], **options)


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(
    "second", ["ld.volatile.{}.u32 %o0", "ld.volatile.{}.v2.u32 {{%o0, %r9}}", "atom.{}.add.u32 %o0"]
)
def test_strong_accesses_of_different_sizes(space, second):
    address, first = ("buf", "%lid, 40") if space == "shared" else ("%rd1+1024", "%ct, 1")
    operand = ", 1" if "atom" in second else ""
    body = f"""ld.param.u64 %rd1, [p0]; mov.u64 %rd5, 1; setp.eq.u32 %p9, %lid, 0; @%p9 st.shared.u64 [buf], %rd5;
    bar.sync 0; mov.u32 %o0, 0; setp.eq.u32 %p1, {first}; @%p1 bra $first;
    {second.format(space)}, [{address}]{operand}; bra $end;
    $first: setp.eq.u32 %p2, %lid, 40; STORE
    $end:"""
    options = {"n": 128, "grid": 2, "global_race": True, **SHARED}
    same = f"@%p2 st.volatile.{space}.v2.u32 [{address}], {{%lid, %lid}};"
    run_ptx(body.replace("STORE", same), [np.zeros(512, "u4")], ["u4"], **options)
    wide = f"@%p2 st.volatile.{space}.u64 [{address}], %rd5;"
    with pytest.raises(RaceFault, match=f"{space}-memory race: store of a location (read|written) by"):
        run_ptx(body.replace("STORE", wide), [np.zeros(512, "u4")], ["u4"], **options)
