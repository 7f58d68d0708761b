"""The file of a FileStore: whole at any moment, one process's at a time, never taken for something else."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from pagedkv.stores import FileStore

from ..support.strategies import long

SIZE, NUM_BLOCKS = 5000, 8
SIZES = {"capacity": NUM_BLOCKS * SIZE, "block_bytes": SIZE}

# Forks writers of its own, which need not import anything, kills them, and looks at what they leave.
KILLS = """
import os, signal, sys, time, numpy as np
from pagedkv.stores import FileStore

def write(rng):
    store = FileStore(path, {capacity}, {block_bytes})
    while True:
        numbers = rng.choice(12, rng.integers(1, 5), replace=False).tolist()
        store.put([bytes([i]) * 16 for i in numbers], [np.full({block_bytes}, i, np.uint8) for i in numbers])
        if rng.random() < 0.2:
            store.remove([bytes([int(rng.integers(12))]) * 16])

path, num_kills, count = sys.argv[1], int(sys.argv[2]), 0
for seed in range(num_kills):
    rng = np.random.default_rng(seed)
    if not (writer := os.fork()):
        write(rng)
    time.sleep(0.03 * rng.random())
    os.kill(writer, signal.SIGKILL)
    assert os.waitpid(writer, 0)[1] == signal.SIGKILL
    with FileStore(path, {capacity}, {block_bytes}) as store:
        for i, block in enumerate(store.get([bytes([i]) * 16 for i in range(12)])):
            assert block is None or bytes(block) == bytes([i]) * {block_bytes}, (seed, i)
            count += block is not None
print(count)
""".format(**SIZES)


def put(store, *numbers):
    store.put([bytes([i]) * 16 for i in numbers], [np.full(SIZE, i, np.uint8) for i in numbers])


def here(store):
    """Which of the blocks are there; they are right."""
    found = store.get([bytes([i]) * 16 for i in range(12)])
    for i, block in enumerate(found):
        assert block is None or bytes(block) == bytes([i]) * SIZE
    return [i for i, block in enumerate(found) if block is not None]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "blocks"


def test_blocks_outlive_the_store(path):
    with FileStore(path, **SIZES) as store:
        put(store, *range(9))
        store.get([bytes([7]) * 16])
        store.remove([bytes([3]) * 16])
    assert path.stat().st_size < NUM_BLOCKS * 8192 + 2 * 4096 + 1
    with FileStore(path, **SIZES) as store:
        assert here(store) == [0, 1, 2, 4, 5, 6, 7]
        put(store, 8, 9)
        assert here(store) == [0, 1, 2, 4, 5, 6, 8, 9]
    assert [x.name for x in path.parent.iterdir()] == ["blocks"]


def test_one_store_at_a_time_has_the_file(path):
    with FileStore(path, **SIZES) as store:
        put(store, 1)
        with pytest.raises(
            BlockingIOError, match=r"path must be a file that no other store has open, got .*blocks: close that one"
        ):
            FileStore(path, **SIZES)
        assert here(store) == [1]
    for call in (lambda: store.get([]), lambda: store.put([], []), lambda: store.remove([])):
        with pytest.raises(ValueError, match="is closed"):
            call()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_has_no_file(path):
    with FileStore(path, **SIZES) as store:
        store._process += 1  # as a child sees it
        with pytest.raises(RuntimeError, match="belongs to the process that opened it: open it in this one"):
            put(store, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_does_not_hold_the_file(path):
    store = FileStore(path, **SIZES)
    inherited = os.dup(store._file.fileno())  # what a child has
    store.close()
    store.close()
    with FileStore(path, **SIZES) as store:
        with pytest.raises(BlockingIOError):
            FileStore(path, **SIZES)
        store._process += 1
        store.close()  # as a child does
        assert store._file.closed
    os.close(inherited)


def cut(content):
    return content[:-1]


def damage_first_page(content):
    return content[:40] + b"?" + content[41:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "path must be a file that a FileStore made, or none yet, got .*blocks"),
        (lambda content: b"# a text\n" * 1000, "path must be a file that a FileStore made, or none yet, got .*blocks"),
        (cut, "path must be a whole file, got .*blocks, which has 73727 bytes: delete it"),
        (damage_first_page, "path must be a whole file, got .*blocks, whose first page is damaged: delete it"),
    ],
)
def test_foreign_and_damaged_files_are_refused(path, change, message):
    FileStore(path, **SIZES).close()
    content = change(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        FileStore(path, **SIZES)
    assert path.read_bytes() == content


def link(path):
    path.symlink_to(path.parent / "nothing")


def link_to_itself(path):
    path.symlink_to(path)


def bind(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", None), link, link_to_itself, bind])
def test_what_is_no_regular_file_is_refused(path, make):
    make(path)
    before = path.lstat()
    message = (
        "path must be a file that a FileStore made, or none yet, got .*blocks, which is no regular file, nor a link"
    )
    with pytest.raises(ValueError, match=message):
        FileStore(path, **SIZES)
    assert path.lstat().st_ino == before.st_ino
    assert [*path.parent.iterdir()] == [path]


def test_a_folder_that_is_not_there_is_named(path):
    path.write_text("a file")
    for missing in (path.parent / "folder" / "blocks", path / "blocks"):
        with pytest.raises(
            FileNotFoundError, match=r"must be in a folder that is there, got .*blocks: make the folder"
        ):
            FileStore(missing, **SIZES)


def test_other_sizes_are_refused(path):
    FileStore(path, **SIZES).close()
    message = "block_bytes and capacity must be those of .*blocks, 5000 and 40000, got 5000 and 45000"
    with pytest.raises(ValueError, match=message):
        FileStore(path, capacity=45000, block_bytes=SIZE)


def test_damaged_entries_are_misses(path):
    with FileStore(path, **SIZES) as store:
        put(store, *range(8))
    content = bytearray(path.read_bytes())
    for slot, byte in enumerate((0, 16, 30, 40)):
        content[4096 + 64 * slot + byte] ^= 1
    content[4096 + 64 * 4 : 4096 + 64 * 5] = content[4096 + 64 * 5 : 4096 + 64 * 6]
    path.write_bytes(content)
    with FileStore(path, **SIZES) as store:
        assert len(here(store)) == 3
        put(store, *range(8))
        assert len(here(store)) == 8


def test_a_put_that_fails_half_way_leaves_no_wrong_block(path, monkeypatch):
    """Every write fails once; what follows reuses the slots, and the process ends before it is done."""
    for failing in range(20):
        with FileStore(path, **SIZES) as store:
            put(store, *range(8))
            write, count = FileStore._write, [0]

            def fail(self, offset, block, write=write, count=count, failing=failing):
                count[0] += 1
                if count[0] in (failing, failing + 9):
                    raise OSError("no space left")
                write(self, offset, block)

            monkeypatch.setattr(FileStore, "_write", fail)
            for numbers in ((8, 9, 10), (11, 1, 0)):
                try:
                    put(store, *numbers)
                except OSError:
                    here(store)
            monkeypatch.setattr(FileStore, "_write", write)
            here(store)
        with FileStore(path, **SIZES) as store:
            here(store)
            assert len(store._slots) + len(store._slots._free) == NUM_BLOCKS
        path.unlink()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("num_kills", [30, *long([1000])])
def test_a_killed_writer_leaves_right_blocks(path, num_kills):
    command = [sys.executable, "-c", KILLS, path, str(num_kills)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) > 2 * num_kills
