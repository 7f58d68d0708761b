"""What the package launches in some cells, as a file: ``python tests/gpu/record.py FILE``, with the cells on stdin.

It is a program of its own, which runs beside any checkout of the package that PYTHONPATH names and uses public names
alone: `tests.gpu.variants` says for what. No memory is read: caches may be larger than this machine's.
"""

import base64
import gzip
import hashlib
import json
import sys
from itertools import accumulate

import ml_dtypes
import numpy as np

import pagedkv
from pagedkv.emulator import EmulatorDevice

MULTIPROCESSORS = 132
ROOM = 1 << 44  # between the addresses of two arrays, which nothing follows
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


class Recorder(EmulatorDevice):
    """A device with the limits of an H100 or an H200 that keeps launches and kernels, and launches nothing."""

    lineinfo = False

    def __init__(self):
        super().__init__()
        self.kernels = {}
        self.start()

    def start(self):
        """Forget arrays, workspaces and launches, but not kernels."""
        self.names, self.workspaces, self.recorded = [], {}, []

    def again(self, trace=None):
        return self

    def address(self, name, array, **options):
        if name not in self.names:
            self.names.append(name)
        return (1 + self.names.index(name)) * ROOM

    def scratch(self, name, nbytes):
        self.workspaces[name] = max(nbytes, self.workspaces.get(name, 0))
        return self.address(name, None)

    def blocks_at_once(self, kernel, shared_bytes):
        """Thread blocks of a kernel that run at the same time, for commits whose grids follow from that."""
        from pagedkv.compiler.occupancy import occupancy

        resources = kernel.linked.resources()
        shared_bytes += resources.shared_bytes
        return MULTIPROCESSORS * occupancy(self.capability, resources.registers, kernel.num_threads, shared_bytes)

    def launch(self, kernel, grid, args, shared_bytes=0):
        key = hashlib.sha256(f"{kernel.name}\n{kernel.ptx}".encode()).hexdigest()[:16]
        facts = {"name": kernel.name, "entry": kernel.entry, "num_threads": kernel.num_threads, "ptx": kernel.ptx}
        self.kernels[key] = facts | {"cubin": base64.b64encode(kernel.cubin).decode()}
        self.recorded.append([key, list(map(int, grid)), [self._named(x) for x in args], int(shared_bytes)])

    def _named(self, x):
        """An address as the name of its array and the bytes from its start; other arguments as they are."""
        if isinstance(x, float) or not ROOM <= x < (1 + len(self.names)) * ROOM:
            return x if isinstance(x, float) else int(x)
        return [self.names[x // ROOM - 1], int(x % ROOM)]


def attend(device, operation, cell):
    """Call an operation as a step does whose arrays are of a cell."""
    size, lens = cell["block_size"], np.array(cell["seq_lens"], np.int32)
    counts = -(-lens // size)
    tables = np.zeros((len(lens), counts.max()), np.int32)
    shape = (int(counts.sum()), size, cell["num_kv_heads"], cell["head_dim"])
    k, v = (np.zeros(shape, np.uint8 if cell["kv_dtype"] else DTYPES[cell["dtype"]]) for _ in "kv")
    q = np.zeros((sum(cell["query_lens"]), cell["num_heads"], cell["head_dim"]), DTYPES[cell["dtype"]])
    options = {"kv_dtype": cell["kv_dtype"], "out": np.zeros_like(q), "backend": device}
    if operation == "decode":
        pagedkv.decode_attention(q, k, v, tables, lens, **options)
    else:
        starts = np.array([0, *accumulate(cell["query_lens"])], np.int32)
        pagedkv.prefill_attention(q, k, v, tables, lens, starts, causal=cell["causal"], **options)


def recording(given):
    """The launches of (key, operation, cell), by key and operation, and the kernels that they name."""
    device, cells = Recorder(), {}
    for key, operation, cell in given:
        device.start()
        attend(device, operation, cell)
        cells.setdefault(key, {})[operation] = {"launches": device.recorded, "workspaces": device.workspaces}
    return {"package": pagedkv.__file__, "cells": cells, "kernels": device.kernels}


if __name__ == "__main__":
    with gzip.open(sys.argv[1], "wt") as file:
        json.dump(recording(json.load(sys.stdin)), file)
