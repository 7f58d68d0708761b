"""Copying blocks in several launches: every kernel is there before the first one starts."""

import numpy as np
import pytest

import pagedkv
from pagedkv.cuda.plans import blocks

from ...support.device_fakes import InterfaceArray, recording


def test_a_kernel_that_cannot_be_compiled_is_met_before_the_first_launch(monkeypatch):
    arrays = np.zeros((4, 4, 8, 2, 64), np.float16)
    k_caches, v_caches = InterfaceArray.of([list(arrays[:2]), list(arrays[2:, ..., :32])])
    pairs = np.array([[0, 1]])
    compiled = []

    def compile_for(device, make, config):
        compiled.append(config)
        if len(compiled) == 2:
            raise pagedkv.BackendUnavailableError("no compiler")
        return make

    monkeypatch.setattr(blocks, "compile_for", compile_for)
    with recording() as devices, pytest.raises(pagedkv.BackendUnavailableError, match="no compiler"):
        pagedkv.copy_blocks(k_caches, v_caches, InterfaceArray(pairs))
    assert len(set(compiled)) == 2
    assert not any(device.launches for device in devices.values())
