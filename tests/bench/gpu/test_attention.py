"""bench decode and bench prefill from end to end on a fake GPU; means, targets and launches."""

import json
import math
import sys

import numpy as np
import pytest

import pagedkv
from pagedkv.__main__ import main
from pagedkv.bench.gpu import decode, decode_peers, prefill, prefill_peers
from pagedkv.bench.gpu.arrays import GpuProblem
from pagedkv.bench.problem import BenchProblem, Cell

from .fake_gpu import COPY_MS, EMPTY_MS, READ_MS, FakeGpu

pytestmark = pytest.mark.usefixtures("one_launch")
BENCHES = {"decode": (decode, decode_peers), "prefill": (prefill, prefill_peers)}
over_benches = pytest.mark.parametrize("what", BENCHES)
DECODE, PREFILL = decode_peers.FIRST, prefill_peers.FIRST


def quietly(text):
    return None


@pytest.fixture
def fake_gpu(monkeypatch):
    gpu = FakeGpu()
    for bench, _ in BENCHES.values():
        monkeypatch.setattr(bench, "open_gpu", lambda copy_bytes: gpu)
    return gpu


@over_benches
def test_a_quick_run_has_everything(fake_gpu, what):
    bench, peers = BENCHES[what]
    rows = bench.run(repeats=1, progress=quietly, quick=True)
    of_cells = [what] * len(bench.quick_cells()) * len(peers.SUBJECTS)
    launches = ["launch"] * len(peers.OURS) if bench is decode else []
    assert [next(iter(row)) for row in rows] == ["device", *of_cells, *launches]
    assert list(rows[1])[-1] == "note"
    assert {row["note"] for row in rows if row.get("subject") in peers.OURS} == {None}
    assert rows[0]["read GB/s"] == pytest.approx(fake_gpu.copy_bytes / (EMPTY_MS + READ_MS) / 1e6)
    assert rows[0]["copy GB/s"] == pytest.approx(2 * fake_gpu.copy_bytes / COPY_MS / 1e6)
    assert (rows[0]["empty us"], rows[0]["empty launch us"]) == (0, pytest.approx(EMPTY_MS * 1e3))


@over_benches
def test_a_missing_package_is_reported_once(fake_gpu, monkeypatch, what):
    bench, peers = BENCHES[what]
    monkeypatch.setattr(fake_gpu, "framework", "torch")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    groups = {"decode": ["lengths"], "prefill": ["verify", "full"]}[what]
    chosen = {"quick": True, "groups": groups, "subjects": [peers.FIRST, "FlashInfer fa3"]}
    rows = bench.run(repeats=1, progress=quietly, **chosen)
    assert [(row["subject"], row["note"]) for row in rows[1:]] == [
        (peers.FIRST, None),
        ("FlashInfer fa3", "flashinfer is not installed"),
        (peers.FIRST, None),
    ]


@pytest.mark.parametrize(
    ("what", "group", "subject"),
    [("decode", "ragged", "v2"), ("decode", "launch", "v1"), ("prefill", "mixed", PREFILL)],
)
def test_groups_and_subjects_are_chosen(fake_gpu, capsys, what, group, subject):
    words = ["bench", what, "--quick", "--repeats", "1", "--json", "--only", group, "--subjects", subject]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row.get("subject", row.get("launch")) for row in rows] == [None, subject]


