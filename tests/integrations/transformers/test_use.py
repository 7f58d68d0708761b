"""use_pagedkv, on a device without kernels too."""

from unittest import mock

import pytest

from pagedkv import BackendUnavailableError
from pagedkv.integrations.transformers import NAME, use, use_pagedkv

from .models import make_model


def test_twice_is_as_good_as_once():
    model = make_model("Llama")
    use_pagedkv(model)
    use_pagedkv(model)
    assert len(model._forward_pre_hooks) == 1
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("operation", ["write_kv", "decode_attention", "prefill_attention"])
def test_without_kernels_attention_is_sdpa(operation):
    model = make_model("Llama")
    error = BackendUnavailableError("GPU 0 has compute capability 7.5")
    with (
        mock.patch.object(use, operation, side_effect=error),
        pytest.warns(UserWarning, match="no kernels for cpu, so attention is sdpa: GPU 0 has compute capability 7.5"),
    ):
        use_pagedkv(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
