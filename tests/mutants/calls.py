"""What calls check and what is kept between them: plans, workspaces, compiled kernels, prepared attention."""

from .mutant import Mutant

GRAPHS = "tests/cuda/test_graphs.py::"
PREPARED = "tests/operations/test_prepared.py::"

MUTANTS = [
    Mutant(
        "the kernel cache trusts a folder below one that others may write to",
        "if of_others and not (is_above and facts.st_mode & stat.S_ISVTX):",
        "if of_others and not is_above:",
        "tests/compiling/test_private_folder.py::test_a_folder_that_others_can_replace_is_not_used",
    ),
    Mutant(
        "an interrupt arrives inside of a compilation",
        "start_new_thread(_do_work, (wanted, answers))",
        "_do_work(wanted, answers)",
        "tests/compiling/test_compile_thread.py::test_interrupted_work_is_finished_for_the_next_call",
    ),
    Mutant(
        "launches of two threads mix on one device",
        "    with device.lock:\n        yield device",
        "    if device.lock:\n        yield device",
        "tests/cuda/plans/test_plan.py::test_the_launches_of_a_call_follow_each_other[merge]",
    ),
    Mutant(
        "a plan ends at the first bound of its bucket",
        "min(bucket(call.max_seq_len),",
        "min(call.max_seq_len,",
        "tests/cuda/plans/test_cache.py::test_a_decode_loop_of_1000_steps_makes_few_plans[int-split]",
    ),
    Mutant(
        "lengths on the host may exceed max_seq_len",
        "values.seq_lens(seq_lens, max_seq_len, capacity)",
        "values.seq_lens(seq_lens, capacity, capacity)",
        "tests/validation/test_attention.py::test_wrong_array",
    ),
    Mutant(
        "pinned memory is filled again while the GPU reads it",
        "        self._gpu.call(driver.cuEventSynchronize, half.event)\n",
        "",
        "tests/cuda/test_copies.py::test_what_is_sent_is_what_was_there_at_the_call",
    ),
    Mutant(
        "graphs share the workspaces of calls",
        "thread, gpu.is_captured(stream))",
        "thread, False)",
        GRAPHS + "test_torch_makes_graphed_callables",
    ),
    Mutant(
        "a workspace that a graph uses is freed when it is outgrown",
        "            if not self._for_graphs:\n                for workspace",
        "            if self:\n                for workspace",
        GRAPHS + "test_graphs_of_one_stream_share_workspaces_and_keep_those_that_were_outgrown",
    ),
    Mutant(
        "prepared attention serves layers with other options",
        ", *options, *chosen, *map(type, chosen)",
        "",
        PREPARED + "test_options_that_alternate",
    ),
    Mutant(
        "prepared attention does not notice that tables were written to",
        "tables = [(x.shape, x.dtype, x.tobytes()) for x in where.values()]",
        "tables = [(x.shape, x.dtype) for x in where.values()]",
        PREPARED + "test_chunks_of_prompts_are_validated_once_too",
    ),
    Mutant(
        "small arrays of the caller are not copied before they are checked",
        "return x.copy() if x is not None and self.on_host else x",
        "return x",
        "tests/validation/test_own_arrays.py",
    ),
]
