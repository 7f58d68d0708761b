"""The store of compiled kernels: gives back what was saved, whole, or nothing."""

import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.compiling import kernel_cache as stores
from pagedkv.compiling import private_folder
from pagedkv.compiling.kernel_cache import Store, cache_dir, hash_of_sources

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes of directories are POSIX")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files to other users")
STRANGER = 12345


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "blobs", ".blob")


@pytest.fixture
def warnings_logged(monkeypatch, caplog):
    monkeypatch.setattr(stores, "_said", set())
    with caplog.at_level(logging.WARNING, "pagedkv"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_what_is_saved_is_loaded(store):
    assert store.load(b"key") is None
    store.save(b"key", b"body")
    store.save(b"other", b"")
    assert store.load(b"key") == b"body"
    assert store.load(b"other") == b""
    store.save(b"key", b"new body")
    assert store.load(b"key") == b"new body"
    assert len(list(store.directory.iterdir())) == 2


@posix
def test_the_directory_and_its_files_are_for_the_user_alone(store):
    store.save(b"key", b"body")
    (file,) = store.directory.iterdir()
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


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


def test_a_folder_in_the_place_of_a_file_is_not_loaded(store):
    store.save(b"key", b"body")
    (file,) = store.directory.iterdir()
    file.unlink()
    file.mkdir()
    assert store.load(b"key") is None
    store.save(b"key", b"body")
    assert list(store.directory.iterdir()) == [file]


def why_unwritten(directory, warnings_logged):
    """Loading says nothing, and the first of two saves why every process compiles: the reason in its words."""
    store = Store(directory, ".blob")
    assert store.load(b"key") is None
    assert warnings_logged() == []
    for _ in range(2):
        store.save(b"key", b"body")
        assert store.load(b"key") is None
    (said,) = warnings_logged()
    before, after = (
        f"compiled kernels cannot be kept in {directory} (",
        "), and every process compiles them again: set PAGEDKV_CACHE_DIR to a folder of your own",
    )
    assert said.startswith(before)
    assert said.endswith(after)
    return said[len(before) : -len(after)]


@pytest.mark.parametrize("name", [".", "below"])
def test_a_directory_that_cannot_be_made_keeps_nothing(tmp_path, warnings_logged, name):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    reason = why_unwritten(blocked / name, warnings_logged)
    assert reason == "Not a directory" or os.name != "posix"
    assert blocked.read_text() == "not a directory"


@posix
def test_a_directory_that_cannot_be_opened_keeps_nothing(tmp_path, monkeypatch, warnings_logged):
    def forbidden(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "blobs")

    monkeypatch.setattr(private_folder, "_open_in", forbidden)
    assert why_unwritten(tmp_path / "blobs", warnings_logged) == "Permission denied"


def test_without_a_directory_nothing_is_kept(warnings_logged):
    for _ in range(2):
        store = Store(None, ".blob")
        assert store.load(b"key") is None
        store.save(b"key", b"body")
    assert warnings_logged() == [
        "compiled kernels are kept nowhere, for there is no home directory: set PAGEDKV_CACHE_DIR"
    ]


def test_a_store_that_is_to_keep_nothing_says_nothing(tmp_path, warnings_logged):
    for directory in (tmp_path / "blobs", None):
        store = Store(directory, ".blob", keep=False)
        store.save(b"key", b"body")
        assert store.load(b"key") is None
    assert not list(tmp_path.iterdir())
    assert warnings_logged() == []


@pytest.mark.parametrize("name", ["os.replace", "os.open", "os.utime"])
def test_a_full_disk_leaves_nothing_half_written(monkeypatch, store, warnings_logged, name):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    store.save(b"key", b"old")
    monkeypatch.setattr(name, full)
    store.save(b"key", b"new")
    monkeypatch.undo()
    assert store.load(b"key") == (b"new" if name == "os.utime" else b"old")
    assert len(list(store.directory.iterdir())) == 1
    assert ["(No space left on device)" in said for said in warnings_logged()] == [True] * (name != "os.utime")


def test_a_file_that_cannot_be_touched_is_loaded(monkeypatch, store):
    def read_only(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    store.save(b"key", b"body")
    monkeypatch.setattr(os, "utime", read_only)
    assert store.load(b"key") == b"body"


def test_an_interrupted_save_leaves_nothing(monkeypatch, store):
    def interrupt(*paths, **descriptors):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(b"key", b"body")
    assert not list(store.directory.iterdir())


def refused(store, path, reason):
    """What is said of a folder that is not used because of a path."""
    return (
        f"compiled kernels are not kept in {store.directory}: {path} {reason}; set PAGEDKV_CACHE_DIR to a folder of "
        "your own, in folders that nobody else may write to (chmod go-w)"
    )


def check_unused(store, warnings_logged, path, reason):
    """Nothing is loaded and nothing saved, and one warning says why."""
    before = sorted(store.directory.iterdir())
    assert store.load(b"key") is None
    store.save(b"other", b"body")
    assert sorted(store.directory.iterdir()) == before
    assert warnings_logged() == [refused(store, path, reason)]


@posix
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(store, warnings_logged, mode):
    store.save(b"key", b"body")
    os.chmod(store.directory, mode)
    check_unused(store, warnings_logged, store.directory, "can be written to by others")
    os.chmod(store.directory, 0o755)
    assert store.load(b"key") == b"body"


@as_root
def test_a_directory_of_another_user_is_not_used(store, warnings_logged):
    store.save(b"key", b"body")
    os.chown(store.directory, STRANGER, STRANGER)
    check_unused(store, warnings_logged, store.directory, "belongs to another user")


@posix
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_directory_below_one_that_others_may_write_is_not_used(tmp_path, warnings_logged, mode):
    shared = tmp_path / "shared"
    store = Store(shared / "mine" / "blobs", ".blob")
    store.save(b"key", b"body")
    shared.chmod(mode)
    check_unused(store, warnings_logged, shared, "can be written to by others")
    shared.chmod(mode | stat.S_ISVTX)  # as /tmp: nobody else can rename what is in it
    assert store.load(b"key") == b"body"


@as_root
def test_a_directory_below_one_of_another_user_is_not_used(tmp_path, warnings_logged):
    store = Store(tmp_path / "theirs" / "blobs", ".blob")
    store.save(b"key", b"body")
    os.chown(tmp_path / "theirs", STRANGER, STRANGER)
    check_unused(store, warnings_logged, tmp_path / "theirs", "belongs to another user")


@posix
def test_a_directory_that_is_a_link_is_not_used(tmp_path, warnings_logged):
    Store(tmp_path / "real", ".blob").save(b"key", b"body")
    (tmp_path / "link").symlink_to("real")
    store = Store(tmp_path / "link", ".blob")
    check_unused(store, warnings_logged, tmp_path / "link", "is a link")


@posix
@pytest.mark.parametrize("absolute", [True, False])
def test_links_of_the_user_above_the_directory_are_followed(tmp_path, absolute):
    for name in ("disk", "disk/large", "home"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "home" / "cache").symlink_to(tmp_path / "disk" / "large" if absolute else "../disk/large")
    Store(tmp_path / "home" / "cache" / "blobs", ".blob").save(b"key", b"body")
    assert Store(tmp_path / "disk" / "large" / "blobs", ".blob").load(b"key") == b"body"
    (tmp_path / "disk" / "large").chmod(0o777)
    assert Store(tmp_path / "home" / "cache" / "blobs", ".blob").load(b"key") is None


@as_root
def test_links_of_another_user_are_not_followed(tmp_path, warnings_logged):
    Store(tmp_path / "real" / "blobs", ".blob").save(b"key", b"body")
    os.symlink("real", tmp_path / "planted")
    os.chown(tmp_path / "planted", STRANGER, STRANGER, follow_symlinks=False)
    store = Store(tmp_path / "planted" / "blobs", ".blob")
    check_unused(store, warnings_logged, tmp_path / "planted", "is a link of another user")


@posix
def test_a_circle_of_links_keeps_nothing(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    store = Store(tmp_path / "a" / "blobs", ".blob")
    store.save(b"key", b"body")
    assert store.load(b"key") is None


def _link_to_a_copy(file):
    os.rename(file, file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real").name)


def _pipe(file):
    file.unlink()
    os.mkfifo(file)


@posix
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_link_to_a_copy, "is a link"),
        (_pipe, "is no regular file"),
        (lambda file: file.chmod(0o620), "can be written to by others"),
        (lambda file: file.chmod(0o602), "can be written to by others"),
        pytest.param(lambda file: os.chown(file, STRANGER, -1), "belongs to another user", marks=as_root),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged, or was saved under another name"),
        (lambda file: file.write_bytes(b""), "is damaged, or was saved under another name"),
    ],
    ids=["link", "pipe", "group", "all", "stranger", "truncated", "empty"],
)
def test_a_file_that_another_may_have_made_is_not_loaded(store, warnings_logged, change, reason):
    store.save(b"key", b"body")
    (file,) = store.directory.iterdir()
    change(file)
    for _ in range(2):
        assert store.load(b"key") is None
    assert warnings_logged() == [
        f"a compiled kernel in {store.directory} is not used, and compiled again: {file} {reason}; if you do not know "
        "why, delete the folder"
    ]
    store.save(b"key", b"again")
    assert store.load(b"key") == b"again"


@posix
def test_directories_swapped_during_loads_win_nothing(tmp_path):
    """A neighbour's directory takes the place of the user's, again and again, with another body under the same key."""
    mine, theirs, aside = (tmp_path / name for name in ("mine", "theirs", "aside"))
    Store(mine, ".blob").save(b"key", b"body")
    Store(theirs, ".blob").save(b"key", b"planted")
    theirs.chmod(0o777)
    over = threading.Event()

    def swap():
        while not over.is_set():
            for source, target in ((mine, aside), (theirs, mine), (mine, theirs), (aside, mine)):
                os.rename(source, target)

    attacker = threading.Thread(target=swap)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    attacker.start()
    try:
        found = {Store(mine, ".blob").load(b"key") for _ in range(8000)}
    finally:
        over.set()
        attacker.join()
        sys.setswitchinterval(interval)
    assert found <= {b"body", None}


@posix
def test_a_directory_by_a_relative_path_is_used(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Store(Path("blobs"), ".blob").save(b"key", b"body")
    assert Store(tmp_path / "x" / ".." / "blobs", ".blob").load(b"key") is None  # there is no x
    assert Store(Path("../" + tmp_path.name) / "blobs", ".blob").load(b"key") == b"body"


def test_without_descriptors_of_directories_paths_do(monkeypatch, tmp_path):
    monkeypatch.setattr(private_folder, "BY_DESCRIPTOR", False)
    store = Store(tmp_path / "below" / "blobs", ".blob", most_files=2)
    for key in (b"1", b"2", b"3"):
        assert store.load(key) is None
        store.save(key, key)
        assert store.load(key) == key
    assert len(list(store.directory.iterdir())) == 2


def _age(store, name, seconds):
    path = store.directory / name
    os.utime(path, (1_000_000 - seconds, 1_000_000 - seconds))
    return path


def _names(store):
    return {path.name for path in store.directory.iterdir()}


def test_the_oldest_files_go_when_there_are_too_many(tmp_path):
    store = Store(tmp_path, ".blob", most_files=3)
    for age in range(4):
        (tmp_path / f"{age}.blob").touch()
        _age(store, f"{age}.blob", age)
    (tmp_path / "foreign.txt").touch()
    _age(store, "foreign.txt", 99)
    store.save(b"key", b"body")
    assert {"0.blob", "1.blob", "foreign.txt"} < _names(store)
    assert len(_names(store)) == 4
    assert store.load(b"key") == b"body"


def test_the_oldest_files_go_when_they_are_too_large(tmp_path):
    store = Store(tmp_path, ".blob", most_bytes=250)
    for age in range(3):
        (tmp_path / f"{age}.blob").write_bytes(bytes(100))
        _age(store, f"{age}.blob", age)
    store.save(b"key", bytes(10))
    assert {"0.blob", "1.blob"} < _names(store)
    assert len(_names(store)) == 3


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
from pagedkv.compiling.kernel_cache import Store
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
