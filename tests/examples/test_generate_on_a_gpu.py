"""generate.py with arrays of CuPy on a GPU, and with a fake that refuses to mix with NumPy's."""

from types import SimpleNamespace

import numpy as np
import pytest

from .test_examples import HEADER, MODEL, TOKENIZER, run


class Elsewhere(np.ndarray):
    """NumPy's functions take it, as they take CuPy's arrays, but never with an array of the host."""

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return self._call(getattr(ufunc, method), inputs, options)

    def __array_function__(self, function, types, args, options):
        return self._call(function, args, options)

    def _call(self, function, args, options):
        assert all(type(x) is not np.ndarray for x in args), "an array of the host"
        result = function(*(x.view(np.ndarray) if type(x) is Elsewhere else x for x in args), **options)
        return [x.view(Elsewhere) for x in result] if isinstance(result, list) else result.view(Elsewhere)

    def __getitem__(self, index):
        assert type(index) is not np.ndarray, "an array of the host"
        return super().__getitem__(index)


def there(x):
    return np.array(x).view(Elsewhere)


def test_the_forward_pass_takes_all_arrays_from_one_module():
    tokens = TOKENIZER.encode(HEADER)
    outs = np.random.default_rng(0).standard_normal((MODEL.num_layers, len(tokens), MODEL.num_heads, MODEL.head_dim))
    asked = []

    def attend(layer, q, k, v):
        asked.append(type(q) is type(k) is type(v) is Elsewhere)
        return there(outs[layer].astype(np.float32)) if asked[-1] else outs[layer].astype(np.float32)

    expected = MODEL.forward(tokens, attend, [len(tokens) - 1])
    model = MODEL.on(SimpleNamespace(asarray=there))
    logits = model.forward(there(tokens), attend, there([len(tokens) - 1]))
    assert type(logits) is Elsewhere
    assert asked == [False] * MODEL.num_layers + [True] * MODEL.num_layers
    np.testing.assert_array_equal(logits.view(np.ndarray), expected)
    assert all(type(x) is Elsewhere for x in (model.cos, model.sin, model.embed, model.norm))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["float32", "fp8_e4m3"])
def test_the_tokens_are_those_of_the_cpu(kv_dtype):
    done = run("def main(", "class Queue:", "--samples", "2", "--device", "cuda", "--kv-dtype", kv_dtype)
    said = [line for line in done.stderr.splitlines() if not line.startswith("pagedkv: compiling the kernel ")]
    assert (done.returncode, said) == (0, [])
    assert "tokens match a run with contiguous caches" in done.stdout
