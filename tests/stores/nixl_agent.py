"""NIXL where it is installed, else a stand-in for its agent, which copies memory within this process."""

import contextlib
import ctypes
from importlib.util import find_spec
from itertools import pairwise

import pytest

from pagedkv.stores import nixl


class StandIn:
    """The calls of an agent that `pagedkv.stores.nixl` makes; a transfer is done at once, unless `state` says else."""

    state = "DONE"

    def register_memory(self, regions, kind):
        assert kind == "DRAM"
        ordered = sorted(regions)
        assert all(first + size <= behind[0] for (first, size, *_), behind in pairwise(ordered))  # NIXL crashes else
        return regions

    def get_agent_metadata(self):
        return b"metadata of the stand-in"

    def add_remote_agent(self, metadata):
        assert metadata == self.get_agent_metadata()
        return b"a host"

    def get_xfer_descs(self, regions, kind):
        assert all(len(region) == 3 for region in regions)
        return regions

    def initialize_xfer(self, operation, here, there, agent):
        assert agent == b"a host"
        return operation, here, there

    def transfer(self, handle):
        operation, here, there = handle
        for (ours, size, _), (theirs, its_size, _) in zip(here, there, strict=True):
            assert size == its_size
            ctypes.memmove(*((ours, theirs) if operation == "READ" else (theirs, ours)), size)
        return self.state

    def check_xfer_state(self, handle):
        return self.state

    def release_xfer_handle(self, handle):
        assert self.state == "DONE"

    deregister_memory = release_xfer_handle


@contextlib.contextmanager
def host_and_store(capacity, block_bytes, host_timeout=10.0, timeout=10.0):
    """A host with memory for blocks, and a store that keeps them there."""
    with pytest.MonkeyPatch.context() as patch:
        if not (find_spec("nixl_cu12") or find_spec("nixl_cu13")):
            patch.setattr(nixl, "_agent", StandIn)
        host = nixl.NixlHost(capacity, block_bytes, timeout=host_timeout)
        with host, nixl.NixlStore(host.address, timeout=timeout) as store:
            yield host, store
