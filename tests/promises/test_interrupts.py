"""Ctrl-C at any time of a call: no hang, no other error, and all or nothing is written."""

import signal

import pytest

from ..support.programs import printed_by


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timer of signals")
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_interrupts(number):
    [line] = printed_by("promises.interrupted", number)
    assert line.startswith(f"{number} interrupts")


@pytest.mark.parametrize(
    "arguments", [(600, 1), pytest.param((10_000, 2, "score_mod"), marks=pytest.mark.long)], ids=["short", "long"]
)
def test_a_thread_that_rewrites_tables_lengths_slots_and_options(arguments):
    [line] = printed_by("promises.rewritten", *arguments)
    assert line.startswith(f"{arguments[0]} calls")
