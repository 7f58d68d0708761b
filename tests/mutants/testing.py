"""Mutants of the testing kit, and of what launches a kernel of the user's."""

from .mutant import Mutant

ALLOCATORS = "tests/testing/test_allocators.py"
MATCHING = "tests/testing/test_matching.py::test_wrong_functions_do_not"
RUN = "tests/emulator/test_run.py::test_"

MUTANTS = [
    Mutant(
        "testing: NaN is no error",
        "testing/error_rule.py",
        "assert error <= bound, _at_fault",
        "assert not error > bound, _at_fault",
        (MATCHING,),
    ),
    Mutant(
        "testing: arguments may be written to",
        "testing/matching.py",
        "assert _bytes(problem) == before",
        "assert _bytes(problem)",
        (MATCHING,),
    ),
    Mutant(
        "testing: a slow function has all its time spent on the first dtype",
        "testing/matching.py",
        "share=max(LEAST_SHARE, 1 / (len(forms) - i)),",
        "share=1,",
        ("tests/testing/test_matching.py::test_a_slow_function_meets_every_dtype_and_layout",),
    ),
    Mutant(
        "testing: an edit changes nothing",
        "testing/edits.py",
        "text = source.replace(old, new)",
        "text = source",
        ("tests/testing/test_edits.py",),
    ),
    Mutant(
        "testing: a failing test shows the emulator's own frames",
        "testing/plugin.py",
        "fault.__traceback__ = _without_ours(fault.__traceback__)",
        "_without_ours(fault.__traceback__)",
        ("tests/testing/test_plugin.py",),
    ),
    Mutant(
        "testing: an allocator may lose blocks",
        "testing/allocators.py",
        "assert used + num_free == self.num_blocks, (",
        "assert used + num_free <= self.num_blocks, (",
        (f"{ALLOCATORS}::test_each_mistake_is_found",),
    ),
    Mutant(
        "testing: an allocator that refuses may have changed something",
        "testing/allocators.py",
        "assert after == before",
        "assert after",
        (f"{ALLOCATORS}::test_what_a_refusal_leaves_is_looked_at",),
    ),
    Mutant(
        "fuzz: nothing was tried, and nothing failed",
        "testing/fuzzing/command.py",
        "if not counts.total():",
        "if False:",
        ("tests/testing/test_fuzz.py::test_where_nothing_is_tried_nothing_passes",),
    ),
    Mutant(
        "emulator.run: arrays without their strides",
        "emulator/run.py",
        "*arg.shape, *arg.strides]",
        "*arg.shape, *np.zeros(arg.shape, arg.dtype).strides]",
        (f"{RUN}arrays_of_any_strides_and_numbers",),
    ),
    Mutant(
        "emulator as a backend: what an array held in the call before",
        "emulator/device.py",
        "fresh.memory, fresh._arrays, fresh._scratch = _large_device(), {}, {}",
        "fresh._scratch = {}",
        (f"{RUN}what_is_checked_is_the_device_s",),
    ),
]
