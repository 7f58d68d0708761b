"""Writing, gathering, copying and merging on the CPU, and who counts in a bench."""

from ..mutant import Mutant

WRITE = ("tests/cpu/test_blocks.py::test_write_oracle",)
ROUNDING = ("tests/cpu/test_blocks.py::test_fp8_rounding_of_every_16_bit_pattern",)
MERGE = ("tests/cpu/test_merge.py::test_oracle",)
TIMING = ("tests/bench/test_contest.py",)

MUTANTS = [
    Mutant(
        "write: slot 0 is skipped",
        "cpu/blocks.py",
        "kept = of_tokens >= 0",
        "kept = of_tokens > 0",
        WRITE,
    ),
    Mutant(
        "write: fp8 forgets the bits below the 16th",
        "cpu/blocks.py",
        "    low += np.uint32(0xFFFF)\n",
        "",
        ROUNDING,
    ),
    Mutant(
        "write: fp8 does not saturate",
        "cpu/blocks.py",
        "np.clip(values, -largest, largest).astype(dtype)",
        "values.astype(dtype)",
        ROUNDING,
    ),
    Mutant(
        "gather: k_scale for the values",
        "cpu/blocks.py",
        "(call.v_cache, call.v_scale, v)",
        "(call.v_cache, call.k_scale, v)",
        ("tests/cpu/test_blocks.py::test_gather",),
    ),
    Mutant(
        "copy: destination onto source",
        "cpu/blocks.py",
        "bits(destination), pairs[:, 1], bits(source)[pairs[:, 0]]",
        "bits(destination), pairs[:, 0], bits(source)[pairs[:, 1]]",
        ("tests/cpu/test_blocks.py::test_swap_blocks_between_pools",),
    ),
    Mutant(
        "merge_states: no shift by the largest",
        "cpu/merge.py",
        "top = np.where(top == -np.inf, np.float32(0), top)",
        "top = np.zeros_like(top)",
        ("tests/cpu/test_merge.py::test_large_lses_do_not_overflow",),
    ),
    Mutant(
        "merge_states: states without keys are multiplied, not left out",
        "cpu/merge.py",
        "term if weight.all() else np.where(weight[..., None] != 0, term, np.float32(0))",
        "term",
        ("tests/cpu/test_merge.py::test_a_state_without_keys_may_hold_anything",),
    ),
    Mutant(
        "merge_states: states count alike",
        "cpu/merge.py",
        "term = state.astype(np.float32) * weight[..., None]",
        "term = state.astype(np.float32) * (weight[..., None] > 0)",
        MERGE,
    ),
    Mutant(
        "bench: contestants that are wrong are timed",
        "bench/contest.py",
        "            if is_right(name, call):\n",
        "            if is_right(name, call) or True:\n",
        TIMING,
    ),
    Mutant(
        "bench: the last run of a cell counts",
        "bench/contest.py",
        "if largest < best:",
        "if True:",
        TIMING,
    ),
]
