"""Forks beside a thread in the middle of calls: in each child the manager works, and what it holds is whole."""

import os
import signal
import sys
import threading

from pagedkv.memory import BlockPool, SequenceTable

NUM_BLOCKS = 50_000


def forks(num_forks):
    """Fork that many times; prints the exit code of each child."""
    pool = BlockPool(NUM_BLOCKS)
    table = SequenceTable(pool, 1, 4, NUM_BLOCKS)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            table.free(table.add(NUM_BLOCKS - 1))  # NumPy lets go of the GIL in the middle of each store

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(num_forks):
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            try:
                table.check()
                pool.check()
                before = table.num_tokens
                table.add(1)
                assert table.num_tokens == before + 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    thread.join()


if __name__ == "__main__":
    forks(int(sys.argv[1]))
