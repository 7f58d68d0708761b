"""torch.ops.pagedkv: what the functions compute, in a graph of torch.compile."""

import inspect
import warnings

import pytest
import torch

import pagedkv
from pagedkv.compat import torch_ops

from ..support.problems import Spec, as_torch, build

torch_ops.register()
OPS = torch.ops.pagedkv
MANY = {"alibi": True, "sinks": True, "window": 9, "softcap": 20.0, "scale": 0.2}
SPECS = {
    "decode": Spec(),
    "decode with options": Spec(layout="HND", kv_dtype="fp8_e4m3", kv_scales="per head", **MANY),
    "prefill": Spec(query_lens=(5, 2)),
    "prefill with options": Spec(query_lens=(5, 2), q_dtype="bfloat16", kv_dtype="bfloat16", causal=False, **MANY),
    "prefill with masks": Spec(query_lens=(5, 2), causal=False, window_right=3, leftpad=True, mask="bits"),
}


def call_of(spec):
    """The operator, the function, and the arguments of both."""
    problem = build(spec.replace(poison="zero"))
    name = "decode_attention" if spec.query_lens is None else "prefill_attention"
    options = {k: as_torch(x) if hasattr(x, "dtype") else x for k, x in problem.options.items() if x is not None}
    return getattr(OPS, name), getattr(pagedkv, name), tuple(map(as_torch, problem.args)), options


def write_arguments():
    k, v = torch.randn(2, 3, 2, 64)
    return k, v, torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64), torch.tensor([17, -1, 40])


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch's own modules
        import torch._dynamo
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_operators_compute_what_functions_compute(spec):
    operator, function, args, options = call_of(spec)
    assert torch.equal(operator(*args, **options), function(*args, **options))
    for got, expected in zip(
        operator(*args, **options, return_lse=True), function(*args, **options, return_lse=True), strict=True
    ):
        assert torch.equal(got, expected)


def test_write_kv_writes():
    k, v, k_cache, v_cache, slots = write_arguments()
    assert OPS.write_kv(k, v, k_cache, v_cache, slots) is None
    assert torch.equal(k_cache[1, 1], k[0])
    assert torch.equal(v_cache[2, 8], v[2])
    assert k_cache.count_nonzero() == 2 * k[0].numel()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_opcheck_of_attention(spec):
    operator, _, args, options = call_of(spec)
    torch.library.opcheck(operator.default, args, options)
    torch.library.opcheck(operator.lse, args, options | {"return_lse": True})


def test_opcheck_of_write_kv():
    torch.library.opcheck(OPS.write_kv.default, write_arguments())


def test_a_layer_is_one_graph_and_gives_the_same_result():
    tables, lens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)

    def layer(q, k, v, k_cache, v_cache, slots):
        OPS.write_kv(k * 2, v, k_cache, v_cache, slots)
        out, lse = OPS.decode_attention(q * 2, k_cache, v_cache, tables, lens, return_lse=True)
        return OPS.decode_attention(out, k_cache, v_cache, tables, lens, window=2) + lse[..., None]

    k, v, k_cache, v_cache, _ = write_arguments()
    q, slots = torch.randn(1, 4, 64), torch.tensor([32, 33, 34])
    ours, theirs = (k_cache.clone(), v_cache.clone()), (k_cache, v_cache)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, *ours, slots), layer(q, k, v, *theirs, slots))
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert ours[0].any()


def test_gradients_are_refused_where_torch_records_them():
    operator, function, args, _ = call_of(SPECS["decode"])
    q = args[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no gradients.*requires grad.*torch.no_grad\(\)"):
        operator(q, *args[1:])
    sinks = torch.zeros(q.shape[1], requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradients"):
        operator(q.detach(), *args[1:], sinks=sinks)
    with torch.no_grad():
        assert torch.equal(operator(q, *args[1:]), function(q, *args[1:]))


def test_torch_notices_that_a_kept_cache_was_written():
    k, v, k_cache, v_cache, slots = write_arguments()
    weight = torch.ones(64, requires_grad=True)
    loss = (k_cache * weight).sum()
    OPS.write_kv(k, v, k_cache, v_cache, slots)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_operators_take_all_options_of_the_functions_but_four():
    for operator in (OPS.decode_attention.default, OPS.prefill_attention.default, OPS.write_kv.default):
        function = getattr(pagedkv, operator._schema.name.partition("::")[2])
        theirs = {x.name: x.default_value if x.has_default_value() else x for x in operator._schema.arguments}
        ours = inspect.signature(function).parameters
        assert [*theirs] == [name for name in ours if name not in ("score_mod", "backend", "out", "return_lse")]
        assert all(ours[name].default in (x, inspect.Parameter.empty) for name, x in theirs.items())


def test_what_operators_cannot_take_is_refused_by_name():
    operator, _, args, _ = call_of(SPECS["decode"])
    for name in ("score_mod", "backend", "out"):
        with pytest.raises(RuntimeError, match=f"Unknown keyword argument '{name}'"):
            operator(*args, **{name: None})
    with pytest.raises(RuntimeError, match=r"type 'Tensor' for argument 'q' but .* 'ndarray'"):
        operator(args[0].numpy(), *args[1:])
    with pytest.raises(RuntimeError, match="k_scale"):
        operator(*args, k_scale=2.0)
    with pytest.raises(ValueError, match="return_lse must be True or left out"):
        operator(*args, return_lse=False)


def test_a_second_registration_changes_nothing():
    before = OPS.decode_attention.default
    torch_ops.register()
    assert OPS.decode_attention.default is before
