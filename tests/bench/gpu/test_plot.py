"""The chart of bench decode --plot, and its errors."""

import sys
from unittest.mock import MagicMock

import pytest

from pagedkv.__main__ import main
from pagedkv.bench.gpu import decode, plot


def row(length, subject, bandwidth, share=0.5, group="lengths"):
    shape = {"decode": group, "B": 8, "Hq": 32, "Hkv": 8, "D": 128, "L": str(length), "P": 16, "kv": "float16"}
    return shape | {"subject": subject, "GB/s": bandwidth, "share": bandwidth and share}


ROWS = [
    {"device": "a GPU"},
    row(2048, "split NHD", 2000.0),
    row(2048, "v1", None),
    row(128, "split NHD", 500.0),
    row(128, "v1", 100.0, 0.1),
    row(64, "split NHD", 9.0, group="pages"),
    row(8192, "v1", None),
    {"launch": "v1"},
]


def test_bandwidth_by_length_of_cells_that_differ_in_nothing_else():
    assert plot.series(ROWS) == {
        "split NHD": [(128, 500.0), (2048, 2000.0)],
        "read": [(128, 1000.0), (2048, 4000.0)],
        "v1": [(128, 100.0)],
    }


def test_every_series_is_a_line(monkeypatch):
    matplotlib = MagicMock()
    for name in ("matplotlib", "matplotlib.backends", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, matplotlib)
    plot.draw(ROWS, "here.png")
    axes = matplotlib.Figure.return_value.add_subplot.return_value
    assert {call.kwargs["label"]: call.args for call in axes.plot.call_args_list} == {
        "split NHD": ((128, 2048), (500.0, 2000.0)),
        "read": ((128, 2048), (1000.0, 4000.0)),
        "v1": ((128,), (100.0,)),
    }
    assert matplotlib.FigureCanvasAgg.return_value.print_figure.call_args.args == ("here.png",)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.draw([row(64, "v1", 1.0, group="pages")], "here.png")


def test_a_missing_matplotlib_is_reported_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr("pagedkv.__main__.find_spec", lambda name: None)
    monkeypatch.setattr(decode, "run", lambda **options: pytest.fail("measured"))
    assert main(["bench", "decode", "--plot", "here.png"]) == 1
    assert "matplotlib" in capsys.readouterr().err


def test_rows_are_printed_before_they_are_drawn(monkeypatch, capsys):
    printed = []
    monkeypatch.setattr("pagedkv.__main__.find_spec", lambda name: True)
    monkeypatch.setattr(decode, "run", lambda **options: [{"decode": "lengths"}])
    monkeypatch.setattr(plot, "draw", lambda rows, path: printed.append((capsys.readouterr().out, rows, path)))
    assert main(["bench", "decode", "--csv", "--plot", "--only", "lengths"]) == 0
    assert printed == [("decode\nlengths\n", [{"decode": "lengths"}], "decode.png")]


def test_a_plot_of_something_else_is_refused(capsys):
    assert main(["bench", "decode", "--plot", "x", "--only", "pages"]) == 2
    assert "--plot draws the group lengths" in capsys.readouterr().err
