"""Every kind of fault but races is detected, and its message says where."""

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, EmulatorError, MemoryFault, SyncFault

from .. import ptx_intrinsics as X
from ..ptx_harness import build, compile_ptx, run, run_ptx

f32, i64, u8, u16 = types.float32, types.int64, types.uint8, types.uint16
P = types.CPointer

Z = np.zeros(64, "f4")
T = np.arange(64)


def test_byte_exact_initialisation():
    def kernel(a, o):
        t = cuda.threadIdx.x
        a[t * 2] = u16(t)
        cuda.syncthreads()
        o[t] = a[t * 2 + (1 if t == 63 else 0)]

    with pytest.raises(MemoryFault, match=r"uninitialised global load.*thread \(63, 0, 0\)"):
        run(kernel, [P(u16), P(f32)], [np.zeros(128, "u2"), Z], uninit=(0,))

    def shared(o, n):
        s = cuda.shared.array(128, u16)
        t = cuda.threadIdx.x
        s[2 * t] = t
        o[t] = s[2 * t + n]

    assert run(shared, [P(f32), i64], [Z, 0])[0][5] == 5
    with pytest.raises(MemoryFault, match="uninitialised shared load"):
        run(shared, [P(f32), i64], [Z, 1])


def test_local_memory():
    """numba zero-fills cuda.local.array, so this is raw PTX."""
    body = """.local .align 8 .b8 depot[32]; mov.u64 %rd1, depot; and.b32 %r1, %lid, 3; mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd2, %rd1, %rd2; st.local.u32 [%rd2], %lid; ld.local.u32 %o0, [%rd2+{}];"""
    u = np.zeros(32, "u4")
    np.testing.assert_array_equal(run_ptx(body.format(0), [u], ["u4"])[0], np.arange(32))
    with pytest.raises(MemoryFault, match="uninitialised local load"):
        run_ptx(body.format(4), [u], ["u4"])
    with pytest.raises(MemoryFault, match=r"out of bounds local load.*local memory of 32 bytes"):
        run_ptx(body.format(32), [u], ["u4"])


@pytest.mark.parametrize(
    ("n", "where"),
    [(64, "0 bytes past the end of arg0"), (1 << 33, "far from every buffer"), (-1, "4 bytes before arg0")],
)
def test_out_of_bounds_global(n, where):
    def kernel(o, n):
        o[cuda.threadIdx.x * 0 + n] = 1

    with pytest.raises(MemoryFault, match=f"out of bounds global store.*{where}"):
        run(kernel, [P(f32), i64], [Z, n])


def test_fault_attributes():
    def kernel(o, n):
        i = cuda.grid(1)
        o[i + n] = 1

    with pytest.raises(MemoryFault) as e:
        run(kernel, [P(f32), i64], [Z, 3], block=32, grid=2)
    assert e.value.thread_block == (1, 0, 0)
    assert e.value.thread == (29, 0, 0)
    assert "st.global" in e.value.text
    ptx = compile_ptx(kernel, P(f32), i64)
    assert "st.global" in ptx.splitlines()[e.value.line - 1]
    assert e.value.address
    assert "arg0" in e.value.place


def test_last_byte_of_an_odd_allocation():
    def kernel(a, o, n):
        o[cuda.threadIdx.x] = a[cuda.threadIdx.x + n]

    a = np.arange(67, dtype="u1")
    run(kernel, [P(u8), P(f32), i64], [a, Z, 3])
    with pytest.raises(MemoryFault, match="past the end"):
        run(kernel, [P(u8), P(f32), i64], [a, Z, 4])


def test_use_after_free():
    def kernel(a, o):
        o[cuda.threadIdx.x] = a[cuda.threadIdx.x]

    dev = Device(1 << 20)
    e = build(kernel, P(f32), P(f32))
    a, o = dev.upload(Z, "a"), dev.upload(Z, "o")
    address = a.address
    dev.free(a)
    with pytest.raises(MemoryFault, match="in freed a"):
        dev.launch(e, 1, 64, [address, o])


def test_misaligned_vector_load():
    def kernel(a, o, n):
        t = cuda.threadIdx.x
        o[t] = X.load_global_16(a, i64(t) * 16 + n)[0]

    a = np.arange(512, dtype="u4")
    assert run(kernel, [P(types.uint32), P(types.uint32), i64], [a, np.zeros(64, "u4"), 16])[1][3] == 16
    with pytest.raises(MemoryFault, match=r"misaligned \(16-byte\)"):
        run(kernel, [P(types.uint32), P(types.uint32), i64], [a, np.zeros(64, "u4"), 8])


def test_shared_bounds_have_red_zones():
    def kernel(o, n):
        a = cuda.shared.array(16, f32)
        b = cuda.shared.array(64, f32)
        t = cuda.threadIdx.x
        b[t] = t
        if t < 16:
            a[t] = t
        cuda.syncthreads()
        o[t] = a[t % 16 + n] + b[t]

    run(kernel, [P(f32), i64], [Z, 0])
    with pytest.raises(MemoryFault, match=r"out of bounds shared load.*past the end of"):
        run(kernel, [P(f32), i64], [Z, 1])  # would silently read array b on a GPU


