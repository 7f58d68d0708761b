"""What comes before what: barriers, syncs of part of a warp, and flags between threads and between thread blocks."""

import numpy as np
import pytest

from pagedkv.emulator import RaceFault, UnsupportedInstructionError

from ..ptx_harness import SHARED, run_ptx

T = np.arange(64)
MY_WORD = "mov.u32 %r20, buf; shl.b32 %r21, %lid, 2; add.u32 %r22, %r20, %r21;"
BETWEEN_BLOCKS = r"(load|store) of a location (written|read) by thread block"
HALF = "setp.lt.u32 %p1, %r30, 16; selp.u32 %r31, 0x0000ffff, 0xffff0000, %p1;"


def read_of_another_lane(distance, sync):
    """Each lane stores a word and loads that of the lane `distance` apart, with its half of the warp in %r31."""
    return f"""{MY_WORD} and.b32 %r30, %lid, 31; {HALF} st.shared.u32 [%r22], %lid; {sync}
    xor.b32 %r23, %r22, {4 * distance}; ld.shared.u32 %o0, [%r23];"""


@pytest.mark.parametrize("seed", [None, 1])
def test_a_sync_of_half_a_warp_orders_the_lanes_that_it_names(seed):
    zero = [np.zeros(64, "u4")]
    for distance in (1, 8, 15):
        body = read_of_another_lane(distance, "bar.warp.sync %r31;")
        np.testing.assert_array_equal(run_ptx(body, zero, ["u4"], seed=seed, **SHARED)[0], T ^ distance)
    for distance in (16, 17, 32) if seed is None else (16, 17):  # seeded, another warp may have stored nothing yet
        with pytest.raises(RaceFault, match="load of a location written by thread"):
            run_ptx(read_of_another_lane(distance, "bar.warp.sync %r31;"), zero, ["u4"], seed=seed, **SHARED)
    for sync in ("bar.warp.sync %r31; bar.warp.sync -1;", "bar.warp.sync -1; bar.warp.sync %r31;", "bar.sync 0;"):
        np.testing.assert_array_equal(run_ptx(read_of_another_lane(16, sync), zero, ["u4"], **SHARED)[0], T ^ 16)


def test_what_a_lane_learned_goes_on_with_the_next_sync():
    """Lane 0 meets 1, then 2: 2 knows what 1 stored. Lane 3, whom neither met, does not."""
    steps = "setp.lt.u32 %p2, %lid, 2; @%p2 bar.warp.sync 0x3; and.b32 %r1, %lid, 1; setp.eq.u32 %p3, %r1, 0;"
    steps += "setp.lt.u32 %p4, %lid, 3; and.pred %p3, %p3, %p4; @%p3 bar.warp.sync 0x5;"
    body = f"""{MY_WORD} st.shared.u32 [%r22], %lid; {steps} mov.u32 %o0, 0; setp.eq.u32 %p5, %lid, READER;
    @%p5 ld.shared.u32 %o0, [buf+4];"""
    out = run_ptx(body.replace("READER", "2"), [np.zeros(64, "u4")], ["u4"], **SHARED)[0]
    assert out[2] == 1
    with pytest.raises(RaceFault, match=r"written by thread \(1, 0, 0\)"):
        run_ptx(body.replace("READER", "3"), [np.zeros(64, "u4")], ["u4"], **SHARED)


@pytest.mark.parametrize("named", ["0x0000000f", "0x00000007"])
def test_a_store_waits_for_every_lane_that_read(named):
    """Lanes 0 to 3 read a word together, then lane 0 stores to it."""
    body = f"""setp.eq.u32 %p1, %lid, 0; @%p1 st.shared.u32 [buf], 7; bar.sync 0; mov.u32 %o0, 0;
    and.b32 %r1, {named}, 15; shr.u32 %r1, %r1, %lid; and.b32 %r1, %r1, 1; setp.eq.u32 %p2, %r1, 1;
    setp.lt.u32 %p3, %lid, 4; @%p3 ld.shared.u32 %o0, [buf]; setp.gt.u32 %p4, %lid, 31; @%p4 bra $end;
    @%p2 bar.warp.sync {named}; @%p1 ld.shared.u32 %o0, [buf]; @%p1 st.shared.u32 [buf], 9;
    $end:"""
    if named == "0x0000000f":
        assert (run_ptx(body, [np.zeros(64, "u4")], ["u4"], **SHARED)[0][:4] == 7).all()
    else:
        with pytest.raises(RaceFault, match="store of a location read by"):
            run_ptx(body, [np.zeros(64, "u4")], ["u4"], **SHARED)


