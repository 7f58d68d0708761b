"""cp.async written in numba through inline assembly: when its bytes are there, and what it may not do."""

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, MemoryFault, RaceFault

from .. import ptx_intrinsics as X
from ..ptx_harness import build

u8p, f32p = types.CPointer(types.uint8), types.CPointer(types.float32)
SRC = np.arange(512, dtype="f4")


def make_async(copies, wait, sync, read_other=True, wait_kind="0"):
    wait_fn = {"0": X.cp_async_wait_0, "1": X.cp_async_wait_1, "all": X.cp_async_wait_all}[wait_kind]

    def kernel(src, out):
        s = cuda.shared.array(512, types.float32)
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


def run_async(kernel, **kw):
    dev = Device(1 << 20)
    out = dev.alloc(64, "f4")
    dev.launch(build(kernel, u8p, f32p), 1, 64, [dev.upload(SRC, "src"), out], **kw)
    return out.get()


def test_cp_async_visibility():
    np.testing.assert_array_equal(run_async(make_async(1, True, True)), (np.arange(64) * 4 + 4) % 256)
    np.testing.assert_array_equal(run_async(make_async(1, True, False, read_other=False)), np.arange(64) * 4)
    np.testing.assert_array_equal(run_async(make_async(2, True, True, wait_kind="1")), (np.arange(64) * 4 + 4) % 256)
    np.testing.assert_array_equal(run_async(make_async(1, True, True, wait_kind="all")), (np.arange(64) * 4 + 4) % 256)
    with pytest.raises(RaceFault, match=r"in flight.*PTX line"):
        run_async(make_async(1, False, True))
    with pytest.raises(RaceFault, match="in flight"):
        run_async(make_async(1, True, True, wait_kind="1"))  # waits for the wrong group
    with pytest.raises(RaceFault, match="no barrier"):
        run_async(make_async(1, True, False))  # waited, but other threads did not synchronise


def test_cp_async_zero_fill_and_bounds():
    def kernel(src, out, n):
        s = cuda.shared.array(256, types.float32)
        t = cuda.threadIdx.x
        valid = types.uint32(max(0, min(16, n - t * 16)))
        X.cp_async_16_zfill(X.shared_address(s) + types.uint32(t * 16), src, types.int64(t * 16), valid)
        X.cp_async_wait_all()
        for i in range(4):
            out[t * 4 + i] = s[t * 4 + i]

    e = build(kernel, u8p, f32p, types.int32)
    for n in (0, 36, 38, 1024):
        dev = Device(1 << 20)
        src = dev.upload(SRC.view("u1")[:n], "src")  # exactly n bytes exist
        out = dev.alloc(256, "f4")
        dev.launch(e, 1, 64, [src, out, n])
        want = np.zeros(1024, "u1")
        want[:n] = SRC.view("u1")[:n]
        np.testing.assert_array_equal(out.get(), want.view("f4"))
    dev = Device(1 << 20)
    args = [dev.upload(SRC.view("u1")[:32], "src"), dev.alloc(256, "f4"), 64]
    with pytest.raises(MemoryFault, match=r"out of bounds global load.*past the end of src"):
        dev.launch(e, 1, 64, args)


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


def test_double_buffer_reuse_race():
    """The next copy into a buffer that slower warps may still read is reported when it is issued."""

    def make(barrier):
        def kernel(src, out):
            s = cuda.shared.array(256, types.float32)
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

    np.testing.assert_array_equal(run_async(make(True)), 3 * ((np.arange(64) * 4 + 8) % 256))
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
