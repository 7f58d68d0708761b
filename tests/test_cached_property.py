"""An attribute that is computed once."""

import os
import signal
import threading

import pytest

from pagedkv.cached_property import cached_property


class Object:
    def __init__(self, value=lambda: 3):
        self.value = value

    @cached_property
    def answer(self):
        """What it is."""
        return self.value()


def test_it_is_computed_once():
    values = iter([3])
    one = Object(lambda: next(values))
    assert (one.answer, one.answer) == (3, 3)
    assert Object.answer.__doc__ == "What it is."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_forked_while_a_thread_computes_it_does_not_wait():
    """functools.cached_property of Python 3.11 has one lock for all objects, which nobody releases in the child."""
    begun, may_end = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: Object(lambda: [begun.set(), may_end.wait()]).answer)
    other.start()
    begun.wait()
    if (child := os.fork()) == 0:
        signal.alarm(5)
        os._exit(Object().answer != 3)
    may_end.set()
    other.join()
    assert os.waitpid(child, 0)[1] == 0
