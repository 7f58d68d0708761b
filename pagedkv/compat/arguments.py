"""Arguments of the originals: what must be a tensor of int32, and errors of pagedkv in the caller's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def require_tensors(**named: Any) -> None:
    """Raise TypeError for what is neither a tensor nor None."""
    for name, x in named.items():
        if x is not None and not isinstance(x, torch.Tensor):
            remedy = ": torch.from_numpy shares its memory" if type(x).__name__ == "ndarray" else ""
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{remedy}")


def require_int32(name: str, x: Any, shape: tuple[int | None, ...]) -> None:
    """Raise unless x is an int32 tensor of this shape, in which None is any length."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.int32:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of torch.int32, got {got}")
    got_shape = x.shape
    if got_shape == shape:
        return
    if len(got_shape) != len(shape) or any(want not in (None, has) for want, has in zip(shape, got_shape, strict=True)):
        wanted = ", ".join("n" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}{',' * (len(shape) == 1)}), got {tuple(x.shape)}")


def in_words(names: dict[str, str], tensors: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Let a function say an argument's name in its original, where a message of pagedkv begins with ours.

    Arguments that `tensors` names are looked at after an AttributeError, since a look before costs each call time.
    """

    def decorate(function: Function) -> Function:
        parameters = tuple(signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except AttributeError:
                given = dict(zip(parameters, args, strict=False)) | options
                require_tensors(**{name: given.get(name) for name in tensors})
                raise
            except (TypeError, ValueError, IndexError) as error:
                ours, _, rest = str(error).partition(" ")
                if ours not in names:
                    raise
                raise type(error)(f"{names[ours]} {rest}") from error

        return call  # type: ignore[return-value]

    return decorate
