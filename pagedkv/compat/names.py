"""Names that an original has and a drop-in module lacks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


def missing_names(module: str, instead: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` of a module, which says what the module has, and what to do `instead`.

    Modules define it where type checkers do not look: they would take every name for one that is there.
    """

    def missing(name: str) -> NoReturn:
        message, there = f"module {module!r} has no attribute {name!r}", sys.modules[module]
        if not name.startswith("_"):  # what Python and its tools look for has no original
            own = [x for x, value in vars(there).items() if str(getattr(value, "__module__", "")).startswith(module)]
            message += f": it has {', '.join(sorted(x for x in own if not x.startswith('_')))}; {instead}"
        raise AttributeError(message, name=name, obj=there)

    return missing
