"""The bytes that a launch reads and writes, against what is known of a kernel."""

import numpy as np
import pytest

from pagedkv.emulator import Device, EmulatorError, Module

from ..ptx_harness import kernel_text

T = np.arange(32)
COPY = "mov.b32 %o0, %i0;"


def footprint(body, **options):
    """Footprint of a kernel of 32 threads on in0 (64 uint32) and out0 (64 uint32)."""
    device = Device(1 << 20)
    args = [device.upload(np.zeros(64, "u4"), "in0"), device.upload(np.zeros(64, "u4"), "out0")]
    options = {"footprint": True} | options
    return device.launch(Module(kernel_text(body, [4], [4])).entry(), 1, 32, args, **options).footprint


def test_a_footprint_has_the_elements_touched_and_no_others():
    touched = footprint(COPY)
    first = np.arange(64) < 32
    touched.expect("in0", read=first, written=False)
    touched.expect("out0", read=False, written=first)
    np.testing.assert_array_equal(touched.read("in0"), first)
    np.testing.assert_array_equal(touched.written("out0"), first)
    np.testing.assert_array_equal(touched.read_bytes("in0"), np.repeat(first[:, None], 4, 1))
    assert not touched.written_bytes("in0").any()


@pytest.mark.parametrize(
    ("name", "expected", "message"),
    [
        ("in0", {"read": False}, r"^in0: 32 elements read and not expected, the first at \(0,\)$"),
        ("in0", {"read": True}, r"^in0: 32 elements expected and not wholly read, the first at \(32,\)$"),
        ("out0", {"written": np.arange(64) < 31}, r"^out0: 1 elements written and not expected, the first at \(31,\)$"),
        ("out0", {"written": np.arange(64) < 33}, r"^out0: 1 elements expected and not wholly written.*\(32,\)$"),
    ],
)
def test_other_elements_are_an_error(name, expected, message):
    with pytest.raises(AssertionError, match=message):
        footprint(COPY).expect(name, **expected)


def test_bytes_of_an_element():
    body = "ld.param.u64 %rd1, [p1]; add.u64 %rd1, %rd1, %gid64; st.global.u8 [%rd1+130], 1; mov.b32 %o0, 0;"
    touched = footprint(body)
    wanted = np.zeros(256, bool)
    wanted[:128] = wanted[130:162] = True
    np.testing.assert_array_equal(touched.written_bytes("out0").reshape(-1), wanted)
    np.testing.assert_array_equal(touched.written("out0"), wanted.reshape(64, 4).all(1))
    with pytest.raises(AssertionError, match="not wholly written"):
        touched.expect("out0", written=np.arange(64) < 41)


def test_wide_and_atomic_accesses():
    body = """ld.param.u64 %rd1, [p0]; setp.lt.u32 %p1, %lid, 4; shl.b64 %rd2, %gid64, 4; add.u64 %rd1, %rd1, %rd2;
    @%p1 ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+128]; ld.param.u64 %rd3, [p1];
    setp.eq.u32 %p2, %lid, 31; @%p2 atom.global.add.u32 %r5, [%rd3+252], 1; mov.b32 %o0, 0;"""
    touched = footprint(body)
    touched.expect("in0", read=np.arange(64) < 48, written=False)
    touched.expect("out0", read=np.arange(64) == 63, written=(np.arange(64) < 32) | (np.arange(64) == 63))


def test_off_by_default_and_unknown_names():
    assert footprint(COPY, footprint=False) is None
    with pytest.raises(EmulatorError, match="no buffer is called 'in1'; there are in0, out0"):
        footprint(COPY).read("in1")
