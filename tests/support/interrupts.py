"""KeyboardInterrupt at every instant at which Python runs signal handlers, and at no other."""

import dis
import functools
import inspect
import itertools
import sys

# The interpreter looks for signals behind these, if what was called is in C, and where a function begins.
LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


class Interrupt:
    """Raises KeyboardInterrupt at one instant of what runs in a with statement, in files of some folders.

    Parameters
    ----------
    instant : int
        Which of them; nothing comes if there are fewer.
    folders : tuple of str
        Parts of the paths of the files.

    Attributes
    ----------
    came_at : str or None
        The function and the line that it came in.
    """

    def __init__(self, instant, folders=("pagedkv/",)):
        self.left, self.folders = instant, folders
        self.came_at = None
        self._in_c = set()  # frames that have just called something, and have not entered a function of Python's

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)
        self._in_c.clear()

    def _called(self, frame, event, _):
        self._in_c.discard(frame.f_back)
        if not any(folder in frame.f_code.co_filename for folder in self.folders):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:  # it may only be closed, where no signal is looked for
            self._look(frame)
        return self._trace

    def _trace(self, frame, event, _):
        if frame in self._in_c:
            self._in_c.discard(frame)
            if event == "opcode":
                self._look(frame)
        if event == "opcode" and frame.f_lasti in looks_of(frame.f_code):
            self._in_c.add(frame)
        return self._trace

    def _look(self, frame):
        self.left -= 1
        if self.left < 0 and self.came_at is None:
            self.came_at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            sys.settrace(self._before)
            raise KeyboardInterrupt


@functools.cache
def looks_of(code):
    """Where the instructions of a function are behind which the interpreter looks for signals."""
    return {at.offset for at in dis.get_instructions(code) if at.opname in LOOKS}


def interrupts_at_every_instant(folders=("pagedkv/",)):
    """An `Interrupt` for each instant of the code that the caller runs in it; the last one comes too late."""
    for instant in itertools.count():
        yield (interrupt := Interrupt(instant, folders))
        if interrupt.came_at is None:
            assert instant, f"nothing has run in {folders}"
            return