SCHEDULES = [{}, {"batch_threads": 32}, {"seed": 1}, {"seed": 2, "batch_threads": 32}, {"seed": 3}]
# Every thread stores a word; the last thread block to count, in one thread, loads those of the next block.
MERGE = """ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %gid, 4; add.u64 %rd2, %rd1, %rd2; add.u64 %rd2, %rd2, 1024;
setp.eq.u32 %p1, %lid, 0; st.global.u32 [%rd2], %gid; BARRIER
@%p1 RELEASE @%p1 atom.global.inc.u32 %r1, [%rd1+2048], 3; @%p1 ACQUIRE
@%p1 st.shared.u32 [buf], %r1; BARRIER ld.shared.u32 %r2, [buf]; setp.ne.u32 %p2, %r2, 3; mov.u32 %o0, 0;
@%p2 bra $end; add.u32 %r3, %gid, 32; and.b32 %r3, %r3, 127; mul.wide.u32 %rd3, %r3, 4; add.u64 %rd3, %rd1, %rd3;
ld.global.u32 %o0, [%rd3+1024];
$end:"""


def merge(barriers=("bar.sync 0;", "bar.sync 0;"), release="membar.gl;", acquire="membar.gl;", **options):
    text = MERGE.replace("BARRIER", barriers[0], 1).replace("BARRIER", barriers[1], 1)
    text = text.replace("@%p1 RELEASE", release and f"@%p1 {release}").replace(
        "@%p1 ACQUIRE", acquire and f"@%p1 {acquire}"
    )
    return run_ptx(
        text, [np.zeros(1024, "u4")], ["u4"], n=128, grid=4, block=32, global_race=True, **SHARED, **options
    )[0]


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_barrier_fence_atomic_fence_barrier(options):
    """One thread releases what its thread block wrote, and acquires for all of it."""
    for fence in ("membar.gl;", "membar.sys;", "fence.acq_rel.gpu;", "fence.sc.gpu;"):
        got = merge(release=fence, acquire=fence, **options).reshape(4, 32)
        last = int(got.any(1).argmax())
        np.testing.assert_array_equal(got[last], (np.arange(32) + 32 * (last + 1)) % 128)


@pytest.mark.parametrize(
    "broken",
    [
        {"release": ""},
        {"acquire": ""},
        {"release": "membar.cta;"},
        {"acquire": "fence.acq_rel.cta;"},
        {"acquire": "fence.acq_rel.cluster;"},
        {"barriers": ("", "bar.sync 0;")},
        {"barriers": ("bar.sync 0;", "")},
        {"barriers": ("@%p1 bar.warp.sync 0x1;", "bar.sync 0;")},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_a_release_or_acquire_with_something_missing(broken, options):
    with pytest.raises(RaceFault):
        merge(**broken, **options)


ALL_FENCED = MERGE.replace("BARRIER", "FENCED bar.sync 0;", 1).replace("BARRIER", "bar.sync 0; THEN", 1)
ACQ_REL, SC = "fence.acq_rel.gpu;", "fence.sc.gpu;"


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("before", "release", "acquire", "after"),
    [
        ("", ACQ_REL, ACQ_REL, ""),
        ("", "fence.release.gpu;", "fence.acquire.gpu;", ""),
        (SC, "", SC, ""),
        (SC, "", "", SC),
        ("", SC, "", SC),
        ("membar.gl;", "", "", "fence.sc.sys;"),
    ],
)
def test_fences_that_order_what_a_thread_block_wrote(before, release, acquire, after, options):
    got = fenced(before, release, acquire, after, **options).reshape(4, 32)
    last = int(got.any(1).argmax())
    np.testing.assert_array_equal(got[last], (np.arange(32) + 32 * (last + 1)) % 128)


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("before", "release", "acquire", "after"),
    [
        (ACQ_REL, "", ACQ_REL, ""),
        (ACQ_REL, "", SC, ""),
        (SC, "", ACQ_REL, ""),
        ("", ACQ_REL, "", ACQ_REL),
        ("", ACQ_REL, "", SC),
        ("", SC, "", ACQ_REL),
        ("fence.release.gpu;", "", ACQ_REL, ""),
        ("fence.sc.cta;", "", SC, ""),
        (SC, "", "", "fence.sc.cta;"),
        ("", "fence.acquire.gpu;", ACQ_REL, ""),
        ("", ACQ_REL, "fence.release.gpu;", ""),
    ],
)
def test_fences_that_do_not(before, release, acquire, after, options):
    """Patterns are of one thread; only fence.sc on both sides orders what is behind the barriers."""
    with pytest.raises(RaceFault, match="load of a location written by thread block"):
        fenced(before, release, acquire, after, **options)


