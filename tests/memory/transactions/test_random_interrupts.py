"""Interrupts at random instants, of which the mutants of transactions need none."""

import pytest

from ...support.programs import printed_by


@pytest.mark.parametrize("number", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_interrupts_come_before_the_change_or_after(number):
    [line] = printed_by("memory.transactions.random_interrupts", number)
    before, after = map(int, line.split())
    assert before + after >= number
    assert before > number / 2
