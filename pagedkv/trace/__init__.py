"""What becomes of every token slot of a KV cache: a trace of requests against paging and what was there before it.

The words are those of the vLLM paper (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 3.1 and figure 2). A slot is room for the K and V of one token in all layers:

* tokens: it holds a token's K and V;
* reserved: a request holds it empty for a token that is still to come;
* internal fragmentation: a request holds it and will never use it, as its end shows;
* external fragmentation: it is free, but the request whose turn it is does not fit. Free slots count only while
  requests wait: slots that nobody asks for are idle, not wasted.

Waste is the last three. Shares are sums over time: slots of each kind, over all slots that are not idle.
"""

from .lengths import Requests, log_normal, read_csv
from .managers import Buddy, Contiguous, Manager, Paged
from .simulate import Run, simulate

__all__ = ["Buddy", "Contiguous", "Manager", "Paged", "Requests", "Run", "log_normal", "read_csv", "simulate"]
