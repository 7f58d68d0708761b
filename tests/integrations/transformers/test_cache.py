"""PagedCache under model.generate."""

import copy
import pickle
from contextlib import suppress
from unittest import mock

import pytest
import torch

from pagedkv import OutOfBlocksError
from pagedkv.integrations.transformers import Engine, PagedCache, use_pagedkv

from ...support.interrupts import interrupts_at_every_instant
from .models import eager_model, greedy, make_model, prompts

LONG, SHORT = prompts(30, 23)
IDS = torch.tensor([LONG, [0] * 7 + SHORT, [0] * 29 + SHORT[:1]])
MASK = (IDS != 0).long()


@pytest.fixture(scope="module")
def model():
    model = make_model("Llama")
    use_pagedkv(model)
    return model


@pytest.fixture
def cache(model):
    cache = PagedCache(model, num_blocks=64, block_size=4)
    yield cache
    cache.kv.check()
    cache.reset()
    assert cache.kv.num_free == 64


def said(model, ids, mask=None, **options):
    torch.manual_seed(1)
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None} | options
    return model.generate(ids, attention_mask=mask, **options)


WAYS = {
    "greedy": {},
    "in chunks": {"prefill_chunk_size": 8},
    "until an end token": {"eos_token_id": list(range(1, 20))},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "beams, sampled": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_gives_the_text_of_eager_attention(model, cache, way):
    expected = said(eager_model("Llama"), IDS, MASK, **WAYS[way])
    assert torch.equal(said(model, IDS, MASK, past_key_values=cache, **WAYS[way]), expected)
    if way == "greedy":  # the last token that was drawn is not written
        assert cache.kv.seq_lens(cache.seqs).tolist() == [30 + 7, 23 + 7, 1 + 7]


def test_beams_share_blocks(model, cache):
    said(model, IDS[:1], past_key_values=cache, num_beams=3)
    assert len(cache.seqs) == 3
    assert cache.kv.stats().shared >= 30 // 4


@pytest.mark.parametrize("way", ["prompt lookup", "an assistant"])
def test_rejected_drafts_are_truncated(model, cache, way):
    ids = torch.tensor([LONG + LONG])
    options = {"prompt_lookup_num_tokens": 4}
    if way == "an assistant":
        options = {"assistant_model": make_model("Llama", num_hidden_layers=1)}
    expected = said(eager_model("Llama"), ids)
    assert torch.equal(said(model, ids, past_key_values=cache, **options), expected)
    assert cache.kv.seq_lens(cache.seqs).tolist() == [cache.get_seq_length()] == [60 + 7]


def test_a_text_goes_on(model, cache):
    first = said(model, IDS[:1], past_key_values=cache)
    more = torch.cat([first, IDS[:1, :9]], 1)
    assert torch.equal(said(model, more, past_key_values=cache), said(eager_model("Llama"), more))


def test_embeddings_in_place_of_tokens(model, cache):
    embeddings = model.get_input_embeddings()(IDS).detach()
    expected = said(eager_model("Llama"), IDS, MASK)[:, IDS.shape[1] :]
    assert torch.equal(said(model, None, MASK, inputs_embeds=embeddings, past_key_values=cache), expected)


def test_rows_are_repeated_and_selected(model, cache):
    model(IDS, attention_mask=MASK, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    assert cache.kv.seq_lens(cache.seqs).tolist() == [30, 30, 23, 23, 1, 1]
    cache.batch_repeat_interleave(1)
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        cache.batch_repeat_interleave(0)
    with pytest.raises(
        ValueError, match="tokens_to_remove must be at least -1, minus what the shortest row has, got -2"
    ):
        cache.crop(-2)
    with pytest.raises(ValueError, match="indices must be at most the 6 rows of the cache, got 7: call batch_repeat"):
        cache.batch_select_indices(torch.arange(7) % 6)
    cache.batch_select_indices(torch.tensor([4, 1, 2]))
    assert cache.kv.seq_lens(cache.seqs).tolist() == [1, 30, 23]
    tables = cache.kv.block_tables(cache.seqs)
    assert cache.kv.stats().used == len({block for row in tables for block in row if block >= 0})


def test_without_room_nothing_changes(model):
    cache = PagedCache(model, num_blocks=12, block_size=4)
    with pytest.raises(OutOfBlocksError) as raised:
        model(IDS, attention_mask=MASK, past_key_values=cache)
    [note] = raised.value.__notes__
    assert (
        "54 tokens of 3 rows to 0 rows in a PagedCache of 12 blocks of 4: make one with more memory or num_blocks"
        in note
    )
    assert (cache.seqs, cache.get_seq_length(), cache.kv.num_free) == ([], 0, 12)
    model(IDS[:1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"^a row must have at most 48 tokens, .* got 60: make one with more memory"):
        model(IDS[:1], past_key_values=cache)
    assert (cache.get_seq_length(), cache.kv.seq_lens(cache.seqs).tolist()) == (30, [30])
    few = PagedCache(model, num_blocks=12, max_seqs=2)
    with pytest.raises(MemoryError) as raised:
        model(IDS, past_key_values=few)
    assert "as large a max_seqs as there are rows" in raised.value.__notes__[0]
    assert few.kv.num_seqs == 0


@pytest.mark.parametrize("where", ["embed_tokens", "norm"])
def test_a_pass_that_is_interrupted_is_undone(model, cache, where):
    interrupted = mock.patch.object(getattr(model.model, where), "forward", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        said(model, IDS, MASK, past_key_values=cache)
    assert cache.get_seq_length() == 0
    first = said(model, IDS, MASK, past_key_values=cache, max_new_tokens=3)
    ids, mask = torch.cat([first, IDS[:, -4:]], 1), torch.cat([MASK, torch.ones(3, 7, dtype=MASK.dtype)], 1)
    with interrupted, pytest.raises(KeyboardInterrupt):
        said(model, ids, mask, past_key_values=cache)
    assert torch.equal(said(model, ids, mask, past_key_values=cache), said(eager_model("Llama"), ids, mask))


CALLS = {
    "first pass": (0, lambda cache: cache.begin(2, 3, None)),
    "pass": (5, lambda cache: cache.begin(2, 3, None)),
    "crop": (5, lambda cache: cache.crop(-2)),
    "reset": (5, lambda cache: cache.reset()),
}


@pytest.mark.parametrize(("num_tokens", "call"), CALLS.values(), ids=CALLS)
def test_after_an_interrupt_at_any_instant_rows_have_as_many_tokens_as_the_cache_says(model, num_tokens, call):
    for interrupt in interrupts_at_every_instant(("memory/guard", "pagedkv/commit", "transformers/cache.py")):
        cache = PagedCache(model, num_blocks=8, block_size=4)
        if num_tokens:
            cache.begin(2, num_tokens, None)
            cache.end()
        with suppress(KeyboardInterrupt), interrupt:
            call(cache)
        if call is CALLS["reset"][1]:
            cache.reset()
        length = cache.get_seq_length()
        cache.begin(2, 1, None)
        assert cache.kv.seq_lens(cache.seqs).tolist() == [length + 1] * 2, interrupt.came_at
        cache.kv.check()


ROWS = {
    "pass": (0, lambda cache: cache.begin(3, 3, None), 3),
    "repeat": (5, lambda cache: cache.batch_repeat_interleave(2), 4),
    "select": (5, lambda cache: cache.batch_select_indices(torch.tensor([1])), 1),
    "swap": (5, lambda cache: cache.batch_select_indices(torch.tensor([1, 0])), 2),
    "select twice": (5, lambda cache: cache.batch_select_indices(torch.tensor([1, 1])), 2),
}


@pytest.mark.parametrize(("num_tokens", "call", "num_rows"), ROWS.values(), ids=ROWS)
def test_an_interrupt_at_any_instant_leaves_no_sequence_that_is_no_row(model, num_tokens, call, num_rows):
    for interrupt in interrupts_at_every_instant(("memory/guard", "pagedkv/commit", "transformers/cache.py")):
        cache = PagedCache(model, num_blocks=8, block_size=4)
        if num_tokens:
            cache.begin(2, num_tokens, torch.tensor([[0, 1, 1, 1, 1], [1] * 5]))
            cache.end()
        with suppress(KeyboardInterrupt), interrupt:
            call(cache)
        came = interrupt.came_at is not None
        rows = dict(zip(cache.seqs, cache.kv.seq_lens(cache.seqs).tolist(), strict=True)) if cache.seqs else {}
        if num_tokens:
            cache.crop(0)
            assert [*rows.values()] in ([4, 5], [5], [5, 4], [5, 5], [4, 4, 5, 5]), interrupt.came_at
            assert came or len(rows) == num_rows
            assert cache.kv.num_seqs == len(cache.seqs) == len(rows), interrupt.came_at
        cache.reset()
        assert cache.kv.num_seqs == 0, interrupt.came_at
        cache.kv.check()


def test_memory_in_place_of_blocks(model):
    cache = PagedCache(model, memory="1MiB", block_size=16)
    assert cache.kv.pool.num_blocks == 2**20 // (2 * 2 * 16 * 2 * 16 * 4)
    assert greedy(model, [LONG], 3, past_key_values=cache) == greedy(eager_model("Llama"), [LONG], 3)


def test_only_the_last_tokens_are_cropped(cache):
    cache.crop(-3)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="tokens_to_remove must be at most 0, minus the number of tokens, got 3"):
        cache.crop(3)


def test_a_filled_cache_is_refused_by_other_attention(model, cache):
    said(model, IDS[:1], past_key_values=cache)
    model.set_attn_implementation("eager")
    try:
        with pytest.raises(RuntimeError, match=r"is eager now, which reads no PagedKVCache: call use_pagedkv\(model\)"):
            model(IDS[:1, :1], past_key_values=cache)
    finally:
        use_pagedkv(model)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (IDS[:0], None, "the batch must have at least one row, got none"),
        (IDS[:, :0], None, r"a new token behind the 0 that this PagedCache has, got none: call reset\(\)"),
        (IDS, MASK[:2], r"must have shape \(rows, tokens\) = \(3, 0 cached \+ 30\), got \(2, 30\): call reset"),
        (IDS, MASK[:, :7], r"\(3, 0 cached \+ 30\), got \(3, 7\)"),
        (IDS, MASK[:, None, None], r"\(3, 0 cached \+ 30\), got \(3, 1, 1, 30\)"),
    ],
)
def test_a_wrong_batch(model, cache, ids, mask, message):
    with pytest.raises(ValueError, match=message):
        model(ids, attention_mask=mask, past_key_values=cache)
    assert (cache.seqs, cache.kv.num_free) == ([], 64)


def test_another_text_needs_a_reset(model, cache):
    """Given the same prompt again, generate would crop it to fewer tokens than are cached."""
    said(model, IDS, MASK, past_key_values=cache)
    with pytest.raises(ValueError, match=r"\(3, 37 cached \+ 23\), got \(3, 30\): call reset\(\) before another text"):
        said(model, IDS, MASK, past_key_values=cache)
    with pytest.raises(ValueError, match=r"behind the 37 that this PagedCache has, got none: call reset\(\) before"):
        said(model, IDS[:, -9:], past_key_values=cache)
    assert cache.get_seq_length() == 37


@pytest.mark.parametrize(("again", "columns"), [(0, 3), (0, 40), (30, 1), (30, 3), (30, 40)])
def test_a_mask_of_another_width(model, cache, again, columns):
    """generate drops a mask that hides nothing, and then passes other positions and tokens."""
    with torch.no_grad():
        model(IDS[:1], past_key_values=cache)
    ids = torch.cat([IDS[:1, :again], IDS[:1, :1]], 1)
    with pytest.raises(ValueError, match=r"position_ids must .*: generate makes them from attention_mask, which must"):
        said(model, ids, torch.ones(1, columns, dtype=torch.long), past_key_values=cache)
    assert cache.kv.seq_lens(cache.seqs).tolist() == [30]


def test_positions_may_count_padding(model, cache):
    """Models without position_ids count padding; generate does not. Both ways continue."""
    columns = torch.arange(30).expand(3, 30)
    more, mask = torch.ones(3, 1, dtype=torch.long), torch.cat([MASK, torch.ones(3, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        model(IDS, attention_mask=MASK, position_ids=columns, past_key_values=cache)
        model(more, attention_mask=mask, position_ids=torch.full((1, 1), 30), past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"position_ids must go on behind the 31 .* of row 0, with 31, got 32: gen"
        ):
            model(more, attention_mask=torch.cat([mask, more], 1), position_ids=more * 32, past_key_values=cache)
    assert cache.kv.seq_lens(cache.seqs).tolist() == [31, 24, 2]


@pytest.mark.parametrize("new", [slice(0, 30), slice(20, 30)])
def test_padding_on_the_right(model, cache, new):
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 25:] = 0
    with torch.no_grad():
        if new.start:
            model(IDS[:2, : new.start], attention_mask=mask[:, : new.start], past_key_values=cache)
        before = cache.get_seq_length()
        with pytest.raises(ValueError, match=r"attention_mask must show the last token of row 1, .* pad on the left"):
            said(model, IDS[:2], mask, past_key_values=cache)
    assert cache.get_seq_length() == before


def test_a_row_without_a_token_in_a_step(model, cache):
    """Rows may end one after another in a loop."""
    rows, mask = IDS[:2], torch.cat([MASK[:2], torch.tensor([[1, 1], [0, 1]])], 1)
    ids, positions = torch.cat([rows, rows[:, -2:]], 1), (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for columns in (slice(30), slice(30, 31), slice(31, 32)):
            inputs = {"attention_mask": mask[:, : columns.stop], "position_ids": positions[:, columns]}
            logits = model(ids[:, columns], **inputs, past_key_values=cache).logits
        expected = eager_model("Llama")(ids, attention_mask=mask, position_ids=positions).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert cache.kv.seq_lens(cache.seqs).tolist() == [32, 24]


def test_a_mask_for_each_type_of_layer_is_refused(model, cache):
    with pytest.raises(TypeError, match=r"^attention_mask must be a \(rows, tokens\) tensor, .* got dict: give what"):
        model(IDS, attention_mask={"full_attention": None}, past_key_values=cache)
    assert cache.kv.num_free == cache.kv.pool.num_blocks


def test_a_mask_hides_no_token_that_is_cached(model, cache):
    with torch.no_grad():
        model(IDS[:2], attention_mask=MASK[:2], past_key_values=cache)
    mask = torch.cat([MASK[:2], torch.ones(2, 1, dtype=MASK.dtype)], 1)
    for row, column in ((0, 3), (1, 0)):  # a token; padding that would be none
        other = mask.clone()
        other[row, column] = 1 - other[row, column]
        with pytest.raises(ValueError, match=r"must show all tokens that this PagedCache has, \[30, 23\] of its rows"):
            model(IDS[:2, -1:], attention_mask=other, past_key_values=cache)
    assert cache.kv.seq_lens(cache.seqs).tolist() == [30, 23]


def test_another_batch_needs_a_reset(model, cache):
    said(model, IDS, MASK, past_key_values=cache)
    with pytest.raises(ValueError, match=r"this PagedCache has 3 rows, and the batch 2: call reset\(\)"):
        model(IDS[:2, -1:], past_key_values=cache)
    cache.reset()
    assert torch.equal(said(model, IDS[:1], past_key_values=cache), said(eager_model("Llama"), IDS[:1]))


@pytest.mark.parametrize(
    ("option", "dtype", "shape"),
    [
        ({"num_hidden_layers": 1}, torch.float32, "1, 2, 16"),
        ({"head_dim": 32}, torch.float32, "2, 2, 32"),
        ({}, torch.float16, "2, 2, 16"),
    ],
)
def test_a_cache_made_for_another_model_is_refused(cache, option, dtype, shape):
    other = make_model("Llama", **option).to(dtype)
    use_pagedkv(other)
    with pytest.raises(ValueError, match=rf"is for .*\(2, 2, 16, .*32\), and .* has \({shape}, {dtype}\): each model"):
        said(other, IDS, MASK, past_key_values=cache)


def test_another_model_does_not_go_on_with_the_tokens_of_one(model, cache):
    first = said(model, IDS[:1], past_key_values=cache)
    other = make_model("Llama")
    use_pagedkv(other)
    with pytest.raises(ValueError, match=r"this PagedCache has tokens of another model: call reset\(\)"):
        said(other, first, past_key_values=cache)
    cache.reset()
    with pytest.raises(ValueError, match="does not take is_causal"):
        model(IDS[:1], past_key_values=cache, is_causal=False)
    assert torch.equal(said(other, IDS[:1], past_key_values=cache), first)


def test_a_cache_made_under_autocast_has_its_dtype(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = PagedCache(model, num_blocks=64)
        said(model, IDS, MASK, past_key_values=inside)
        assert inside.kv.k_caches[0].dtype == torch.bfloat16
        assert len(list(Engine(model, num_blocks=64).tokens(LONG, 2, ignore_eos=True))) == 2
    outside = PagedCache(model, num_blocks=64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="v must have dtype") as caught:
        said(model, IDS, MASK, past_key_values=outside)
    [note] = caught.value.__notes__
    assert note == "torch.autocast is on: make the cache with dtype=torch.bfloat16, or where it is on"


def test_use_cache_false_is_refused(model, cache):
    with pytest.raises(
        ValueError, match="use_cache=False generate would write the whole text anew in each step: leave it out"
    ):
        said(model, IDS, MASK, past_key_values=cache, use_cache=False)


def test_inputs_by_their_place(model, cache):
    """Otherwise a positional mask would be ignored, and padding be visible."""
    with torch.no_grad():
        expected = eager_model("Llama")(IDS, MASK).logits
        paged = model(IDS, MASK, None, cache).logits
    torch.testing.assert_close(paged[MASK == 1], expected[MASK == 1], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize("place", ["class", "instance"])
def test_a_forward_that_passes_its_inputs_on(place, cache):
    model = make_model("Llama")
    kind, forward = type(model), model.forward
    if place == "instance":
        model.forward = lambda *args, **inputs: forward(*args, **inputs)
    else:
        model.__class__ = type("Wrapped", (kind,), {"forward": lambda self, *args, **x: kind.forward(self, *args, **x)})
    use_pagedkv(model)
    with torch.no_grad():
        assert model(IDS, past_key_values=cache).logits.shape[:2] == IDS.shape
    cache.reset()
    assert torch.equal(said(model, IDS, MASK, past_key_values=cache), said(eager_model("Llama"), IDS, MASK))
    Engine(model, num_blocks=8)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_cache_is_refused(cache, copied):
    with pytest.raises(TypeError, match=r"a PagedCache cannot be copied or pickled, .* crop\(-n\) goes back"):
        copied(cache)


def test_a_name_is_no_model():
    for use in (use_pagedkv, PagedCache):
        with pytest.raises(TypeError, match=r"model must be a model of transformers, as from_pretrained .* got 'gpt2'"):
            use("gpt2")


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # those of torch's own modules, which a compilation imports
@pytest.mark.parametrize("way", ["its forward alone", "with its hooks", "before use_pagedkv"])
def test_a_compiled_model_generates_the_same_text(cache, way):
    """torch compiles the code around attention; `generate` of the compiled module is that of the model."""
    model = make_model("Llama")
    if way == "its forward alone":
        compiled, model.forward = model, torch.compile(model.forward, backend="eager")
    elif way == "with its hooks":
        use_pagedkv(model)
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    use_pagedkv(compiled)
    with torch.no_grad():
        out = compiled(IDS, attention_mask=MASK, past_key_values=cache).logits
        expected = eager_model("Llama")(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(out[MASK == 1], expected[MASK == 1], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == IDS.shape[1]
    cache.reset()
    expected = said(eager_model("Llama"), IDS[:1])
    assert torch.equal(said(compiled, IDS[:1], past_key_values=cache), expected)
    assert list(Engine(compiled, num_blocks=16, eos_token_id=()).tokens(LONG, 8)) == expected[0, 30:].tolist()


def test_a_model_without_pagedkv_gets_a_helpful_error(cache):
    with pytest.raises(RuntimeError, match=r"does not fill a PagedCache: call use_pagedkv\(model\) first"):
        said(eager_model("Llama"), IDS, past_key_values=cache)
