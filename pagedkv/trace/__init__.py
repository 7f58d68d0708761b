"""Simulation of a trace of requests: how paging and older allocators use the slots of a KV cache.

The words are those of the vLLM paper (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 3.1 and figure 2). A slot is room for the K and V of one token in all layers:

* tokens: the slot holds a token's K and V;
* reserved: a request holds it empty for a token that is still to come;
* internal fragmentation: a request holds it and will never use it, or never again, since a window has passed its token;
* external fragmentation: it is free, but the next request does not fit. Free slots count only while requests wait;
  otherwise they are idle, not wasted.

Waste is the sum of the last three. Shares are sums over time: slots of each kind, over all slots that are not idle.
"""

from .lengths import Requests, log_normal, read_csv
from .managers import Buddy, Contiguous, Manager, Paged
from .simulate import Run, simulate

__all__ = ["Buddy", "Contiguous", "Manager", "Paged", "Requests", "Run", "log_normal", "read_csv", "simulate"]
