"""Runs device functions on each device that a test of a kernel runs on."""

from functools import partial

import pytest

from . import function_cases


@pytest.fixture(scope="module")
def run(open_device):
    """`function_cases.run` on a device."""
    return partial(function_cases.run, open_device)


@pytest.fixture(scope="module")
def launch(open_device):
    """`function_cases.launch` on a device."""
    return partial(function_cases.launch, open_device)
