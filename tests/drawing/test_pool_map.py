"""Maps of pools: what a character and a square stand for, and how large the pictures get."""

import dataclasses
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.drawing.pool_map import PoolMap

P = 4
SVG = "{http://www.w3.org/2000/svg}"


def make(blocks, cached=None):
    """From (owner, references, fill) of each block; None for a free one."""
    owners, refs, fills = np.array([block or (-1, 0, 0) for block in blocks], np.int64).reshape(-1, 3).T
    return PoolMap(owners, refs.astype(np.int32), fills.astype(np.int32), P, cached)


def rows(pool_map, width):
    return pool_map.to_text(width).splitlines()[:-1]


def test_a_letter_for_each_sequence_in_the_order_of_handles():
    pool_map = make([(90, 1, P), (17, 1, P), (17, 1, 1), None, (17, 2, P), (90, 1, 0)])
    assert rows(pool_map, 6) == ["BAa.+b"]
    assert rows(make([(5, 1, P)] * 3), 2) == ["AA", "A"]
    assert rows(make([(handle, 1, P) for handle in range(30)]), 32) == ["ABCDEFGHIJKLMNOPQRSTUVWXYZABCD"]


def test_cached_blocks_differ_from_free_ones_in_the_map():
    blocks = make([(1, 1, P), None, None], np.array([False, True, False]))
    assert rows(blocks, 3) == ["A~."]
    assert "~ cached" in blocks.to_text()
    assert "dashed: cached" in blocks.to_html()
    assert "cached" not in make([None]).to_text() + make([None]).to_html()


@pytest.mark.parametrize(
    ("pair", "sign"),
    [
        ([(1, 1, P), (1, 1, P)], "A"),
        ([(1, 1, P), (1, 1, 3)], "a"),
        ([(1, 1, P), None], "a"),
        ([(1, 1, P), (2, 1, P)], "#"),
        ([(1, 1, P), (2, 1, 3)], "-"),
        ([(1, 1, P), (1, 2, P)], "+"),
        ([None, None], "."),
    ],
)
def test_a_character_for_two_blocks(pair, sign):
    [row, *_] = rows(make([*pair, *[None] * 62]), 2)
    assert row == sign + "."
    assert make([*pair, *[None] * 62]).to_text(2).endswith("# - of several sequences; 2 blocks a character")


def test_a_character_for_two_blocks_of_groups():
    groups = np.array([0, 0, 0, 1, 1, -1, -1, -1, 1, 1] + [-1] * 54)
    blocks = [(1, 1, P) if group >= 0 else None for group in groups]
    pool_map = dataclasses.replace(make(blocks), groups=groups, windows=(None, 8))
    lines = pool_map.to_text(2).splitlines()
    assert ["".join(lines[17:33])[:6], lines[33]] == ["0#1.1.", "groups of layers: 0 all tokens  1 window 8  # several"]
    paths = pool_map.to_html()
    assert [len(re.findall(box, paths)) for box in ("h5v5h-5z", "h5v-5h-5z", "h9v-9h-9z")] == [4, 4, 3]


def squares(picture, **attributes):
    """How many squares the paths with these attributes have."""
    paths = [path for path in picture.iter(f"{SVG}path") if attributes.items() <= path.attrib.items()]
    return sum(len(re.findall("M", path.get("d"))) for path in paths)


def picture_of(pool_map):
    return ET.fromstring(f"<div>{pool_map.to_html()}</div>").find(f"{SVG}svg")


def test_squares_of_the_picture():
    blocks = [(90, 1, P), (17, 1, P), (17, 1, 1), None, (17, 2, P), (90, 1, 0), None]
    picture = picture_of(make(blocks, np.array([False] * 6 + [True])))
    by_title = {group.find(f"{SVG}title").text: group for group in picture.iter(f"{SVG}g")}
    assert {title: squares(group, **{"fill-opacity": ".3"}) for title, group in by_title.items()} == {
        "sequence 17": 3,
        "sequence 90": 2,
    }
    heights = re.findall(r"v-(\d+)", by_title["sequence 17"].findall(f"{SVG}path")[1].get("d"))
    assert heights == ["9", "3", "9"]
    assert squares(picture, **{"stroke-opacity": ".35"}) == 1
    assert squares(picture, **{"stroke-dasharray": "2 1"}) == 1
    assert squares(picture, stroke="currentColor") == 1
    assert picture.get("viewBox") == "0 0 78 12"


@pytest.mark.parametrize("num_seqs", [100, 101])
def test_pictures_of_large_pools_are_small(num_seqs):
    rng = np.random.default_rng(0)
    blocks = [(int(seq), 1, 3) if seq < num_seqs else None for seq in rng.integers(0, num_seqs + 1, 100_000)]
    for pool_map in (make(blocks), make(sorted(blocks, key=lambda block: block or (0, 0, 0)))):
        picture = picture_of(pool_map)
        assert len(pool_map.to_html()) < 60_000
        assert len(pool_map.to_text()) < 1200
        cells = -(-100_000 // 98)
        assert squares(picture, **{"fill-opacity": ".3"}) + squares(picture, **{"stroke-opacity": ".35"}) == cells
        assert pool_map.to_text().endswith("98 blocks a character")


@given(
    st.lists(st.none() | st.tuples(st.integers(0, 5), st.integers(1, 2), st.integers(0, P)), min_size=1, max_size=90),
    st.integers(1, 9),
)
def test_every_block_is_in_one_cell(blocks, width):
    pool_map = make(blocks)
    lines = rows(pool_map, width)
    per_cell = -(-len(blocks) // (16 * width))
    assert len(lines) <= 16
    assert sum(map(len, lines)) == -(-len(blocks) // per_cell)
    assert all(len(line) == width for line in lines[:-1])
    free = [all(block is None for block in blocks[i : i + per_cell]) for i in range(0, len(blocks), per_cell)]
    assert [sign == "." for sign in "".join(lines)] == free
    picture = picture_of(pool_map)
    assert squares(picture, **{"fill-opacity": ".3"}) == sum(block is not None for block in blocks)
