"""What lets the tests of the kernels run on a GPU, itself run on the emulator."""

import numpy as np
import pytest

from pagedkv.cuda.plans import blocks

from ..attention.kernels import V1
from ..support.devices import CopyingDevice, OneMemory
from ..support.problems import assert_close
from .block_cases import copying

STRIDED = V1.replace("strided", strides="strided")


def test_what_a_kernel_writes_comes_back():
    problem = STRIDED.build(seq_lens=(37, 0, 5))
    with OneMemory() as inner:
        assert_close(problem, *STRIDED.attend(problem, device=CopyingDevice(inner)))
        assert len(inner.launches) == 1


def pairs_of_views():
    """Elements in the middle of memory: every other row, backwards, and 8 bytes off."""
    memory = np.arange(8 * 4 * 16 + 8, dtype=np.uint8)[8:].reshape(8, 4, 16)
    return memory, memory[::-2, :, 4:12]


def test_views_keep_their_gaps():
    memory, view = pairs_of_views()
    expected, expected_view = pairs_of_views()
    expected_view[0] = expected_view[3]
    with CopyingDevice(OneMemory()) as device:
        blocks.copy_blocks(device, copying([view], np.array([[3, 0]])))
    np.testing.assert_array_equal(memory, expected)


class Scribbler(OneMemory):
    """Writes one byte where it likes after each launch."""

    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def launch(self, kernel, grid, args, *rest):
        super().launch(kernel, grid, args, *rest)
        self.copy_from_host([(args[0] + self.offset, np.array([77], np.uint8))])


@pytest.mark.parametrize("offset", [-1, 8, 8 * 16])
def test_a_byte_beside_the_elements_is_noticed(offset):
    _, view = pairs_of_views()
    with (
        pytest.raises(AssertionError, match=r"1 bytes beside source\[0\] were written"),
        CopyingDevice(Scribbler(offset)) as device,
    ):
        blocks.copy_blocks(device, copying([view], np.array([[3, 0]])))


def test_a_write_into_a_read_only_array_is_noticed():
    _, view = pairs_of_views()
    view.flags.writeable = False
    with pytest.raises(AssertionError, match="beside source"), CopyingDevice(OneMemory()) as device:
        blocks.copy_blocks(device, copying([view], np.array([[3, 0]])))


def test_an_exception_leaves_the_arrays_alone():
    memory, view = pairs_of_views()
    expected, _ = pairs_of_views()
    device = CopyingDevice(OneMemory())
    blocks.copy_blocks(device, copying([view], np.array([[3, 0]])))
    device.__exit__(KeyError, KeyError(), None)
    np.testing.assert_array_equal(memory, expected)
