"""The kernel cache returns a saved blob as a whole or not at all."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.kernel_cache.files import Store, hash_of_sources


def test_what_is_saved_is_loaded(store):
    assert store.load(b"key") is None
    store.save(b"key", b"body")
    store.save(b"other", b"")
    assert store.load(b"key") == b"body"
    assert store.load(b"other") == b""
    store.save(b"key", b"new body")
    assert store.load(b"key") == b"new body"
    assert len(list(store.directory.iterdir())) == 2


@given(damage=st.data())
def test_no_damaged_file_is_loaded(tmp_path_factory, damage):
    store = Store(tmp_path_factory.mktemp("blobs"), ".blob")
    store.save(b"key", b"some body")
    (file,) = store.directory.iterdir()
    whole = file.read_bytes()
    cut = damage.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[cut] ^= damage.draw(st.integers(1, 255))
    tail = damage.draw(st.binary(min_size=1))
    for content in (whole[:cut], bytes(flipped), whole + tail, tail):
        file.write_bytes(content)
        assert store.load(b"key") is None
    store.save(b"key", b"again")
    assert store.load(b"key") == b"again"


def test_a_whole_file_of_another_key_is_not_loaded(store):
    store.save(b"key", b"body")
    (file,) = store.directory.iterdir()
    store.save(b"other", b"other body")
    (other,) = set(store.directory.iterdir()) - {file}
    os.replace(other, file)
    assert store.load(b"key") is None


def test_without_a_directory_nothing_is_kept(warnings_logged):
    for _ in range(2):
        store = Store(None, ".blob")
        assert store.load(b"key") is None
        store.save(b"key", b"body")
    assert warnings_logged() == [
        "compiled kernels are kept nowhere, for there is no home directory: set PAGEDKV_CACHE_DIR"
    ]


def test_a_store_that_keeps_nothing_logs_nothing(tmp_path, warnings_logged):
    for directory in (tmp_path / "blobs", None):
        store = Store(directory, ".blob", keep=False)
        store.save(b"key", b"body")
        assert store.load(b"key") is None
    assert not list(tmp_path.iterdir())
    assert warnings_logged() == []


@pytest.mark.parametrize("name", ["os.replace", "os.open", "os.utime"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_nothing_half_written(monkeypatch, store, warnings_logged, name, error):
    def fail(*args, **kwargs):
        raise error

    store.save(b"key", b"old")
    monkeypatch.setattr(name, fail)
    with suppress(KeyboardInterrupt):
        store.save(b"key", b"new")
    monkeypatch.undo()
    assert store.load(b"key") == (b"new" if name == "os.utime" else b"old")
    assert len(list(store.directory.iterdir())) == 1
    is_said = name != "os.utime" and isinstance(error, OSError)
    assert ["(No space left on device)" in said for said in warnings_logged()] == [True] * is_said


def _age(store, name, seconds):
    path = store.directory / name
    os.utime(path, (1_000_000 - seconds, 1_000_000 - seconds))
    return path


def _names(store):
    return {path.name for path in store.directory.iterdir()}


@pytest.mark.parametrize("limit", [{"most_files": 3}, {"most_bytes": 250}])
def test_the_oldest_files_go_when_there_are_too_many_or_they_are_too_large(tmp_path, limit):
    store = Store(tmp_path, ".blob", **limit)
    (tmp_path / "foreign.txt").touch()
    _age(store, "foreign.txt", 99)
    for age in range(4):
        (tmp_path / f"{age}.blob").write_bytes(bytes(100))
        _age(store, f"{age}.blob", age)
    store.save(b"key", b"body")
    assert {"0.blob", "1.blob", "foreign.txt"} < _names(store)
    assert len(_names(store)) == 4
    assert store.load(b"key") == b"body"


def test_the_newest_stays_even_when_it_is_too_large_or_looks_old(tmp_path):
    store = Store(tmp_path, ".blob", most_files=1)
    (tmp_path / "future.blob").touch()
    os.utime(tmp_path / "future.blob", (2**32, 2**32))
    store.save(b"key", b"body")
    assert store.load(b"key") == b"body"
    assert len(_names(store)) == 1


def test_a_blob_that_is_used_is_not_the_oldest(tmp_path):
    store = Store(tmp_path, ".blob", most_files=2)
    for seconds, key in ((1000, b"used"), (2000, b"unused")):
        store.save(key, key)
        path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(path, (seconds, seconds))
    assert store.load(b"used") == b"used"
    store.save(b"new", b"new")
    assert store.load(b"unused") is None
    assert store.load(b"used") == b"used"


RACE = """
import sys
from pathlib import Path
from pagedkv.kernel_cache.files import Store
store = Store(Path(sys.argv[1]), ".blob", most_files=3)
for step in range(300):
    key = b"%d" % (step % 5)
    body = store.load(key)
    assert body is None or body == key * 1000, body
    store.save(key, key * 1000)
"""


def test_processes_that_race_see_whole_blobs(tmp_path):
    running = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert len(list(tmp_path.iterdir())) <= 5
    assert not list(tmp_path.glob("new-*"))


def test_the_hash_of_sources_sees_names_and_contents(tmp_path):
    hashes = [hash_of_sources(tmp_path)]
    (tmp_path / "a.py").write_text("one")
    hashes.append(hash_of_sources(tmp_path))
    (tmp_path / "a.py").write_text("two")
    hashes.append(hash_of_sources(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    hashes.append(hash_of_sources(tmp_path))
    (tmp_path / "room").mkdir()
    (tmp_path / "b.py").rename(tmp_path / "room" / "b.py")
    hashes.append(hash_of_sources(tmp_path))
    (tmp_path / "room" / "b.py").write_text("three")
    hashes.append(hash_of_sources(tmp_path))
    assert len(set(hashes)) == 6
    (tmp_path / "notes.txt").write_text("three")
    assert hash_of_sources(tmp_path) == hashes[-1]
    assert hash_of_sources(tmp_path / "room" / "b.py") == hash_of_sources(tmp_path / "room")
