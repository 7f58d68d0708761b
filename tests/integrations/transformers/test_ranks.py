"""Models that transformers shards over ranks: what a rank's cache holds, and which models are refused."""

import pytest
from transformers.distributed import DistributedConfig

from pagedkv.integrations.transformers.models import heads_divided_by, kv_shape, require_supported

from .models import make_model


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
