"""cp.async written in numba through inline assembly: when its bytes are there, and what it may not do."""

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, MemoryFault, RaceFault

from .. import ptx_intrinsics as X
from ..ptx_harness import SHARED, aligned, build, compile_ptx, emulate, filled, run_ptx

u8p, f32p = types.CPointer(types.uint8), types.CPointer(types.float32)
SRC = np.arange(512, dtype="f4")


def make_async(copies, wait, sync, read_other=True, wait_kind="0"):
    wait_fn = {"0": X.cp_async_wait_0, "1": X.cp_async_wait_1, "all": X.cp_async_wait_all}[wait_kind]

    def kernel(src, out):
        s = cuda.shared.array(512, types.float32, alignment=16)
        t = cuda.threadIdx.x
        p = X.shared_address(s) + types.uint32(t * 16)
        X.cp_async_16(p, src, types.int64(t * 16))
        X.cp_async_commit()
        if copies == 2:
            X.cp_async_16(p + types.uint32(1024), src, types.int64(t * 16 + 1024))
            X.cp_async_commit()
        if wait:
            wait_fn()
        if sync:
            cuda.syncthreads()
        out[t] = s[(t * 4 + 4) % 256] if read_other else s[t * 4]

    return kernel


def run_async(kernel, launch=emulate, **options):
    out = filled(64, "f4")
    launch(compile_ptx(kernel, u8p, f32p, cc=(8, 0)), [SRC, out], block=64, **options)
    return out


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (make_async(1, True, True), (np.arange(64) * 4 + 4) % 256),
        (make_async(1, True, False, read_other=False), np.arange(64) * 4),
        (make_async(2, True, True, wait_kind="1"), (np.arange(64) * 4 + 4) % 256),
        (make_async(1, True, True, wait_kind="all"), (np.arange(64) * 4 + 4) % 256),
    ],
    ids=["one group", "own bytes", "two groups", "all"],
)
def test_what_cp_async_has_copied_is_visible(kernel, expected, launch):
    np.testing.assert_array_equal(run_async(kernel, launch), expected)


def test_cp_async_visibility():
    with pytest.raises(RaceFault, match=r"in flight.*PTX line"):
        run_async(make_async(1, False, True))
    with pytest.raises(RaceFault, match="in flight"):
        run_async(make_async(1, True, True, wait_kind="1"))  # waits for the wrong group
    with pytest.raises(RaceFault, match="no barrier"):
        run_async(make_async(1, True, False))  # waited, but other threads did not synchronise


def test_cp_async_zero_fill_and_bounds(launch):
    def kernel(src, out, n):
        s = cuda.shared.array(256, types.float32, alignment=16)
        t = cuda.threadIdx.x
        valid = types.uint32(max(0, min(16, n - t * 16)))
        X.cp_async_16_zfill(X.shared_address(s) + types.uint32(t * 16), src, types.int64(t * 16), valid)
        X.cp_async_wait_all()
        for i in range(4):
            out[t * 4 + i] = s[t * 4 + i]

    text = compile_ptx(kernel, u8p, f32p, types.int32, cc=(8, 0))
    for n in (0, 36, 38, 1024):
        out = filled(256, "f4")
        launch(text, [aligned(SRC.view("u1")[:n]), out, n], block=64)  # exactly n bytes exist
        want = np.zeros(1024, "u1")
        want[:n] = SRC.view("u1")[:n]
        np.testing.assert_array_equal(out, want.view("f4"))
    with pytest.raises(MemoryFault, match=r"out of bounds global load.*past the end of arg0"):
        emulate(text, [aligned(SRC.view("u1")[:32]), filled(256, "f4"), 64], block=64)


def test_cp_async_alignment():
    def kernel(src, out, a, b):
        s = cuda.shared.array(256, types.float32, alignment=16)
        t = cuda.threadIdx.x
        X.cp_async_16_zfill(
            X.shared_address(s) + types.uint32(t * 16 + a), src, types.int64(t * 16 + b), types.uint32(0)
        )
        X.cp_async_wait_all()
        out[t] = s[t * 4]

    e = build(kernel, u8p, f32p, types.int32, types.int32)
    for a, b, what in ((0, 0, None), (8, 0, "shared store"), (0, 4, "global load"), (1024, 0, "out of bounds shared")):
        dev = Device(1 << 20)
        args = [dev.upload(SRC, "src"), dev.alloc(32, "f4"), a, b]
        if what is None:
            dev.launch(e, 1, 32, args)
        else:
            with pytest.raises(MemoryFault, match=what):
                dev.launch(e, 1, 32, args)


