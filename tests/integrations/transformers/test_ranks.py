"""Models that transformers shards over ranks: tokens, caches and messages of the ranks; which models are refused."""

import numpy as np
import pytest
from transformers.distributed import DistributedConfig

from pagedkv.integrations.transformers import Engine
from pagedkv.integrations.transformers.cache import make_swap_space
from pagedkv.integrations.transformers.models import heads_divided_by, kv_shape, require_supported
from pagedkv.integrations.transformers.ranks import join_ranks

from .models import make_model
from .rank_programs import BLOCKS, greedy_tokens, logprobs, run


def sharded(family, size, tp_plan=None, **sizes):
    """A model that says what from_pretrained records of one that it shards; its weights are whole."""
    model = make_model(family)
    model.config.distributed_config = DistributedConfig(tp_size=size, **sizes)
    model._tp_size = size
    model._tp_plan |= tp_plan or {}
    return model


def test_a_rank_has_its_share_of_the_heads_that_the_plan_divides():
    assert heads_divided_by(sharded("Qwen3", 2)) == 2
    assert kv_shape(sharded("Qwen3", 2)) == (2, 1, 16)
    # The plan gathers what the fused projection of Phi-3 computes, and that of GPT-OSS divides no head.
    for family in ("Phi3", "GptOss"):
        assert heads_divided_by(sharded(family, 4)) == 1
        assert kv_shape(sharded(family, 4))[1] == 2


def test_ranks_do_not_swap():
    with pytest.raises(ValueError, match="swap must be None for a model on several ranks: each of them would measure"):
        make_swap_space(sharded("Qwen3", 2), None, "1MiB")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": 4}, r"has 2 KV heads, which 4 ranks cannot divide evenly \(take a tp_size that does\)"),
        ({"size": 2, "pp_size": 2}, r"is sharded with pp_size=2, and not by heads alone \(tp_size\)"),
        ({"size": 1, "fsdp_size": 2}, r"is sharded with fsdp_size=2, and not by heads alone \(tp_size\)"),
        (
            {"size": 2, "tp_plan": {"model.layers.*.self_attn.v_proj": "colwise_gather_output"}},
            "has a tp_plan that shards some of q_proj, k_proj and v_proj and not all",
        ),
    ],
)
def test_a_model_whose_heads_ranks_do_not_divide_evenly_is_refused(options, reason):
    with pytest.raises(ValueError, match=f"^LlamaForCausalLM {reason}: pagedkv cannot run it"):
        require_supported(sharded("Llama", **options))


def test_ranks_do_not_divide_layers_of_several_shapes():
    with pytest.raises(
        ValueError, match="has layers of several shapes, whose heads pagedkv does not divide over 2 ran"
    ):
        require_supported(sharded("Gemma4 31B", 2))


def test_without_torchrun_there_are_no_ranks():
    with pytest.raises(ValueError, match=r"^torchrun starts ranks, and has not started this process: "), join_ranks():
        pass
    with pytest.raises(ValueError, match=r"^timeout must be positive"), join_ranks(timeout=0):
        pass
    with pytest.raises(RuntimeError, match=r"^only ranks other than 0 of a sharded model follow"):
        Engine(make_model("Llama"), num_blocks=8).follow()


# -- two ranks
@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What both of two ranks found."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("ranks")
    make_model("Llama", vocab_size=98).save_pretrained(folder)  # which transformers 5.20 divides evenly
    return run("everything", folder)


@pytest.fixture(scope="module")
def alone():
    """The tokens of one process."""
    return greedy_tokens(Engine(make_model("Llama", vocab_size=98), num_blocks=BLOCKS))


def test_ranks_that_are_called_with_the_same_generate_what_one_process_does(two, alone):
    assert [found["same"] for found in two] == [alone, alone]


def test_rank_0_generates_what_one_process_does_while_others_follow(two, alone):
    assert two[0]["led"] == two[0]["led after aborts"] == alone


