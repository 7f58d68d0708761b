"""The bench of the emulator: every row is there, and counts instructions of the emulator."""

import pytest

from pagedkv.__main__ import main
from pagedkv.bench import emulator


@pytest.mark.usefixtures("without_lines")
def test_rows(monkeypatch):
    """Prefill is compiled for 4 query heads of a KV head, as in other tests."""
    monkeypatch.setattr(emulator, "NUMS_SEQS", (1,))
    monkeypatch.setattr(emulator, "NUM_HEADS", 4)
    monkeypatch.setattr(emulator, "NUM_KV_HEADS", 1)
    monkeypatch.setattr(emulator, "NUM_PROMPTS", 1)
    monkeypatch.setattr(emulator, "SEQ_LEN", 32)
    told = []
    rows = emulator.run(repeats=1, progress=told.append)
    assert [row["emulator"] for row in rows] == [*emulator.OPTIONS] * 2
    assert {row["kernel"] for row in rows} == {"v1", "prefill"}
    assert len(told) == len(rows)
    for row in rows:
        assert row["num_seqs"] == 1
        assert 1e4 < row["instructions/s"] * row["ms"] / 1000 < 1e6


def test_command_line(monkeypatch, capsys):
    monkeypatch.setattr(emulator, "run", lambda *, repeats, progress: [{"repeats": repeats}])
    assert main(["bench", "emulator", "--csv", "--repeats", "3"]) == 0
    assert capsys.readouterr().out == "repeats\n3\n"
