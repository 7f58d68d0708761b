"""bench cpu from end to end, on small problems."""

import os

import numpy as np
import pytest

import pagedkv
from pagedkv.bench.cpu import peers, run
from pagedkv.bench.report import Interrupted

WITH_TORCH = {name: peers.SUBJECTS[name] for name in ("pagedkv", "SDPA", "gather + SDPA")}


def missing(problem, num_threads):
    raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")


def wrong(problem, num_threads):
    return lambda: np.zeros_like(problem.q)


def first_columns(rows):
    return [next(iter(row)) for row in rows]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(run, "SHAPES", ((2, 64),))
    monkeypatch.setattr(run, "GROUP_SIZES", (1, 2))
    for name in ("SUM_BYTES", "QUICK_SUM_BYTES"):
        monkeypatch.setattr(run, name, 2**20)
    monkeypatch.setattr(run, "SMALL_CALLS", 1)
    monkeypatch.setattr(run, "SMALL_TURNS", 2)
    monkeypatch.setattr(run, "DRAFTS_LENGTH", 64)
    monkeypatch.setattr(run, "PREFILL_TOKENS", 64)
    monkeypatch.setattr(run, "PREFILL_HEADS", 8)
    monkeypatch.setattr(run, "_first_call_row", lambda operation: {"first call": operation})
    monkeypatch.setattr(run, "SUBJECTS", WITH_TORCH)


def test_a_quick_run_has_a_row_for_each_subject():
    rows = run.run(repeats=1, quick=True, progress=lambda text: None)
    assert first_columns(rows) == ["threads", "decode", "peer", "peer", "prefill"]
    assert [row["note"] for row in rows[2:]] == [None] * 3
    assert rows[1]["L"] == run.QUICK_SHAPE[1]


def test_quick_leaves_out_what_is_compiled_for_seconds(monkeypatch):
    monkeypatch.setattr(run, "SUBJECTS", WITH_TORCH | dict.fromkeys(peers.COMPILED, missing))
    rows = run.run(repeats=1, quick=True, progress=lambda text: None)
    assert not {row.get("peer") for row in rows} & set(peers.COMPILED)


def test_a_run_has_rows_for_all_subjects_and_notes_for_those_that_fail(monkeypatch):
    monkeypatch.setattr(run, "CACHES", ("float32",))
    monkeypatch.setattr(run, "SUBJECTS", WITH_TORCH | {"Nowhere": missing, "Zero": wrong})
    rows = run.run(repeats=2, progress=lambda text: None)
    decode = [row for row in rows if "decode" in row]
    assert [row["G"] for row in decode] == [1, 2]
    shown = ["SDPA", "gather + SDPA", "Nowhere", "Zero", "SDPA", "gather + SDPA", "Zero"]
    assert [row["peer"] for row in rows if "peer" in row] == shown
    others = ["small call", "verification", "first call", "first call"]
    assert first_columns(rows)[-6:] == ["prefill", "prefill", *others]
    assert [(row["prefill"], row["G"], row["note"]) for row in rows[-6:-4]] == [
        ("float32", 1, None),
        ("bfloat16", 4, None),
    ]
    assert {"us", "again us"} < set(rows[-4])
    for row in decode:
        assert row["share"] == pytest.approx(row["KV GB/s"] / row["read GB/s"])
        assert row["ms"] == pytest.approx(sum(row["samples ms"]) / 2)
        assert len(row["read samples ms"]) == 2
    of = {row["peer"]: row for row in rows if "peer" in row and row["G"] == 1}
    assert of["Nowhere"]["note"] == "nowhere is not installed"
    assert of["Zero"]["note"].startswith("wrong: error 1, allowed 0.0001")
    assert of["Zero"]["ms"] is of["Zero"]["samples ms"] is None
    assert of["SDPA"]["x pagedkv"] == pytest.approx(of["SDPA"]["ms"] / decode[0]["ms"]) == decode[0]["x SDPA"]


def test_a_wrong_pagedkv_call_is_not_timed(monkeypatch):
    monkeypatch.setattr(run, "SUBJECTS", {"pagedkv": wrong})
    with pytest.raises(RuntimeError, match=r"^pagedkv has no time in Cell.*: wrong: error 1"):
        run.run(repeats=1, quick=True, progress=lambda text: None)


@pytest.mark.parametrize(("one_thread", "expected"), [(True, 1), (False, 2)])
def test_threads(monkeypatch, one_thread, expected):
    seen = []

    def noting(problem, num_threads):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        seen.append((num_threads, pagedkv.get_num_threads(), cores))
        return WITH_TORCH["pagedkv"](problem, num_threads)

    monkeypatch.setattr(run, "SUBJECTS", {"pagedkv": noting})
    before = pagedkv.get_num_threads()
    pagedkv.set_num_threads(2)
    try:
        [header, *_] = run.run(repeats=1, quick=True, one_thread=one_thread, progress=lambda text: None)
        assert pagedkv.get_num_threads() == 2
    finally:
        pagedkv.set_num_threads(before)
    [(num_threads, own, cores)] = seen
    assert num_threads == own == header["threads"] == expected
    assert cores is None or cores == len(header["pinned to"].split()) <= expected


def test_ctrl_c_keeps_the_cells_that_are_done(monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_prefill_row", interrupted)
    with pytest.raises(Interrupted) as left:
        run.run(repeats=1, quick=True, progress=lambda text: None)
    assert first_columns(left.value.rows) == ["threads", "decode", "peer", "peer"]
