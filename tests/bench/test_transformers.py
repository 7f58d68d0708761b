"""The bench of models of transformers: both kinds of attention generate the same text."""

from pagedkv.bench import transformers


def test_rows_compare_texts_and_times_with_sdpa():
    told = []
    rows = transformers.run(repeats=1, progress=told.append, quick=True)
    assert [row["transformers"] for row in rows] == ["continuous batching", "Engine", "generate"]
    assert len(told) == 2
    for row in rows:
        assert row["same"]
        assert (row["pagedkv s"], row["sdpa s"]) == (min(row["pagedkv samples"]), min(row["sdpa samples"]))
        assert row["times"] == row["sdpa s"] / row["pagedkv s"]
