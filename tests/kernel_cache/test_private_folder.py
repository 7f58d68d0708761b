"""The folder of compiled kernels must be private; otherwise nothing is kept, and a log line says why."""

import os
import stat

import pytest

from pagedkv.kernel_cache import private_folder
from pagedkv.kernel_cache.files import Store

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes of folders are POSIX")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "home" / "blobs", ".blob")
    store.save(b"key", b"body")
    assert store.load(b"key") == b"body"
    return store


@posix
def test_folders_and_files_are_made_for_the_user_alone(store):
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


def give_to_a_stranger(path):
    os.chown(path, 12345, 12345, follow_symlinks=False)


def link(path):
    """Move a file, and put a link to it in its place."""
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def link_of_a_stranger(path):
    link(path)
    give_to_a_stranger(path)


def link_through_a_folder_of_all(path):
    (path.parent / "shared").mkdir()
    path.rename(path.parent / "shared" / "moved")
    path.symlink_to("shared/moved")
    (path.parent / "shared").chmod(0o777)


OF_OTHERS, OF_A_STRANGER = "can be written to by others", "belongs to another user"


@posix
@pytest.mark.parametrize(
    ("folder", "spoil", "at_fault", "reason"),
    [
        ("home/blobs", mode(0o720), "home/blobs", OF_OTHERS),
        ("home/blobs", mode(0o1777), "home/blobs", OF_OTHERS),
        ("home", mode(0o775), "home", OF_OTHERS),
        ("home", mode(0o757), "home", OF_OTHERS),
        ("home", link_through_a_folder_of_all, "shared", OF_OTHERS),
        ("home/blobs", link, "home/blobs", "is a link"),
        pytest.param("home", give_to_a_stranger, "home", OF_A_STRANGER, marks=as_root),
        pytest.param("home/blobs", give_to_a_stranger, "home/blobs", OF_A_STRANGER, marks=as_root),
        pytest.param("home", link_of_a_stranger, "home", OF_A_STRANGER, marks=as_root),
    ],
)
def test_a_folder_that_others_can_replace_is_not_used(
    tmp_path, store, warnings_logged, folder, spoil, at_fault, reason
):
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
    ],
    ids=["readable", "sticky", "link"],
)
def test_others_may_read_and_links_of_the_user_above_are_followed(tmp_path, store, folder, change):
    change(tmp_path / folder)
    assert store.load(b"key") == b"body"


@posix
def test_folders_above_a_relative_path_are_checked_too(monkeypatch, tmp_path, store):
    monkeypatch.chdir(tmp_path / "home")
    relative = Store(store.directory.relative_to(tmp_path / "home"), ".blob")
    assert relative.load(b"key") == b"body"
    tmp_path.chmod(0o777)
    assert relative.load(b"key") is None


def replace_by_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@posix
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (link, "is a link"),
        (replace_by_a_pipe, "is no regular file"),
        (mode(0o620), OF_OTHERS),
        (mode(0o602), OF_OTHERS),
        pytest.param(give_to_a_stranger, OF_A_STRANGER, marks=as_root),
        (lambda file: os.truncate(file, 3), "is damaged, or was saved under another name"),
        (lambda file: os.truncate(file, 2**40), "is damaged: it has 1099511627776 bytes"),
    ],
    ids=["link", "pipe", "group", "all", "stranger", "truncated", "larger than memory"],
)
def test_a_file_that_another_may_have_made_is_not_loaded(store, warnings_logged, change, reason):
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


def test_on_systems_without_owners_any_folder_is_used(monkeypatch, store):
    """On Windows, where Python is told no owners and no modes."""
    monkeypatch.setattr(private_folder, "HAS_OWNERS", False)
    store.directory.chmod(0o777)
    assert store.load(b"key") == b"body"
