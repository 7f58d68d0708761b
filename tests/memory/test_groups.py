"""Groups of layers: which there are, and how many blocks a sequence needs in them."""

from pathlib import Path

import numpy as np
import pytest

from pagedkv.memory.groups import Group, LayerGroups

P = 4
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "which-models.md"
# By hand: model, (layers without a window, with one), window, S, (groups of the former, of the latter), padding layers.
MODELS = [
    ("Gemma 2 9B", (21, 21), 4096, 21, (1, 1), 0),
    ("Gemma 3 1B", (4, 22), 512, 2, (2, 11), 0),
    ("Gemma 3 4B", (5, 29), 1024, 5, (1, 6), 1),
    ("Gemma 3 12B", (8, 40), 1024, 8, (1, 5), 0),
    ("Gemma 3 27B", (10, 52), 1024, 5, (2, 11), 3),
    ("Gemma 3n E4B", (4, 16), 512, 4, (1, 4), 0),
    ("GPT-OSS 20B", (12, 12), 128, 12, (1, 1), 0),
    ("GPT-OSS 120B", (18, 18), 128, 18, (1, 1), 0),
    ("Command R7B", (8, 24), 4096, 8, (1, 3), 0),
    ("Command A", (16, 48), 4096, 16, (1, 3), 0),
    ("OLMo 3 7B", (8, 24), 4096, 8, (1, 3), 0),
    ("EXAONE 4 32B", (16, 48), 4096, 16, (1, 3), 0),
    ("Mistral 7B v0.1", (0, 32), 4096, 32, (0, 1), 0),
]
# With one block size: model, (layers with a window, Hkv and D), the same of those without, window, layers of a group of
# each, (groups of the former, of the latter).
SHAPES = [
    ("Gemma 4 E2B", (12, (1, 256)), (3, (1, 512)), 512, (6, 3), (2, 1)),
    ("Gemma 4 E4B", (20, (2, 256)), (4, (2, 512)), 512, (4, 2), (5, 2)),
    ("Gemma 4 12B", (40, (8, 256)), (8, (1, 512)), 1024, (2, 8), (20, 1)),
    ("Gemma 4 26B-A4B", (25, (8, 256)), (5, (2, 512)), 1024, (1, 2), (25, 3)),
    ("Gemma 4 31B", (50, (16, 256)), (10, (4, 512)), 1024, (5, 10), (10, 1)),
]


def two_groups(window):
    return LayerGroups.of([window, None], 2, P)