def fenced(before, release, acquire, after, **options):
    """All threads pass the fences `before` the first barrier and `after` the second, one those at the atomic."""
    text = ALL_FENCED.replace("FENCED", before).replace("THEN", after)
    text = text.replace("@%p1 RELEASE", release and f"@%p1 {release}")
    text = text.replace("@%p1 ACQUIRE", acquire and f"@%p1 {acquire}")
    zeros = [np.zeros(1024, "u4")]
    return run_ptx(text, zeros, ["u4"], n=128, grid=4, block=32, global_race=True, **SHARED, **options)[0]


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_an_atomic_learns_only_from_those_before_it(options):
    """The first thread block to count, not the last, loads what the next block wrote."""
    text = MERGE.replace("BARRIER", "bar.sync 0;").replace("RELEASE", ACQ_REL).replace("ACQUIRE", ACQ_REL)
    text = text.replace("setp.ne.u32 %p2, %r2, 3;", "setp.ne.u32 %p2, %r2, 0;")
    options = {"n": 128, "grid": 4, "block": 32, "global_race": True, **SHARED, **options}
    with pytest.raises(RaceFault, match=BETWEEN_BLOCKS):
        run_ptx(text, [np.zeros(1024, "u4")], ["u4"], **options)


@pytest.mark.parametrize("fence", ["fence.proxy.alias;", "membar.proxy.alias;", "fence.mbarrier_init.release.cluster;"])
def test_fences_that_the_emulator_does_not_model(fence):
    with pytest.raises(UnsupportedInstructionError, match=rf"does not model.*{fence}"):
        merge(release=fence)


FLAG = """ld.param.u64 %rd1, [p0]; setp.eq.u32 %p1, %ct, 0; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
@%p1 bra $writer;
$spin: READ; setp.eq.u32 %p2, %r1, 0; @%p2 bra $spin; ACQUIRE ld.global.u32 %o0, [%rd1+640]; bra $end;
$writer: st.global.u32 [%rd1+640], 42; RELEASE WRITE;
$end:"""


def hand_over(read, acquire, release, write, **options):
    text = FLAG.replace("READ", read).replace("ACQUIRE", acquire).replace("RELEASE", release).replace("WRITE", write)
    out = run_ptx(
        text, [np.zeros(256, "u4")], ["u4"], n=64, grid=2, seed=1, global_race=True, step_limit=100_000, **options
    )[0]
    assert out[32] == 42


LOADS = {
    "relaxed": "ld.relaxed.gpu.global.u32 %r1, [%rd1+512]",
    "volatile": "ld.volatile.global.u32 %r1, [%rd1+512]",
    "atomic": "atom.global.or.b32 %r1, [%rd1+512], 0",
}
STORES = {
    "relaxed": "st.relaxed.gpu.global.u32 [%rd1+512], 1",
    "atomic": "atom.global.exch.b32 %r2, [%rd1+512], 1",
    "reduction": "red.global.add.u32 [%rd1+512], 1",
    "cas": "atom.global.cas.b32 %r2, [%rd1+512], 0, 1",
}


@pytest.mark.parametrize("read", LOADS)
@pytest.mark.parametrize("write", STORES)
def test_flags_between_thread_blocks(read, write):
    load, store = LOADS[read], STORES[write]
    hand_over(load, "membar.gl;", "membar.gl;", store)
    for acquire, release in (("", "membar.gl;"), ("membar.gl;", ""), ("membar.cta;", "membar.gl;")):
        with pytest.raises(RaceFault, match="load of a location written by thread block"):
            hand_over(load, acquire, release, store)


def test_acquire_and_release_at_the_access():
    load, store = "ld.acquire.gpu.global.u32 %r1, [%rd1+512]", "st.release.gpu.global.u32 [%rd1+512], 1"
    hand_over(load, "", "", store)
    hand_over(load, "", "membar.gl;", STORES["atomic"])
    hand_over(
        LOADS["atomic"].replace("atom.", "atom.acquire.gpu."),
        "",
        "",
        "atom.acq_rel.gpu.global.exch.b32 %r2, [%rd1+512], 1",
    )
    for read, write in (
        (load.replace("gpu", "cta"), store),
        (load, store.replace("gpu", "cta")),
        (load, STORES["cas"]),
    ):
        with pytest.raises(RaceFault, match=BETWEEN_BLOCKS):
            hand_over(read, "", "", write)


