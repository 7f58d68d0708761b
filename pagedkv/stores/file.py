"""FileStore: wire blocks in one file, which survive the process.

The file has a page of sizes, an entry of 64 bytes for each slot, and the slots. An entry is all zeros, or has the key,
the size and the age of the slot's block, and a checksum of these. A block that makes room loses its entry first; then
the new block is written, and its entry last. So a process that is killed at any moment leaves entries of whole blocks
only. After a power failure the system may have kept an entry and lost its block: the block's own checksum tells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import BinaryIO

from ..memory.prefix.digests import NUM_BYTES, blake2b_128
from .recycled import RecycledMemory
from .slots import Slots
from .store import Buffer, sizes_of

_MAGIC = b"pagedkv file of wire blocks, 1\n\0"
_SIZES = Struct("<32sQQ")
_ENTRY = Struct("<16sQQ")
_ENTRY_BYTES, _PAGE = 64, 4096
_EMPTY = bytes(_ENTRY_BYTES)


class FileStore:
    """Keeps blocks in one file, which one process at a time may have open.

    Any thread may call it. A process that is killed while it stores loses at most what it was storing and what made
    room; one that is killed while it makes the file may leave an unfinished one beside it, with a dot before its name.

    Parameters
    ----------
    path : str or path
        A file that a FileStore made, with the same capacity and block_bytes; it is made if there is none.
    capacity, block_bytes : int
        As in `HostStore`; the file grows to a little more than `capacity`.

    Raises
    ------
    ValueError
        The file is none of a FileStore, is damaged, or has other sizes. It stays as it is.
    FileNotFoundError
        There is no such folder.
    BlockingIOError
        Another process, or another store of this one, has it open.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from pagedkv.stores import FileStore
    >>> with TemporaryDirectory() as folder:
    ...     for turn in range(2):
    ...         with FileStore(Path(folder) / "blocks", capacity=10_000, block_bytes=1000) as store:
    ...             print(store.get([b"a key, 16 bytes."])[0] is not None)
    ...             store.put([b"a key, 16 bytes."], [b"a block"])
    False
    True
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int, block_bytes: int) -> None:
        self._slots = Slots(capacity, block_bytes)
        self.capacity, self.block_bytes = self._slots.capacity, self._slots.block_bytes
        self._path, self._process = Path(path), os.getpid()
        self._memory, self._lock = RecycledMemory(), Lock()
        self._stride = -(-self.block_bytes // _PAGE) * _PAGE
        self._first = -(-(_PAGE + self._slots.num_slots * _ENTRY_BYTES) // _PAGE) * _PAGE
        if not self._path.exists():
            self._make()
        if not self._path.is_file():
            raise ValueError(
                f"path must be a file that a FileStore made, or none yet, got {self._path}, which is no regular file, "
                "nor a link to one"
            )
        self._file: BinaryIO = open(self._path, "r+b", buffering=0)  # noqa: SIM115
        try:
            _hold(self._file, self._path)
            self._require_own()
            self._age = self._read_entries()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process open the file."""
        if self._process == os.getpid() and not self._file.closed:
            _let_go(self._file)
        self._file.close()

    def get(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Look up keys; see `BlockStore.get`."""
        with self._lock:
            self._require_open()
            places = self._slots.find(keys)
            found = self._memory.room_for(places)
            for i, place in enumerate(places):
                if place is not None and not self._read(self._offset(place[0]), found[i]):
                    found[i] = None
            return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys are there; see `BlockStore.has`."""
        with self._lock:
            self._require_open()
            return [place is not None for place in self._slots.find(keys)]

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> None:
        """Keep copies of blocks; see `BlockStore.put`."""
        with self._lock:
            self._require_open()
            chosen, slots, evicted = self._slots.plan(keys, sizes_of(blocks))
            self._slots.remove(evicted)
            # A put that failed half-way may have left entries in free slots, too.
            self._erase(slots)
            for i, slot in zip(chosen, slots, strict=True):
                self._write(self._offset(slot), blocks[i])
            sizes = sizes_of([blocks[i] for i in chosen])
            for i, slot, size in zip(reversed(chosen), reversed(slots), reversed(sizes), strict=True):
                self._age += 1
                entry = _ENTRY.pack(keys[i], size, self._age)
                self._write(_PAGE + slot * _ENTRY_BYTES, (entry + self._check(entry, slot)).ljust(_ENTRY_BYTES, b"\0"))
            self._slots.put([keys[i] for i in chosen], slots, sizes)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        with self._lock:
            self._require_open()
            self._erase(self._slots.remove(keys))

    def _erase(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._write(_PAGE + slot * _ENTRY_BYTES, _EMPTY)

    def _make(self) -> None:
        """Make the file under another name, and give it its own when it is whole, unless another process did."""
        if not self._path.parent.is_dir():
            raise FileNotFoundError(f"path must be in a folder that is there, got {self._path}: make the folder first")
        with NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.name}-", delete=False) as file:
            try:
                file.write(self._sizes())
                file.truncate(self._first + self._slots.num_slots * self._stride)
                file.flush()
                os.fsync(file.fileno())
                file.close()
                with suppress(FileExistsError):
                    os.link(file.name, self._path)
            finally:
                Path(file.name).unlink(missing_ok=True)

    def _sizes(self) -> bytes:
        sizes = _SIZES.pack(_MAGIC, self.block_bytes, self._slots.num_slots)
        return sizes + blake2b_128(sizes)

    def _require_own(self) -> None:
        """Raise ValueError unless the file begins as this store would, and is as long."""
        room = bytearray(len(self._sizes()))
        whole = self._read(0, memoryview(room))
        sizes, check = bytes(room[: _SIZES.size]), bytes(room[_SIZES.size :])
        if not whole or not sizes.startswith(_MAGIC):
            raise ValueError(f"path must be a file that a FileStore made, or none yet, got {self._path}")
        length = os.fstat(self._file.fileno()).st_size
        if check != blake2b_128(sizes):
            raise ValueError(f"path must be a whole file, got {self._path}, whose first page is damaged: delete it")
        _, block_bytes, num_slots = _SIZES.unpack(sizes)
        if (block_bytes, num_slots) != (self.block_bytes, self._slots.num_slots):
            raise ValueError(
                f"block_bytes and capacity must be those of {self._path}, {block_bytes} and {block_bytes * num_slots}, "
                f"got {self.block_bytes} and {self.capacity}: give those, or another path"
            )
        if length != self._first + num_slots * self._stride:
            raise ValueError(f"path must be a whole file, got {self._path}, which has {length} bytes: delete it")

    def _read_entries(self) -> int:
        """Find the keys of a file, oldest first; returns the age of the newest."""
        room = memoryview(bytearray(self._slots.num_slots * _ENTRY_BYTES))
        self._read(_PAGE, room)
        newest: dict[bytes, tuple[int, int, int]] = {}
        for slot in range(self._slots.num_slots):
            stored = bytes(room[slot * _ENTRY_BYTES :][: _ENTRY.size + NUM_BYTES])
            entry, check = stored[: _ENTRY.size], stored[_ENTRY.size :]
            key, size, age = _ENTRY.unpack(entry)
            if check == self._check(entry, slot) and size <= self.block_bytes:
                newest[key] = max((age, slot, size), newest.get(key, (0, 0, 0)))
        keys = sorted(newest, key=newest.__getitem__, reverse=True)
        self._slots.put(keys, [newest[key][1] for key in keys], [newest[key][2] for key in keys])
        return max((age for age, _, _ in newest.values()), default=0)

    @staticmethod
    def _check(entry: bytes, slot: int) -> bytes:
        return blake2b_128(entry + slot.to_bytes(8, "little"))

    def _offset(self, slot: int) -> int:
        return self._first + slot * self._stride

    def _read(self, offset: int, room: memoryview | None) -> bool:
        """Fill memory from the file; whether there was enough."""
        self._file.seek(offset)
        while room:
            count = self._file.readinto(room)  # type: ignore[attr-defined]
            if not count:
                return False
            room = room[count:]
        return True

    def _write(self, offset: int, block: Buffer) -> None:
        self._file.seek(offset)
        left = memoryview(block).cast("B")
        while left:
            left = left[self._file.write(left) :]

    def _require_open(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(f"the file {self._path} belongs to the process that opened it: open it in this one")
        if self._file.closed:
            raise ValueError(f"the store of {self._path} is closed")


def _let_go(file: BinaryIO) -> None:
    """Unlock a file, which forked processes hold as well as long as they have it open."""
    if sys.platform != "win32":  # there closing is enough, since no process forks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


def _hold(file: BinaryIO, path: Path) -> None:
    """Lock a file until it is closed, or its process ends."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(2**62)  # a byte that nobody reads: Windows lets no others read locked ones
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise BlockingIOError(
            f"path must be a file that no other store has open, got {path}: close that one, take another path, or a "
            "RedisStore, which many processes share"
        ) from error
