"""Arguments of the originals: their types, numbers that are tensors, and errors of pagedkv in the caller's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

import torch

from ..arrays import host_view
from ..validation import require

Function = TypeVar("Function", bound=Callable[..., Any])


def require_tensors(**named: Any) -> None:
    """Raise TypeError for what is no dense tensor with data."""
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            remedy = ": torch.from_numpy shares its memory" if type(x).__name__ == "ndarray" else ""
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{remedy}")
        if not _has_data(x):
            raise TypeError(f"{name} must be a dense tensor with data, got one of {x.layout} on {x.device}")


def _has_data(x: Any) -> bool:
    return x.layout is torch.strided and not x.is_meta


def number(name: str, x: Any, *, positive: bool = False) -> float:
    """Convert to a float within the range of float32, or raise; torch takes a tensor of one element for a number."""
    if isinstance(x, torch.Tensor):
        require_tensors(**{name: x})
        if x.numel() != 1:
            raise ValueError(f"{name} must be one number, got {tuple(x.shape)}")
        x = x.item()
    return require.number(name, x, positive=positive)


def contiguous_rows(x: Any) -> Any:
    """x, copied if its last axis has a stride: FlashAttention copies such a tensor, pagedkv refuses it."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def as_int32(name: str, x: Any, shape: tuple[int | None, ...]) -> Any:
    """x as `contiguous_rows`, or raise unless it is an int32 tensor of this shape, in which None is any length."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.int32:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of torch.int32, got {got}")
    if not _has_data(x):
        require_tensors(**{name: x})
    got_shape = x.shape
    if got_shape != shape and (
        len(got_shape) != len(shape) or any(want not in (None, has) for want, has in zip(shape, got_shape, strict=True))
    ):
        wanted = ", ".join("n" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}{',' * (len(shape) == 1)}), got {tuple(x.shape)}")
    return contiguous_rows(x)


def require_writable(name: str, x: Any) -> None:
    """Raise ValueError if two indices of a tensor on the host name one element: copy_ raises too late."""
    if (view := host_view(x)) is not x:
        require.writable(name, view)


def in_words(names: dict[str, str], tensors: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Let a function say an argument's name in its original, where a message of pagedkv begins with ours.

    Those that `tensors` names are looked at after an error that names no argument; before, it would cost time.
    """

    def decorate(function: Function) -> Function:
        parameters = signature(function).parameters

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except Exception as error:
                ours, _, rest = str(error).partition(" ")
                array, bracket, position = ours.partition("[")  # an array of a list
                theirs = names.get(ours) or (f"{names[array]}{bracket}{position}" if array in names else None)
                if theirs is not None and isinstance(error, (TypeError, ValueError, IndexError)):
                    raise type(error)(f"{theirs} {rest}") from error
                if ours not in parameters:
                    given = dict(zip(parameters, args, strict=False)) | options
                    for name in tensors:
                        x = given.get(name, parameters[name].default)
                        if x is not None or parameters[name].default is Parameter.empty:
                            require_tensors(**{name: x})
                raise

        return call  # type: ignore[return-value]

    return decorate
