"""Plans that callers keep: the same results as the calls, and an error for everything that is not as planned."""

import gc
import weakref
from inspect import signature

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.operations import plan as planning

from ..support.bits import bits

B, HQ, HKV, D, P, N, M = 2, 3, 1, 64, 16, 8, 3
PLANS = {"decode": (pagedkv.plan_decode, pagedkv.decode_attention)}
PLANS["prefill"] = pagedkv.plan_prefill, pagedkv.prefill_attention
STARTS = np.array([0, 2, 5], np.int32)
OPTIONS = [
    {},
    {"window": 9, "softcap": 2.0, "return_lse": True},
    {"sinks": np.ones(HQ, np.float32), "alibi_slopes": np.ones(HQ, np.float32), "scale": 0.5, "max_seq_len": 40},
]


class Layers:
    """Tables and lengths, and q, K and V of three layers."""

    def __init__(self, kind="decode", convert=lambda x: x):
        rng = np.random.default_rng(0)
        self.plan, self.call = PLANS[kind]
        rows = B if kind == "decode" else int(STARTS[-1])
        self.qs = [convert(rng.standard_normal((rows, HQ, D), np.float32)) for _ in range(3)]
        self.caches = [[convert(rng.standard_normal((N, P, HKV, D), np.float32)) for _ in "kv"] for _ in range(3)]
        tables, self.lens = rng.permutation(N)[: B * M].reshape(B, M).astype(np.int32), np.array([40, 7], np.int32)
        self.where = [convert(x) for x in (tables, self.lens, STARTS)[: 2 + (kind == "prefill")]]

    def planned(self, **options):
        return self.plan(self.qs[0], *self.caches[0], *self.where, **options)


def assert_same(got, expected):
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    for x, y in zip(got, expected, strict=True):
        assert type(x) is type(y)
        assert (bits(np.asarray(x)) == bits(np.asarray(y))).all()