def test_stores_after_a_release_at_the_same_location():
    load, release = "ld.acquire.gpu.global.u32 %r1, [%rd1+512]", "st.release.gpu.global.u32 [%rd1+512], 0;"
    hand_over(load, "", release, STORES["relaxed"])
    for broken in (release.replace("+512", "+516"), release.replace("gpu", "cta")):
        with pytest.raises(RaceFault, match=BETWEEN_BLOCKS):
            hand_over(load, "", broken, STORES["relaxed"])


def test_an_acquire_is_of_its_own_location():
    elsewhere = "ld.acquire.gpu.global.u32 %r3, [%rd1+516];"
    with pytest.raises(RaceFault, match="load of a location written by thread block"):
        hand_over(LOADS["relaxed"], elsewhere, "membar.gl;", STORES["relaxed"])


def test_flags_of_several_words():
    """Each element of a vector is a flag; a word is none for half of it."""
    store, load = "st.volatile.global.v2.u32 [%rd1+512], {%r5, 1}", "ld.volatile.global.{} %{}1, [%rd1+516]"
    hand_over(load.format("u32", "r"), "membar.gl;", "mov.u32 %r5, 0; membar.gl;", store)
    half = load.format("u16", "h") + "; cvt.u32.u16 %r1, %h1"
    with pytest.raises(RaceFault, match=BETWEEN_BLOCKS):
        hand_over(half, "membar.gl;", "mov.u32 %r5, 0; membar.gl;", store)


AFTER = """ld.param.u64 %rd1, [p0]; setp.eq.u32 %p1, %ct, 0; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
@!%p1 bra $other; st.global.u32 [%rd1+640], 42; membar.gl; red.global.add.u32 [%rd1+512], 1; bra $end;
$other: READ; membar.gl; ld.global.u32 %o0, [%rd1+640];
$end:"""


def test_a_reduction_acquires_nothing():
    options = {"n": 64, "grid": 2, "global_race": True}
    run_ptx(AFTER.replace("READ", "atom.global.add.u32 %r1, [%rd1+512], 1"), [np.zeros(256, "u4")], ["u4"], **options)
    for read in ("red.global.add.u32 [%rd1+512], 1", "atom.global.add.u32 _, [%rd1+512], 1"):
        with pytest.raises(RaceFault, match="load of a location written by thread block"):
            run_ptx(AFTER.replace("READ", read), [np.zeros(256, "u4")], ["u4"], **options)


def test_a_compare_and_swap_that_fails_stores_nothing():
    """Thread block 0 fails to take the lock that 1 holds: 1 learns nothing from it."""
    body = """ld.param.u64 %rd1, [p0]; setp.eq.u32 %p1, %ct, 0; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
    @!%p1 bra $other; st.global.u32 [%rd1+640], 42; membar.gl; atom.global.cas.b32 %r1, [%rd1+512], VALUE, 0; bra $end;
    $other: atom.global.or.b32 %r1, [%rd1+512], 0; membar.gl; ld.global.u32 %o0, [%rd1+640];
    $end:"""
    run_ptx(body.replace("VALUE", "0"), [np.zeros(256, "u4")], ["u4"], n=64, grid=2, global_race=True)
    with pytest.raises(RaceFault, match="load of a location written by thread block"):
        run_ptx(body.replace("VALUE", "1"), [np.zeros(256, "u4")], ["u4"], n=64, grid=2, global_race=True)


IN_A_BLOCK = """mov.u32 %o0, 0; and.b32 %r30, %lid, 31; setp.ne.u32 %p5, %r30, 0; setp.eq.u32 %p1, %lid, 0;
@%p1 st.shared.u32 [buf], 0; bar.sync 0; @%p5 bra $end; @%p1 bra $writer;
$spin: atom.shared.or.b32 %r1, [buf], 0; setp.eq.u32 %p2, %r1, 0; @%p2 bra $spin; ACQUIRE
ld.shared.u32 %o0, [buf+64]; bra $end;
$writer: st.shared.u32 [buf+64], 42; RELEASE atom.shared.exch.b32 %r1, [buf], 1;
$end:"""


