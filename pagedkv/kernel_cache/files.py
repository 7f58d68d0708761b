"""A directory of compiled kernels: bounded, private to the user, and never trusted when damaged."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from . import private_folder
from .private_folder import RefusedError

DIGEST_BYTES = 32
MOST_FILES = 1000
MOST_BYTES = 256 * 1024 * 1024
MOST_FILE_BYTES = 16 * 1024 * 1024  # the largest kernels have some 250 KB; longer files are damaged

DAMAGED = "a compiled kernel in %s is not used, and compiled again: %s; if you do not know why, delete the folder"
REFUSED = (
    "compiled kernels are not kept in %s: %s; set PAGEDKV_CACHE_DIR to a folder of your own, in folders that nobody "
    "else may write to (chmod go-w)"
)
UNUSABLE = (
    "compiled kernels cannot be kept in %s (%s), and every process compiles them again: set PAGEDKV_CACHE_DIR to a "
    "folder of your own"
)

T = TypeVar("T")
_warned: set[tuple[Path | None, str]] = set()  # the warnings so far, each with its folder


def hash_of_sources(*paths: Path) -> bytes:
    """Hash Python files, and all those in and below directories.

    Take it at import: a file that changes later, under a running process, is not the code that runs.
    """
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(path if path.is_dir() else path.parent).as_posix()
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


class Store:
    """Keeps byte blobs on disk by key, one file each.

    A blob that is missing, damaged or saved under another key counts as absent, and a directory that cannot be used
    stays empty: the caller compiles again. Blobs are executed, so the store uses directories and files only if nobody
    but the user and root may write to them (`private_folder`). It logs what it refuses or cannot write, each kind of
    fault once for all stores in a folder.

    Parameters
    ----------
    directory : pathlib.Path or None
        Made when the first blob is saved; None for a user without a home directory.
    suffix : str
        The ending of its files; no other file is touched.
    keep : bool
        False for a store that is meant to keep nothing.
    most_files, most_bytes : int
        Beyond these limits the least recently used files are deleted.
    """

    def __init__(
        self,
        directory: Path | None,
        suffix: str,
        *,
        keep: bool = True,
        most_files: int = MOST_FILES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.directory = directory
        self._keep = keep
        self._suffix = suffix
        self._most_files = most_files
        self._most_bytes = most_bytes

    def load(self, key: bytes) -> bytes | None:
        """The blob of a key (any bytes), or None."""
        digest = hashlib.sha256(key).digest()

        def load(path: Path) -> bytes:
            content = private_folder.read(path, MOST_FILE_BYTES)
            body = content[DIGEST_BYTES:]
            if hashlib.sha256(digest + body).digest() != content[:DIGEST_BYTES]:
                raise RefusedError(path, "is damaged, or was saved under another name")
            return body

        return self._with_file(digest, load, make=False)

    def save(self, key: bytes, body: bytes) -> None:
        """Save a blob as a whole or not at all. A failure is logged, and costs no more than another compilation."""
        digest = hashlib.sha256(key).digest()

        def save(path: Path) -> None:
            private_folder.write(path, hashlib.sha256(digest + body).digest() + body)
            self._drop_oldest(path)

        if len(body) <= MOST_FILE_BYTES - DIGEST_BYTES:
            self._with_file(digest, save, make=True)

    def _with_file(self, digest: bytes, use: Callable[[Path], T], *, make: bool) -> T | None:
        """Call `use` with the path of a key's file; None if the file cannot be used."""
        if not self._keep:
            return None
        if self.directory is None:
            if make:
                _warn_once(
                    None, "compiled kernels are kept nowhere, for there is no home directory: set PAGEDKV_CACHE_DIR"
                )
            return None
        try:
            private_folder.require_private(self.directory, make=make)
            return use(self.directory / (digest.hex()[:40] + self._suffix))
        except RefusedError as refused:
            _warn_once(self.directory, DAMAGED if refused.path.parent == self.directory else REFUSED, refused)
        except OSError as error:
            if make:  # a missing file to load is no fault
                _warn_once(self.directory, UNUSABLE, error.strerror)
        return None

    def _drop_oldest(self, newest: Path) -> None:
        """Delete the least recently used files beyond the limits, but never `newest`."""
        files = []
        for path in newest.parent.glob(f"*{self._suffix}"):  # including files that a killed process has begun
            with suppress(OSError):  # another process may delete it first
                facts = path.lstat()
                files.append((path != newest, -facts.st_mtime_ns, facts.st_size, path))
        total = 0
        for count, (_, _, nbytes, path) in enumerate(sorted(files), start=1):
            total += nbytes
            if count > self._most_files or total > self._most_bytes:
                with suppress(OSError):
                    path.unlink()


def _warn_once(directory: Path | None, text: str, *args: object) -> None:
    """Log a warning once for all stores in a folder, which has a directory for each kind of kernels."""
    if (about := (directory and directory.parent, text)) not in _warned:
        _warned.add(about)
        logging.getLogger("pagedkv").warning(text, *filter(None, (directory,)), *args)
