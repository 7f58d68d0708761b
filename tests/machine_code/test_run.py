"""What is counted of one variant of each kernel, and the command line."""

import json

import pytest

from pagedkv.kernels.split.config import MERGE_LOADS, NUM_THREADS

from . import __main__ as command
from .targets import targets
from .variants import WORK, quick_variants


@pytest.fixture(scope="module")
def rows():
    told = []
    rows = command.rows(quick_variants(), [(9, 0)], told.append, processes=1)
    assert len(told) == len(quick_variants())
    return rows


def test_each_quick_variant_has_a_row_and_no_spills(rows):
    counted = [row for row in rows if "kernel" in row]
    assert [row["kernel"] for row in counted] == [variant.kernel for variant in quick_variants()]
    assert {row["kernel"] for row in counted} == set(WORK)
    for row in counted:
        assert row["cc"] == "9.0"
        assert row["external"] == row["spill B"] == row["stack B"] == 0
        assert 16 <= row["registers"] <= (255 if row["kernel"].startswith("prefill") else 168)
        assert 1 <= row["blocks/SM"] <= 16
        assert row["limit"]
        assert row["instr/512B"] > 4


def test_split_is_within_its_targets(rows):
    row, short = (row for row in rows if row.get("kernel") == "split")
    assert row["KV sectors"] == short["KV sectors"] == 1
    assert row["KV in flight KiB"] >= row["blocks/SM"] * 32
    assert row["merge in flight KiB"] == NUM_THREADS * MERGE_LOADS * 16 / 1024
    assert row["wavefronts"] <= 1.1
    assert row["loop instr/512B"] <= 14
    assert row["instr/512B"] <= 30
    assert 0 < row["partials"] <= 0.04 < short["partials"] <= 0.13
    assert row["instr/512B"] < short["instr/512B"] <= 50


def test_prefill_is_within_its_targets(rows):
    (row,) = (row for row in rows if row.get("kernel") == "prefill")
    assert row["KV sectors"] == row["wavefronts"] == 1
    assert row["blocks/SM"] == 2
    assert row["other/mma"] <= 3.3
    assert row["ldmatrix/mma"] <= 0.32
    named = {row["target"]: row["reached"] for row in rows if "target" in row}
    assert named["prefill: other instructions per mma, D 64"] == "yes"


def test_prefill_of_few_rows_is_within_its_targets(rows):
    (row,) = (row for row in rows if row.get("kernel") == "prefill_split")
    assert row["KV sectors"] == 1
    assert row["wavefronts"] <= 1.01
    assert row["loop instr/512B"] <= 18
    assert 0 < row["partials"] <= 0.14  # a state of each warp, which a second launch merges


@pytest.mark.parametrize(("kernel", "dynamic", "v_bytes"), [("v1", 8192, 8), ("v2", 2048, 16)])
def test_attention_reads_what_it_needs_once(rows, kernel, dynamic, v_bytes):
    (row,) = (row for row in rows if row.get("kernel") == kernel)
    assert row["dynamic B"] == dynamic
    assert row["static B"] == 4 * (row["D"] + 8) + 16  # the query, two sums of each warp, and the length
    assert (row["K load B"], row["V load B"]) == (16, v_bytes)
    assert row["K sectors"] == row["V sectors"] == 1
    assert row["wavefronts"] >= 1
    # Each lane of 4 warps has asked for a vector, at the least.
    assert min(row["K in flight KiB"], row["V in flight KiB"]) >= row["blocks/SM"] * 128 * v_bytes / 1024


def test_helpers_move_what_they_need(rows):
    for row in rows:
        if row.get("kernel") in ("write_kv", "gather_kv", "copy_blocks", "merge_states"):
            assert row["read load B"] == 16
            assert 1 <= row["read sectors"] <= 2
            assert 1 <= row["written sectors"] <= 2


def test_quick_variants_reach_their_targets(rows):
    named = {row["target"]: row for row in targets([row for row in rows if "kernel" in row])}
    assert named == {row["target"]: row for row in rows if "target" in row}
    assert {"spill B", "stack B", "K sectors", "V sectors", "K load B", "external"} <= set(named)
    assert {row["reached"] for row in named.values()} == {"yes"}
    assert named["external"]["rows"] == len(quick_variants())


def test_command_line(monkeypatch, capsys):
    monkeypatch.setattr(command, "rows", lambda wanted, capabilities, _: [{"n": len(wanted), "cc": capabilities}])
    assert command.main(["--json", "--cc", "8.0", "10.0", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"n": len(quick_variants()), "cc": [[8, 0], [10, 0]]}]
    with pytest.raises(SystemExit):
        command.main(["--cc", "7.5"])
    assert "must be of 8.0, 9.0, 10.0, got 7.5" in capsys.readouterr().err
