"""`python -m pagedkv trace`: its table, its JSON, and errors of options."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pagedkv.__main__ import main
from pagedkv.extras import pip_install
from pagedkv.trace import command, log_normal, plot, simulate
from pagedkv.trace.managers import Paged

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ["--requests", "20", "--memory", "600", "--max-len", "200"]


def out(capsys, *words):
    assert main(["trace", *words]) == 0
    return capsys.readouterr().out


def test_the_table_has_a_line_for_each_manager(capsys):
    head, requests, empty, columns, *lines = out(capsys, *SMALL, "--block-sizes", "16,4").splitlines()
    assert head.split() == ["requests", "mean", "prompt", "mean", "output", "longest", "memory"]
    assert requests.split()[0] == "20"
    assert empty == ""
    assert columns.split()[:4] == ["manager", "P", "waste", "%"]
    assert [re.split("  +", line.strip())[:2] for line in lines] == [
        ["contiguous, 200 each", "-"],
        ["contiguous, oracle", "-"],
        ["buddy, oracle", "-"],
        ["paged", "16"],
        ["paged", "4"],
    ]


def test_json_has_every_figure_and_series(capsys):
    rows = json.loads(out(capsys, *SMALL, "--seed", "3", "--block-sizes", "8", "--json"))["rows"]
    requests = log_normal(20, max_len=200, seed=3)
    assert rows[0]["longest"] == requests.seq_lens.max()
    run = simulate(requests, Paged(600, 8, max_len=200))
    row = rows[-1]
    assert row["waste %"] == pytest.approx(100 * run.waste)
    assert row["waste %"] == pytest.approx(row["reserved %"] + row["internal %"] + row["external %"])
    assert (row["steps"], row["preempted"], row["most"]) == (run.num_steps, run.preempted, run.running.max())
    held = (run.tokens + run.reserved + run.internal).mean()
    assert row["table entries"] == round(held / 8)
    starts = row["steps over time"]
    assert len(starts) == len(row["tokens over time"]) == 100
    sizes = np.diff(starts, append=run.num_steps)
    assert np.dot(sizes, row["tokens over time"]) == pytest.approx(run.tokens.sum(), rel=1e-2)


def test_the_figures_of_the_docs_are_those_of_the_command():
    """With the claim of the vLLM paper: in blocks of 16 tokens less than a 25th of the slots is wasted."""
    recorded = json.loads(max((DOCS / "figures").glob("trace-*.json")).read_text())["rows"]
    rows = command.run(block_sizes=(16,), progress=lambda text: None)
    assert rows == [row for row in recorded if row.get("P") in (None, 16)]
    assert rows[1]["waste %"] > 70
    assert rows[-1]["waste %"] < 4


def test_windows_save_room_where_blocks_come_back(capsys):
    words = [*SMALL, "--block-sizes", "8", "--json"]
    without, windowed = (json.loads(out(capsys, *words, *more))["rows"] for more in ([], ["--windows", "32,32,all"]))
    assert windowed[0] == without[0] | {"layers": "1 without a window, 2 of window 32"}
    assert [row["steps"] for row in windowed[1:4]] == [row["steps"] for row in without[1:4]]
    assert windowed[4]["at once"] > 1.3 * without[4]["at once"]
    assert max(map(sum, zip(*(windowed[4][f"{kind} over time"] for kind in plot.NAMES), strict=True))) <= 600.5


@pytest.mark.parametrize("windows", ["", "0", "8,none", "8,,all", "-8"])
def test_windows_are_ints_or_all(windows, capsys):
    with pytest.raises(SystemExit) as left:
        main(["trace", f"--windows={windows}"])
    assert left.value.code == 2
    assert f"must be a window or all for each layer, as in 1024,1024,all, got {windows}" in capsys.readouterr().err


def test_a_file_gives_the_lengths_and_the_longest(tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n30,10\n50,7\n90,1\n")
    rows = json.loads(out(capsys, "--csv", str(path), "--requests", "2", "--json", "--block-sizes", "1"))["rows"]
    assert rows[0] == {"requests": 2, "mean prompt": 40, "mean output": 8.5, "longest": 57, "memory": 16384}
    assert rows[1]["manager"] == "contiguous, 57 each"


def test_rows_of_the_table_are_enough_for_all_that_fit():
    requests = log_normal(100, prompt_mean=1, output_mean=1, sigma=0)
    manager = command._paged(requests, 320, 4, 0.0)
    assert manager.table.max_seqs == 80
    assert simulate(requests, manager).running.max() == 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "0"], "num_requests must be at least 1, got 0"),
        (["--sigma", "nan"], "sigma must be from 0 to 10, got nan"),
        (["--output-mean", "-3"], "output_mean must be from 1 to 2147483647, got -3.0"),
        (["--memory", "-1"], "memory must be at least 1, got -1"),
        (["--memory", "100"], "--memory must be at least the 2048 slots of --max-len, got 100"),
        (["--max-len", "1"], "max_len must be at least 2, got 1"),
        (["--block-sizes", "16385"], "--block-sizes must be from 1 to the 16384 slots of --memory, got 16385"),
        (["--watermark", "nan"], "watermark must be from 0 to 1, got nan"),
        (["--csv", "x", "--seed", "1"], "--seed and --csv exclude each other: lengths are drawn or read"),
        (
            ["--csv", "nowhere.csv"],
            "--csv nowhere.csv cannot be read (No such file or directory): give a file with a row for each request, "
            "below the names prompt_tokens,output_tokens",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line_before_anything_runs(words, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "simulate", lambda *_: pytest.fail("it runs"))
    assert main(["trace", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(message)


@pytest.mark.parametrize("sizes", ["", "0", "8,x", "8,,16", "-8", "1.5"])
def test_block_sizes_are_ints(sizes, capsys):
    with pytest.raises(SystemExit) as left:
        main(["trace", f"--block-sizes={sizes}"])
    assert left.value.code == 2
    assert f"must be block sizes of at least 1, as in 8,16,32, got {sizes}" in capsys.readouterr().err


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "simulate", interrupted)
    assert main(["trace", *SMALL]) == 130
    assert capsys.readouterr() == ("", "\ninterrupted\n")


def test_a_missing_matplotlib_is_reported_first(monkeypatch, capsys):
    monkeypatch.setattr("pagedkv.__main__.find_spec", lambda name: None)
    monkeypatch.setattr(command, "simulate", lambda *_: pytest.fail("it runs"))
    assert main(["trace", *SMALL, "--plot", "x.png"]) == 1
    assert capsys.readouterr().err == f"plots are drawn by matplotlib, which is not installed: {pip_install('plot')}\n"


class Drawn:
    """A fake matplotlib that records every call."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        def note(*args, **options):
            self.calls.append((name, args, options))
            return [Drawn(self.calls) for _ in range(3)] if name == "subplots" else self

        return note