@pytest.mark.parametrize("fence", ["membar.cta;", "membar.gl;"])
def test_flags_in_a_thread_block(fence):
    """Warp 1 waits for a value that warp 0 stores in shared memory."""

    def go(acquire, release):
        text = IN_A_BLOCK.replace("ACQUIRE", acquire).replace("RELEASE", release)
        return run_ptx(text, [np.zeros(64, "u4")], ["u4"], seed=1, step_limit=100_000, **SHARED)[0]

    assert go(fence, fence)[32] == 42
    for acquire, release in (("", fence), (fence, "")):
        with pytest.raises(RaceFault, match="shared-memory race: load of a location written by thread"):
            go(acquire, release)


# In each round every thread block stores a word and waits for the others, then loads all words.
ROUNDS = """ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %ct, 4; add.u64 %rd2, %rd1, %rd2; mov.u32 %r9, 0;
mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; mov.u32 %r8, 0;
$round: @%p5 bra $wait; add.u32 %r7, %r9, %ct; st.global.u32 [%rd2+1024], %r7;
membar.gl; red.global.add.u32 [%rd1+2048], 1; add.u32 %r8, %r8, 3;
$spin: ld.volatile.global.u32 %r1, [%rd1+2048]; setp.lt.u32 %p2, %r1, %r8; @%p2 bra $spin; membar.gl;
$wait: bar.sync 0; ld.global.u32 %r3, [%rd1+1024]; ld.global.u32 %r4, [%rd1+1028]; ld.global.u32 %r5, [%rd1+1032];
add.u32 %o0, %o0, %r3; add.u32 %o0, %o0, %r4; add.u32 %o0, %o0, %r5; SECOND
add.u32 %r9, %r9, 10; setp.lt.u32 %p3, %r9, 20; @%p3 bra $round;
$end:"""
SECOND = """bar.sync 0; @%p5 bra $go; membar.gl; red.global.add.u32 [%rd1+2048], 1; add.u32 %r8, %r8, 3;
$spin2: ld.volatile.global.u32 %r1, [%rd1+2048]; setp.lt.u32 %p2, %r1, %r8; @%p2 bra $spin2; membar.gl;
$go: bar.sync 0;"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_barriers_of_the_grid(seed):
    """Loads and stores of one location in turns; without the second barrier a store may come before another's load."""
    options = {"n": 96, "grid": 3, "seed": seed, "global_race": True, "step_limit": 1_000_000}
    out = run_ptx(ROUNDS.replace("SECOND", SECOND), [np.zeros(1024, "u4")], ["u4"], **options)[0]
    assert (out == 3 + 33).all()
    for broken in ("", SECOND.replace("bar.sync 0; @%p5", "@%p5", 1), SECOND.replace("membar.gl;", "", 1)):
        with pytest.raises(RaceFault, match="store of a location read by thread block"):
            run_ptx(ROUNDS.replace("SECOND", broken), [np.zeros(1024, "u4")], ["u4"], **options)


READERS = """ld.param.u64 %rd1, [p0]; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
setp.eq.u32 %p1, %ct, 1; @%p1 bra $one; setp.eq.u32 %p2, %ct, 2; @%p2 bra $two;
ld.global.u32 %o0, [%rd1+1024]; FIRST bra $end;
$one: ld.global.u32 %o0, [%rd1+1024]; SECOND bra $end;
$two: atom.global.or.b32 %r1, [%rd1+2048], 0; membar.gl; ld.global.u32 %o0, [%rd1+1024]; st.global.u32 [%rd1+1024], 5;
$end:"""


@pytest.mark.parametrize("silent", ["", "FIRST", "SECOND"])
def test_a_store_is_ordered_after_the_reads_of_two_thread_blocks(silent):
    """Blocks 0 and 1 read a word and say so, each at its own time; block 2 hears both, reads and stores."""
    text = READERS.replace(silent, "") if silent else READERS
    text = text.replace("FIRST", "SECOND").replace("SECOND", "membar.gl; red.global.add.u32 [%rd1+2048], 1;")
    if silent:
        with pytest.raises(RaceFault, match="store of a location read by thread block"):
            run_ptx(text, [np.zeros(1024, "u4")], ["u4"], n=96, grid=3, global_race=True)
    else:
        run_ptx(text, [np.zeros(1024, "u4")], ["u4"], n=96, grid=3, global_race=True)
