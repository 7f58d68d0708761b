"""The order of steps: each step of a tile once, as its rows lie in memory, then the next tile's first one."""

import numpy as np
import pytest

from pagedkv.cpu.attention.steps.code import INT64, INT_BYTES, STEP, step
from pagedkv.cpu.attention.steps.step_order import StepOrder, StepPosition

from .stepper import pass_over, stepper

PAST = -1
COLUMNS = 3


def emit_order(code, found, number, tile_pass):
    """Store head, token and `past` of each step from `number` on, up to the next tile's first one."""
    step_order = StepOrder(code, tile_pass, STEP)

    def one_step(i, parts):
        at = StepPosition(*parts)
        row = code.builder.add(found, code.times(i, COLUMNS * INT_BYTES))
        for column, value in enumerate((at.head, step_order.token(at), code.builder.zext(at.past, INT64))):
            code.store(value, row, column * INT_BYTES)
        return [*step_order.after(at)]

    turns = code.plus(code.builder.sub(step_order.num_steps, number), 1)
    code.loop(turns, [*step_order.position(number)], one_step)


@pytest.fixture(scope="module")
def run():
    return stepper(step(emit_order))


def order(steps, heads, run_steps):
    """(head, token) of all steps of a tile."""
    return [
        (head, n * STEP)
        for begin in range(0, steps, run_steps)
        for head in range(heads)
        for n in range(begin, min(begin + run_steps, steps))
    ]


@pytest.mark.parametrize("run_steps", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_steps_come_in_the_order_of_memory(run, steps, heads, run_steps):
    expected = [(*at, 0) for at in order(steps, heads, run_steps)] + [(0, 0, 1)]
    over = pass_over(np.zeros((steps * STEP - 3, heads, 16), np.float32), 1, run_steps=run_steps)
    for number in range(len(expected)):
        found = np.full((len(expected) - number, COLUMNS), PAST)
        run(found, number, over)
        assert [tuple(row) for row in found] == expected[number:]
