"""A directory of compiled kernels: bounded, private to the user, and never trusted when damaged."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .private_folder import PrivateFolder, RefusedError, open_private

DIGEST_BYTES = 32
MOST_FILES = 1000
MOST_BYTES = 256 * 1024 * 1024

T = TypeVar("T")
_said: set[Path | None] = set()  # the directories of which has been said what is wrong with them


def hash_of_sources(*paths: Path) -> bytes:
    """A hash of Python files, and of all those in and below directories.

    Take it at import: a file that changes later, under a running process, is not the code that runs.
    """
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(path if path.is_dir() else path.parent).as_posix()
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


class Store:
    """Byte blobs by key, one file each.

    A blob that is missing, truncated, altered or saved under another key counts as absent, and an unusable directory
    keeps nothing: the caller compiles again. What is loaded gets executed, so only a directory is used that is proven
    to be the user's alone (`private_folder.open_private`), and in it only regular files of the user's. What is refused,
    or cannot be written, is logged, once for each directory.

    Parameters
    ----------
    directory : pathlib.Path or None
        Made when the first blob is saved; None where there is none to be had.
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
        digest, name = self._place(key)

        def read(folder: PrivateFolder) -> bytes:
            content = folder.read(name)
            body = content[DIGEST_BYTES:]
            if hashlib.sha256(digest + body).digest() != content[:DIGEST_BYTES]:
                raise RefusedError(folder.path / name, "is damaged, or was saved under another name")
            return body

        return self._in_folder(read, make=False)

    def save(self, key: bytes, body: bytes) -> None:
        """Keep a blob, whole or not at all. Failure to write only costs time at the next start, and is logged."""
        digest, name = self._place(key)
        # Named like a blob, so that what a killed process leaves behind is evicted in turn.
        unfinished = f"new-{secrets.token_hex(8)}{self._suffix}"

        def write(folder: PrivateFolder) -> None:
            folder.write(name, hashlib.sha256(digest + body).digest() + body, by_way_of=unfinished)
            self._drop_oldest(folder, name)

        self._in_folder(write, make=True)

    def _place(self, key: bytes) -> tuple[bytes, str]:
        digest = hashlib.sha256(key).digest()
        return digest, digest.hex()[:40] + self._suffix

    def _in_folder(self, use: Callable[[PrivateFolder], T], *, make: bool) -> T | None:
        if not self._keep:
            return None
        if self.directory is None:
            if make:
                _say(None, "compiled kernels are kept nowhere, for there is no home directory: set PAGEDKV_CACHE_DIR")
            return None
        try:
            with open_private(self.directory, make=make) as folder:
                return use(folder)
        except RefusedError as refused:
            _say_refused(self.directory, refused)
        except OSError as error:
            if make:  # nothing to load is no fault
                _say(
                    self.directory,
                    "compiled kernels cannot be kept in %s (%s), and every process compiles them again: set "
                    "PAGEDKV_CACHE_DIR to a folder of your own",
                    self.directory,
                    error.strerror,
                )
        return None

    def _drop_oldest(self, folder: PrivateFolder, newest: str) -> None:
        files = [
            (name != newest, -facts.st_mtime_ns, facts.st_size, name)
            for name, facts in folder.files()
            if name.endswith(self._suffix)
        ]
        total = 0
        for count, (_, _, nbytes, name) in enumerate(sorted(files), start=1):
            total += nbytes
            if count > self._most_files or total > self._most_bytes:
                folder.remove(name)


def _say_refused(directory: Path, refused: RefusedError) -> None:
    if refused.path.parent == directory:
        text = "a compiled kernel in %s is not used, and compiled again: %s; if you do not know why, delete the folder"
    else:
        text = (
            "compiled kernels are not kept in %s: %s; set PAGEDKV_CACHE_DIR to a folder of your own, in folders that "
            "nobody else may write to (chmod go-w)"
        )
    _say(directory, text, directory, refused)


def _say(directory: Path | None, text: str, *args: object) -> None:
    if directory not in _said:
        _said.add(directory)
        logging.getLogger("pagedkv").warning(text, *args)
