"""Every supported family of models generates the same text as with eager attention; others are refused."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from pagedkv.integrations.transformers import Engine, PagedCache, use_pagedkv

from .models import (
    ALTERNATING,
    FAMILIES,
    HYBRIDS,
    SIZES,
    eager_model,
    error_bound,
    greedy,
    greedy_batch,
    logits,
    make_model,
    prompts,
)

LONG = {"Llama", "Qwen3"}  # test_paged.py and test_cache.py have a Llama
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
EXPERTS_OF_GEMMA = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 32, "global_head_dim": 32}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("family", [pytest.param(x, marks=pytest.mark.long if x in LONG else ()) for x in FAMILIES])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_family_generates_what_eager_attention_does(family, device):
    model, texts = make_model(family).to(device), prompts(40, 70, 9)
    use_pagedkv(model)
    expected = greedy(eager_model(family), texts, 6)
    assert len({token for said in expected for token in said}) > 6
    if family != "Bloom" and "Gemma4" not in family:  # transformers' continuous batching does not take these
        assert greedy_batch(model, texts, 6) == expected
    cache = PagedCache(model, num_blocks=48)
    assert greedy(model, texts, 6, past_key_values=cache) == expected
    cache.reset()
    engine = Engine(model, num_blocks=48, eos_token_id=())
    assert [list(stream) for stream in [engine.tokens(text, 6) for text in texts]] == expected
    exact, bound = error_bound(eager_model(family), texts[1])
    paged = logits(model, texts[1], (0, 30, 31, 32, 60), past_key_values=cache).cpu()
    assert (paged - exact).abs().max() <= bound


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3", "Gemma4 31B"])
def test_int8_rows_change_logits_less_than_fp8_does(family):
    """By one argument, for 20 of the 32 bytes of rows of 16 dims in bfloat16."""
    model, [text] = make_model(family).bfloat16(), prompts(70)
    use_pagedkv(model)
    caches = {kv_dtype: PagedCache(model, num_blocks=16, kv_dtype=kv_dtype) for kv_dtype in (None, "int8", "fp8_e4m3")}
    exact, *wide = (logits(model, text, (0, 40), past_key_values=cache).float() for cache in caches.values())
    of_int8, of_fp8 = ((x - exact).square().mean().sqrt() for x in wide)
    assert of_int8 < min(of_fp8 / 2, exact.square().mean().sqrt() / 10)


def test_the_docs_list_every_tested_family():
    page = (Path(__file__).parents[3] / "docs" / "howto" / "which-models.md").read_text()
    tested = " ".join(
        row.split("|")[2] for row in page.split("| family | tested |")[1].splitlines() if row.count("|") == 4
    )
    names = [family.split()[0].lower().replace("_", ".") for family in (*FAMILIES, *HYBRIDS)]
    assert [name for name in names if name not in re.sub(r"[ -]", "", tested).lower()] == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=9, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
            ),
            "T5ForConditionalGeneration is an encoder-decoder",
        ),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=9, hidden_size=8, state_size=2, num_hidden_layers=1)
            ),
            r"MambaForCausalLM has layers with a state in place of keys and values \(Mamba\)",
        ),
        (
            lambda: make_model("Jamba", num_experts=2, attn_layer_offset=1, attn_layer_period=2),
            r"JambaForCausalLM has layers with a state \(Mamba 1\) that begin each chunk of a text from zero",
        ),
        (
            lambda: make_model("Zaya", layer_types=["hybrid"] * 2),
            r"ZayaForCausalLM has layers with a state of a kind that pagedkv does not know \(zaya\)",
        ),
        (
            lambda: make_model("GraniteMoeHybrid", layer_types=["linear_attention"] * 3),
            "GraniteMoeHybridForCausalLM has layers with a state, and it has no layer with keys and values",
        ),
        (
            lambda: make_model("DeepseekV2", kv_lora_rank=8, q_lora_rank=8, n_routed_experts=2, head_dim=None),
            r"DeepseekV2ForCausalLM caches latent keys and values \(MLA\)",
        ),
        (
            lambda: transformers.MptForCausalLM(
                transformers.MptConfig(vocab_size=9, d_model=16, n_heads=2, n_layers=1)
            ),
            "MptForCausalLM computes attention in its own layers, not by transformers' AttentionInterface",
        ),
        (
            lambda: make_model("Qwen3", layer_types=["full_attention", "chunked_attention"]),
            "Qwen3ForCausalLM has layers of types chunked_attention",
        ),
        (lambda: make_model("DiffLlama"), "DiffLlamaForCausalLM attends twice in each layer"),
        (
            lambda: make_model("Gemma4", hidden_size_per_layer_input=0, use_bidirectional_attention="all"),
            "Gemma4ForCausalLM lets tokens see later ones",
        ),
        (
            lambda: transformers.DiffusionGemmaForBlockDiffusion(
                transformers.DiffusionGemmaConfig(text_config=SIZES | EXPERTS_OF_GEMMA, vision_config=TOWER)
            ),
            "DiffusionGemmaForBlockDiffusion generates by diffusion, with tokens that see later ones",
        ),
        (
            lambda: make_model("Qwen2Moe", use_sliding_window=True, max_window_layers=1, **EXPERTS),
            "Qwen2MoeForCausalLM has a sliding window that its layers do not ask attention for",
        ),
        (
            lambda: make_model("Phimoe", sliding_window=8, **EXPERTS),
            "PhimoeForCausalLM has a sliding window that its layers do not ask attention for",
        ),
        (
            lambda: make_model("Olmoe", sliding_window=8, **EXPERTS),
            "OlmoeForCausalLM has a sliding window that its layers do not ask attention for",
        ),
        (
            lambda: make_model("SmolLM3", sliding_window=8, use_sliding_window=False, layer_types=ALTERNATING[:2]),
            "SmolLM3ForCausalLM has a sliding window that its layers do not ask attention for",
        ),
        (
            lambda: transformers.GPTBigCodeForCausalLM(
                transformers.GPTBigCodeConfig(
                    vocab_size=9, n_embd=32, n_head=4, n_layer=1, multi_query=False, num_key_value_heads=2
                )
            ),
            "GPTBigCodeForCausalLM has multi_query=False and num_key_value_heads=2",
        ),
        (lambda: make_model("Nemotron"), "NemotronForCausalLM computes attention in its own layers"),
        (
            lambda: transformers.BertModel(
                transformers.BertConfig(
                    vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
                )
            ),
            "BertModel is an encoder, whose tokens see later ones",
        ),
        (lambda: make_model("Llama", head_dim=4), "has head_dim 4, which is no multiple of 8 from 8 to 512"),
        (
            lambda: make_model("Llama").double(),
            "has dtype torch.float64, which is none of float32, float16 and bfloat16",
        ),
    ],
    ids=[
        "encoder-decoder",
        "Mamba",
        "Jamba",
        "Zaya",
        "states alone",
        "MLA",
        "own layers",
        "chunked",
        "twice",
        "both ways",
        "diffusion",
        "Qwen2Moe",
        "Phimoe",
        "Olmoe",
        "SmolLM3",
        "GPTBigCode",
        "Nemotron",
        "encoder",
        "head_dim",
        "dtype",
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by GPTBigCode in transformers 5.20
def test_others_are_refused(make, reason):
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        PagedCache(model, num_blocks=4)
    with pytest.raises(ValueError, match=reason) as caught:
        use_pagedkv(model)
    assert str(caught.value).endswith('pagedkv cannot run it; keep model.set_attn_implementation("sdpa")')
    assert model.config._attn_implementation == before


@pytest.mark.long
def test_logits_in_bfloat16_are_within_the_error_bound():
    model, text = make_model("Llama").bfloat16(), prompts(50)[0]
    eager = make_model("Llama").bfloat16()
    eager.set_attn_implementation("eager")
    use_pagedkv(model)
    exact, bound = error_bound(eager, text)
    paged = logits(model, text, (0, 30, 31), past_key_values=PagedCache(model, num_blocks=4))
    assert paged.dtype == torch.bfloat16
    assert (paged - exact).abs().max() <= bound
