"""The bench: its numbers' forms, and one small run."""

import csv
import io
import json

import pytest

from pagedkv.bench import cpu, memory, report

ROWS = [{"decode": "float32", "ms": 1.25, "x": None}, {"decode": "float16", "ms": 1234.5, "x": 2}, {"growth": 4.0}]


def test_table_has_one_block_for_each_set_of_columns():
    machine, empty, *lines = report.as_table(ROWS).splitlines()
    assert "numpy" in machine
    assert empty == ""
    assert [line.split() for line in lines] == [
        ["decode", "ms", "x"],
        ["float32", "1.25", "-"],
        ["float16", "1234", "2"],
        [],
        ["growth"],
        ["4"],
    ]


def test_json_and_csv_hold_every_value():
    assert json.loads(report.as_json(ROWS))["rows"] == ROWS
    rows = list(csv.DictReader(io.StringIO(report.as_csv(ROWS))))
    assert rows[1] == {"decode": "float16", "ms": "1234.5", "x": "2", "growth": ""}


def test_interleaved_calls_everyone_in_turn():
    calls = []
    seconds = report.interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == list("ababab")
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_spread_is_relative_to_the_median():
    assert report.spread([1.0]) == 0
    assert report.spread([2.0, 2.0, 2.0]) == 0
    assert report.spread([1.0, 2.0, 3.0]) == pytest.approx(1.0)


def test_quick_cpu_bench_runs(monkeypatch):
    monkeypatch.setattr(cpu, "QUICK_SUM_BYTES", 2**20)
    rows = cpu.run(repeats=1, quick=True, progress=lambda text: None)
    assert [next(iter(row)) for row in rows] == ["decode", "prefill"]


def test_quick_memory_bench_runs():
    rows = memory.run(repeats=1, quick=True, progress=lambda text: None)
    assert [(row["operation"], row["num_seqs"]) for row in rows] == [(name, 16) for name in memory.OPERATIONS]
    assert all(0 < row["pagedkv_us"] < 1e6 for row in rows)


def test_cpu_bench_runs(monkeypatch):
    monkeypatch.setattr(cpu, "SHAPES", ((2, 64),))
    monkeypatch.setattr(cpu, "GROUP_SIZES", (1,))
    monkeypatch.setattr(cpu, "SUM_BYTES", 2**20)
    monkeypatch.setattr(cpu, "_first_call_row", lambda operation: {"first call": operation})
    rows = cpu.run(repeats=1, dtypes=("float32",), progress=lambda text: None)
    assert [next(iter(row)) for row in rows] == ["decode", "prefill", "growth", "first call", "first call"]
    assert rows[0]["share"] == pytest.approx(rows[0]["KV GB/s"] / rows[0]["read GB/s"])
