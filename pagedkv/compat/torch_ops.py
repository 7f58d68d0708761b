"""``torch.ops.pagedkv``: operators of torch that compute what the functions of pagedkv compute.

torch.compile breaks its graph at a function of pagedkv. An operator stays in the graph: torch knows its schema, the
shapes of its results, and that `write_kv` changes the caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch

from ..operations.attention import decode_attention, prefill_attention
from ..operations.caches import write_kv
from .names import missing_names

# What torch's schemas call the types of the options.
_TYPES = {
    **dict.fromkeys(("k_scale", "v_scale", "k_scales", "v_scales"), "Tensor?"),
    **dict.fromkeys(("alibi_slopes", "sinks", "leftpad", "mask"), "Tensor?"),
    **dict.fromkeys(("cos", "sin", "positions"), "Tensor?"),
    **dict.fromkeys(("causal", "exact", "interleaved"), "bool"),
    **dict.fromkeys(("layout", "kernel"), "str"),
    **dict.fromkeys(("scale", "softcap"), "float?"),
    **dict.fromkeys(("window", "window_right", "rotary_dim"), "int?"),
    "max_seq_len": "SymInt?",
    "kv_dtype": "str?",
    "check": "bool?",
}
# A schema cannot hold a function, an operator makes its own result, and tensors say which backend they need. return_lse
# selects an overload, for an operator always returns the same number of tensors.
_LEFT_OUT = {"score_mod", "backend", "out", "return_lse"}


def register() -> None:
    """Define `decode_attention`, `prefill_attention` and `write_kv` in ``torch.ops.pagedkv``; again, do nothing.

    They take the arguments of the functions, as tensors on the host or on a CUDA device, without ``score_mod``, ``out``
    and ``backend``; ``k_scale`` and ``v_scale`` are tensors. With ``return_lse=True`` the first two return (out, lse).
    They compute no gradients: where torch records them, an argument that requires grad is a RuntimeError.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import torch_ops
    >>> torch_ops.register()
    >>> k_cache = v_cache = torch.ones(4, 16, 2, 64)
    >>> q, block_tables, seq_lens = torch.ones(1, 8, 64), torch.tensor([[3, 1]]).int(), torch.tensor([20]).int()
    >>> torch.ops.pagedkv.decode_attention(q, k_cache, v_cache, block_tables, seq_lens).shape
    torch.Size([1, 8, 64])
    """
    _library()


@cache
def _library() -> torch.library.Library:
    """Make the definitions, which last as long as the returned object."""
    library = torch.library.Library("pagedkv", "DEF")

    def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
        library.define(f"{name}{schema}", tags=torch.Tag.needs_fixed_stride_order)
        library.impl(name, _refusing_gradients(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"pagedkv::{name}", _refusing_gradients(fake), lib=library)

    for function in (decode_attention, prefill_attention):
        parameters = _parameters(function)
        define(function.__name__, f"({parameters}) -> Tensor", function, _like)
        with_lse = f"({parameters}, bool return_lse) -> (Tensor, Tensor)"
        define(f"{function.__name__}.lse", with_lse, _with_lse(function), _like_with_lse)
    mutated = {"k_cache": "Tensor(a!)", "v_cache": "Tensor(b!)", "k_scales": "Tensor(c!)?", "v_scales": "Tensor(d!)?"}
    parameters = _parameters(write_kv, mutated)
    define("write_kv", f"({parameters}) -> ()", _write, lambda *args, **options: None)
    return library


def _parameters(function: Callable[..., Any], mutated: dict[str, str] | None = None) -> str:
    """Write the parameters of a function as a schema of torch."""
    types, required, options = _TYPES | (mutated or {}), [], []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is inspect.Parameter.empty:
            required.append(f"{types.get(name, 'Tensor')} {name}")
        elif name not in _LEFT_OUT:
            default = f'"{parameter.default}"' if isinstance(parameter.default, str) else parameter.default
            options.append(f"{types[name]} {name}={default}")
    return ", ".join([*required, "*", *options])


def _refusing_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to raise RuntimeError if torch would need its gradient."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            for x in (*args, *options.values()):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    raise RuntimeError(
                        "torch.ops.pagedkv computes no gradients, got a tensor that requires grad: call it under "
                        "torch.no_grad() or torch.inference_mode(), or pass tensor.detach()"
                    )
        return function(*args, **options)

    return call


def _with_lse(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function for the overload that returns two tensors."""

    def call(*args: Any, return_lse: bool, **options: Any) -> Any:
        if not return_lse:
            raise ValueError("return_lse must be True or left out, got False")
        return function(*args, return_lse=True, **options)

    return call


def _write(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, **options: Any) -> None:
    # Otherwise torch would not notice that what it kept of a cache for a gradient has changed.
    for written in (k_cache, v_cache, options.get("k_scales"), options.get("v_scales")):
        if written is not None:
            torch.autograd.graph.increment_version(written)
    write_kv(k, v, k_cache, v_cache, slots, **options)


def _like(q: Any, *args: Any, **options: Any) -> Any:
    return q.new_empty(q.shape)


def _like_with_lse(q: Any, *args: Any, **options: Any) -> Any:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


if not TYPE_CHECKING:
    __getattr__ = missing_names(__name__, "after register() the operators are in torch.ops.pagedkv")
