"""`pagedkv serve` under torchrun: one process's tokens, and an end with a message when a rank dies or stalls."""

import contextlib
import re
import signal
import subprocess
import sys
import time

import pytest

from ..integrations.transformers.byte_tokenizer import byte_tokenizer
from ..integrations.transformers.models import make_model
from .serving import begin, complete, port_of, serving, wait_until

psutil = pytest.importorskip("psutil", reason="accelerate is not installed, which brings psutil")
pytestmark = pytest.mark.long  # each imports torch in three processes

TIMEOUT = 5  # seconds for which ranks wait for one that stalls
PROMPTS = ["one two three", "def f(x):", "the same, and a longer one with it"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with 4 KV heads, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make_model("Llama", vocab_size=256, num_key_value_heads=4).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def torchrun(folder, num_ranks=2):
    """Run the server on ranks: its port, the process of torchrun, and those of the ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += [
        "-m",
        "pagedkv",
        "serve",
        str(folder),
        "--port",
        "0",
        "--num-blocks",
        "1024",
        "--rank-timeout",
        str(TIMEOUT),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            port = port_of(process)
            ranks = {}
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, KeyError):
                    ranks[int(child.environ()["RANK"])] = child
            yield port, process, [ranks[i] for i in range(num_ranks)]
        finally:
            for child in (
                [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []
            ):
                with contextlib.suppress(psutil.Error):
                    child.kill()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rank_0_answers_with_the_tokens_of_one_process(folder, num_ranks):
    asked = [{"max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": stream} for stream in (False, True)]
    with serving(model=[folder]) as alone:
        expected = [complete(alone.port, prompt, **options) for prompt in PROMPTS for options in asked]
    with torchrun(folder, num_ranks) as (port, process, _):
        assert [complete(port, prompt, **options) for prompt in PROMPTS for options in asked] == expected
        begin(port, prompt="x", stream=True, max_tokens=400, ignore_eos=True).close()  # is aborted
        assert complete(port, PROMPTS[0], **asked[0]) == expected[0]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "lost another rank" not in errors
    assert "terminate called" not in errors  # gloo's abort


# While there is nothing to compute nobody waits for a rank that stalls.
ENDS = [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGSTOP, True)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("end", "is_busy"), ENDS)
def test_a_rank_that_dies_or_stalls_ends_all(folder, rank, end, is_busy):
    with torchrun(folder) as (port, process, ranks), contextlib.ExitStack() as clients:
        complete(port, PROMPTS[0], max_tokens=4)
        if is_busy:
            client = clients.enter_context(begin(port, prompt="x", stream=True, max_tokens=450, ignore_eos=True))
            client.recv(100)
        lost, other = ranks[rank], ranks[1 - rank]
        started = time.monotonic()
        lost.send_signal(end)
        wait_until(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE, 4 * TIMEOUT)
        seconds = time.monotonic() - started
        if end == signal.SIGSTOP:
            lost.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(rf"rank +: {1 - rank} .*\n +exitcode +: 1 ", errors), errors
    assert re.search(r"lost another rank|the Engine of rank 0 has ended", errors), errors
    assert "terminate called" not in errors
    assert seconds < (2 * TIMEOUT if end == signal.SIGSTOP else TIMEOUT)
