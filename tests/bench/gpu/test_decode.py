"""bench decode: subjects that are right, wrong, missing or broken; means, targets, launches, the command line."""

import json
import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.__main__ import main
from pagedkv.bench.gpu import decode, peers
from pagedkv.bench.gpu.peers import FIRST, SUBJECTS, Problem
from pagedkv.bench.gpu.workloads import Cell, HostProblem
from pagedkv.bench.reasons import Refused, reason

from ...support.device_fakes import InterfaceArray, recording
from ...support.strategies import long
from .fake_gpu import COPY_MS, READ_MS, FakeGpu

pytestmark = pytest.mark.usefixtures("one_launch")
CELL = Cell("x", (40, 3, 32), 4, 2, 64, dtype="bfloat16")
EQUAL = Cell("x", (40, 40), 4, 2, 64)
FP8 = Cell("x", (40, 3), 4, 2, 64, kv_dtype="fp8_e4m3")


def quietly(text):
    return None


def measured(gpu, subjects, cell=CELL, repeats=2):
    rows = decode.measure(gpu, cell, subjects, repeats, quietly)
    return {row["subject"]: row for row in rows}


def expected_of(problem):
    return problem.gpu.array(problem.host.expected)


def taking(milliseconds, name="peer"):
    """A subject that is right."""
    return lambda problem: problem.gpu.subject(name, milliseconds, expected_of(problem))


def test_time_becomes_bandwidth_and_a_share_of_what_reading_has():
    gpu = FakeGpu()
    rows = measured(gpu, {FIRST: taking(0.25), "slower": taking(0.5)})
    for name, milliseconds in ((FIRST, 0.25), ("slower", 0.5)):
        row = rows[name]
        assert row["us"] == pytest.approx(milliseconds * 1e3)
        assert row["GB/s"] == pytest.approx(CELL.num_bytes / milliseconds / 1e6)
        assert row["read GB/s"] == pytest.approx(gpu.copy_bytes / READ_MS / 1e6)
        assert row["copy GB/s"] == pytest.approx(2 * gpu.copy_bytes / COPY_MS / 1e6)
        assert row["share"] == pytest.approx(row["GB/s"] / row["read GB/s"])
        assert row[f"x {FIRST}"] == pytest.approx(milliseconds / 0.25)
        assert (row["note"], row["error"], row["spread"], row["late"]) == (None, 0, 0, 0)
    assert gpu.released == 1


def test_everyone_the_read_and_the_copy_take_turns():
    gpu = FakeGpu()
    measured(gpu, {"a": taking(2.0, "a"), "b": taking(2.0, "b")}, repeats=3)
    turns = [name for name in gpu.trace if name in ("read", "copy", "a", "b")]
    assert turns[-14:-2] == ["read", "copy", "a", "b"] * 3
    assert turns[-2:] == ["a", "b"]  # looked at once more


def wrong(problem):
    result = problem.host.expected.copy()
    result[1, 2, 3] += 0.1 * np.abs(result).max()
    return problem.gpu.subject("wrong", 1.0, result)


def wrong_later(problem):
    results = [problem.host.expected] * 10

    def call():
        problem.gpu.clock += 1.0
        return results.pop() if results else np.full_like(problem.host.expected, np.nan)

    return call


def test_a_wrong_result_is_reported_and_not_timed():
    gpu = FakeGpu()
    rows = measured(gpu, {"wrong": wrong, "wrong later": wrong_later, "right": taking(1.0)}, repeats=9)
    assert gpu.trace.count("wrong") == 1
    assert rows["wrong"]["us"] is None
    assert rows["wrong"]["error"] == pytest.approx(0.1, rel=0.1)
    assert rows["wrong"]["note"] == "wrong: error 0.1, allowed 0.02"
    assert rows["wrong later"]["us"] is None
    assert rows["wrong later"]["note"].startswith("wrong: error inf")
    assert rows["right"]["us"] == pytest.approx(1000)