@pytest.fixture
def plan_of_decode():
    layers = Layers()
    return layers, layers.planned()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("convert", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
def test_a_plan_has_the_bits_of_the_calls(monkeypatch, convert, kind, options):
    layers = Layers(kind, convert)
    plan = layers.planned(**options)
    monkeypatch.setattr(planning, "attention_call", None)  # nothing is validated again
    for q, caches in zip(layers.qs, layers.caches, strict=True):
        expected = layers.call(q, *caches, *layers.where, **options)
        assert_same(plan.run(q, *caches), expected)
        out = q * 0
        got = plan.run(q, *caches, out=out)
        assert (got[0] if "return_lse" in options else got) is out
        assert_same(got, expected)


def test_a_plan_of_the_emulator_has_the_bits_of_its_calls():
    layers = Layers()
    plan = layers.planned(backend="emulator")
    for q, caches in zip(layers.qs[:2], layers.caches[:2], strict=True):
        assert_same(plan.run(q, *caches), layers.call(q, *caches, *layers.where, backend="emulator"))


def test_addresses_that_the_emulator_does_not_take():
    layers = Layers()
    plan = layers.planned(backend="emulator")
    for name in ("q", "k_cache", "v_cache", "out"):
        given = {"q": layers.qs[1], "k_cache": layers.caches[1][0], "v_cache": layers.caches[1][1]}
        like = given.get(name, layers.qs[1])
        buffer = np.zeros(like.size + 2, np.float32)
        start = 1 if buffer.ctypes.data % 16 == 0 else 0
        given[name] = buffer[start:][: like.size].reshape(like.shape)
        with pytest.raises(ValueError, match=rf"^{name} must begin at a multiple of 16 bytes for backend"):
            plan.run(**given)


def test_on_the_host_a_plan_is_of_the_values_that_it_has_read(plan_of_decode):
    layers, plan = plan_of_decode
    before = plan.run(layers.qs[0], *layers.caches[0])
    layers.lens[0] = 20
    assert_same(plan.run(layers.qs[0], *layers.caches[0]), before)
    plan.refresh()
    after = plan.run(layers.qs[1], *layers.caches[1])
    assert_same(after, layers.call(layers.qs[1], *layers.caches[1], *layers.where))
    layers.lens[1] = M * P + 1
    with pytest.raises(ValueError, match=r"^seq_lens must be in 0\.\.max_blocks \* block_size = 0\.\.48, got 49"):
        plan.refresh()
    assert_same(plan.run(layers.qs[1], *layers.caches[1]), after)


def test_a_closed_plan_says_so(plan_of_decode):
    layers, plan = plan_of_decode
    for _ in range(2):
        plan.close()
    for call in (plan.refresh, lambda: plan.run(layers.qs[0], *layers.caches[0])):
        with pytest.raises(RuntimeError, match=r"^this plan is closed: plan_decode and plan_prefill make another one$"):
            call()


def test_a_plan_that_is_closed_while_another_thread_refreshes_it_stays_closed(plan_of_decode, monkeypatch):
    _, plan = plan_of_decode
    validate = planning.attention_call
    monkeypatch.setattr(planning, "attention_call", lambda arguments: (plan.close(), validate(arguments))[1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^this plan is closed"):
            plan.refresh()


Q = np.zeros((B, HQ, D), np.float32)
PAGES = np.zeros((N, P, HKV, D), np.float32)
WRONG = [
    ({"q": Q[:1]}, ValueError, r"q must have shape as planned = \(2, 3, 64\), got \(1, 3, 64\)"),
    ({"q": Q.astype(np.float16)}, TypeError, "q must have dtype float32, as planned, got float16"),
    ({"q": np.zeros((B, 2 * HQ, D), np.float32)[:, ::2]}, ValueError, "q must have strides .* as planned, got"),
    ({"q": np.repeat(Q, 2, 2)[..., ::2]}, ValueError, "q must be contiguous along its last axis"),
    ({"q": Q.tolist()}, TypeError, "q must be an array"),
    ({"k_cache": PAGES[:-1]}, ValueError, "k_cache must have shape as planned"),
    ({"v_cache": PAGES.astype(np.float16)}, TypeError, "v_cache must have dtype float32, as planned"),
    ({"v_scales": PAGES[..., 0]}, ValueError, "the plan takes no k_scales and v_scales, as the call that was planned"),
    ({"out": Q[:1].copy()}, ValueError, "out must have shape of q"),
    ({"out": Q.astype(np.float16)}, TypeError, "out must have dtype float32, that of q"),
    ({"out": np.zeros((B, HQ, 2 * D), np.float32)[..., :D]}, ValueError, "out must be C-contiguous for a plan"),
    ({"out": Q}, ValueError, "out must not overlap q"),
    ({"out": np.broadcast_to(Q[:1] * 0, Q.shape)}, ValueError, "out must be C-contiguous for a plan"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_what_is_not_as_planned_is_refused(plan_of_decode, backend, changes, error, message):
    layers, _ = plan_of_decode
    plan = layers.planned(backend=backend)
    given = {"q": Q, "k_cache": PAGES, "v_cache": PAGES} | changes
    with pytest.raises(error, match=f"^{message}"):
        plan.run(**given)


def test_options_that_a_plan_does_not_have():
    layers = Layers()
    for name in ("out", "causal", "tables"):
        with pytest.raises(TypeError, match=rf"^plan_decode\(\) got an unexpected keyword argument '{name}'$"):
            layers.planned(**{name: None})
    with pytest.raises(ValueError, match=r"^window must be at least 1, got 0$"):
        layers.planned(window=0)


def test_layers_share_plans_whatever_plain_options_they_have():
    """Else a new one works, but every layer validates its call again."""
    arrays = {*("q", "k_cache", "v_cache", "block_tables", "seq_lens", "query_starts", "leftpad", "mask", "out")}
    of_the_cache = {*("layout", "kv_dtype", "k_scale", "v_scale", "k_scales", "v_scales", "max_seq_len")}
    known = {name for _, operation in PLANS.values() for name in signature(operation).parameters}
    assert known - planning._OPTIONS == arrays | of_the_cache


def test_a_plan_of_nothing():
    none = Layers()
    none.qs, none.where = [none.qs[0][:0]], [x[:0] for x in none.where]
    assert none.planned().run(none.qs[0], *none.caches[0]).shape == (0, HQ, D)


def test_scales_of_rows_are_checked_as_the_caches_are():
    tables, lens = np.zeros((0, M), np.int32), np.zeros(0, np.int32)
    caches = {"k_cache": PAGES.astype(np.int8), "v_cache": PAGES.astype(np.int8)}
    scales = {name: PAGES[..., 0].copy() for name in ("k_scales", "v_scales")}
    plan = pagedkv.plan_decode(Q[:0], **caches, block_tables=tables, seq_lens=lens, kv_dtype="int8", **scales)
    assert plan.run(Q[:0], **caches, **scales).shape == (0, HQ, D)
    for given in ({}, *({name: x} for name, x in scales.items())):
        with pytest.raises(ValueError, match=r"^the plan needs k_scales and v_scales, as the call that was planned$"):
            plan.run(Q[:0], **caches, **given)
    with pytest.raises(TypeError, match=r"^k_scales must have dtype float32, as planned, got int8$"):
        plan.run(Q[:0], **caches, **scales | {"k_scales": caches["k_cache"][..., 0]})


def test_a_plan_keeps_neither_q_nor_caches():
    layers = Layers()
    plan = layers.planned()
    gone = weakref.ref(layers.qs[0]), weakref.ref(layers.caches[0][0])
    again = Layers()
    expected = again.call(again.qs[1], *again.caches[1], *again.where)
    del layers
    gc.collect()
    assert [x() for x in gone] == [None, None]
    plan.refresh()
    assert_same(plan.run(again.qs[1], *again.caches[1]), expected)
