"""Models of transformers on pagedkv: ``pip install "pagedkv[transformers]"``.

Nothing in pagedkv imports it: torch and transformers come with it.
"""

from .versions import require_transformers

require_transformers()

from .attention import NAME, CachedPass, ForwardPass, paged_attention, set_attention  # noqa: E402

__all__ = ["NAME", "CachedPass", "ForwardPass", "paged_attention", "set_attention"]
