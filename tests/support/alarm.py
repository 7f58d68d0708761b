"""An interrupt at a chosen time, to the microsecond where the system allows it."""

import contextlib
import ctypes
import signal

PR_SET_TIMERSLACK = 29


class Alarm:
    """Raises KeyboardInterrupt, once, in what runs between `arm` and `disarm`."""

    def __init__(self):
        self.armed = False
        signal.signal(signal.SIGALRM, self._ring)
        with contextlib.suppress(AttributeError):  # Linux may be 50 microseconds late, unless it is asked not to be
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)

    def _ring(self, number, frame):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def arm(self, seconds):
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm(self):
        self.armed = False
