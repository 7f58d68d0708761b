"""Streams, copies between host and device, and numba-cuda as the compiler."""

from .mutant import Mutant

PLANS = "tests/cuda/plans/test_cache.py::"
ATTENTION = "tests/cuda/plans/test_attention.py::"
READ = "tests/bench/gpu/test_read.py::test_every_byte_is_read_once_and_added_up"
GRID = "tests/kernels/split/test_split_plan.py::test_a_bound_leaves_few_thread_blocks_without_work"
COPIES = "tests/cuda/test_copies.py::"
GRAPHS = "tests/cuda/test_graphs.py::"
OVERRIDES = "tests/cuda/compiler/test_numba_overrides.py::"

MUTANTS = [
    Mutant(
        "a call's launches are mixed with those of another thread",
        "cuda/driver.py",
        "    with device.lock:\n        yield device",
        "    if device.lock:\n        yield device",
        ("tests/cuda/plans/test_plan.py::test_the_launches_of_a_call_follow_each_other[merge]",),
    ),
    Mutant(
        "a repeated call's launches are mixed with those of another thread",
        "cuda/plans/cache.py",
        "with device.lock:",
        "if device.lock:",
        ("tests/cuda/plans/test_plan.py::test_the_launches_of_a_call_follow_each_other[decode]",),
    ),
    Mutant(
        "launches end with the tables, whatever bound there is",
        "cuda/plans/plan.py",
        "min(bucket(call.max_seq_len), call.block_tables.shape[1] * call.spec.block_size, LONGEST)",
        "call.block_tables.shape[1] * call.spec.block_size",
        (GRID, ATTENTION + "test_a_bound_leaves_v1_little_shared_memory"),
    ),
    Mutant(
        "a plan of a bucket ends at the first bound that came",
        "cuda/plans/plan.py",
        "min(bucket(call.max_seq_len),",
        "min(call.max_seq_len,",
        (PLANS + "test_a_decode_loop_of_1000_steps_makes_few_plans[int-split]",),
        ci=True,
    ),
    Mutant(
        "a plan forgets that the tables end before the bucket",
        "cuda/plans/plan.py",
        "return min(bucket(call.max_seq_len), call.block_tables.shape[1] * call.spec.block_size, LONGEST)",
        "return bucket(call.max_seq_len)",
        (ATTENTION + "test_a_bound_beyond_the_tables_is_none[split]",),
    ),
    Mutant(
        "any bound repeats any call",
        "cuda/plans/cache.py",
        "        max_seq_len = bucket(int(max_seq_len))\n",
        "        max_seq_len = 0\n",
        (PLANS + "test_a_decode_loop_of_1000_steps_makes_few_plans[int-split]",),
    ),
    Mutant(
        "a negative bound has the bucket of a valid one",
        "buckets.py",
        "    if num_tokens < 0:\n",
        "    if num_tokens is None:\n",
        (PLANS + "test_a_wrong_bound_between_good_ones",),
    ),
    Mutant(
        "lengths on the host may be beyond the bound",
        "validation/attention.py",
        "values.seq_lens, max_seq_len, form.capacity)",
        "values.seq_lens, form.capacity, form.capacity)",
        ("tests/validation/test_attention.py::test_wrong_array",),
    ),
    Mutant(
        "tables on a device are as wide as they are used",
        "memory/device/batch.py",
        "tables.update(block_tables, room)",
        "tables.update(block_tables)",
        ("tests/memory/device/test_mirror.py::test_tables_on_a_device_change_their_shape_once_for_each_doubling",),
    ),
    Mutant(
        "the read leaves out a turn",
        "kernels/read.py",
        "for turn in range(TURNS):",
        "for turn in range(TURNS - 1):",
        (READ,),
    ),
    Mutant(
        "warps of the read are one vector apart",
        "kernels/read.py",
        "ROW_BYTES = NUM_THREADS // WARP_SIZE, 4 * LOADS, NUM_THREADS * 16",
        "ROW_BYTES = NUM_THREADS // WARP_SIZE, 4 * LOADS, NUM_THREADS * 16 - 16",
        (READ,),
    ),
    Mutant(
        "shares of decode are of the copy",
        "bench/gpu/decode.py",
        "result.columns(name, cell.num_bytes, READ)",
        'result.columns(name, cell.num_bytes, "copy")',
        ("tests/bench/gpu/test_decode.py::test_time_becomes_bandwidth_and_a_share_of_what_reading_has",),
    ),
    Mutant(
        "pinned memory is filled again while the GPU reads it",
        "cuda/copies.py",
        "        self._gpu.call(driver.cuEventSynchronize, half.event)\n",
        "",
        (COPIES + "test_what_is_sent_is_what_was_there_at_the_call",),
    ),
    Mutant(
        "what has arrived in one half of the pinned memory is forgotten",
        "cuda/copies.py",
        "for _ in self._halves:",
        "for _ in self._halves[:1]:",
        (COPIES + "test_pageable_memory_is_filled_when_the_call_returns",),
    ),
    Mutant(
        "graphs and calls share workspaces",
        "cuda/driver.py",
        "thread, gpu.is_captured(stream))",
        "thread, False)",
        (GRAPHS + "test_torch_makes_graphed_callables", GRAPHS + "test_cupy_captures_on_the_stream_of_calls"),
        ci=True,
    ),
    Mutant(
        "what a graph may use is freed when it is outgrown",
        "cuda/driver.py",
        "            if before and not self._for_graphs:\n                self._free(",
        "            if before:\n                self._free(",
        (GRAPHS + "test_graphs_of_one_stream_share_workspaces_and_keep_those_that_were_outgrown",),
    ),
    Mutant(
        "what a graph uses is released",
        "cuda/driver.py",
        "        if self._for_graphs:\n            return 0\n",
        "",
        (GRAPHS + "test_graphs_of_one_stream_share_workspaces_and_keep_those_that_were_outgrown",),
    ),
    Mutant(
        "a thread inherits workspaces of one that has ended",
        "cuda/driver.py",
        "thread = _thread.token if",
        "thread = threading.get_ident() if",
        ("tests/cuda/test_driver.py::test_a_thread_gets_nothing_of_one_that_has_ended",),
    ),
    Mutant(
        "a report is taken while kernels are launched",
        "cuda/driver.py",
        "        with self.lock, self._gpu.relaxed():\n            address,",
        "        with self._gpu.relaxed():\n            address,",
        ("tests/cuda/test_driver.py::test_nothing_is_launched_between_the_copy_and_the_memset_of_a_report",),
    ),
    Mutant(
        "memory that cannot be zeroed is lost",
        "cuda/gpu.py",
        "            driver.cuMemFree(address)\n",
        "",
        ("tests/cuda/test_driver.py::test_memory_that_cannot_be_zeroed_is_freed",),
    ),
    Mutant(
        "a workspace is zeroed behind the host's back",
        "cuda/gpu.py",
        "            self.call(driver.cuStreamSynchronize, stream)\n",
        "",
        (GRAPHS + "test_torch_makes_graphed_callables",),
    ),
    Mutant(
        "a capture forbids to allocate and to load",
        "cuda/gpu.py",
        "self.call(exchange, relaxed.CU_STREAM_CAPTURE_MODE_RELAXED)",
        "self.call(exchange, relaxed.CU_STREAM_CAPTURE_MODE_RELAXED - 2)",
        (GRAPHS + "test_torch_captures_on_a_stream_that_no_call_has_seen",),
    ),
    Mutant(
        "a stream is asked about in a thread without a context",
        "cuda/gpu.py",
        "            if int(error) == 0:\n",
        "            if stream:\n",
        ("tests/cuda/test_driver.py::test_a_thread_without_a_context_gets_none",),
    ),
    Mutant(
        "copies are captured",
        "cuda/driver.py",
        "        if self._for_graphs:\n            raise",
        "        if not self:\n            raise",
        ("tests/cuda/test_driver.py::test_copies_are_not_captured",),
    ),
    Mutant(
        "PTX is for a linker as new as the compiler",
        "cuda/compiler/compile.py",
        "    ptx = with_lowest_version(ptx, capability)\n",
        "",
        ("tests/cuda/compiler/test_compile.py::test_a_kernel_says_what_it_is",),
    ),
    Mutant(
        "an operator has the type that it had for other scalars",
        "cuda/compiler/numba_overrides.py",
        "key = function, tuple(args)",
        "key = function",
        (OVERRIDES + "test_an_operator_is_typed_once_for_the_same_scalars",),
    ),
    Mutant(
        "arrays are taken for scalars",
        "cuda/compiler/numba_overrides.py",
        "            or not all(isinstance(arg, scalars) for arg in args)\n",
        "",
        (OVERRIDES + "test_what_is_no_operator_on_scalars_is_typed_each_time",),
    ),
    Mutant(
        "all types have the size of the first one",
        "cuda/compiler/numba_overrides.py",
        "        if kind not in known:\n",
        "        if not known.setdefault(kind, next(iter(known.values()), 0)):\n",
        (OVERRIDES + "test_the_size_of_a_type_is_asked_once",),
    ),
    Mutant(
        "numba-cuda keeps an override",
        "cuda/compiler/numba_overrides.py",
        "            delattr(owner, name)\n",
        "            setattr(owner, name, value)\n",
        (OVERRIDES + "test_numba_is_itself_after_a_compilation_and_after_an_error",),
    ),
]
