"""How a plan is run."""

import sys
import threading
import time

import numpy as np
import pytest

import pagedkv

from ...support.device_fakes import RecordingDevice, fake_torch, recording
from .device_calls import HQ, B, D, decode

pytestmark = pytest.mark.usefixtures("nothing_planned")


class SlowDevice(RecordingDevice):
    """Lets other threads go on in the middle of a launch, and takes down whose it is."""

    def launch(self, kernel, *rest):
        self.launches.append((threading.get_ident(), kernel.name))
        time.sleep(1e-3)


@pytest.mark.parametrize("operation", ["decode", "merge"])
def test_the_launches_of_a_call_follow_each_other(monkeypatch, operation):
    """They share workspaces with those of every other call on the stream."""
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    outs = [torch.Tensor(np.zeros((B, HQ, D), np.float16)) for _ in range(20)]
    lses = [torch.Tensor(np.zeros((B, HQ), np.float32)) for _ in range(20)]

    def call():
        if operation == "decode":
            decode(kernel="v2")
        else:
            pagedkv.merge_states(outs, lses)

    with recording(SlowDevice) as devices:
        call()
        (device,) = devices.values()
        calls_per_thread, per_call = 10, len(device.launches)
        assert per_call == {"decode": 2, "merge": 3}[operation]
        device.launches.clear()
        threads = [threading.Thread(target=lambda: [call() for _ in range(calls_per_thread)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(device.launches) == 3 * calls_per_thread * per_call
    for first in range(0, len(device.launches), per_call):
        assert len({thread for thread, _ in device.launches[first : first + per_call]}) == 1