def test_a_subject_that_cannot_is_a_row_with_its_reason():
    def broken(problem):
        raise RuntimeError("no kernel for this shape\nand a long trace")

    def missing(problem):
        import a_package_that_nobody_has  # noqa: F401

    rows = measured(FakeGpu(), {"broken": broken, "missing": missing, FIRST: taking(1.0)})
    assert rows["broken"]["note"] == "RuntimeError: no kernel for this shape"
    assert rows["missing"]["note"] == "a_package_that_nobody_has is not installed"
    assert rows["broken"]["us"] is rows["missing"]["us"] is None
    assert rows[FIRST]["us"] == pytest.approx(1000)


def test_a_device_that_fails_in_the_turns_leaves_rows():
    def failing(problem):
        results = [problem.host.expected]

        def call():
            if not results:
                raise RuntimeError("an illegal memory access")
            return results.pop()

        return call

    rows = measured(FakeGpu(), {"failing": failing, FIRST: taking(1.0)})
    assert {row["note"] for row in rows.values()} == {"RuntimeError: an illegal memory access"}
    assert {row["us"] for row in rows.values()} == {None}


def test_reasons_are_short():
    assert reason(Refused("so")) == "so"
    assert reason(pagedkv.BackendUnavailableError("not here")) == "not here"
    assert reason(ValueError("x" * 1000)) == f"ValueError: {'x' * 145}..."
    assert reason(KeyError()) == "KeyError: "


@pytest.mark.parametrize("cell", [*long([CELL]), EQUAL, FP8], ids=str)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_kernels_of_pagedkv_get_each_layout(cell, framework):
    """On the host they are one and the same: this is about the arrays that they get."""
    rows = measured(FakeGpu(framework), peers.OURS, cell, repeats=1)
    for row in rows.values():
        assert row["note"] is None
        assert 0 <= row["error"] < decode.TOLERANCE[cell.dtype]


@pytest.mark.parametrize(
    ("name", "launches"),
    [("v1", ["v1"]), ("v2", ["v2", "v2_reduce"]), ("split NHD", ["split"]), ("split HND", ["split"])],
)
def test_kernels_of_pagedkv_are_launched_for_device_arrays(monkeypatch, name, launches):
    def on_device(*args, out, **options):
        return pagedkv.decode_attention(*map(InterfaceArray, args), out=InterfaceArray(out), **options)

    monkeypatch.setattr(peers, "decode_attention", on_device)
    call = SUBJECTS[name](Problem(FakeGpu(), HostProblem(EQUAL)))
    with recording() as devices:
        call()
    (device,) = devices.values()
    assert [kernel.name.partition("[")[0] for kernel, *_ in device.launches] == launches


def test_torch_peers_without_torch():
    rows = measured(FakeGpu("numpy"), peers.PEERS, repeats=1)
    assert {row["note"] for row in rows.values()} == {"needs torch with CUDA"}


def test_sdpa_is_right_on_dense_keys_and_refuses_the_rest():
    subjects = {name: SUBJECTS[name] for name in ("SDPA", "SDPA rows")}
    assert {row["note"] for row in measured(FakeGpu("torch"), subjects, EQUAL, 1).values()} == {None}
    ragged = "dense K and V have sequences of one length"
    assert {row["note"] for row in measured(FakeGpu("torch"), subjects, CELL, 1).values()} == {ragged}
    fp8 = Cell("x", (40,), 4, 2, 64, kv_dtype="fp8_e4m3")
    assert {row["note"] for row in measured(FakeGpu("torch"), subjects, fp8, 1).values()} == {"no fp8 K and V"}


class FakeFlashInfer:
    """Takes plan's arrays as FlashInfer's documentation says, and runs on the CPU."""

    def __init__(self, workspace, kv_layout, *, use_tensor_cores):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        self.kv_dtype = options["kv_data_type"]
        counts = indptr.diff()
        self.seq_lens = ((counts - 1) * page_size + last_page_len).int()
        self.tables = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        for i, count in enumerate(counts):
            self.tables[i, :count] = indices[indptr[i] : indptr[i + 1]]

    def run(self, q, kv):
        assert kv[0].dtype == self.kv_dtype
        kv_dtype = {torch.float8_e4m3fn: "fp8_e4m3"}.get(self.kv_dtype)
        k, v = (x.view(torch.uint8) if kv_dtype else x for x in kv)
        return pagedkv.decode_attention(q, k, v, self.tables, self.seq_lens, kv_dtype=kv_dtype)


