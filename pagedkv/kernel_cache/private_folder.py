"""Folders that nobody but the user and root may write to, and the files in them."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

HAS_OWNERS = hasattr(os, "geteuid")  # on Windows access control lists keep a user's own folders private
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for a writer


class RefusedError(Exception):
    """Raised for a path that somebody else may have made, or may replace."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path


def require_private(folder: Path, *, make: bool) -> None:
    """Raise unless a folder and all folders above it are private; `make` creates missing ones.

    OSError if it is not there, or cannot be made. RefusedError if it is a link, or not the user's, or others may write
    to it; or if a folder or a link above is neither the user's nor root's, or others may write to a folder above that
    is not sticky: in /tmp, which is, they cannot rename what is not theirs.
    """
    folder = folder.absolute()
    above = {*folder.parents, *Path(os.path.realpath(folder.parent), folder.name).parents}
    for path in (*sorted(above, key=lambda path: len(path.parts)), folder):
        if make and not path.exists():
            with suppress(FileExistsError):  # another process may be first
                path.mkdir(0o700)
        facts, of_link = path.stat(), path.lstat()
        if path == folder and stat.S_ISLNK(of_link.st_mode):
            raise RefusedError(path, "is a link")
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        _require_own(facts, path, is_above=path != folder)
        _require_own(of_link, path, is_above=path != folder)


def read(path: Path, most_bytes: int) -> bytes:
    """Read a file in a private folder, and mark it as the one used last.

    OSError if it cannot be read; RefusedError if it is a link or no file, another user's, writable by others, or longer
    than `most_bytes`.
    """
    with open(path, "rb", opener=_open) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise RefusedError(path, "is no regular file")
        _require_own(facts, path)
        if facts.st_size > most_bytes:
            raise RefusedError(path, f"is damaged: it has {facts.st_size} bytes")
        with suppress(OSError):
            os.utime(path)
        return file.read(facts.st_size)


def write(path: Path, content: bytes) -> None:
    """Write a file in a private folder as a whole or not at all; until then its name begins with ``new-``."""
    unfinished = path.with_name(f"new-{secrets.token_hex(8)}{path.suffix}")
    try:
        with open(unfinished, "xb", opener=_open) as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | _SAFELY, 0o600)
    except OSError as error:
        if os.path.islink(path):
            raise RefusedError(Path(path), "is a link") from error
        raise


def _require_own(facts: os.stat_result, path: Path, *, is_above: bool = False) -> None:
    if not HAS_OWNERS:
        return
    if facts.st_uid != os.geteuid() and not (is_above and facts.st_uid == 0):
        raise RefusedError(path, "belongs to another user")
    of_others = 0 if stat.S_ISLNK(facts.st_mode) else facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if of_others and not (is_above and facts.st_mode & stat.S_ISVTX):
        raise RefusedError(path, "can be written to by others")
