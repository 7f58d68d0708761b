"""Kernels of several commits side by side, tried where there is no GPU: recordings, launches, rows, the model."""

import gzip
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import pagedkv
from pagedkv.bench.gpu import measure
from pagedkv.bench.problem import Cell
from pagedkv.cuda import driver

from ..support.device_fakes import InterfaceArray, recording
from ..support.strategies import long
from . import recordings, variants
from .record import Recorder
from .record import recording as record
from .test_harness import out as out  # a fixture

pytestmark = pytest.mark.usefixtures("without_lines")
# Kernels that the families have compiled.
STEP, CHUNK = Cell("decode", (40, 7), 8, 2, 64), Cell("chunk", (70, 33), 6, 2, 64, dtype="float32", query_lens=(40, 3))


def leave(folder, names, cells, change=lambda name, recorded: None):
    """A recording of this checkout for each name."""
    recorded = json.dumps(record(recordings.recorded_of(cells)))
    for i, name in enumerate(names):
        of_name = json.loads(recorded)
        change(name, of_name)
        with gzip.open(folder / f"{i}-{name}{recordings.SUFFIX}", "wt") as file:
            json.dump({"name": name, **of_name}, file)


@pytest.fixture
def folder(out, monkeypatch):
    """Where recordings are, also of kernels without code; a sample is one launch."""
    monkeypatch.setattr(Recorder, "blocks_at_once", lambda self, kernel, shared_bytes: 2 * 132)
    monkeypatch.setattr(variants, "folder_of", lambda is_dry: out)
    monkeypatch.setattr(variants, "REPEATS", 2)
    monkeypatch.setattr(measure, "MOST_LAUNCHES", 1)
    return out


