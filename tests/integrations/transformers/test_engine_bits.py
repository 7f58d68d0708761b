"""The same log-probabilities to the last bit, whatever runs beside a request, however it is cut and found."""

import pytest
import torch

from pagedkv.integrations.transformers import Engine

from .models import make_model, prompts

NEW = 8
TEXT, *CROWD = prompts(40, 3, 17, 33, 5, 23)
SMALL_POOL = {"num_blocks": 14, "block_size": 4}


def linear_has_equal_bits():
    """Whether torch computes a row of a matrix product alike among any number of rows, which is not ours to promise."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(97, 64, dtype=torch.bfloat16)
    whole = torch.nn.functional.linear(x, w)
    return all(torch.equal(torch.nn.functional.linear(x[:n], w), whole[:n]) for n in range(1, 64))


@pytest.fixture(scope="module")
def model():
    if not linear_has_equal_bits():
        pytest.skip("torch rounds a row of a bfloat16 product by the number of rows on this machine")
    return make_model("Llama", eos_token_id=None).bfloat16()


def values(generation):
    return [one.logprob for one in (generation.prompt_logprobs or []) + generation.logprobs]


@pytest.fixture(scope="module", params=[None, "int8"])
def kv_dtype(request):
    return request.param


@pytest.fixture(scope="module")
def alone(model, kv_dtype):
    return values(Engine(model, num_blocks=64, kv_dtype=kv_dtype).generate(TEXT, NEW, logprobs=0, prompt_logprobs=0))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}, SMALL_POOL, SMALL_POOL | {"swap": "1MiB"}],
    ids=["in a crowd", "in chunks", "under preemption", "swapped"],
)
def test_log_probabilities_have_the_same_bits(model, alone, kv_dtype, options):
    engine = Engine(model, **{"num_blocks": 64, "kv_dtype": kv_dtype} | options)
    for others in (CROWD, CROWD[::-1]):
        made, *_ = engine.generate([TEXT, *others], NEW, logprobs=0, prompt_logprobs=0)
        assert values(made) == alone
        *_, made = engine.generate([*others, TEXT], NEW, logprobs=0, prompt_logprobs=0)
        assert values(made) == alone
    assert (engine.stats().num_preempted > 0) == ("block_size" in options)


def test_behind_a_prefix_hit(model, alone, kv_dtype):
    engine = Engine(model, num_blocks=64, kv_dtype=kv_dtype)
    for _ in range(2):
        made = engine.generate([TEXT, *CROWD], NEW, logprobs=0)[0]
    assert made.num_cached == 32
    assert values(made) == alone[len(TEXT) - 1 :]
