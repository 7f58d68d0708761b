"""A directory of compiled kernels: bounded, private to the user, and never trusted when damaged."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path

DIGEST_BYTES = 32
MOST_FILES = 1000
MOST_BYTES = 256 * 1024 * 1024


def cache_dir(kind: str) -> Path | None:
    """Where compiled kernels of one kind ("cpu", "cuda") are kept.

    A folder of ``PAGEDKV_CACHE_DIR``, or of ``pagedkv`` in the user's own cache directory; None for a user without a
    home directory.
    """
    if chosen := os.environ.get("PAGEDKV_CACHE_DIR"):
        return Path(chosen) / kind
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "pagedkv" / kind


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
    keeps nothing: the caller compiles again. What is loaded gets executed, so a directory that belongs to another user,
    or that others may write to, is never used.

    Parameters
    ----------
    directory : pathlib.Path or None
        Made when the first blob is saved. None keeps nothing.
    suffix : str
        The ending of its files; no other file is touched.
    most_files, most_bytes : int
        Beyond these limits the least recently used files are deleted.
    """

    def __init__(
        self, directory: Path | None, suffix: str, *, most_files: int = MOST_FILES, most_bytes: int = MOST_BYTES
    ) -> None:
        self.directory = directory
        self._suffix = suffix
        self._most_files = most_files
        self._most_bytes = most_bytes

    def load(self, key: bytes) -> bytes | None:
        """The blob of a key (any bytes), or None."""
        if self.directory is None:
            return None
        digest, path = self._place(self.directory, key)
        try:
            if not _is_private(self.directory):
                return None
            content = path.read_bytes()
            body = content[DIGEST_BYTES:]
            if hashlib.sha256(digest + body).digest() != content[:DIGEST_BYTES]:
                return None
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return body

    def save(self, key: bytes, body: bytes) -> None:
        """Keep a blob, whole or not at all. Failure to write only costs time at the next start."""
        if self.directory is None:
            return
        digest, path = self._place(self.directory, key)
        with contextlib.suppress(OSError):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self.directory):
                return
            # Named like a blob, so that what a killed process leaves behind is evicted in turn.
            with tempfile.NamedTemporaryFile(
                dir=self.directory, prefix="new-", suffix=self._suffix, delete=False
            ) as file:
                try:
                    file.write(hashlib.sha256(digest + body).digest() + body)
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._drop_oldest(self.directory, path)

    def _place(self, directory: Path, key: bytes) -> tuple[bytes, Path]:
        digest = hashlib.sha256(key).digest()
        return digest, directory / (digest.hex()[:40] + self._suffix)

    def _drop_oldest(self, directory: Path, newest: Path) -> None:
        files = []
        for path in directory.glob("*" + self._suffix):
            # Another process may drop it first.
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                files.append((path != newest, -facts.st_mtime_ns, facts.st_size, path))
        total = 0
        for count, (_, _, nbytes, path) in enumerate(sorted(files), start=1):
            total += nbytes
            if count > self._most_files or total > self._most_bytes:
                path.unlink(missing_ok=True)


def _is_private(directory: Path) -> bool:
    if os.name != "posix":
        return True
    facts = directory.stat()
    if facts.st_uid != os.geteuid():
        _say_refused(directory, "it belongs to another user")
    elif facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _say_refused(directory, "others may write to it")
    else:
        return True
    return False


@cache
def _say_refused(directory: Path, reason: str) -> None:
    logging.getLogger("pagedkv").warning("compiled kernels are not kept in %s: %s", directory, reason)