@pytest.mark.parametrize("cell", [CELL, FP8], ids=str)
def test_flashinfer_gets_the_pages(monkeypatch, cell):
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = FakeFlashInfer
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE", 16)
    subjects = {name: SUBJECTS[name] for name in ("FlashInfer", "FlashInfer TC")}
    assert {row["note"] for row in measured(FakeGpu("torch"), subjects, cell, 1).values()} == {None}


@pytest.mark.parametrize(
    ("version", "package", "tables"), [(2, "flash_attn", "block_table"), (3, "flash_attn_interface", "page_table")]
)
def test_flash_attention_gets_the_pages(monkeypatch, version, package, tables):
    def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, **options):
        return pagedkv.decode_attention(q[:, 0], k, v, options.pop(tables), cache_seqlens, **options)[:, None]

    module = ModuleType(package)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, package, module)
    subjects = {"fa": SUBJECTS[f"FlashAttention {version}"]}
    assert measured(FakeGpu("torch"), subjects, CELL, 1)["fa"]["note"] is None
    assert measured(FakeGpu("torch"), subjects, FP8, 1)["fa"]["note"] == "no fp8 cache under 16-bit queries"


def test_the_fastest_configuration_is_chosen():
    gpu = FakeGpu()
    calls = [gpu.subject(name, milliseconds) for name, milliseconds in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    assert peers.fastest(gpu, calls) is calls[1]


def row(group, subject=FIRST, share=0.5, **changes):
    values = {"decode": group, "B": 1, "Hq": 1, "Hkv": 1, "D": 64, "L": "5", "P": 16, "q": "float16", "kv": "float16"}
    return values | {"subject": subject, "us": 10.0, "share": share, f"x {FIRST}": 1.0} | changes


def test_geometric_mean():
    rows = [row("kernelbench", share=share) for share in (0.5, 0.8, 0.9, 1.0, 0.2)]
    rows += [row("kernelbench", "peer", share=share) for share in (0.5, None, 0.9, 1.0, 0.2)] + [row("fp8")]
    own, peer = decode.means(rows)
    assert own["share"] == pytest.approx((0.5 * 0.8 * 0.9 * 1.0 * 0.2) ** 0.2)
    assert (own["subject"], own["timed"], peer["timed"], peer["share"]) == (FIRST, 5, 4, None)
    assert math.isclose(own["share"], np.exp(np.log([0.5, 0.8, 0.9, 1.0, 0.2]).mean()))


def test_targets():
    rows = [row("headline", share=0.95), row("headline", share=0.91), row("pages", P=1, us=10.9), row("pages", us=10.0)]
    rows += [row("kernelbench", share=0.81)] * 5 + [row("headline", "Triton", **{f"x {FIRST}": 0.9, "L": "77"})]
    rows += [row("headline", "v1", **{f"x {FIRST}": 0.5})]
    launch = {"launch": FIRST, "host us": 15.0, "replay adds us": 3.5, "note": None}
    results = {each["target"]: each for each in decode.targets(rows, [launch])}
    assert [each["reached"] for each in results.values()] == ["no", "yes", "yes", "yes", "no", "no"]
    assert results["headline, least share"]["measured"] == 0.91
    assert results["time of P = 1 over P = 16"]["measured"] == pytest.approx(1.09)
    beaten = results[f"least time of a peer over {FIRST}'s"]
    assert (beaten["measured"], beaten["where"].split()[0]) == (0.9, "Triton")
    assert "77" in beaten["where"]
    assert decode.targets([row("headline", us=None, share=None)], []) == []


def test_what_a_launch_costs(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setitem(SUBJECTS, "slow", lambda problem: gpu.subject("slow", 0.5))
    problem = Problem(gpu, HostProblem(EQUAL))
    result = decode.launch_row(gpu, "slow", problem, 2)
    assert {key: result[key] for key in ("call us", "replay us", "kernel us")} == pytest.approx(
        {"call us": 500, "replay us": 500, "kernel us": 500}
    )
    assert result["replay adds us"] == pytest.approx(0)
    assert result["host us"] > 0

    def capture(call, times):
        raise RuntimeError("cannot be captured")

    monkeypatch.setattr(gpu, "capture", capture)
    assert decode.launch_row(gpu, "slow", problem, 2)["note"] == "RuntimeError: cannot be captured"


@pytest.fixture
def fake_gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(decode, "open_gpu", lambda copy_bytes: gpu)
    return gpu


def test_a_quick_run_has_everything(fake_gpu):
    rows = decode.run(repeats=1, progress=quietly, quick=True)
    kinds = [next(iter(row)) for row in rows]
    assert kinds == ["device"] + ["decode"] * 4 * len(SUBJECTS) + ["launch"] * len(peers.OURS)
    assert list(rows[1])[-1] == "note"
    assert rows[0]["read GB/s"] == pytest.approx(fake_gpu.copy_bytes / READ_MS / 1e6)
    assert rows[0]["copy GB/s"] == pytest.approx(2 * fake_gpu.copy_bytes / COPY_MS / 1e6)
    assert rows[0]["empty us"] == 0
    assert {row["note"] for row in rows if row.get("subject") in peers.OURS} == {None}


def test_what_is_not_installed_is_said_once(fake_gpu, monkeypatch):
    monkeypatch.setattr(fake_gpu, "framework", "torch")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    rows = decode.run(repeats=1, progress=quietly, quick=True, groups=["lengths"], subjects=["v1", "FlashInfer"])
    assert [(row["subject"], row["note"]) for row in rows[1:]] == [
        ("v1", None),
        ("FlashInfer", "flashinfer is not installed"),
        ("v1", None),
    ]


def test_groups_and_subjects_are_chosen(fake_gpu):
    rows = decode.run(repeats=1, progress=quietly, quick=True, groups=["fp8"], subjects=["v1", "SDPA"])
    assert [row.get("subject") for row in rows] == [None, "v1", "SDPA"]
    rows = decode.run(repeats=1, progress=quietly, quick=True, groups=["launch"], subjects=["v1"])
    assert [row.get("launch") for row in rows] == [None, "v1"]


def test_command_line(fake_gpu, capsys):
    assert main(["bench", "decode", "--quick", "--repeats", "1", "--json", "--only", "ragged", "--subjects", "v2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row.get("subject") for row in rows] == [None, "v2"]


def test_ctrl_c_leaves_what_has_been_measured(fake_gpu, monkeypatch, capsys):
    measure, done = decode.measure, []

    def interrupted(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(True)
        return measure(*arguments)

    monkeypatch.setattr(decode, "measure", interrupted)
    assert main(["bench", "decode", "--quick", "--repeats", "1", "--json", "--subjects", "v1", "v2"]) == 130
    captured = capsys.readouterr()
    assert [row.get("subject") for row in json.loads(captured.out)["rows"]] == [None, "v1", "v2"]
    assert "interrupted" in captured.err


@pytest.mark.parametrize("what", ["decode", "prefill", "write"])
def test_command_line_without_a_gpu(monkeypatch, capsys, what):
    def capabilities():
        raise pagedkv.BackendUnavailableError("there is no GPU here")

    monkeypatch.setattr("pagedkv.cuda.driver.capabilities", capabilities)
    assert main(["bench", what]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "there is no GPU here" in captured.err
    assert "bench cpu" in captured.err


@pytest.mark.parametrize("wrong", [["--only", "foo"], ["--subjects", "foo"]])
def test_command_line_refuses_unknown_names(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "decode", *wrong])
    assert "foo" in capsys.readouterr().err


@pytest.mark.gpu
def test_quick_on_a_gpu(capsys):
    assert main(["bench", "decode", "--quick", "--repeats", "2", "--json", "--subjects", *peers.OURS, "Triton"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["read GB/s"] > rows[0]["copy GB/s"] / 2 > 0
    ours = [row for row in rows if row.get("subject") in peers.OURS]
    assert [row["note"] for row in ours] == [None] * len(ours)
    assert all(row["us"] > 0 and row["share"] > 0 for row in ours)
    assert [row["note"] for row in rows if "launch" in row] == [None] * len(peers.OURS)
