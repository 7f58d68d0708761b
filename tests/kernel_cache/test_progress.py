"""What a terminal shows while a kernel is compiled."""

import io
import logging
import os
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from numba import float64

from pagedkv.cpu.compile import compile_kernel
from pagedkv.kernel_cache import progress
from pagedkv.kernel_cache.compile_thread import on_compile_thread
from pagedkv.kernel_cache.progress import showing_progress

SHOWN = "\0337\033[?7lpagedkv: compiling decode, once ...\033[?7h\0338"
ERASED = "\033[K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))  # pytest has its own in each phase of a test
    monkeypatch.setenv("TERM", "xterm")
    return stderr


@pytest.mark.parametrize("error", [None, TypeError])
def test_a_terminal_shows_a_progress_line_and_keeps_other_output(terminal, error):
    with suppress(TypeError), showing_progress("decode"):
        assert terminal.getvalue() == SHOWN
        terminal.write("of another thread\n")
        if error:
            raise error
    assert terminal.getvalue() == SHOWN + "of another thread\n" + ERASED


def test_a_compiled_kernel_shows_its_name(terminal):
    def fill(values):
        values[0] = 1

    compile_kernel(fill, (float64[::1],), "progress", keep=False)
    assert "pagedkv: compiling fill for the CPU, once ..." in terminal.getvalue()


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_erases_the_line_at_once(terminal):
    begun, finish = threading.Event(), threading.Event()

    def work():
        with showing_progress("decode"):
            begun.set()
            finish.wait(60)

    def interrupt():
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            on_compile_thread(work)
        assert terminal.getvalue() == SHOWN + ERASED
    finally:
        finish.set()
        on_compile_thread(lambda: None)  # it waits for the work


def test_the_log_says_what_is_compiled_and_how_long_it_took(caplog):
    with caplog.at_level(logging.INFO, "pagedkv"), showing_progress("decode"):
        pass
    assert [record.getMessage() for record in caplog.records] == ["compiling decode", "compiled decode in 0.0 s"]


@pytest.mark.parametrize("is_dumb", [True, False])
def test_without_a_terminal_a_line_appears_unless_logging_is_configured(monkeypatch, terminal, is_dumb):
    """In notebooks, containers and CI a silent compilation would look like a hang."""
    monkeypatch.setattr(progress, "_logger", logger := logging.Logger("pagedkv"))
    if is_dumb:
        monkeypatch.setenv("TERM", "dumb")
    else:
        progress.sys.stderr = io.StringIO()
    for level, handlers in ((logging.NOTSET, []), (logging.WARNING, []), (logging.NOTSET, [logging.NullHandler()])):
        logger.level, logger.handlers = level, handlers
        with showing_progress("decode"):
            assert progress.sys.stderr.getvalue() == "pagedkv: compiling decode, once ...\n"


class Lost(Terminal):
    def write(self, text):
        raise OSError("the terminal is gone")


def closed(stderr):
    stderr.close()
    return stderr


@pytest.mark.parametrize("stderr", [None, closed(io.StringIO()), Lost()], ids=["none", "closed", "lost"])
def test_an_unwritable_stderr_is_no_error(monkeypatch, stderr):
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))
    monkeypatch.setattr(progress, "_logger", logging.Logger("pagedkv"))
    with showing_progress("decode"):
        pass
