"""The forms of a bench's report, and one small run."""

import csv
import io
import json

from pagedkv.bench import memory, report

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


def test_a_long_sentence_at_the_end_makes_no_other_line_long():
    rows = [{"to use": "GPUs", "what is missing": 99 * "x"}, {"to use": "plots", "what is missing": "matplotlib"}]
    assert report.as_tables(rows).splitlines() == [
        "to use  what is missing",
        f"  GPUs  {99 * 'x'}",
        " plots  matplotlib",
    ]


def test_json_and_csv_hold_every_value():
    assert json.loads(report.as_json(ROWS))["rows"] == ROWS
    rows = list(csv.DictReader(io.StringIO(report.as_csv(ROWS))))
    assert rows[1] == {"decode": "float16", "ms": "1234.5", "x": "2", "growth": ""}


def test_lists_are_in_json_alone():
    rows = [{"ms": 1.5, "samples ms": [1.0, 2.0]}, {"ms": 2.5, "samples ms": None}]
    assert json.loads(report.as_json(rows))["rows"] == rows
    assert report.as_csv(rows) == "ms\n1.5\n2.5"
    assert [line.split() for line in report.as_table(rows).splitlines()[2:]] == [["ms"], ["1.5"], ["2.5"]]


def test_quick_memory_bench_runs():
    rows = memory.run(repeats=1, quick=True, progress=lambda text: None)
    operations, serving = rows[: len(memory.OPERATIONS)], rows[len(memory.OPERATIONS) :]
    assert [(row["operation"], row["num_seqs"]) for row in operations] == [(name, 16) for name in memory.OPERATIONS]
    assert [row["serving"] for row in serving] == [
        "prompt, a miss",
        "prompt, a hit",
        "decode step, 16 sequences",
        "scheduler step, 20 running, 50 waiting",
    ]
    assert all(0 < row["pagedkv_us"] < 1e6 for row in rows)
