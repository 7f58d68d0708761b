"""The scheduler, the engine and the integration with transformers."""

from .mutant import Mutant

CACHE = "tests/integrations/transformers/test_cache.py::"
ENGINE = "tests/integrations/transformers/test_engine.py::"
HYBRIDS = "tests/integrations/transformers/test_hybrids.py::"
LOGPROBS = "tests/integrations/transformers/test_logprobs.py::"
RANKS = "tests/integrations/transformers/test_ranks.py::"
MACHINE = "tests/scheduling/test_machine.py::TestPlainMachine"
FINDS_NOTHING = "test_a_request_that_finds_nothing_computes_all_beside_the_others_and_they_find_it"
PREEMPTED = "tests/scheduling/test_scheduler.py::test_the_first_request_is_never_preempted_and_no_other_one_is_lost"
SWAPPING = "tests/scheduling/test_swapping.py::"

MUTANTS = [
    Mutant(
        "scheduler: the oldest request is preempted first",
        "self._preempt(running.requests[running.lanes[-1]])",
        "self._preempt(running.requests[running.lanes[0]])",
        PREEMPTED,
    ),
    Mutant(
        "scheduler: a step exceeds the token budget",
        "np.maximum(self.budget - len(more) - before, 0)",
        "np.maximum(self.budget - before, 0)",
        MACHINE,
    ),
    Mutant(
        "scheduler: a chunk is sampled before its prompt ends",
        "is_sampled = ends == running.lens[lanes]",
        "is_sampled = ends >= running.lens[lanes] - 1",
        MACHINE,
    ),
    Mutant(
        "scheduler: a preempted request is lost",
        "        self._waiting.push(request)\n        self.num_preempted += 1\n",
        "        self.num_preempted += 1\n",
        PREEMPTED,
    ),
    Mutant(
        "scheduler: a request starts in blocks that others have reserved",
        "reserve = reserved + (self._watermark if len(running) else 0)",
        "reserve = self._watermark if len(running) else 0",
        MACHINE,
    ),
    Mutant(
        "scheduler: requests that decode reserve blocks for a chunk",
        "self.peaks(num_tokens, np.minimum(chunk, num_tokens - num_computed), keep)",
        "self.peaks(num_tokens, chunk, keep)",
        "tests/scheduling/test_windows.py::test_those_that_decode_reserve_no_chunk",
    ),
    Mutant(
        "scheduler: blocks that windows pass count until the end of a prompt",
        "int(np.minimum(num_taken, rows.groups.peaks(num_tokens, chunk, rows.keep)).sum())",
        "int(num_taken.sum())",
        "tests/scheduling/test_windows.py::test_a_request_that_just_fits_ends",
    ),
    Mutant(
        "scheduler: blocks of an aborted request are free during its step",
        "if found.lane != NOT_RUNNING and self._step is not None:",
        "if False:",
        "tests/scheduling/test_scheduler.py",
    ),
    Mutant(
        "swapping: what comes back costs nothing",
        "_typical(self._out) + missing * _typical(self._in)",
        "_typical(self._out)",
        SWAPPING + "test_a_token_costs_what_a_step_with_chunks_takes_longer",
    ),
    Mutant(
        "swapping: a swap that did not pay is never tried again",
        "if self._num_refused == _TRY_AGAIN:",
        "if False:",
        SWAPPING + "test_a_swap_is_tried_again_after_16_that_were_not",
    ),
    Mutant(
        "swapping: restart keeps copies of other tokens",
        "ids_of(tokens[number]), NOT_RUNNING, None",
        "ids_of(tokens[number]), NOT_RUNNING, request.copy",
        SWAPPING + "test_restart_computes_what_is_out_again_with_other_tokens",
    ),
    Mutant(
        "engine: tokens with logits that are not finite enter the prefix cache",
        "kept, first = stops - 1,",
        "kept, first = step.logits_indices,",
        "tests/integrations/transformers/test_engine_errors.py::test_keys_that_are_not_finite_are_never_found",
    ),
    Mutant(
        "scheduler: a request that must compute all of its prompt waits for what it will not take",
        "self._cache.prefix_cache or not request.finds or",
        "self._cache.prefix_cache or",
        "tests/scheduling/test_scheduler.py::" + FINDS_NOTHING,
    ),
    Mutant(
        "scheduler: a request that must compute all of its prompt takes what is found",
        "find(rows, prompt) if find_any else NO_HIT",
        "find(rows, prompt)",
        "tests/scheduling/test_scheduler.py::" + FINDS_NOTHING,
    ),
    Mutant(
        "engine: log-probabilities of a prompt are those of the token before",
        "at = len(request.prompt_logprobs) + 1",
        "at = len(request.prompt_logprobs)",
        LOGPROBS + "test_they_are_those_of_the_model[in chunks]",
    ),
    Mutant(
        "engine: log-probabilities of a token are those behind penalties",
        "rows = logits[[last[number] for number in wanted]]",
        "rows = logits[[last[number] for number in wanted]] / 2",
        LOGPROBS + "test_they_are_those_of_the_model[together]",
    ),
    Mutant(
        "engine: penalties count the tokens of the prompt",
        "counts = Counter(self.tokens)",
        "counts = Counter(self.all_tokens.tolist())",
        "tests/integrations/transformers/test_engine_options.py::test_penalties_are_those_of_openai[2.0-0.0]",
    ),
    Mutant(
        "engine: all texts of a prompt draw with one seed",
        'as_int("seed", options["seed"]) + i',
        'as_int("seed", options["seed"])',
        "tests/integrations/transformers/test_generate.py::test_several_texts_of_a_prompt",
    ),
    Mutant(
        "engine: a text goes on after its end token",
        "                self.scheduler.abort(number)\n            if reason:",
        "                pass\n            if reason:",
        ENGINE + "test_end_tokens_end_a_text",
    ),
    Mutant(
        "engine: a step that failed is not dropped",
        "            self.scheduler.drop()\n",
        "            pass\n",
        ENGINE + "test_a_request_of_a_step_that_failed_can_be_aborted",
    ),
    Mutant(
        "engine: requests share their random draws",
        "samplings[i].draw(places[i]) for i in rows",
        "samplings[rows[0]].draw(places[i]) for i in rows",
        ENGINE + "test_draws_depend_on_the_seed_alone",
    ),
    Mutant(
        "transformers: an interrupted forward leaves its tokens in the cache",
        "        self.kv.truncate(self.seqs, self._before)\n",
        "",
        CACHE + "test_a_pass_that_is_interrupted_is_undone",
    ),
    Mutant(
        "transformers: rows of padding are in the batch",
        "attention_mask[:, -length:].bool().flatten()",
        "torch.ones_like(attention_mask[:, -length:]).bool().flatten()",
        CACHE + "test_generate_gives_the_text_of_eager_attention",
    ),
    Mutant(
        "transformers: a layer attends as what its module says",
        'getattr(module, "layer_idx", None) if self._updated is None else self._updated',
        'getattr(module, "layer_idx", None)',
        "tests/integrations/transformers/test_families.py::test_each_family_generates_what_eager_attention_does[cpu-HrmText]",
    ),
    Mutant(
        "transformers: a layer attends twice",
        "        if layer in self._attended:\n",
        "        if False:\n",
        "tests/integrations/transformers/test_running.py::test_layers_that_a_cache_has_no_room_for_are_refused[twice-step]",
    ),
    Mutant(
        "transformers: rejected draft tokens stay in the cache",
        "length + tokens_to_remove, lengths",
        "length + tokens_to_remove, lengths - tokens_to_remove",
        CACHE + "test_rejected_drafts_are_truncated[prompt lookup]",
    ),
    Mutant(
        "transformers: an interrupted pass leaves its tokens in the cache",
        "self.seqs, self._before, self._next_length = seqs, self.kv.seq_lens(seqs), self.length + length",
        "self.seqs, self._before, self._next_length = seqs, self.kv.seq_lens(seqs) + length, self.length + length",
        CACHE + "test_after_an_interrupt_at_any_instant_rows_have_as_many_tokens_as_the_cache_says[pass]",
    ),
    Mutant(
        "transformers: the full layers of an older configuration are one layer off",
        "[_SLIDING if (layer + 1) % every else _FULL",
        "[_SLIDING if layer % every else _FULL",
        "tests/test_layer_windows.py::test_windows",
    ),
    Mutant(
        "hybrids: requests that begin share a pass with others that go on",
        "kinds = np.stack([counts, self._kv.state_lens(step.seqs) > 0])",
        "kinds = np.stack([counts, counts])",
        HYBRIDS + "test_requests_that_begin_and_go_on_in_one_step",
    ),
    Mutant(
        "hybrids: a state that is not finite becomes a snapshot",
        "finite &= of_all.isfinite().flatten(1).all(dim=1)",
        "finite &= True",
        HYBRIDS + "test_a_state_that_is_not_finite_is_no_snapshot",
    ),
    Mutant(
        "hybrids: a pass counts as done before its states are stored",
        "if self._states.layers and (self.kv.state_lens(self.seqs) != self._before).any():",
        "if False:",
        HYBRIDS + "test_an_interrupt_while_states_are_stored_asks_for_a_reset",
    ),
    Mutant(
        "ranks: a cache has as many blocks as its own rank has room for",
        "if fewest < made.pool.num_blocks:",
        "if False:",
        RANKS + "test_all_ranks_have_as_many_blocks_as_the_smallest",
    ),
    Mutant(
        "ranks: each has all KV heads",
        "_num_kv_heads(config) // heads_divided_by(model)",
        "_num_kv_heads(config)",
        RANKS + "test_a_rank_has_its_share_of_the_heads_that_the_plan_divides",
    ),
]
