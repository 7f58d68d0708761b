"""bench prefill: what becomes of times, targets, the command line."""

import json
import sys

import pytest

from pagedkv.__main__ import main
from pagedkv.bench.gpu.prefill import peers, run
from pagedkv.bench.gpu.prefill.peers import FIRST, SUBJECTS
from pagedkv.bench.gpu.prefill.workloads import Cell

from ..fake_gpu import READ_MS, FakeGpu

pytestmark = pytest.mark.usefixtures("one_launch")
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
PROMPT = Cell("prompt", (40,), query_lens=(40,), **SIZES)
VERIFY = Cell("verify", (40, 40), query_lens=(8, 8), **SIZES)


def quietly(text):
    return None


def taking(milliseconds):
    """A subject that is right where it is looked at."""

    def subject(problem):
        result = problem.host.q.astype("float32")
        result[problem.host.checked] = problem.host.expected
        return problem.gpu.subject("peer", milliseconds, result)

    return subject


def measured(cell, subjects):
    return {row["subject"]: row for row in run.measure(FakeGpu(), cell, subjects, 2, quietly)}


def test_time_becomes_a_rate_and_of_few_tokens_a_bandwidth():
    for cell in (PROMPT, VERIFY):
        rows = measured(cell, {FIRST: taking(0.25), "slower": taking(0.5)})
        for name, milliseconds in ((FIRST, 0.25), ("slower", 0.5)):
            row = rows[name]
            assert row["us"] == pytest.approx(milliseconds * 1e3)
            assert row["TFLOP/s"] == pytest.approx(cell.num_flops / milliseconds / 1e9)
            assert row[f"x {FIRST}"] == pytest.approx(milliseconds / 0.25)
            if cell is VERIFY:
                assert row["GB/s"] == pytest.approx(cell.num_bytes / milliseconds / 1e6)
                assert row["share"] == pytest.approx(row["GB/s"] / (FakeGpu().copy_bytes / READ_MS / 1e6))
            else:
                assert (row["GB/s"], row["share"]) == (None, None)
        shape = {key: rows[FIRST][key] for key in ("prefill", "B", "n", "L", "causal")}
        assert shape == {
            "prefill": cell.group,
            "B": len(cell.seq_lens),
            "n": cell.query_length,
            "L": "40",
            "causal": "yes",
        }


def row(group, subject=FIRST, **changes):
    return {"prefill": group, "subject": subject, "L": "9", "us": 1.0, "TFLOP/s": 300.0, "share": None} | {
        f"x {FIRST}": 1.0,
        **changes,
    }


def test_targets():
    rows = [row("prompt"), row("prompt", **{"TFLOP/s": 330.0}), row("chunk", **{"TFLOP/s": 900.0})]
    rows += [row("prompt", peers.FLASH_ATTENTION_2, **{f"x {FIRST}": x}) for x in (0.94, 1.2)]
    rows += [row("verify", L="32768", share=0.81), row("verify", L="8192", share=0.1)]
    results = run.targets(rows, "NVIDIA H100 80GB HBM3")
    assert [(each["measured"], each["reached"]) for each in results] == [(330.0, "yes"), (0.94, "no"), (0.81, "yes")]
    assert [each["measured"] for each in run.targets(rows, "NVIDIA A100")] == [0.94, 0.81]
    assert run.targets([row("prompt", us=None, **{"TFLOP/s": None})], "NVIDIA H100") == []


@pytest.fixture
def fake_gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(run, "open_gpu", lambda copy_bytes: gpu)
    return gpu


def test_a_quick_run_has_everything(fake_gpu):
    rows = run.run(repeats=1, progress=quietly, quick=True)
    assert [next(iter(each)) for each in rows] == ["device"] + ["prefill"] * 6 * len(SUBJECTS)
    assert list(rows[1])[-1] == "note"
    assert {each["note"] for each in rows if each.get("subject") in peers.OURS} == {None}


def test_what_is_not_installed_is_said_once(fake_gpu, monkeypatch):
    monkeypatch.setattr(fake_gpu, "framework", "torch")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    rows = run.run(repeats=1, progress=quietly, quick=True, groups=["verify", "full"], subjects=[FIRST, "FlashInfer"])
    assert [(each["subject"], each["note"]) for each in rows[1:]] == [
        (FIRST, None),
        ("FlashInfer", "flashinfer is not installed"),
        (FIRST, None),
    ]


def test_command_line(fake_gpu, capsys):
    words = ["bench", "prefill", "--quick", "--repeats", "1", "--json", "--only", "mixed", "--subjects", "prefill HND"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(each.get("prefill"), each.get("subject")) for each in rows] == [(None, None), ("mixed", "prefill HND")]


def test_ctrl_c_leaves_what_has_been_measured(fake_gpu, monkeypatch, capsys):
    measure, done = run.measure, []

    def interrupted(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(True)
        return measure(*arguments)

    monkeypatch.setattr(run, "measure", interrupted)
    assert main(["bench", "prefill", "--quick", "--repeats", "1", "--json", "--subjects", FIRST]) == 130
    captured = capsys.readouterr()
    assert [each.get("subject") for each in json.loads(captured.out)["rows"]] == [None, FIRST]
    assert "interrupted" in captured.err


@pytest.mark.parametrize("wrong", [["--only", "foo"], ["--subjects", "foo"]])
def test_command_line_refuses_unknown_names(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "prefill", *wrong])
    assert "foo" in capsys.readouterr().err


@pytest.mark.gpu
def test_quick_on_a_gpu(capsys):
    assert main(["bench", "prefill", "--quick", "--repeats", "2", "--json", "--subjects", *peers.OURS, "SDPA"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    ours = [each for each in rows if each.get("subject") in peers.OURS]
    assert [each["note"] for each in ours] == [None] * len(ours)
    assert all(each["us"] > 0 and each["TFLOP/s"] > 0 for each in ours)
