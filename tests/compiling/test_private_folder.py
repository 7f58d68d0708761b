"""The folder of compiled kernels: the user's alone, or nothing is kept in it, and a line says why."""

import os
import stat
from pathlib import Path

import pytest

from pagedkv.compiling import private_folder
from pagedkv.compiling.kernel_cache import Store

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes of directories are POSIX")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files to other users")
STRANGER = 12345


@posix
def test_the_directory_and_its_files_are_for_the_user_alone(store):
    store.save(b"key", b"body")
    (file,) = store.directory.iterdir()
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


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

    monkeypatch.setattr(private_folder, "require_private", forbidden)
    assert why_unwritten(tmp_path / "blobs", warnings_logged) == "Permission denied"


def test_a_folder_that_cannot_be_used_is_said_once_for_all_kinds_of_kernels(tmp_path, warnings_logged):
    (tmp_path / "file").write_text("not a directory")
    for kind in ("cpu", "cuda"):
        Store(tmp_path / "file" / kind, ".blob").save(b"key", b"body")
    assert len(warnings_logged()) == 1


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
    check_unused(store, warnings_logged, tmp_path / "planted", "belongs to another user")


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
        (lambda file: os.truncate(file, 2**40), "is damaged: it has 1099511627776 bytes"),
    ],
    ids=["link", "pipe", "group", "all", "stranger", "truncated", "empty", "larger than memory"],
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
def test_a_directory_by_a_relative_path_is_used(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Store(Path("blobs"), ".blob").save(b"key", b"body")
    assert Store(tmp_path / "x" / ".." / "blobs", ".blob").load(b"key") is None  # there is no x
    assert Store(Path("../" + tmp_path.name) / "blobs", ".blob").load(b"key") == b"body"


def test_where_folders_have_no_owners_blobs_are_kept(monkeypatch, tmp_path):
    """On Windows."""
    monkeypatch.setattr(private_folder, "HAS_OWNERS", False)
    store = Store(tmp_path / "below" / "blobs", ".blob", most_files=2)
    for key in (b"1", b"2", b"3"):
        assert store.load(key) is None
        store.save(key, key)
        assert store.load(key) == key
    assert len(list(store.directory.iterdir())) == 2
