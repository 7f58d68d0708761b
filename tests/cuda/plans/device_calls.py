"""Calls of decode_attention on arrays that say they are on a device."""

import numpy as np

import pagedkv

from ...support.device_fakes import InterfaceArray

N, P, HKV, HQ, D, B, M = 8, 16, 2, 4, 64, 3, 2
X = 8  # float16 elements of a vector


def host_arguments():
    return {
        "q": np.zeros((B, HQ, D), np.float16),
        "k_cache": np.zeros((N, HKV, D // X, P, X), np.float16),
        "v_cache": np.zeros((N, HKV, D, P), np.float16),
        "block_tables": np.zeros((B, M), np.int32),
        "seq_lens": np.zeros(B, np.int32),
        "out": np.zeros((B, HQ, D), np.float16),
    }


def decode(kind=InterfaceArray, **changes):
    arguments = host_arguments() | {"layout": "vllm", "kernel": "v1"} | changes
    given = {name: kind(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    return pagedkv.decode_attention(**given)


def launches(devices):
    return [launch for device in devices.values() for launch in device.launches]
