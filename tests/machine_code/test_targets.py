"""Targets: which rows each of them is about, and the worst of these."""

import json
from pathlib import Path

from .__main__ import CAPABILITIES
from .targets import targets
from .variants import variants

RECORD = Path(__file__).with_name("record.json")


def test_a_target_that_is_missed_is_named():
    row = {"kernel": "v1", "q": "float16", "kv": "float16", "D": 64, "P": 8, "case": "-", "cc": "9.0"}
    row |= {"spill B": 0, "stack B": 0, "K sectors": 1.0, "V sectors": None, "K load B": 16}
    split = row | {"kernel": "split", "G": 9, "cc": "9.0", "loop instr/512B": 60.5, "KV in flight KiB": 47}
    bad = row | {"D": 128, "spill B": 8, "K load B": 4, "K sectors": 1.06}
    exempt = row | {"D": 512, "spill B": 16}
    named = {row["target"]: row for row in targets([row, bad, exempt, split])}
    for target in ("split: loop", "split: KV in flight KiB"):
        assert (named[target]["reached"], named[target]["misses"], named[target]["rows"]) == ("no", 1, 1)
    assert "V sectors" not in named
    assert (named["stack B"]["reached"], named["stack B"]["misses"], named["stack B"]["rows"]) == ("yes", 0, 2)
    for target, worst in (("spill B", 8), ("K load B", 4), ("K sectors", 1.06)):
        assert (named[target]["worst"], named[target]["reached"], named[target]["misses"]) == (worst, "no", 1)
        assert named[target]["worst row"] == "v1 float16 float16 128 8 - 9.0"


def test_prefill_in_fp8_is_held_against_16_bits_and_options_to_128_dims_must_not_spill():
    half = {"kernel": "prefill", "q": "float16", "kv": "float16", "D": 64, "G": 4, "P": 16, "case": "-", "cc": "9.0"}
    half |= {"spill B": 0, "stack B": 0, "other/mma": 3.0, "ldmatrix/mma": 0.3, "blocks/SM": 2}
    fp8 = half | {"kv": "fp8_e4m3", "other/mma": 3.75}
    spills = [half | {"D": dims, "case": "score_mod", "spill B": 4} for dims in (128, 256)]
    named = {row["target"]: row for row in targets([half, fp8, *spills])}
    more = named["prefill: other instructions per mma, fp8, more"]
    assert (more["worst"], more["reached"], more["rows"]) == (0.75, "no", 1)
    assert (named["prefill: spill B"]["misses"], named["prefill: spill B"]["rows"]) == (1, 3)


def test_the_record_has_all_variants_and_reaches_every_target():
    counted = [row for row in json.loads(RECORD.read_text())["rows"] if "kernel" in row]
    assert len(counted) == sum(variant.suits(capability) for variant in variants() for capability in CAPABILITIES)
    assert [row["target"] for row in targets(counted) if row["reached"] != "yes"] == []
