"""Targets: which rows each of them is about, and the worst of these."""

from pagedkv.bench.static.targets import targets


def test_a_target_that_is_missed_is_named():
    row = {"kernel": "v1", "q": "float16", "kv": "float16", "D": 64, "P": 8, "case": "-", "cc": "9.0"}
    row |= {"spill B": 0, "stack B": 0, "K sectors": 1.0, "V sectors": None, "K load B": 16}
    split = row | {"kernel": "split", "G": 9, "cc": "9.0", "loop instr/512B": 20.5, "KV in flight KiB": 63}
    bad = row | {"D": 128, "spill B": 8, "K load B": 4, "K sectors": 1.06}
    exempt = row | {"D": 512, "spill B": 16}
    named = {row["target"]: row for row in targets([row, bad, exempt, split])}
    for target in ("split: loop, 16 bits, G 9 to 16", "split: KV in flight KiB"):
        assert (named[target]["reached"], named[target]["misses"], named[target]["rows"]) == ("no", 1, 1)
    assert "split: loop, 16 bits, G 1 to 8" not in named
    assert "V sectors" not in named
    assert (named["stack B"]["reached"], named["stack B"]["misses"], named["stack B"]["rows"]) == ("yes", 0, 2)
    for target, worst in (("spill B", 8), ("K load B", 4), ("K sectors", 1.06)):
        assert (named[target]["worst"], named[target]["reached"], named[target]["misses"]) == (worst, "no", 1)
        assert named[target]["worst row"] == "v1 float16 float16 128 8 - 9.0"
