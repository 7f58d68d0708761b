"""Counters on access patterns with known answers."""

import numpy as np
import pytest

from ..ptx_harness import stats_of

U = np.arange(64, dtype="u4")


@pytest.mark.parametrize(("stride", "waves"), [(1, 1), (2, 2), (3, 1), (8, 8), (32, 32), (33, 1)])
def test_bank_conflicts(stride, waves):
    body = f"""mov.u32 %r1, buf; mul.lo.u32 %r2, %lid, {4 * stride}; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %lid;
    ld.shared.u32 %o0, [%r1];"""
    s = stats_of(body, [U], ["u4"], n=32, block=32, shared=".shared .align 16 .b8 buf[8192];")
    assert (s.shared_requests, s.shared_wavefronts, s.shared_wavefronts_min) == (2, 2 * waves, 2)


def test_wide_shared_and_broadcast():
    shared = ".shared .align 16 .b8 buf[2048];"
    body = """mov.u32 %r1, buf; shl.b32 %r2, %lid, 4; add.u32 %r1, %r1, %r2;
    st.shared.v4.u32 [%r1], {%lid, %lid, %lid, %lid};
    bar.sync 0; ld.shared.u32 %o0, [buf];"""
    s = stats_of(body, [U], ["u4"], n=64, shared=shared)
    assert s.shared_requests == 4
    assert s.shared_wavefronts == s.shared_wavefronts_min == 2 * 4 + 2


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (32, 32)])
def test_sectors(stride, sectors):
    body = f"""ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %lid, {4 * stride}; add.u64 %rd1, %rd1, %rd2;
    ld.global.u32 %o0, [%rd1];"""
    big = np.zeros(32 * 32, "u4")
    s = stats_of(body, [big], ["u4"], n=32, block=32)
    # the harness adds one coalesced load (4 sectors) and one store (4 sectors)
    assert s.global_sectors == sectors + 8
    assert s.global_sectors_min == 12
    t = s.buffers["in0"]
    assert t.bytes_read == 256
    assert t.bytes_written == 0
    assert t.sectors_read == sectors + 4
    assert s.buffers["out0"].bytes_written == 128
    assert s.buffers["out0"].sectors_written == 4


def test_instruction_classes_count_warps_that_are_active():
    body = """setp.lt.u32 %p1, %lid, 32; mov.u32 %o0, 0; @!%p1 bra $end;
    cvt.rn.f32.u32 %f1, %i0; fma.rn.f32 %f2, %f1, %f1, %f1; fma.rn.f32 %f3, %f2, %f1, %f1; cvt.rzi.u32.f32 %o0, %f3;
    $end: bar.sync 0;"""
    s = stats_of(body, [U], ["u4"])
    w = s.warp_instructions
    assert w["fma"] == 2
    assert w["cvt"] == 2 + 2
    assert w["barrier"] == 2
    assert s.barriers == 1


def test_partial_sector_mask():
    body = """mov.u32 %o0, 0; ld.param.u64 %rd1, [p0]; setp.lt.u32 %p1, %lid, 3; @%p1 ld.global.u32 %o0, [%rd1];"""
    s = stats_of(body, [U], ["u4"])
    assert s.global_requests == 5
    assert s.global_sectors == 4 * 4 + 1
    assert s.buffers["in0"].bytes_read == 256 + 12
