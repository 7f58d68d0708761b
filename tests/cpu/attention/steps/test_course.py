"""The course of a sweep: each step of a tile once, in the order in which rows lie in memory, then the next tile's."""

import numpy as np
import pytest

from pagedkv.cpu.attention.steps.code import INT64, INT_BYTES, STEP, step
from pagedkv.cpu.attention.steps.course import Course, Place, Sweep

from .stepper import stepper, swept

PAST = -1
COLUMNS = 3


def emit_course(code, places, number, *arguments):
    """Store head, token and whether it is past of each step from `number` on, up to the next tile's first one."""
    course = Course(code, Sweep(*arguments), STEP)

    def of_step(i, parts):
        at = Place(*parts)
        row = code.builder.add(places, code.times(i, COLUMNS * INT_BYTES))
        for column, value in enumerate((at.head, course.token(at), code.builder.zext(at.past, INT64))):
            code.store(value, row, column * INT_BYTES)
        return [*course.after(at)]

    turns = code.plus(code.builder.sub(course.num_steps, number), 1)
    code.loop(turns, [*course.place(number)], of_step)


@pytest.fixture(scope="module")
def run():
    return stepper(step(emit_course))


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
    expected = [(*place, 0) for place in order(steps, heads, run_steps)] + [(0, 0, 1)]
    arguments = swept(np.zeros((steps * STEP - 3, heads, 16), np.float32), 1, run_steps=run_steps)
    for number in range(len(expected)):
        places = np.full((len(expected) - number, COLUMNS), PAST)
        run(places, number, *arguments)
        assert [tuple(place) for place in places] == expected[number:]
