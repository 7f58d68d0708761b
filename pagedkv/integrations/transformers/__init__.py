"""Models of transformers on pagedkv, which need the extra ``transformers``.

Nothing in pagedkv imports it: torch and transformers come with it.
"""

from .versions import require_transformers

require_transformers()

from .attention import NAME, CachedPass, ForwardPass, paged_attention  # noqa: E402
from .cache import PagedCache  # noqa: E402
from .engine import Engine  # noqa: E402
from .options import RequestOptions  # noqa: E402
from .use import set_attention, use_pagedkv  # noqa: E402

__all__ = [
    "NAME",
    "CachedPass",
    "Engine",
    "ForwardPass",
    "PagedCache",
    "RequestOptions",
    "paged_attention",
    "set_attention",
    "use_pagedkv",
]
