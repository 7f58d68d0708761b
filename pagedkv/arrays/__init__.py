"""Arrays of every framework: what an argument is, found out once, and how NumPy sees it. Nothing is imported for it."""

from .argument import Argument, DeviceArgument, Facts, HostArgument
from .identify import current_streams, device_kinds, host_view, identify, to_host
from .shadow import Array, Shadow, address_of, make_shadow, metadata_of
from .torch_tensor import between_graphs

__all__ = [
    "Argument",
    "Array",
    "DeviceArgument",
    "Facts",
    "HostArgument",
    "Shadow",
    "address_of",
    "between_graphs",
    "current_streams",
    "device_kinds",
    "host_view",
    "identify",
    "make_shadow",
    "metadata_of",
    "to_host",
]
