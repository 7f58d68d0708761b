"""A directory that is proven to be the user's alone, and what is read and written in it.

It is walked to from the root, one name at a time, and what has been opened is what is looked at: nobody can put another
directory in its place between the look and the read. Windows has no descriptors of directories; there the path is used
as it is, and the user's own folders are private by their access control lists.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_LINKS = 40  # as many as Linux follows
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
IS_A_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)  # what systems say of one that is not to be followed

BY_DESCRIPTOR = os.open in os.supports_dir_fd
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_WAITLESS = getattr(os, "O_NONBLOCK", 0)  # opening a pipe waits for somebody who writes to it
_LISTED = os.O_RDONLY | _FILE | getattr(os, "O_DIRECTORY", 0)
_PASSED = _LISTED | getattr(os, "O_PATH", 0)  # a directory that is only passed through need not be readable


class RefusedError(Exception):
    """Somebody else may have made, or may replace, what was to be used.

    Attributes
    ----------
    path : Path
        What is refused.
    reason : str
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason


class PrivateFolder:
    """An open directory; see `open_private`. Names are those of files directly in it.

    Attributes
    ----------
    path : Path
        For messages, and for systems without descriptors of directories.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = path
        self._descriptor = descriptor

    def read(self, name: str) -> bytes:
        """The content of a file, which becomes the one used last.

        Raises
        ------
        OSError
            There is none, or it cannot be read.
        RefusedError
            It is a link, or no file, or belongs to another user, or others may write to it.
        """
        try:
            file = os.open(self._at(name), os.O_RDONLY | _FILE | _WAITLESS, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno in IS_A_LINK:
                raise RefusedError(self.path / name, "is a link") from error
            raise
        try:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                raise RefusedError(self.path / name, "is no regular file")
            if self._descriptor is not None:
                _refuse_others(facts, self.path / name)
            with open(file, "rb", closefd=False) as opened:
                content = opened.read()
            with suppress(OSError):
                os.utime(file if os.utime in os.supports_fd else self._at(name))
            return content
        finally:
            os.close(file)

    def write(self, name: str, content: bytes, *, by_way_of: str) -> None:
        """Put a file in its place whole, or not at all; `by_way_of` is its name until it is complete."""
        file = os.open(
            self._at(by_way_of), os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self._descriptor
        )
        try:
            with open(file, "wb") as opened:
                opened.write(content)
            os.replace(self._at(by_way_of), self._at(name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.remove(by_way_of)
            raise

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Names and facts of all that is in it."""
        with os.scandir(self.path if self._descriptor is None else self._descriptor) as entries:
            for entry in entries:
                with suppress(OSError):  # another process may delete it first
                    yield entry.name, entry.stat(follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Delete a file, if that is possible."""
        with suppress(OSError):
            os.unlink(self._at(name), dir_fd=self._descriptor)

    def _at(self, name: str) -> str | Path:
        return self.path / name if self._descriptor is None else name


@contextmanager
def open_private(directory: Path, *, make: bool) -> Iterator[PrivateFolder]:
    """Open a directory for the length of a ``with`` statement; `make` makes it, and those above, if need be.

    It must belong to the user, and nobody else may write to it. Every directory above must belong to the user or to
    root, and others may write to it only if it is sticky, like /tmp: there they cannot rename what is not theirs. Links
    among those above are followed if they belong to the user or to root.

    Raises
    ------
    OSError
        It is not there, or cannot be opened or made.
    RefusedError
        It is a link, or its owner, its mode, or those of a directory above are others.
    """
    if not BY_DESCRIPTOR:
        if make:
            directory.mkdir(parents=True, exist_ok=True)
        yield PrivateFolder(directory, None)
        return
    descriptor = _walk(directory, make=make)
    try:
        yield PrivateFolder(directory, descriptor)
    finally:
        os.close(descriptor)


def _walk(directory: Path, *, make: bool) -> int:
    names = list(reversed(directory.absolute().parts))
    here, links = Path(names.pop()), 0
    descriptor = os.open(here, _PASSED)
    try:
        while names:
            _refuse_writers(os.fstat(descriptor), here)
            name = names.pop()
            if names and (target := _link(name, descriptor, here)) is not None:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))
                names.extend(reversed(target.parts))
                if not target.is_absolute():
                    continue
                name, here = names.pop(), Path("/")
            child = _open_in(descriptor, name, here, make=make, last=not names)
            os.close(descriptor)
            descriptor, here = child, here / name
        _refuse_others(os.fstat(descriptor), here)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _link(name: str, descriptor: int, here: Path) -> Path | None:
    """Where a link in a directory leads to, None for what is no link."""
    try:
        facts = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(facts.st_mode):
        return None
    if facts.st_uid not in (0, os.geteuid()):
        raise RefusedError(here / name, "is a link of another user")
    return Path(os.readlink(name, dir_fd=descriptor))


def _open_in(descriptor: int, name: str, here: Path, *, make: bool, last: bool) -> int:
    flags = _LISTED if last else _PASSED
    try:
        return os.open(name, flags, dir_fd=descriptor)
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):  # another process may be first
            os.mkdir(name, 0o700, dir_fd=descriptor)
        return os.open(name, flags, dir_fd=descriptor)
    except OSError as error:
        if error.errno in IS_A_LINK and stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            raise RefusedError(here / name, "is a link") from error
        raise


def _refuse_writers(facts: os.stat_result, passed: Path) -> None:
    """Refuse a directory in which others may replace the one that is passed to."""
    if facts.st_uid not in (0, os.geteuid()):
        raise RefusedError(passed, "belongs to another user")
    if facts.st_mode & OTHERS_MAY_WRITE and not facts.st_mode & stat.S_ISVTX:
        raise RefusedError(passed, "can be written to by others")


def _refuse_others(facts: os.stat_result, path: Path) -> None:
    if facts.st_uid != os.geteuid():
        raise RefusedError(path, "belongs to another user")
    if facts.st_mode & OTHERS_MAY_WRITE:
        raise RefusedError(path, "can be written to by others")