@pytest.fixture
def drawn(monkeypatch):
    calls = []
    figure = ModuleType("matplotlib.figure")
    figure.Figure = lambda **_: Drawn(calls)
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    monkeypatch.setattr("pagedkv.__main__.find_spec", lambda name: True)
    return calls


@pytest.mark.parametrize(("words", "path"), [(["here.svg"], "here.svg"), ([], "trace.png")])
def test_bars_lines_and_points_of_the_plot(drawn, capsys, words, path):
    assert main(["trace", *SMALL, "--block-sizes", "4,16,64", "--plot", *words]) == 0
    assert capsys.readouterr().err.endswith(f"drawn in {path}\n")
    bars = [(args, options) for name, args, options in drawn if name == "barh"]
    assert [options["label"] for _, options in bars] == list(plot.NAMES.values())
    assert np.sum([values for (_, values), _ in bars], axis=0) == pytest.approx([100] * 6)
    assert bars[1][1]["left"] == list(bars[0][0][1])
    lines = [options["label"] for name, _, options in drawn if name == "plot" and "label" in options]
    assert lines == ["contiguous, 200 each", "contiguous, oracle", "buddy, oracle", "paged, P = 16"]
    assert [args[0] for name, args, _ in drawn if name == "annotate"] == ["P = 4", "P = 16", "P = 64"]
    assert ("savefig", (path,), {"dpi": 150}) in drawn


def test_a_plot_that_cannot_be_written_comes_after_the_table(monkeypatch, drawn, capsys):
    def draw(rows, path):
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(plot, "draw", draw)
    assert main(["trace", *SMALL, "--plot", "no/x.png"]) == 1
    printed = capsys.readouterr()
    assert re.search(r"^ +paged +16 ", printed.out, re.MULTILINE)
    assert printed.err == "the plot cannot be written: [Errno 2] No such file or directory: 'no/x.png'\n"
