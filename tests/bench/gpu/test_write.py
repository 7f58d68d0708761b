"""bench write: bytes to move, slots of tokens, and the count of wrong elements."""

import json

import numpy as np
import pytest

from pagedkv.__main__ import main
from pagedkv.bench.gpu import write
from pagedkv.bench.gpu.write import BLOCK_SIZE, CASES, QUICK_CASES, Case

from .fake_gpu import COPY_MS, FakeGpu


def quietly(text):
    return None


def test_traffic_is_read_once_and_written_once():
    assert Case("step", 10).num_bytes == 10 * 8 * 128 * 2 * (2 + 2)
    assert Case("step", 10, "fp8_e4m3").num_bytes == 10 * 8 * 128 * 2 * (2 + 1)


@pytest.mark.parametrize("case", [*CASES, *QUICK_CASES], ids=str)
def test_every_token_has_a_slot_of_its_own(case):
    slots = case.slots()
    assert slots.dtype == np.int64
    assert len(np.unique(slots)) == len(slots) == case.num_tokens
    assert slots.min() >= 0
    assert slots.max() < case.num_blocks * BLOCK_SIZE
    per_block = np.bincount(slots // BLOCK_SIZE)
    assert per_block.max() == (1 if case.name == "step" else min(BLOCK_SIZE, case.num_tokens))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("case", QUICK_CASES, ids=str)
def test_all_subjects_write_the_same_elements(framework, case):
    rows = {row["subject"]: row for row in write.measure(FakeGpu(framework), case, 1, quietly)}
    refused = rows.pop("torch index")
    assert {(row["error"], row["note"]) for row in rows.values()} == {(0, None)}
    if framework == "numpy":
        assert refused["note"] == "needs torch with CUDA"
    else:
        assert refused["note"] == ("no conversion to fp8" if case.kv_dtype else None)


def test_a_share_is_that_of_a_copy_which_reads_and_writes_too(monkeypatch):
    def write_kv(*args, **options):
        original(*args, **options)
        gpu.clock += 0.1

    gpu, original = FakeGpu(), write.write_kv
    monkeypatch.setattr(write, "write_kv", write_kv)
    row = write.measure(gpu, QUICK_CASES[0], 1, quietly)[0]
    assert row["GB/s"] == pytest.approx(QUICK_CASES[0].num_bytes / 0.1e6)
    assert row["copy us"] == pytest.approx(COPY_MS * 1e3 * QUICK_CASES[0].num_bytes / (2 * gpu.copy_bytes))
    assert row["share"] == pytest.approx(row["copy us"] / row["us"])


def test_a_wrong_element_is_counted_and_nothing_is_timed(monkeypatch):
    def write_kv(k, v, k_cache, v_cache, slots, **options):
        original(k, v, k_cache, v_cache, slots, **options)
        if options["layout"] == "HND":
            v_cache[0, 1, 2, 3] += 1

    original = write.write_kv
    problem = write._Problem(FakeGpu(), QUICK_CASES[0])
    monkeypatch.setattr(write, "write_kv", write_kv)
    layout, caches = write._pagedkv(problem, "HND")()
    monkeypatch.undo()
    assert problem.differing(layout, caches) == 1


def test_command_line(monkeypatch, capsys):
    gpu = FakeGpu()
    monkeypatch.setattr(write, "open_gpu", lambda copy_bytes: gpu)
    assert main(["bench", "write", "--quick", "--repeats", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row.get("write") for row in rows] == [None, *["step"] * 4, *["prompt"] * 4]


@pytest.mark.gpu
def test_quick_on_a_gpu(capsys):
    assert main(["bench", "write", "--quick", "--repeats", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    ours = [row for row in rows if row.get("subject") in ("NHD", "HND", "vllm")]
    assert [(row["error"], row["note"]) for row in ours] == [(0, None)] * 6
