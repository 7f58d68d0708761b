"""A model of transformers under the scheduler."""

from ..mutant import Mutant

TESTS = "tests/integrations/transformers/test_engine.py::"
ERRORS = "tests/integrations/transformers/test_engine_errors.py::"
INTERRUPTS = "tests/integrations/transformers/test_engine_interrupts.py"
ROOM = "integrations/transformers/"

MUTANTS = [
    Mutant(
        "engine: an interrupted call is not mended",
        ROOM + "engine.py",
        "            if self._is_torn:\n",
        "            if False:\n",
        (INTERRUPTS,),
    ),
    Mutant(
        "engine: the scheduler goes on before the tokens are kept",
        ROOM + "engine.py",
        """            commit([*writes, (vars(self), "_made", self._made + made)])
            self._update(step, tokens, made)
""",
        """            self._update(step, tokens, made)
            commit([*writes, (vars(self), "_made", self._made + made)])
""",
        (INTERRUPTS,),
    ),
    Mutant(
        "scheduler: an interrupt loses the sequence that was being started",
        "cache.py",
        "            writes.append((last, 0, seq))\n",
        "            pass\n",
        (INTERRUPTS,),
    ),
    Mutant(
        "engine: what is not finite is found again",
        ROOM + "engine.py",
        "step.batch.query_starts[1:].long() - 1",
        "step.logits_indices",
        (ERRORS + "test_nothing_that_is_not_finite_is_found_again",),
    ),
    Mutant(
        "engine: +inf is the most probable token",
        ROOM + "sampling.py",
        "logits.amax(-1).isfinite()",
        "logits.amax(-1).isnan().logical_not()",
        (ERRORS + "test_rows_that_no_token_can_be_chosen_from",),
    ),
    Mutant(
        "engine: what may become a text of stop goes out",
        ROOM + "text.py",
        "        return text[:cut]\n",
        "        return text\n",
        ("tests/integrations/transformers/test_engine_prompts.py::test_the_text_ends_before_the_first_stop",),
    ),
    Mutant(
        "engine: what is no character is decoded again and again",
        ROOM + "text.py",
        "if len(self._tokens) > _MOST_TOKENS:",
        "if False:",
        ("tests/integrations/transformers/test_text.py::test_a_token_takes_the_same_time_wherever_it_stands",),
    ),
    Mutant(
        "engine: a text goes on behind its end token",
        ROOM + "engine.py",
        "                self.scheduler.abort(number)\n            if reason:",
        "                pass\n            if reason:",
        (TESTS + "test_end_tokens_end_a_text",),
    ),
    Mutant(
        "engine: a stream that is left goes on",
        ROOM + "engine.py",
        "partial(self._left.append, number)",
        "partial(self._left.count, number)",
        (TESTS + "test_leaving_a_stream_and_cancel_free_the_blocks",),
    ),
    Mutant(
        "engine: a stream that is left in the middle of a step ends at once",
        ROOM + "engine.py",
        "partial(self._left.append, number)",
        "partial(self.cancel, number)",
        (TESTS + "test_a_stream_that_is_left_in_the_middle_of_a_step_ends_behind_it",),
    ),
    Mutant(
        "engine: a step that failed is not dropped",
        ROOM + "engine.py",
        "            self.scheduler.drop()\n",
        "            pass\n",
        (TESTS + "test_a_request_of_a_step_that_failed_can_be_cancelled",),
    ),
    Mutant(
        "engine: all tokens of a request share a draw",
        ROOM + "sampling.py",
        "counter=place",
        "counter=0",
        (TESTS + "test_draws_of_one_request_are_uniform",),
    ),
    Mutant(
        "engine: requests share their draws",
        ROOM + "sampling.py",
        "samplings[i].draw(places[i]) for i in rows",
        "samplings[rows[0]].draw(places[i]) for i in rows",
        (TESTS + "test_draws_depend_on_the_seed_alone",),
    ),
    Mutant(
        "engine: top_p is of all tokens and not of those that top_k leaves",
        ROOM + "sampling.py",
        "samplings], p) * whole)",
        "samplings], p))",
        (TESTS + "test_draws_follow_the_distribution",),
    ),
    Mutant(
        "engine: half a character is text",
        ROOM + "text.py",
        "if new and not new.endswith(INCOMPLETE):",
        "if new:",
        (TESTS + "test_text_comes_in_whole_characters",),
    ),
    Mutant(
        "engine: a special token takes the space of the next word",
        ROOM + "text.py",
        "if not new and self._is_special(token):",
        "if False:",
        (TESTS + "test_a_special_token_leaves_the_space_of_the_next_word",),
    ),
    Mutant(
        "engine: a stream that is left before its first token goes on",
        ROOM + "stream.py",
        "if self._is_open and not self._request.reason:\n            self._cancel()",
        "if self._num_given and not self._request.reason:\n            self._cancel()",
        (TESTS + "test_a_stream_that_is_left_before_its_first_token_is_cancelled",),
    ),
    Mutant(
        "engine: a step goes on with attention that reads no cache",
        ROOM + "use.py",
        "    elif made is not None or cache is",
        "    elif cache is",
        (TESTS + "test_a_step_needs_the_attention_of_pagedkv",),
    ),
]
