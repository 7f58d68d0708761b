"""Models of transformers: their pages, and PagedCache."""

from ..mutant import Mutant

PAGED = ("tests/integrations/transformers/test_paged.py",)
CACHE = ("tests/integrations/transformers/test_cache.py",)
GENERATE = (CACHE[0] + "::test_generate_says_what_it_says_with_eager_attention",)
ATTENTION = ("tests/integrations/transformers/test_attention.py",)

MUTANTS = [
    Mutant(
        "a pass that is interrupted stays in the cache",
        "integrations/transformers/cache.py",
        "        self.kv.truncate(self.seqs, self._before)\n",
        "",
        ("tests/integrations/transformers/test_cache.py::test_a_pass_that_is_interrupted_is_undone",),
    ),
    Mutant(
        "a model keeps the pages of a generate_batch that has ended",
        "integrations/transformers/use.py",
        "    kept = vars(cache)",
        "    kept = vars(_paged).setdefault(id(cache), {1: cache})",
        ("tests/integrations/transformers/test_paged.py::test_the_pages_go_with_their_cache",),
    ),
    Mutant(
        "layers keep the pass that they were in",
        "integrations/transformers/use.py",
        "    running.begin(None)\n",
        "    pass\n",
        ("tests/integrations/transformers/test_use.py::test_a_pass_that_somebody_keeps_has_ended",),
    ),
    Mutant(
        "layers keep the pass of a forward that was interrupted",
        "integrations/transformers/attention.py",
        "else weakref.ref(forward_pass)",
        "else lambda: forward_pass",
        ("tests/integrations/transformers/test_use.py::test_a_model_keeps_nothing_of_a_pass",),
    ),
    Mutant(
        "a cache takes the tokens of any model",
        "integrations/transformers/use.py",
        "cache.require_suits(model)",
        "pass",
        ("tests/integrations/transformers/test_cache.py::test_a_cache_for_another_model",),
    ),
    Mutant(
        "a model goes on with the tokens of another one",
        "integrations/transformers/cache.py",
        "if self._filled_by() is not model:",
        "if self._filled_by() is None:",
        ("tests/integrations/transformers/test_cache.py::test_another_model_does_not_go_on_with_the_tokens_of_one",),
    ),
    Mutant(
        "inputs by their place are not seen",
        "integrations/transformers/use.py",
        "args, strict=False)) | inputs if args else inputs",
        "args[:1], strict=False)) | inputs if args else inputs",
        ("tests/integrations/transformers/test_cache.py::test_inputs_by_their_place",),
    ),
    Mutant(
        "a mask for other rows is taken",
        "integrations/transformers/cache.py",
        "shape != (num_rows, self._length + length)",
        "shape[1:] != (self._length + length,)",
        ("tests/integrations/transformers/test_cache.py::test_a_wrong_batch",),
    ),
    Mutant(
        "without a pass layers get no mask",
        "integrations/transformers/attention.py",
        "return running.forward_pass is not None",
        "return True",
        ("tests/integrations/transformers/test_use.py::test_without_a_pass_it_is_the_model_that_it_was[Llama]",),
    ),
    Mutant(
        "layers that do not get a pass attend without the cache",
        "integrations/transformers/use.py",
        "is not None and not running.has_attended",
        "is not None and False",
        ("tests/integrations/transformers/test_use.py::test_layers_that_do_not_get_a_pass_are_noticed",),
    ),
    Mutant(
        "a row goes on at any position",
        "integrations/transformers/cache.py",
        "if not any(((got == right) | ~of_input).all()",
        "if not any(True or ((got == right) | ~of_input).all()",
        (CACHE[0] + "::test_a_mask_of_another_width",),
    ),
    Mutant(
        "threads share the pass of a model",
        "integrations/transformers/attention.py",
        "class _Running(threading.local):",
        "class _Running:",
        ("tests/integrations/transformers/test_use.py::test_threads_share_a_model",),
    ),
    Mutant(
        "a chunk that wraps around a ring is read in place",
        "integrations/transformers/paged.py",
        "<= pages.window",
        "<= 8 * pages.window",
        PAGED,
        ci=True,
    ),
    Mutant(
        "a ring begins with its oldest token",
        "integrations/transformers/paged.py",
        "ages = (firsts - (past - cached)) % self.pages.window",
        "ages = firsts % self.pages.window + 0 * past",
        PAGED,
    ),
    Mutant(
        "padding is written",
        "integrations/transformers/paged.py",
        "return slots.masked_fill(rows == self.unused, -1)",
        "return slots",
        PAGED,
    ),
    Mutant(
        "the rows of padding are in the batch",
        "integrations/transformers/cache.py",
        "attention_mask[:, -length:].bool().flatten()",
        "torch.ones_like(attention_mask[:, -length:]).bool().flatten()",
        GENERATE,
        ci=True,
    ),
    Mutant(
        "beams keep their tokens",
        "integrations/transformers/cache.py",
        "self.kv.reorder(self.seqs, beam_idx.tolist())",
        "beam_idx.tolist()",
        CACHE,
    ),
    Mutant(
        "drafts in vain stay",
        "integrations/transformers/cache.py",
        "self.kv.truncate(self.seqs, lengths)",
        "self.kv.truncate(self.seqs, self.kv.seq_lens(self.seqs))",
        CACHE,
    ),
    Mutant(
        "sinks are forgotten",
        "integrations/transformers/attention.py",
        '"sinks": None if sinks is None else sinks.float()',
        '"sinks": None',
        ("tests/integrations/transformers/test_families.py::test_a_family[cpu-GptOss]",),
    ),
    Mutant(
        "slopes of Bloom are forgotten",
        "integrations/transformers/layers.py",
        '"alibi_slopes": slopes',
        '"alibi_slopes": None',
        ("tests/integrations/transformers/test_families.py::test_a_family[cpu-Bloom]",),
    ),
    Mutant(
        "a mask is ignored",
        "integrations/transformers/attention.py",
        '(attention_mask is not None and "attention_mask")',
        '(False and "attention_mask")',
        ATTENTION,
    ),
]