def rows(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def double_scale(name, recorded):
    """Change the scale of the first launch of "b"; its bits are the argument that they are in."""
    bits = int(np.float32(64**-0.5).view(np.uint32))
    if name == "b":
        for of_operations in recorded["cells"].values():
            for of_operation in of_operations.values():
                args = of_operation["launches"][0][2]
                args[args.index(bits)] = int(np.float32(1.0).view(np.uint32))


@pytest.mark.parametrize(
    ("operation", "cell"),
    [
        ("decode", STEP),
        ("prefill", CHUNK),
        *long([("decode", recordings.DRY["few"][0]), ("prefill", recordings.DRY["prefill"][0])]),
    ],
    ids=str,
)
def test_variants_take_turns_beside_peers_and_a_wrong_one_has_no_time(folder, operation, cell):
    leave(folder, ["a", "b", "c"], [cell], double_scale)
    comparison = variants.Comparison(is_dry=True)
    comparison.clock = iter([1755, 1500, *[1755] * 99]).__next__
    comparison.compare(operation, cell)
    found = {row["subject"]: row for row in rows(folder)}
    assert {name: found[name]["same bits"] for name in "abc"} == {"a": True, "b": False, "c": True}
    assert found["b"]["us"] is None
    assert found["b"]["note"].startswith("wrong: error")
    names = ["a", "c", *(f"{name}, {variants.FEW}" for name in "ac" if cell.group == "few rows")]
    assert all(found[name]["us"] > 0 and found[name]["note"] is None for name in names)
    assert (found["a"]["B"], found["a"]["MHz"], found["a"]["least MHz"]) == (len(cell.seq_lens), 1755, 1500)
    assert found["cuDNN" if operation == "decode" else "cuDNN dense"]["note"] is not None


def test_the_same_bits_again_and_again(folder):
    leave(folder, ["a", "b"], [STEP], double_scale)
    assert variants.Comparison(is_dry=True).same([STEP], 2)
    assert [(row["variant"], row["differ"], row["as the first"]) for row in rows(folder)] == [
        ("a", 0, True),
        ("b", 0, False),
    ]


def test_bits_that_differ_are_counted(folder, monkeypatch):
    leave(folder, ["a"], [STEP])
    comparison, calls = variants.Comparison(is_dry=True), []

    def call(variant, operation, problem):
        def noisy():
            calls.append(problem.new_out() + (len(calls) == 4))
            return calls[-1]

        return noisy

    monkeypatch.setattr(comparison, "call", call)
    assert not comparison.same([STEP], 3)
    assert [row["differ"] for row in rows(folder)] == [1]


def named(args):
    """Arguments of a launch, without addresses."""
    return [None if isinstance(x, int) and x >= 1 << 40 else x for x in args]


@pytest.mark.parametrize("cell", [STEP, CHUNK, Cell("x", (9000, 40), 16, 4, query_lens=(3, 2))], ids=str)
def test_what_is_launched_on_a_gpu_is_what_a_call_with_its_arrays_launches(folder, monkeypatch, cell):
    (operation,) = recordings.operations(cell)
    with recording() as devices:
        leave(folder, ["a"], [cell])
        monkeypatch.setattr(variants, "open_gpu", lambda: SimpleNamespace(num_multiprocessors=132))
        monkeypatch.setattr(variants.Comparison, "_require_code", lambda self: None)
        monkeypatch.setattr(variants.torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
        comparison = variants.Comparison(is_dry=False)
        problem = variants.Drawn(variants.OnTheHost("torch"), cell, "cpu")
        result = comparison.call(comparison.variants[0], operation, problem)()
        given = [problem.q, *problem.nhd, problem.block_tables, problem.seq_lens, problem.query_starts]
        q, *rest = (InterfaceArray(x.numpy()) for x in given)
        call = pagedkv.decode_attention if operation == "decode" else pagedkv.prefill_attention
        call(q, *rest[: 4 if operation == "decode" else 5], out=InterfaceArray(result.numpy()))
        ours, theirs = devices[0, 7].launches, devices[0, 0].launches
    assert len(ours) == len(theirs)
    for (kernel, *own, shared_bytes), (other, *expected, expected_bytes) in zip(ours, theirs, strict=True):
        assert (kernel.entry, own[0], shared_bytes) == (other.entry, expected[0], expected_bytes)
        assert named(own[1]) == named(expected[1])
        assert result.data_ptr() in own[1] or kernel.entry == "pagedkv_prefill_split"


def test_as_many_thread_blocks_as_run_at_once_on_132_multiprocessors():
    """By registers: 3 blocks of 4 warps with 168 registers a thread, 2 with more."""

    def kernel(registers):
        resources = SimpleNamespace(registers=registers, shared_bytes=1024)
        return SimpleNamespace(num_threads=128, linked=SimpleNamespace(resources=lambda: resources))

    assert [Recorder().blocks_at_once(kernel(n), 512) for n in (168, 169)] == [3 * 132, 2 * 132]


def test_beside_decode_only_the_kernels_of_few_rows_are_launched(folder):
    """On 9.0 prefill launches wgmma's, too, whose thread blocks find nothing to do there."""
    cell = Cell("few rows", (600, 600), 8, 2)
    with recording():
        leave(folder, ["a"], [cell])
        (variant,) = recordings.recorded_variants(folder)
        launches = variant.bind(variant.of(cell, "prefill"), {})
    assert [kernel.entry for kernel, *_ in launches] == ["pagedkv_prefill_split", "pagedkv_prefill_merge"]


def test_what_a_driver_refuses_is_linked_here(folder, monkeypatch):
    leave(folder, ["a"], [STEP])
    comparison = variants.Comparison(is_dry=True)

    def kernel(compiled, shared_bytes):
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    gpu = SimpleNamespace(relaxed=nullcontext, kernel=kernel)
    monkeypatch.setattr(driver, "cuda_device", lambda ordinal, stream: SimpleNamespace(_gpu=gpu))
    comparison._require_code()
    assert rows(folder) == [{"note": "kernels are linked here: RuntimeError: CUDA_ERROR_NO_BINARY_FOR_GPU"}]
    assert {kernel._linked for kernel in comparison.variants[0].kernels} == {None}


def test_the_model_of_prefill():
    """T = a items + b tiles; the counts are those of a GPU of 132 multiprocessors."""
    prompts = [cell for cell in recordings.CELLS["prefill"] if cell.group == "prompt"]
    counts = [variants.tiles_of(cell) for cell in prompts]
    assert [round(of, 1) for pair in counts for of in pair] == [31.0, 139.6, 31.0, 512.0, 31.0, 2001.5]
    found = variants.fit({cell: (5.7 * a + 1.94 * b) * 1e-6 for cell, (a, b) in zip(prompts, counts, strict=True)})
    assert found == pytest.approx({"us an item": 5.7, "us a tile": 1.94, "worst error": 0}, abs=1e-9)


class FakeNvml:
    """As far as a clock needs it; the first clock that it says is that of graphics."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = 77
        return index

    def nvmlDeviceGetClockInfo(self, device, kind, megahertz):
        megahertz._obj.value = 1000 + 755 * kind
        return int(device.value != 77)


def test_the_clock_is_that_of_the_multiprocessors(monkeypatch):
    monkeypatch.setattr(variants.ctypes, "CDLL", lambda name: FakeNvml())
    assert variants.Clock()() == 1755
    monkeypatch.setattr(FakeNvml, "nvmlInit_v2", lambda self: 9)
    assert variants.Clock()() is None


@pytest.mark.long
@pytest.mark.skipif(not (recordings.ROOT / ".git").exists(), reason="no clone")
def test_a_commit_is_recorded_from_a_checkout_of_its_own(folder):
    (folder / f"0-old{recordings.SUFFIX}").touch()
    recordings.record(["HEAD"], [STEP], folder)
    (variant,) = recordings.recorded_variants(folder)
    assert [launch[2][0] for launch in variant.of(STEP, "decode")["launches"]] == [["out", 0]]


def test_nothing_is_compared_without_a_recording(folder):
    with pytest.raises(SystemExit, match="nothing is recorded"):
        variants.Comparison(is_dry=True)