def held_after(window, num_tokens):
    """Blocks of the window's group when all queries are computed."""
    groups = LayerGroups.of([window, None], 2, P)
    return -(-num_tokens // P) - int(groups.first_columns(num_tokens)[0])


@pytest.mark.parametrize(("model", "counts", "window", "size", "num_groups", "padding"), MODELS, ids=lambda x: str(x))
def test_the_groups_of_models(model, counts, window, size, num_groups, padding):
    full, windowed = counts
    layers = LayerGroups.of([None] * full + [window] * windowed, full + windowed, 16)
    of_windows = [group.window for group in layers.groups]
    assert layers.group_size == size
    assert (of_windows.count(None), of_windows.count(window)) == num_groups
    assert layers.num_padding == padding


@pytest.mark.parametrize(("model", "counts", "window", "size"), [case[:4] for case in MODELS], ids=lambda x: str(x))
def test_the_docs_say_what_windows_save(model, counts, window, size):
    full, windowed = counts
    layers = LayerGroups.of([None] * full + [window] * windowed, full + windowed, 16)
    parts = [size * layers.held(n) / (sum(counts) * n // 16) for n in (8192, 32768)]
    [row] = [row for row in PAGE.read_text().splitlines() if row.startswith(f"| {model} |")]
    cells = row.split("|")[2:-1]
    assert cells[0].split()[0].strip(",") == str(sum(counts))
    assert [cell.strip() for cell in cells[1:]] == [
        f"{windowed} of {window:,}",
        f"{len(layers.groups)} of {size}",
        *(f"{part:.0%}" for part in parts),
    ]


@pytest.mark.parametrize(("model", "windowed", "full", "window", "sizes", "num_groups"), SHAPES, ids=lambda x: str(x))
def test_the_groups_of_layers_of_several_shapes(model, windowed, full, window, sizes, num_groups):
    windows, shapes = [window] * windowed[0] + [None] * full[0], [windowed[1]] * windowed[0] + [full[1]] * full[0]
    layers = LayerGroups.of(windows, len(windows), 16, shapes=shapes)
    for shape, of_shape, size, num in zip((windowed[1], full[1]), (window, None), sizes, num_groups, strict=True):
        groups = [group for group in layers.groups if group.shape == shape]
        assert {group.window for group in groups} == {of_shape}
        assert (max(len(group.layers) for group in groups), len(groups)) == (size, num)


def test_groups_of_a_forced_size():
    layers = LayerGroups.of(([1024] * 5 + [None]) * 10 + [1024] * 2, 62, 16, group_size=10)
    assert (len(layers.groups), layers.num_padding) == (7, 8)
    shapes = [(8, 16)] * 4 + [(2, 16)] * 8
    groups = LayerGroups.of(None, 12, 16, shapes=shapes, group_size=2).groups
    assert [(len(group.layers), group.shape) for group in groups] == [(2, (8, 16)), (2, (8, 16)), (8, (2, 16))]


def test_every_layer_has_a_place_of_its_own_and_groups_are_filled_evenly():
    windows = [8, 8, None, 8, 8, None, 8, 3, 8, 8]
    layers = LayerGroups.of(windows, 10, P, group_size=3)
    assert [group.layers for group in layers.groups] == [(0, 1, 3), (2, 5), (4, 6), (7,), (8, 9)]
    assert [group.window for group in layers.groups] == [8, None, 8, 3, 8]
    assert layers.leader == 1
    assert layers.num_padding == 5
    for layer, window in enumerate(windows):
        group = layers.groups[layers.group_of[layer]]
        assert group.window == window
        assert group.layers[layers.place_of[layer]] == layer


def test_without_a_full_group_the_largest_window_leads():
    assert LayerGroups.of([3, 8, 6, 8], 4, P, group_size=1).leader == 1


@pytest.mark.parametrize("windows", [None, [None] * 3, 100, [100, 200, None]])
def test_windows_that_hide_nothing_make_one_group(windows):
    layers = LayerGroups.of(windows, 3, P, max_seq_len=100)
    assert layers.groups == (Group(None, (0, 1, 2)),)
    assert layers.group_size == 3


def test_layers_that_read_the_keys_of_others_take_no_place():
    layers = LayerGroups.of([6, None, 6, None, 6], 5, P, same_as={3: 1, 4: 2}, group_size=2)
    assert [group.layers for group in layers.groups] == [(0, 2), (1,)]
    assert layers.group_of == (0, 1, 0, 1, 0)
    assert layers.place_of == (0, 0, 1, 0, 1)
    assert layers.num_padding == 1


# -- blocks of a sequence
def test_blocks_while_a_sequence_decodes():
    held = {n: two_groups(6).peaks(n).tolist() for n in (4, 8, 9, 12, 13, 17, 40)}
    assert held == {4: [1, 1], 8: [2, 2], 9: [3, 3], 12: [3, 3], 13: [3, 4], 17: [3, 5], 40: [3, 10]}
    assert two_groups(6).held(40) == 13


@pytest.mark.parametrize(
    ("window", "peak", "after"),
    [
        (1, 1, 0),
        (2, 2, 1),
        (4, 2, 1),
        (5, 2, 1),
        (6, 3, 2),
        (7, 3, 2),
        (8, 3, 2),
        (9, 3, 2),
        (39, 10, 10),
        (40, 10, 10),
        (41, 10, 10),
    ],
)
def test_blocks_of_a_window(window, peak, after):
    assert LayerGroups.of([window, None], 2, P).peaks(40)[0] == peak
    assert held_after(window, 40) == after


def test_the_peak_of_a_prompt_in_chunks():
    assert [two_groups(6).peak(40, chunk) for chunk in (1, 4, 8, 16, 40)] == [13, 14, 15, 17, 20]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 13])
def test_a_peak_is_what_the_rule_of_release_leaves(window):
    """Chunk by chunk, over all offsets to a block boundary."""
    layers = LayerGroups.of(window, 1, P)
    for chunk in (1, 3, 4, 8, 10):
        for keep in (0, 3):
            most = 0
            for offset in range(P):
                done = offset
                while done + chunk <= 60:
                    held = -(-(done + chunk) // P) - int(layers.first_columns(done, keep)[0])
                    most, done = max(most, held), done + chunk
            assert most == layers.peak(60, chunk, keep), (chunk, keep)


@pytest.mark.parametrize("windows", [None, 6, [6, None], [6, 3, None]])
def test_lengths_come_one_by_one_or_in_arrays(windows):
    layers = LayerGroups.of(windows, 3 if windows == [6, 3, None] else 2, P)
    lengths = np.arange(50).reshape(5, 10)
    for chunk, keep in ((1, 0), (8, 3)):
        peaks = layers.peak(lengths, chunk, keep)
        assert peaks.shape == lengths.shape
        assert peaks.ravel().tolist() == [layers.peak(n, chunk, keep) for n in range(50)]
        assert (layers.peaks(lengths, chunk, keep).sum(axis=0) == peaks).all()
    assert layers.first_columns(lengths).shape == (len(layers.groups), 5, 10)


@pytest.mark.parametrize("windows", [None, [6, None], [6, 3, None]])
def test_growth_is_what_a_sequence_takes_at_its_peak_besides_what_it_holds(windows):
    layers = LayerGroups.of(windows, 3 if windows == [6, 3, None] else 2, P)
    computed, lens = map(np.array, zip(*((a, n) for n in range(30) for a in range(n)), strict=True))
    for chunk, keep in ((1, 0), (8, 3)):
        growths = [layers.growth(a, n, chunk, keep) for a, n in zip(computed.tolist(), lens.tolist(), strict=True)]
        assert layers.growth(computed, lens, chunk, keep) == sum(growths)
        for a, n, growth in zip(computed, lens, growths, strict=True):
            done = np.arange(a, n)
            most = (-(-np.minimum(done + chunk, n) // P) - layers.first_columns(done, keep)).max(axis=1)
            taken = most - (-(-a // P) - layers.first_columns(a, keep))
            assert taken.sum() <= growth <= (taken + 1).sum()


@pytest.mark.parametrize("windows", [None, [6, None], [6, 3, None], [6, None, None]])
def test_the_longest_sequence_that_fits(windows):
    layers = LayerGroups.of(windows, 3 if windows and len(windows) == 3 else 2, P, group_size=1)
    for num_blocks in range(40):
        longest = layers.longest(num_blocks, 8)
        assert layers.peak(longest, 8) <= num_blocks < layers.peak(longest + 1, 8)


def test_any_length_fits_where_every_layer_has_a_window():
    layers = LayerGroups.of([6, 3], 2, P)
    assert layers.longest(5) == 2**63 - 1
    assert layers.longest(4) == 2 * P


# -- refusals
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"windows": 0}, ValueError, r"^windows must be at least 1, got 0$"),
        (
            {"windows": np.array([4, 4, 4])},
            TypeError,
            r"^windows must be an int or None, or a list or tuple .*, got ndarray: pass its tolist\(\)$",
        ),
        ({"windows": range(1, 4)}, TypeError, r"^windows must be an int or None, or a list or tuple .*, got range$"),
        ({"windows": [4, True, None]}, TypeError, r"^windows must be an int, got bool$"),
        ({"windows": [4, None]}, ValueError, r"^windows must be one for all layers, or a list of 3, got 2$"),
        ({"group_size": 0}, ValueError, r"^group_size must be at least 1, got 0$"),
        ({"group_size": 3}, ValueError, r"^group_size must be at most 2, the layers of one window, got 3$"),
        ({"max_seq_len": "8"}, TypeError, r"^max_seq_len must be an int, got str$"),
        ({"same_as": [(2, 0)]}, TypeError, r"^same_as must be a dict from layers to earlier layers, got list$"),
        ({"same_as": {"2": 0, 1: 0}}, TypeError, r"^same_as must be an int, got str$"),
        ({"same_as": {3: 0}}, ValueError, r"^same_as must be at most 2, got 3$"),
        ({"same_as": {0: 2}}, ValueError, r"^same_as must name an earlier layer for layer 0, got 2$"),
        ({"same_as": {1: 0}}, ValueError, r"^same_as must name a layer of the same window .* None, but 0 has 4$"),
        (
            {"windows": None, "same_as": {1: 0, 2: 1}},
            ValueError,
            r"^same_as must name layers with K and V, but 1, for layer 2, has none itself$",
        ),
    ],
)
def test_wrong_groups_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LayerGroups.of(**{"windows": [4, None, 4], "num_layers": 3, "block_size": P} | arguments)