def test_ranks_have_the_log_probabilities_of_one_process(two):
    model = make_model("Llama", vocab_size=98)
    exact, of_int8 = (logprobs(Engine(model, num_blocks=BLOCKS, kv_dtype=kv_dtype)) for kv_dtype in (None, "int8"))
    assert np.abs(np.subtract(exact, of_int8)).max() > 5e-3
    np.testing.assert_allclose(two[0]["logprobs"], exact, atol=1e-4)
    for found in two:
        np.testing.assert_allclose(found["int8"], of_int8, atol=1e-3)


def test_generate_with_a_paged_cache_on_ranks(two, alone):
    assert [found["generated"] for found in two] == [alone, alone]


def test_each_rank_keeps_its_share_of_the_kv_heads(two):
    assert [found["kv_heads"] for found in two] == [1, 1]


def test_all_ranks_have_as_many_blocks_as_the_smallest(two):
    assert [(found["blocks"], found["cache blocks"]) for found in two] == [(BLOCKS - 1, BLOCKS)] * 2


def test_draws_without_a_seed_are_the_same_on_all_ranks(two):
    assert two[0]["drawn"] == two[1]["drawn"]
    assert len(set(two[0]["drawn"])) > 8


def test_a_request_that_is_not_finite_on_one_rank_ends_on_all(two):
    assert [found["not finite on rank 1"] for found in two] == [[[0, "error"]]] * 2


def test_a_stream_that_rank_0_drops_ends_on_all_ranks(two):
    assert [found["after a stream is dropped"] for found in two] == [0, 0]


def test_ranks_that_follow_are_told_of_aborts(two):
    assert [found["used"] for found in two] == [0, 0]


def test_engines_of_ranks_have_the_same_settings(two):
    message = "ValueError: max_num_seqs must be the same on all ranks, got 4 on one and 5 on another"
    assert [found["other setting"] for found in two] == [message, message]


def test_a_rank_that_is_called_with_something_else_ends(two):
    assert two[0]["other call"] == ""
    assert two[1]["other call"].startswith(
        "RuntimeError: rank 1 was called with add of request 3 since the last step, and rank 0 with nothing: "
    )
    assert two[1]["after another call"].startswith("RuntimeError: the Engine of rank 1 has ended: ")


def test_rank_0_leads_and_does_not_follow(two):
    assert two[0]["leader follows"].startswith("RuntimeError: only ranks other than 0 of a sharded model follow")


def test_a_rank_that_was_let_go_takes_no_calls(two):
    assert two[1]["closed"].startswith("RuntimeError: the Engine of rank 1 has ended: it was closed")


# -- families
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 98}
OF_HEADS = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
OF_HEADS |= {"model.layers.*.self_attn.o_proj": "rowwise"}
OF_SINKS = {"model.layers.*.self_attn.sinks": "colwise", "model.layers.*.self_attn": "local_params"}


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("family", "options", "heads_are_divided"),
    [
        ("Llama", {}, True),
        ("Qwen3", {}, True),
        ("Mistral", {}, True),
        ("Gemma2", {}, True),
        ("Gemma3", {}, True),
        ("GptOss", {}, False),
        ("GptOss", {"tp_plan": OF_HEADS | OF_SINKS}, True),
        ("GptOss", {"tp_plan": "auto", "ep_size": 2}, False),
        ("Phi3", {}, False),
        ("Mixtral", {}, True),
    ],
)
def test_each_family_generates_on_ranks_what_one_process_does(tmp_path, family, options, heads_are_divided, num_ranks):
    if options.get("ep_size"):
        options = options | {"ep_size": num_ranks}
    model = make_model(family, **HEADS)
    model.save_pretrained(tmp_path)
    expected = greedy_tokens(Engine(type(model).from_pretrained(tmp_path), num_blocks=BLOCKS))
    assert len({token for said in expected for token in said}) > 6
    found = run("same_tokens", tmp_path, num_ranks, **options)
    assert [rank["same"] for rank in found] == [expected] * num_ranks
    assert found[0]["led"] == expected
    assert [rank["generated"] for rank in found] == [expected] * num_ranks
    assert [rank["kv_heads"] for rank in found] == [4 // num_ranks if heads_are_divided else 4] * num_ranks
