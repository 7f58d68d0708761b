"""What a terminal shows while a kernel is compiled."""

import io
import logging
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from numba import float64

from pagedkv.compiling import progress
from pagedkv.compiling.compile_thread import on_compile_thread
from pagedkv.compiling.progress import showing_progress
from pagedkv.cpu.compile import compile_kernel


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))  # pytest has its own in each phase of a test
    monkeypatch.setenv("TERM", "xterm")
    return stderr


def shown(terminal):
    """The lines that were told, and whether each was erased before the next one."""
    parts = terminal.getvalue().split("\0337\033[?7l")
    assert parts[0] == ""
    assert all(part.endswith("\033[?7h\0338\033[K") for part in parts[1:])
    return [part.removesuffix("\033[?7h\0338\033[K") for part in parts[1:]]


def test_a_terminal_shows_what_is_compiled_and_no_more_when_it_is_done(terminal):
    with showing_progress("decode for the CPU"):
        assert terminal.getvalue() == "\0337\033[?7lpagedkv: compiling decode for the CPU, once ...\033[?7h\0338"
    assert shown(terminal) == ["pagedkv: compiling decode for the CPU, once ..."]


def test_the_line_goes_after_an_error(terminal):
    with pytest.raises(TypeError, match="no kernel"), showing_progress("decode"):
        raise TypeError("no kernel")
    assert shown(terminal) == ["pagedkv: compiling decode, once ..."]


def test_a_kernel_tells_when_it_is_compiled(terminal):
    def fill(values):
        for i in range(values.size):
            values[i] = 1

    compile_kernel(fill, (float64[::1],), "progress", keep=False)
    assert shown(terminal) == ["pagedkv: compiling fill for the CPU, once ..."]


def test_what_is_written_meanwhile_stays(terminal):
    """A thread's own lines, or the traceback after Ctrl-C: the cursor does not go back over them."""
    with showing_progress("decode"):
        before = terminal.getvalue()
        terminal.write("a line\n")
    assert terminal.getvalue() == f"{before}a line\n\033[K"
    assert before.endswith("\0338")


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
        assert shown(terminal) == ["pagedkv: compiling decode, once ..."]
    finally:
        finish.set()
        on_compile_thread(lambda: None)  # it waits for the work


def test_the_logger_says_what_is_compiled_and_how_long_it_took(caplog):
    with caplog.at_level(logging.INFO, "pagedkv"), showing_progress("decode"):
        pass
    assert [record.getMessage() for record in caplog.records] == ["compiling decode", "compiled decode in 0.0 s"]


@pytest.mark.parametrize("is_dumb", [True, False])
def test_without_a_terminal_there_is_a_line_unless_logging_is_configured(monkeypatch, terminal, is_dumb):
    """As in notebooks, containers and CI: what nobody sees is taken for a hang."""
    monkeypatch.setattr(progress, "_logger", logger := logging.Logger("pagedkv"))
    if is_dumb:
        monkeypatch.setenv("TERM", "dumb")
        stderr = terminal
    else:
        stderr = progress.sys.stderr = io.StringIO()
    with showing_progress("decode"):
        assert stderr.getvalue() == "pagedkv: compiling decode, once ...\n"
    logger.setLevel(logging.WARNING)
    with showing_progress("prefill"):
        pass
    logger.setLevel(logging.NOTSET)
    logger.addHandler(logging.NullHandler())
    with showing_progress("prefill"):
        pass
    assert stderr.getvalue() == "pagedkv: compiling decode, once ...\n"


@pytest.mark.parametrize("stderr", [None, io.StringIO()], ids=["no stderr", "a closed one"])
def test_nothing_depends_on_the_line(monkeypatch, stderr):
    if stderr:
        stderr.close()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))
    monkeypatch.setattr(progress, "_logger", logging.Logger("pagedkv"))
    with showing_progress("decode"):
        pass


def test_a_terminal_that_goes_away_is_no_error(monkeypatch, terminal):
    def lost(text):
        raise OSError("the terminal is gone")

    monkeypatch.setattr(terminal, "write", lost)
    with showing_progress("decode"):
        pass
