"""The folder of compiled kernels: the user's alone, or nothing is kept in it, and a line says why."""

import os
import stat
from pathlib import Path

import pytest

from pagedkv.compiling import private_folder
from pagedkv.compiling.kernel_cache import Store

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes of folders are POSIX")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files to other users")
STRANGER = 12345


@posix
def test_folders_and_files_are_made_for_the_user_alone(tmp_path):
    store = Store(tmp_path / "home" / "blobs", ".blob")
    store.save(b"key", b"body")
    (file,) = store.directory.iterdir()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (store.directory.parent, store.directory, file)]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("name", [".", "below"])
def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path, warnings_logged, name):
    """Loading says nothing. The first save says why every process compiles, for all kinds of kernels."""
    (tmp_path / "file").write_text("not a directory")
    for kind in ("cpu", "cuda"):
        store = Store(tmp_path / "file" / name / kind, ".blob")
        assert store.load(b"key") is None
        assert len(warnings_logged()) == (kind == "cuda")
        store.save(b"key", b"body")
        assert store.load(b"key") is None
    assert warnings_logged() == [
        f"compiled kernels cannot be kept in {tmp_path / 'file' / name / 'cpu'} (Not a directory), and every process "
        "compiles them again: set PAGEDKV_CACHE_DIR to a folder of your own"
    ]


def mode(value):
    return lambda path: path.chmod(value)


def of_a_stranger(path):
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def link(path):
    """Move what is there, and put a link to it in its place."""
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def link_of_a_stranger(path):
    link(path)
    of_a_stranger(path)


def link_through_a_folder_of_all(path):
    (path.parent / "shared").mkdir()
    path.rename(path.parent / "shared" / "moved")
    path.symlink_to("shared/moved")
    (path.parent / "shared").chmod(0o777)


@posix
@pytest.mark.parametrize(
    ("folder", "spoil", "at_fault", "reason"),
    [
        *(("home/blobs", mode(value), "home/blobs", "can be written to by others") for value in (0o720, 0o702, 0o1777)),
        *(("home", mode(value), "home", "can be written to by others") for value in (0o775, 0o757)),
        ("home", link_through_a_folder_of_all, "shared", "can be written to by others"),
        ("home/blobs", link, "home/blobs", "is a link"),
        *(
            pytest.param(folder, spoil, folder, "belongs to another user", marks=as_root)
            for folder in ("home", "home/blobs")
            for spoil in (of_a_stranger, link_of_a_stranger)
            if (folder, spoil) != ("home/blobs", link_of_a_stranger)
        ),
    ],
)
def test_a_folder_that_others_may_have_made_or_may_replace_is_not_used(
    tmp_path, warnings_logged, folder, spoil, at_fault, reason
):
    store = Store(tmp_path / "home" / "blobs", ".blob")
    store.save(b"key", b"body")
    spoil(tmp_path / folder)
    before = sorted(store.directory.iterdir())
    assert store.load(b"key") is None
    store.save(b"other", b"body")
    assert sorted(store.directory.iterdir()) == before
    assert warnings_logged() == [
        f"compiled kernels are not kept in {store.directory}: {tmp_path / at_fault} {reason}; set PAGEDKV_CACHE_DIR to "
        "a folder of your own, in folders that nobody else may write to (chmod go-w)"
    ]


@posix
@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("home/blobs", mode(0o755)),
        ("home", mode(0o1777)),  # as /tmp: nobody else can rename what is in it
        ("home", link),
        ("home", lambda path: (link(path), path.unlink(), path.symlink_to(path.with_name("moved")))),
    ],
    ids=["readable", "sticky", "link", "absolute link"],
)
def test_others_may_read_and_links_of_the_user_above_are_followed(tmp_path, folder, change):
    store = Store(tmp_path / "home" / "blobs", ".blob")
    store.save(b"key", b"body")
    change(tmp_path / folder)
    assert store.load(b"key") == b"body"


@posix
def test_a_folder_by_a_relative_path_is_used(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Store(Path("blobs"), ".blob").save(b"key", b"body")
    assert Store(tmp_path / "x" / ".." / "blobs", ".blob").load(b"key") is None  # there is no x
    assert Store(Path("../" + tmp_path.name) / "blobs", ".blob").load(b"key") == b"body"


@posix
def test_a_circle_of_links_keeps_nothing(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    store = Store(tmp_path / "a" / "blobs", ".blob")
    store.save(b"key", b"body")
    assert store.load(b"key") is None


def pipe(file):
    file.unlink()
    os.mkfifo(file)


DAMAGED = "is damaged, or was saved under another name"


@posix
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (link, "is a link"),
        (pipe, "is no regular file"),
        (mode(0o620), "can be written to by others"),
        (mode(0o602), "can be written to by others"),
        pytest.param(of_a_stranger, "belongs to another user", marks=as_root),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), DAMAGED),
        (lambda file: file.write_bytes(b""), DAMAGED),
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


def test_where_folders_have_no_owners_blobs_are_kept(monkeypatch, tmp_path):
    """On Windows."""
    monkeypatch.setattr(private_folder, "HAS_OWNERS", False)
    store = Store(tmp_path / "below" / "blobs", ".blob", most_files=2)
    for key in (b"1", b"2", b"3"):
        assert store.load(key) is None
        store.save(key, key)
        assert store.load(key) == key
    assert len(list(store.directory.iterdir())) == 2