@over_benches
def test_ctrl_c_leaves_what_has_been_measured(fake_gpu, monkeypatch, capsys, what):
    bench, peers = BENCHES[what]
    measure, done = bench.measure.measure, []

    def interrupted(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(True)
        return measure(*arguments)

    monkeypatch.setattr(bench.measure, "measure", interrupted)
    assert main(["bench", what, "--quick", "--repeats", "1", "--json", "--subjects", peers.FIRST]) == 130
    captured = capsys.readouterr()
    assert [row.get("subject") for row in json.loads(captured.out)["rows"]] == [None, peers.FIRST]
    assert "interrupted" in captured.err


@pytest.mark.parametrize("option", ["--only", "--subjects"])
@over_benches
def test_the_command_line_refuses_unknown_names(what, option, capsys):
    with pytest.raises(SystemExit):
        main(["bench", what, option, "foo"])
    assert "foo" in capsys.readouterr().err


@pytest.mark.parametrize("what", [*BENCHES, "write"])
def test_without_a_gpu(monkeypatch, capsys, what):
    def capabilities():
        raise pagedkv.BackendUnavailableError("there is no GPU here")

    monkeypatch.setattr("pagedkv.cuda.driver.capabilities", capabilities)
    assert main(["bench", what]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "there is no GPU here" in captured.err
    assert "bench cpu" in captured.err


def decode_row(group, subject=DECODE, share=0.5, **changes):
    values = Cell(group, (5,), 1, 1, 64).columns("decode")
    return values | {"subject": subject, "us": 10.0, "share": share, f"x {DECODE}": 1.0} | changes


def test_geometric_mean():
    rows = [decode_row("kernelbench", share=share) for share in (0.5, 0.8, 0.9, 1.0, 0.2)]
    rows += [decode_row("kernelbench", "peer", share=share) for share in (0.5, None, 0.9, 1.0, 0.2)]
    own, peer = decode.means([*rows, decode_row("fp8")])
    assert (own["subject"], own["timed"], peer["timed"], peer["share"]) == (DECODE, 5, 4, None)
    assert math.isclose(own["share"], np.exp(np.log([0.5, 0.8, 0.9, 1.0, 0.2]).mean()))


def test_targets_of_decode():
    rows = [decode_row("headline", share=share) for share in (0.95, 0.91)]
    rows += [decode_row("pages", P=1, us=10.9), decode_row("pages", us=10.0)]
    rows += [decode_row("kernelbench", share=0.81)] * 5
    rows += [decode_row("headline", "Triton", **{f"x {DECODE}": 0.9, "L": "77"})]
    rows += [decode_row("headline", "v1", **{f"x {DECODE}": 0.5})]
    launch = {"launch": DECODE, "host us": 15.0, "replay adds us": 3.5, "note": None}
    results = {each["target"]: each for each in decode.targets(rows, [launch])}
    assert [each["reached"] for each in results.values()] == ["no", "yes", "yes", "yes", "no", "no"]
    assert results["headline, least share"]["measured"] == 0.91
    assert results["time of P = 1 over P = 16"]["measured"] == pytest.approx(1.09)
    beaten = results[f"least time of a peer over {DECODE}'s"]
    assert (beaten["measured"], beaten["where"].split()[0]) == (0.9, "Triton")
    assert "77" in beaten["where"]
    assert decode.targets([decode_row("headline", us=None, share=None)], []) == []


def prefill_row(group, subject=PREFILL, **changes):
    values = {"prefill": group, "subject": subject, "L": "9", "us": 1.0, "TFLOP/s": 300.0, "share": None}
    return values | {f"x {PREFILL}": 1.0} | changes


def test_targets_of_prefill():
    rows = [prefill_row("prompt"), prefill_row("prompt", **{"TFLOP/s": 330.0})]
    rows += [prefill_row("chunk", **{"TFLOP/s": 900.0})]
    rows += [prefill_row("prompt", prefill_peers.FLASH_ATTENTION_2, **{f"x {PREFILL}": x}) for x in (0.94, 1.2)]
    rows += [prefill_row("verify", L="32768", share=0.81), prefill_row("verify", L="8192", share=0.1)]
    results = prefill.targets(rows, "NVIDIA H100 80GB HBM3")
    assert [(each["measured"], each["reached"]) for each in results] == [(330.0, "yes"), (0.94, "no"), (0.81, "yes")]
    assert [each["measured"] for each in prefill.targets(rows, "NVIDIA A100")] == [0.94, 0.81]
    assert prefill.targets([prefill_row("prompt", us=None, **{"TFLOP/s": None})], "NVIDIA H100") == []


def test_what_a_launch_costs(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setitem(decode.SUBJECTS, "slow", lambda problem: gpu.subject("slow", 0.5))
    problem = GpuProblem(gpu, BenchProblem(Cell("x", (40, 40), 4, 2, 64)))
    result = decode.launch_row(gpu, "slow", problem, 2)
    assert {key: result[key] for key in ("call us", "replay us", "kernel us")} == pytest.approx(
        {"call us": 500, "replay us": 500, "kernel us": 500}
    )
    assert result["replay adds us"] == pytest.approx(0)
    assert 0 < result["host p10 us"] <= result["host us"] <= result["host p90 us"] <= result["host p99 us"]
    assert result["thread us"] > 0

    def capture(call, times):
        raise RuntimeError("cannot be captured")

    monkeypatch.setattr(gpu, "capture", capture)
    assert decode.launch_row(gpu, "slow", problem, 2)["note"] == "RuntimeError: cannot be captured"


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "peer"), [("decode", "Triton"), ("prefill", "SDPA")])
def test_quick_on_a_gpu(capsys, what, peer):
    _, peers = BENCHES[what]
    assert main(["bench", what, "--quick", "--repeats", "2", "--json", "--subjects", *peers.OURS, peer]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["read GB/s"] > rows[0]["copy GB/s"] / 2 > 0
    ours = [row for row in rows if row.get("subject") in peers.OURS]
    assert [row["note"] for row in ours] == [None] * len(ours)
    assert all(row["us"] > 0 for row in ours)
    assert [row["note"] for row in rows if "launch" in row] == [None] * (len(peers.OURS) if what == "decode" else 0)
