"""Which versions of transformers the integration knows."""

from __future__ import annotations

from importlib import import_module, metadata

# From here to there transformers' PagedAttentionCache and Cache are what paged.py and cache.py read.
OLDEST, BEFORE = (5, 20), (5, 24)


def require_transformers() -> str:
    """The version of transformers that is installed.

    Raises
    ------
    ModuleNotFoundError
        torch or transformers is not installed.
    ImportError
        The version of transformers is none of those that the integration was written for.
    """
    remedy = 'pip install "pagedkv[transformers]"'
    for name in ("torch", "transformers"):
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{name} cannot be imported ({error}): {remedy}", name=error.name) from error
    version = metadata.version("transformers")
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) < BEFORE:
        oldest, before = ("{}.{}".format(*bound) for bound in (OLDEST, BEFORE))
        raise ImportError(f"transformers must be at least {oldest} and below {before}, got {version}: {remedy}")
    return version
