"""Pictures of the bytes and banks that lanes take."""

from xml.etree import ElementTree

import numpy as np
import pytest

from pagedkv.drawing import Svg, draw_banks, draw_bytes
from pagedkv.drawing.lane_map import bank_wavefronts, lane_list
from pagedkv.emulator import WarpAccess

LANES = np.arange(32)
SVG = "{http://www.w3.org/2000/svg}"


def access(offsets, size=4, array="x", phase=0, space="global"):
    return WarpAccess("load", space, array, size, np.asarray(offsets), phase)


def parsed(picture):
    """Title, description and lines of text; and what the boxes say to the pointer."""
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img"
    assert root[0].tag == SVG + "title"
    boxes = [group.find(SVG + "title").text for group in root.findall(SVG + "g")]
    return root[0].text, root.find(SVG + "desc").text, [line.text for line in root.findall(SVG + "text")], boxes


def test_bytes_of_two_instructions():
    title, description, lines, boxes = parsed(draw_bytes([access(8 * LANES), access(np.where(LANES < 2, 512, -1), 16)]))
    assert title == "Bytes of x that each lane takes"
    assert lines[1] == "2 instructions: 144 bytes in 9 sectors of 32, asked for 9 times"
    assert description.startswith(lines[1])
    assert "Instruction 2: 16 bytes a lane, lane 0 from byte 512, lane 1 from byte 512." in description
    assert boxes[0] == "bytes 0 to 3, instruction 1: lane 0"
    assert "bytes 512 to 527, instruction 2: lanes 0-1" in boxes
    assert len(boxes) == 32 + 1 + 2  # and the colours of the instructions
    assert [line for line in lines if line and line.startswith("byte ")] == [f"byte {128 * i}" for i in (0, 1)] + [
        "byte 512"
    ]
    assert "256 bytes that no lane takes" in lines


def test_rows_begin_where_the_device_s_do():
    _, _, lines, boxes = parsed(draw_bytes([access(16 * LANES[:4], 16, phase=112)]))
    assert lines[1] == "1 instruction: 64 bytes in 3 sectors of 32, asked for 3 times"
    assert [line for line in lines if line and line.startswith("byte ")] == ["byte 0", "byte 16"]
    assert boxes[1] == "bytes 16 to 31, instruction 1: lane 1"


def test_bytes_of_several_instructions_are_one_box():
    _, _, lines, boxes = parsed(draw_bytes([access([0, 4]), access([4, 0])]))
    assert boxes[0] == "bytes 0 to 3, instruction 1: lane 0; instruction 2: lane 1"
    assert lines[1] == "2 instructions: 8 bytes in 1 sector of 32, asked for 2 times"


def test_only_so_many_rows():
    _, _, lines, boxes = parsed(draw_bytes([access(128 * LANES)], max_rows=3))
    assert len(boxes) == 3
    assert lines[-1] == "and 29 more rows"


@pytest.mark.parametrize(
    ("offsets", "size", "wavefronts", "fewest"),
    [
        (4 * LANES, 4, 1, 1),
        (0 * LANES, 4, 1, 1),
        (8 * LANES, 4, 2, 1),
        (128 * LANES, 4, 32, 1),
        (132 * LANES, 4, 1, 1),
        (8 * LANES, 8, 2, 2),
        (16 * LANES, 16, 4, 4),
        (128 * LANES, 16, 32, 4),
        (2 * LANES, 2, 1, 1),
        (np.where(LANES % 2, 128 * LANES, -1), 4, 16, 1),
    ],
)
def test_lanes_that_share_a_bank_take_more_wavefronts(offsets, size, wavefronts, fewest):
    for phase in (0, 32):
        one = access(offsets, size, phase=phase, space="shared")
        found, least = bank_wavefronts(one)
        assert len(found) == one.wavefronts == wavefronts
        assert least == fewest
        title, description, lines, boxes = parsed(draw_banks(one))
        assert title == "Banks of x that each lane takes"
        assert len(boxes) == sum(map(len, found))
        assert lines[1].startswith(f"{wavefronts} wavefront")
        assert description.startswith(lines[1])
    lanes = sorted({lane for banks in found for _, group in banks.values() for lane in group})
    assert lanes == np.flatnonzero(one.offsets >= 0).tolist()


def test_a_conflict_is_reported():
    _, _, lines, boxes = parsed(draw_banks(access(np.array([0, 128, 4]), phase=64, space="shared")))
    assert lines[1] == "2 wavefronts, 1 of them for conflicts"
    assert boxes == ["bank 16, byte 0: lane 0", "bank 17, byte 4: lane 2", "bank 16, byte 128: lane 1"]


def test_names_are_escaped_and_notebooks_show_it():
    picture = draw_bytes([access([0], array="<a & b>")])
    assert parsed(picture)[0] == "Bytes of <a & b> that each lane takes"
    assert isinstance(picture, Svg)
    assert picture._repr_svg_() == picture
    assert "prefers-color-scheme:dark" in picture


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], r"^accesses must be one or more, got none: print\(trace\) names the arrays"),
        ([access([0]), access([0], array="y")], r"got 2 to \['x', 'y'\]$"),
        ([access([-1, -1])], "^accesses must have a lane that takes part, got none to x$"),
    ],
)
def test_refusals(wrong, says):
    with pytest.raises(ValueError, match=says):
        draw_bytes(wrong)
    for one in wrong[-1:]:
        if (one.offsets < 0).all():
            with pytest.raises(ValueError, match=says):
                draw_banks(one)


def test_drawing_something_else_is_refused():
    one = access([0])
    for wrong in (one, "x", [[one]]):
        with pytest.raises(
            TypeError, match=r'^draw_bytes takes accesses, such as trace\.accesses\("x"\), and draw_banks'
        ):
            draw_bytes(wrong)
    with pytest.raises(TypeError, match=r"draw_banks takes one of them$"):
        draw_banks([one])


def test_global_memory_has_no_banks():
    with pytest.raises(ValueError, match=r"^x is in global memory, which has no banks: draw_bytes draws its sectors$"):
        draw_banks(access([0]))


def test_lanes_in_words():
    assert lane_list([3]) == "lane 3"
    assert lane_list([0, 2]) == "lanes 0,2"
    assert lane_list([0, 1, 2, 5]) == "lanes 0-2,5"
