"""Environment variables."""

import sys
from pathlib import Path

import pytest

from pagedkv.environment import cache_dir, is_on, num_threads
from pagedkv.validation import require


@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((value, True) for value in ("1", "true", "True", "yes", "ON", " 1 ")),
        *((value, False) for value in ("0", "false", "FALSE", "no", "off", "", None)),
    ],
)
def test_a_variable_is_on_or_off_in_usual_words(monkeypatch, value, on):
    monkeypatch.delenv("PAGEDKV_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("PAGEDKV_CHECK", value)
    assert is_on("PAGEDKV_CHECK") is on
    assert require.check(None) is on


@pytest.mark.parametrize("value", ["2", "y", "enabled", "10"])
def test_a_variable_that_says_neither_is_refused(monkeypatch, value):
    monkeypatch.setenv("PAGEDKV_CHECK", value)
    message = f"^PAGEDKV_CHECK must be 1, true, yes, on, or 0, false, no, off or empty, got '{value}'$"
    with pytest.raises(ValueError, match=message):
        require.check(None)
    assert require.check(True) is True


def test_the_number_of_threads_is_one_or_is_refused(monkeypatch):
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1024")
    assert num_threads() == 1024
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "")
    assert num_threads() is None
    for value in ("0", "1025", "-1", "two", "1.0", "9" * 5000):
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", value)
        with pytest.raises(ValueError, match=f"PAGEDKV_NUM_THREADS must be an integer in 1..1024, got '{value[:80]}'"):
            num_threads()


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    assert cache_dir("cuda") == tmp_path / "cuda"
    monkeypatch.delenv("PAGEDKV_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir("cpu") == tmp_path / "xdg" / "pagedkv" / "cpu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir("cpu") == Path.home() / ".cache" / "pagedkv" / "cpu"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_dir("cpu") == tmp_path / "local" / "pagedkv" / "cpu"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir("cpu") == Path.home() / "Library" / "Caches" / "pagedkv" / "cpu"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PAGEDKV_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_dir("cpu") is None
