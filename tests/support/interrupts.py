"""Interrupts at every instant at which Python runs a signal handler, and at no other."""

import dis
import sys

# Behind these the interpreter looks for signals, if what was called is in C; besides, where a function begins.
LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


class Interrupt:
    """Raises KeyboardInterrupt at one instant of what runs in a with statement, in files of some folders.

    Parameters
    ----------
    instant : int
        Which of them; nothing comes if there are fewer.
    folders : tuple of str
        Parts of the paths of the files.
    """

    def __init__(self, instant, folders):
        self.left, self.folders = instant, folders
        self.came_at = None
        self._names, self._last = {}, {}

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)
        self._last.clear()

    def _called(self, frame, event, _):
        self._last.pop(frame.f_back, None)  # what was called is Python's: no signal is looked for when it returns
        if not any(folder in frame.f_code.co_filename for folder in self.folders):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._look(frame)
        return self._trace

    def _trace(self, frame, event, _):
        if event == "opcode":
            if self._last.get(frame) in LOOKS:
                self._look(frame)
            self._last[frame] = self._name(frame)
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace

    def _look(self, frame):
        self.left -= 1
        if self.left < 0 and self.came_at is None:
            self.came_at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            sys.settrace(self._before)
            raise KeyboardInterrupt

    def _name(self, frame):
        code = frame.f_code
        if code not in self._names:
            self._names[code] = {at.offset: at.opname for at in dis.get_instructions(code)}
        return self._names[code].get(frame.f_lasti)