def test_double_buffer_reuse_race(launch):
    """The next copy into a buffer that slower warps may still read is reported when it is issued."""

    def make(barrier):
        def kernel(src, out):
            s = cuda.shared.array(256, types.float32, alignment=16)
            t = cuda.threadIdx.x
            p = X.shared_address(s) + types.uint32(t * 16)
            acc = types.float32(0)
            for _i in range(3):
                X.cp_async_16(p, src, types.int64(t * 16))
                X.cp_async_commit()
                X.cp_async_wait_0()
                cuda.syncthreads()
                acc += s[(t * 4 + 8) % 256]
                if barrier:
                    cuda.syncthreads()
            out[t] = acc

        return kernel

    np.testing.assert_array_equal(run_async(make(True), launch), 3 * ((np.arange(64) * 4 + 8) % 256))
    with pytest.raises(RaceFault, match="store of a location read by"):
        run_async(make(False))


def test_copies_to_one_place():
    def kernel(src, out):
        s = cuda.shared.array(256, types.float32, alignment=16)
        t = cuda.threadIdx.x
        X.cp_async_16(X.shared_address(s) + types.uint32(t // 2 * 16), src, types.int64(t * 16))
        X.cp_async_wait_all()
        out[t] = s[0]

    with pytest.raises(RaceFault, match=r"two threads copy to one shared location.*thread \(1, 0, 0\)"):
        run_async(kernel, race=False)


# Thread 0 starts a copy of 16 bytes; then somebody stores to the array.
IN_FLIGHT = """ld.param.u64 %rd1, [p0]; setp.eq.u32 %p1, %lid, 0; setp.eq.u32 %p2, %lid, 40; mov.u32 %o0, 0;
mov.u32 %r5, 0; @%p1 cp.async.ca.shared.global [buf], [%rd1+64], 16, AMOUNT; cp.async.commit_group; FIRST
cp.async.wait_group 0; SECOND bar.sync 0; ld.shared.u32 %o0, [buf];"""


def in_flight(first="", second="", amount="16", **options):
    text = IN_FLIGHT.replace("FIRST", first).replace("SECOND", second).replace("AMOUNT", amount)
    return run_ptx(text, [np.arange(1024, dtype="u4")], ["u4"], n=64, **SHARED, **options)[0]


@pytest.mark.parametrize("options", [{}, {"race": False}, {"seed": 1}], ids=str)
def test_a_store_to_the_source_of_a_copy_in_flight(options):
    for store in ("st.global.u32 [%rd1+64], %r5", "st.global.u8 [%rd1+79], 19", "red.global.add.u32 [%rd1+72], 1"):
        with pytest.raises(
            RaceFault, match=r"to the source of a cp\.async still in flight \(PTX line \d+: @%p1 cp\.async"
        ):
            in_flight(f"bar.sync 0; @%p2 {store};", **options)
        assert (in_flight("", f"bar.sync 0; @%p2 {store};", **options) == 16).all()
    for store in ("st.global.u32 [%rd1+60], 1", "st.global.u8 [%rd1+80], 1"):
        assert (in_flight(f"@%p1 {store};", **options) == 16).all()
    in_flight("@%p1 st.global.u8 [%rd1+70], 1;", amount="6", **options)
    in_flight("@%p1 st.global.u8 [%rd1+64], 1;", amount="0", **options)
    with pytest.raises(RaceFault, match=r"to the source of a cp\.async still in flight"):
        in_flight("@%p1 st.global.u8 [%rd1+69], 1;", amount="6", **options)


# Thread block 0 copies a word and says so; 1 hears it and stores to the word.
HEARD = """ld.param.u64 %rd1, [p0]; setp.eq.u32 %p1, %ct, 1; mov.u32 %o0, 0; setp.ne.u32 %p5, %lid, 0; @%p5 bra $end;
@%p1 bra $other; cp.async.ca.shared.global [buf], [%rd1+64], AMOUNT; FIRST SECOND bra $end;
$other: atom.global.or.b32 %r1, [%rd1+512], 0; membar.gl; st.global.u32 [%rd1+64], 1;
$end:"""


@pytest.mark.parametrize("amount", ["4", "8, 5"])
def test_another_thread_block_stores_to_the_source(amount):
    """It must be told after the wait."""
    wait, tell = "cp.async.wait_all;", "membar.gl; red.global.add.u32 [%rd1+512], 1;"
    options = {"n": 64, "grid": 2, "global_race": True, "batch_threads": 32, **SHARED}
    text = HEARD.replace("AMOUNT", amount)
    run_ptx(text.replace("FIRST", wait).replace("SECOND", tell), [np.zeros(1024, "u4")], ["u4"], **options)
    with pytest.raises(RaceFault, match="store of a location read by thread block"):
        run_ptx(text.replace("FIRST", tell).replace("SECOND", wait), [np.zeros(1024, "u4")], ["u4"], **options)
