"""The prefill kernels; the tests run in the emulator."""

from .mutant import Mutant

PREFILL = "tests/kernels/prefill/test_prefill.py::"
SPLIT = "tests/kernels/prefill/test_split.py::"
FORM = PREFILL + "test_every_form_meets_the_error_bound[emulator-tensor cores]"
PIVOTS = "tests/kernels/prefill/test_invariance.py::test_pivots_that_move_leave_other_rows_alone[emulator-tensor cores]"
SPLIT_FORM = SPLIT + "test_every_form_meets_the_error_bound[emulator-tensor cores]"
SPLIT_NEEDLE = SPLIT + "test_a_needle_is_found_at_the_ends_of_tiles_parts_and_splits[emulator-tensor cores]"

MUTANTS = [
    Mutant(
        "prefill: no barrier before a tile is used",
        "            wait_all()\n            cuda.syncthreads()\n            is_followed",
        "            wait_all()\n            is_followed",
        FORM,
    ),
    Mutant(
        "prefill: nobody waits for the copies of a tile",
        "            wait_all()\n            cuda.syncthreads()\n            is_followed",
        "            cuda.syncthreads()\n            is_followed",
        FORM,
    ),
    Mutant(
        "prefill: no barrier after fp8 rows are converted",
        "lane, warp)\n                cuda.syncthreads()\n            elif",
        "lane, warp)\n            elif",
        PREFILL + "test_every_form_meets_the_error_bound[emulator-fp8]",
    ),
    Mutant(
        "prefill: the pivot of a row moves with its neighbour's",
        "        new = multiply_and_add(float32(-largest), unit, BIAS) if is_above else old\n",
        "        new = multiply_and_add(float32(-largest), unit, BIAS)\n",
        PIVOTS,
    ),
    Mutant(
        "prefill: the output is not rescaled when the pivot moves",
        "            rescale(registers)\n\n    return update_pivots\n",
        "\n    return update_pivots\n",
        PIVOTS,
    ),
    Mutant(
        "prefill: lengths out of range are not checked",
        "is_valid = length <= uint32(max_seq_len) and query_len <= length",
        "is_valid = True",
        "tests/kernels/prefill/test_tables.py::test_a_length_that_is_not_looked_at_harms_nobody[emulator-tensor cores]",
    ),
    Mutant(
        "prefill split: K is used before other lanes have copied it",
        "            sync_lanes(warp)\n            multiply_keys",
        "            multiply_keys",
        SPLIT_FORM,
    ),
    Mutant(
        "prefill split: the second piece of a tile is the first one again",
        "uint32(first + PIECE * i)",
        "first",
        SPLIT_NEEDLE,
    ),
    Mutant(
        "prefill split: states are merged without their pivots",
        "            weight = weight_of(pivot, maximum)\n",
        "            weight = float32(1)\n",
        SPLIT_NEEDLE,
    ),
    Mutant(
        "wgmma: copies are not fenced before the products",
        "        wait_all()\n        fence_proxy()\n        cuda.syncthreads()\n",
        "        wait_all()\n        cuda.syncthreads()\n",
        "tests/kernels/prefill/test_wgmma.py::test_a_prompt_of_several_tiles_of_rows_and_keys[emulator-64 dims]",
    ),
]