def test_the_first_kib_of_shared_memory_is_the_system_s():
    text = "mov.u32 %r0, {}; st.shared.u32 [%r0], 7; ld.shared.u32 %o0, [%r0];"
    options = {"n": 32, "shared": ".shared .align 1024 .b8 buf[4096];"}
    assert (run_ptx(text.format("buf"), [], ["u4"], race=False, **options)[0] == 7).all()
    for address in (0, 1020):
        with pytest.raises(MemoryFault, match="out of bounds"):
            run_ptx(text.format(address), [], ["u4"], race=False, **options)


def test_declared_shared_alignment():
    """numba gives a float32 array .align 4 unless told otherwise; 16-byte accesses then work only by luck."""

    def plain(src, o):
        s = cuda.shared.array(256, f32)
        t = cuda.threadIdx.x
        X.cp_async_16(X.shared_address(s) + types.uint32(t * 16), src, i64(t) * 16)
        X.cp_async_wait_all()
        o[t] = s[t * 4]

    def aligned(src, o):
        s = cuda.shared.array(256, f32, alignment=16)
        t = cuda.threadIdx.x
        X.cp_async_16(X.shared_address(s) + types.uint32(t * 16), src, i64(t) * 16)
        X.cp_async_wait_all()
        o[t] = s[t * 4]

    sig, args = [P(u8), P(f32)], [np.arange(256, dtype="f4"), Z]
    run(plain, sig, args)
    np.testing.assert_array_equal(run(aligned, sig, args, strict_shared_alignment=True)[1], 4 * T)
    with pytest.raises(MemoryFault, match=r"misaligned \(16-byte\) shared store"):
        run(plain, sig, args, strict_shared_alignment=True)


def test_dynamic_shared_size():
    def kernel(o):
        s = cuda.shared.array(0, f32)
        t = cuda.threadIdx.x
        s[t] = t
        o[t] = s[t]

    run(kernel, [P(f32)], [Z], shared_bytes=256)
    with pytest.raises(MemoryFault, match="dynamic shared memory"):
        run(kernel, [P(f32)], [Z], shared_bytes=252)


def test_barrier_divergence():
    def kernel(o):
        t = cuda.threadIdx.x
        if t < 32:
            cuda.syncthreads()
            o[t] = 1
            cuda.syncthreads()
            o[t] = 3
        else:
            o[t] = 2
            cuda.syncthreads()

    with pytest.raises(SyncFault):
        run(kernel, [P(f32)], [Z])


def test_barrier_after_partial_exit():
    def kernel(o, n):
        s = cuda.shared.array(64, f32)
        t = cuda.threadIdx.x
        if t >= n:
            return
        s[t] = t
        cuda.syncthreads()
        o[t] = s[n - 1 - t]

    np.testing.assert_array_equal(run(kernel, [P(f32), i64], [Z, 32])[0][:32], T[:32][::-1])  # whole warps may leave
    with pytest.raises(SyncFault, match="part of a warp"):
        run(kernel, [P(f32), i64], [Z, 40])


def test_shuffle_with_absent_lanes():
    def kernel(o):
        t = cuda.threadIdx.x
        x = f32(t)
        if t >= 16:
            return
        o[t] = cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)

    with pytest.raises(SyncFault, match="exited"):
        run(kernel, [P(f32)], [Z], block=32)

    def halves(o):
        t = cuda.threadIdx.x
        x = f32(t)
        x = cuda.shfl_xor_sync(65535, x, 1) if t < 16 else cuda.shfl_xor_sync(4294901760, x, 2)
        o[t] = x

    np.testing.assert_array_equal(
        run(halves, [P(f32)], [Z], block=32)[0][:32], np.where(T[:32] < 16, T[:32] ^ 1, T[:32] ^ 2)
    )

    def outside(o):
        t = cuda.threadIdx.x
        x = f32(t)
        if t < 16:
            x = cuda.shfl_xor_sync(0x0000FFFF, x, 16)
        o[t] = x

    with pytest.raises(SyncFault, match="does not take part"):
        run(outside, [P(f32)], [Z], block=32)

    def waits_for_others(o):
        t = cuda.threadIdx.x
        x = f32(t)
        if t < 16:
            x = cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
        cuda.syncthreads()
        o[t] = x

    with pytest.raises(SyncFault, match="never arrive"):
        run(waits_for_others, [P(f32)], [Z], block=32)


def test_trap_and_step_limit():
    with pytest.raises(EmulatorError, match=r"the kernel trapped; thread block .* thread \(7, 0, 0\).*PTX line"):
        run_ptx("setp.eq.u32 %p1, %gid, 7; @%p1 trap; mov.u32 %o0, 1;", [np.zeros(32, "u4")], ["u4"])
    with pytest.raises(EmulatorError, match="step limit"):
        run_ptx("$again: bra $again; mov.u32 %o0, 1;", [np.zeros(32, "u4")], ["u4"], step_limit=100)


@pytest.mark.parametrize("init_check", [True, False])
def test_atomics_need_a_value_to_start_from(init_check):
    body = "ld.param.u64 %rd1, [p1]; atom.global.add.u32 %o0, [%rd1], 1;"
    zero = np.zeros(32, "u4")
    if init_check:
        with pytest.raises(MemoryFault, match="uninitialised global atomic"):
            run_ptx(body, [zero], ["u4"])
    else:
        assert run_ptx(body, [zero], ["u4"], init_check=False)[0][-1] == 0xA5A5A5A5 + 31
