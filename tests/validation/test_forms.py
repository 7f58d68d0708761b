"""A call like a valid one before it is not looked at again; one that differs in anything that matters is."""

import numpy as np
import pytest

from pagedkv.validation import attention, caches, forms

from ..support.wrong_arguments import attention_arguments, ragged_arguments

DEFAULTS = {
    **dict.fromkeys(("max_seq_len", "scale", "kv_dtype", "k_scale", "v_scale", "alibi_slopes", "window")),
    **dict.fromkeys(("softcap", "sinks", "score_mod", "out", "check")),
    **{"layout": "NHD", "kernel": "auto", "backend": "auto", "return_lse": False},
}


@pytest.fixture(autouse=True)
def looked_at(monkeypatch):
    """The calls that have been looked at since the test began, when nothing was known."""
    seen, checked = [], forms._checked

    def counting(*args):
        seen.append(args)
        return checked(*args)

    monkeypatch.setattr(forms, "_checked", counting)
    monkeypatch.setattr(attention, "_forms", forms.attention_forms())
    return seen


def arguments(**options):
    given = DEFAULTS | attention_arguments()
    return given | {"out": np.zeros_like(given["q"])} | options


@pytest.mark.parametrize("of", [attention_arguments, ragged_arguments])
def test_only_the_first_of_many_calls_is_looked_at(looked_at, of):
    first = attention.attention_call(DEFAULTS | of())
    for longest in (12, 13, 100):
        call = attention.attention_call(DEFAULTS | of() | {"max_seq_len": longest})
        assert call.form is first.form
        assert call.max_seq_len == min(longest, 12)
    assert len(looked_at) == 1


@pytest.mark.parametrize(
    ("valid", "wrong", "error"),
    [
        ({"window": 1}, {"window": True}, TypeError),
        ({"window": 1}, {"window": 1.0}, TypeError),
        ({"scale": 1}, {"scale": True}, TypeError),
        ({"softcap": 1.0}, {"softcap": True}, TypeError),
        ({"return_lse": True}, {"return_lse": 1}, TypeError),
        ({"check": False}, {"check": 0}, TypeError),
        ({}, {"kernel": "v1"}, ValueError),
        ({}, {"k_scale": 1.0}, ValueError),
        ({}, {"kv_dtype": "fp8_e4m3"}, TypeError),
        ({}, {"q": np.zeros((3, 4, 32), np.float32)[..., ::2]}, ValueError),
        ({}, {"q": np.zeros((3, 4, 16))}, TypeError),
        ({}, {"out": np.broadcast_to(np.float32(0), (3, 4, 16))}, ValueError),
        ({}, {"out": np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (3, 4, 16), (0, 64, 4))}, ValueError),
        ({}, {"seq_lens": np.array([12, 5, 0])}, TypeError),
        ({}, {"score_mod": 3}, TypeError),
        ({"sinks": np.zeros(4, np.float32)}, {"alibi_slopes": np.zeros(3, np.float32)}, ValueError),
        ({"sinks": np.zeros(4, np.float32)}, {"sinks": np.zeros(4)}, TypeError),
        ({"max_seq_len": 12}, {"max_seq_len": 3}, ValueError),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else None,
)
def test_what_differs_is_refused_after_a_valid_call(valid, wrong, error):
    attention.attention_call(arguments(**valid))
    with pytest.raises(error):
        attention.attention_call(arguments(**valid, **wrong) if not valid.keys() & wrong else arguments(**wrong))


def test_options_and_arrays_of_a_call_are_its_own(looked_at):
    first = attention.attention_call(arguments(sinks=np.zeros(4, np.float32)))
    second = attention.attention_call(arguments(sinks=np.ones(4, np.float32), score_mod=lambda s, q, k, h, i: s))
    assert first.form is second.form
    assert len(looked_at) == 1
    assert first.options.score_mod is None
    assert [call.options.sinks.tolist() for call in (first, second)] == [[0.0] * 4, [1.0] * 4]
    assert second.form.options.sinks is second.form.options.score_mod is None


def test_an_option_that_cannot_be_hashed_is_looked_at_each_time(looked_at):
    for scale in (0.5, 0.25):
        assert attention.attention_call(arguments(scale=np.array(scale))).options.scale == scale
    assert len(looked_at) == 2


def test_the_emulator_is_chosen_by_addresses_too(looked_at):
    for _ in range(2):
        attention.attention_call(arguments(backend="emulator"))
    assert len(looked_at) == 2


def test_the_oldest_are_forgotten(monkeypatch, looked_at):
    monkeypatch.setattr(forms, "MOST_FORMS", 8)
    for window in range(1, 10):
        attention.attention_call(arguments(window=window))
        assert len(attention._forms) == min(window, 8)
    for window in (9, 2, 1):
        attention.attention_call(arguments(window=window))
    assert len(looked_at) == 10


class Width:
    """An index like a tensor of torch, whose hash is that of the object."""

    width = 3

    def __index__(self):
        return self.width


def test_an_index_that_changes_is_read_in_each_call():
    window = Width()
    for window.width in (3, 1):
        assert attention.attention_call(arguments(window=window)).options.window == window.width


WRITE_DEFAULTS = {
    **dict.fromkeys(("kv_dtype", "k_scale", "v_scale", "cos", "sin", "positions", "check")),
    **{"layout": "NHD", "interleaved": False, "backend": "auto"},
}


def written(num_tokens=3, **options):
    k_cache, v_cache, k, v = (np.zeros(shape, np.float32) for shape in [(4, 4, 2, 16)] * 2 + [(num_tokens, 2, 16)] * 2)
    slots = np.arange(num_tokens)
    return WRITE_DEFAULTS | {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots} | options


@pytest.fixture
def writes_looked_at(monkeypatch):
    seen, checked = [], caches._write_form

    def counting(*args):
        seen.append(args)
        return checked(*args)

    monkeypatch.setattr(caches, "_write_forms", forms.Forms(counting, caches.WRITE_OPTIONS))
    return seen


def test_only_the_first_of_many_writes_is_looked_at(writes_looked_at):
    for _ in range(3):
        caches.write_call(written())
    assert len(writes_looked_at) == 1
    caches.write_call(written(num_tokens=2))
    assert len(writes_looked_at) == 2


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"slots": np.array([0, 1, 16])}, IndexError),
        ({"slots": np.array([0, 1, 1])}, ValueError),
        ({"slots": np.arange(3, dtype=np.int32)}, TypeError),
        ({"k": np.zeros((3, 2, 16))}, TypeError),
        ({"v": np.zeros((3, 2, 32), np.float32)[..., ::2]}, ValueError),
        ({"k_cache": np.broadcast_to(np.float32(0), (4, 4, 2, 16))}, ValueError),
        ({"check": 0}, TypeError),
        ({"interleaved": True}, ValueError),
        ({"layout": "HND"}, ValueError),
        ({"k_scale": 1.0}, ValueError),
        ({"kv_dtype": "fp8_e4m3"}, TypeError),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else None,
)
def test_what_differs_is_refused_after_a_valid_write(wrong, error):
    caches.write_call(written())
    with pytest.raises(error):
        caches.write_call(written(**wrong))


def test_a_write_like_one_before_must_not_overlap_either():
    given = written(num_tokens=4)
    caches.write_call(given)
    with pytest.raises(ValueError, match="k_cache must not overlap k"):
        caches.write_call(given | {"k": given["k_cache"][0]})
