"""The versions of transformers that the integration supports."""

from __future__ import annotations

from importlib import import_module, metadata

from ...extras import pip_install

# The range of versions whose PagedAttentionCache and Cache paged.py and cache.py can read.
OLDEST, BEFORE = (5, 20), (5, 25)


def require_transformers() -> str:
    """Check that a supported version of transformers is installed, and return it.

    Raises
    ------
    ModuleNotFoundError
        torch or transformers is not installed.
    ImportError
        The integration does not support the installed version of transformers.
    """
    remedy = pip_install("transformers")
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
