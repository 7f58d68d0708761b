"""What calls check and what is kept between them: plans, workspaces, compiled kernels."""

from .mutant import Mutant

GRAPHS = "tests/cuda/test_graphs.py::"
BATCH_PLANS = "tests/operations/test_batch_plans.py::"
GPU_PLAN = "tests/cuda/plans/test_gpu_plan.py::"
DEVICE_BATCHES = "tests/cuda/plans/test_batch_plans.py::"

MUTANTS = [
    Mutant(
        "plans leave out the first key that rows see",
        "positions - self.before, 0 if",
        "positions - self.before + 1, 0 if",
        "tests/test_visible.py",
    ),
    Mutant(
        "the kernel cache trusts a folder below one that others may write to",
        "if of_others and not (is_above and facts.st_mode & stat.S_ISVTX):",
        "if of_others and not is_above:",
        "tests/kernel_cache/test_private_folder.py::test_a_folder_that_others_can_replace_is_not_used",
    ),
    Mutant(
        "an interrupt arrives inside of a compilation",
        "start_new_thread(_do_work, (wanted, answers))",
        "_do_work(wanted, answers)",
        "tests/kernel_cache/test_compile_thread.py::test_interrupted_work_is_finished_for_the_next_call",
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
        "a plan of a batch serves layers with other options",
        "settings = *options, *chosen, *map(type, chosen)  #",
        "settings = ()  #",
        BATCH_PLANS + "test_options_that_alternate",
    ),
    Mutant(
        "a plan of a batch does not notice that tables were written to",
        "tables = [(x.shape, x.dtype, x.tobytes()) for x in where.values()]",
        "tables = [(x.shape, x.dtype) for x in where.values()]",
        BATCH_PLANS + "test_chunks_of_prompts_are_validated_once_too",
    ),
    Mutant(
        "a plan is launched with a workspace that was freed",
        "bound.epoch == device.epoch",
        "bound.epoch <= device.epoch",
        GPU_PLAN + "test_a_workspace_that_has_moved_is_not_launched_with",
    ),
    Mutant(
        "two threads write into the parameters of one plan",
        "with device.lock:  # of the values, too",
        "if device.lock:  # of the values, too",
        GPU_PLAN + "test_two_threads_in_one_plan_do_not_mix_their_addresses",
    ),
    Mutant(
        "a plan writes its output over its input",
        "if facts != self._out_facts or not (plan is None or plan.overlaps_no_input(addresses)):",
        "if facts != self._out_facts:",
        GPU_PLAN + "TestLaunches::test_out_is_compared_with_the_inputs_each_time[torch]",
    ),
    Mutant(
        "a plan of a batch reads tables that have moved since",
        "key = caches_key, facts, *map(read, where.values()), bound,",
        "key = caches_key, facts, *map(type, where.values()), bound,",
        DEVICE_BATCHES + "test_tables_that_have_moved_are_found",
    ),
    Mutant(
        "an older batch reads the tables of a newer one",
        "        self.epoch += 1  # before anything is overwritten\n",
        "",
        DEVICE_BATCHES + "test_an_older_batch_is_refused",
    ),
    Mutant(
        "small arrays of the caller are not copied before they are checked",
        "return x.copy() if x is not None and self.on_host else x",
        "return x",
        "tests/validation/test_own_arrays.py",
    ),
]
