"""Arrays of the host: pages hold every element once, and fetching any bytes brings all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.emulator import Device
from pagedkv.emulator.state import host_array
from pagedkv.emulator.state.host_array import PAGE_BYTES

LARGE = np.arange(3 * 200 * 500, dtype=np.int32).reshape(3, 200, 500)
VIEWS = {
    "contiguous": LARGE,
    "rows apart": LARGE[:, ::2],
    "rows and slices apart": LARGE[:, 10:90:2],
    "columns apart": LARGE[:, :, 3::7],
    "transposed": LARGE.transpose(2, 0, 1),
    "backwards": LARGE[::-1, ::-1, ::-3],
    "repeated": np.broadcast_to(LARGE[:, None, ::9], (3, 4, 23, 500)),
    "sliding": np.lib.stride_tricks.sliding_window_view(LARGE.reshape(-1)[:40_000], 1000)[::7],
    "one element": LARGE[1, 2, 3:4],
    "no axis": LARGE[1, 2, 3:4].reshape(()),
    "empty": LARGE[:, :0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_buffer_holds_what_the_array_holds(name):
    view = VIEWS[name]
    buffer = Device(8 << 20).mirror(view)
    np.testing.assert_array_equal(buffer.get(), view)
    assert buffer.initialised().all()
    marks = np.ones(8 << 20, np.uint8)  # 2 where there are elements, and 1 between them
    buffer.bytes_in(marks)[...] = 2
    inside = slice(buffer.offset, buffer.offset + buffer.nbytes)
    np.testing.assert_array_equal(buffer.memory.space.shadow[inside], marks[inside])


@pytest.fixture(scope="module")
def small_pages():
    """No array is so small that it is one page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_array, "SMALL_BYTES", 0)
        yield


@given(st.sampled_from(sorted(VIEWS)), st.data())
@pytest.mark.usefixtures("small_pages")
def test_fetching_bytes_brings_their_pages_and_no_others(name, data):
    view = VIEWS[name]
    device = Device(2 << 20)
    device.alloc(data.draw(st.integers(0, 9)))
    buffer = device.mirror(view)
    if not buffer.nbytes:
        assert not device.fetch(np.array([buffer.offset]), 1)
        return
    size = data.draw(st.sampled_from([1, 4, 16]))
    anywhere = st.integers(-300, buffer.nbytes + 300)
    whole = anywhere.filter(lambda a: a <= -size or a >= buffer.nbytes or 0 <= a <= buffer.nbytes - size)
    at = np.array(data.draw(st.lists(whole, min_size=1, max_size=5)))
    inside = [a + q for a in at for q in range(size) if 0 <= a + q < buffer.nbytes]
    assert device.fetch(at + buffer.offset, size) == bool(inside)
    shadow = device.space.shadow[buffer.offset : buffer.offset + buffer.nbytes]
    assert (shadow[inside] != 0).all()
    assert np.count_nonzero(shadow) <= len(at) * 2 * PAGE_BYTES
    elements = (buffer.bytes_in(device.space.shadow) == 2).all(-1)
    np.testing.assert_array_equal(bytes_now(buffer)[elements], view[elements])
    assert not device.fetch(at + buffer.offset, size)
    np.testing.assert_array_equal(buffer.get(), view)


def bytes_now(buffer):
    """The device's bytes, without the copies that Buffer.view makes first."""
    return np.ndarray(buffer.shape, buffer.dtype, buffer.memory.space.data, buffer._origin, buffer.strides)
