"""A prompt that one process computes and another goes on from."""

import re
import subprocess
import sys
import time

import numpy as np
import pytest

from pagedkv.stores import HostStore, StoredPrefixes

from .test_examples import EXAMPLES, load


def run(*args):
    command = [sys.executable, "-W", "error", str(EXAMPLES / "prefill_elsewhere.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_two_processes_generate_what_one_does(tmp_path):
    done = run("--store", tmp_path / "blocks", "--max-new-tokens", 20)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^prefill: 0 tokens loaded, 236 computed, 224 in the store$", done.stdout, re.MULTILINE)
    assert re.search(r"^decode: 224 tokens loaded in [\d.]+ ms, 12 computed$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("check: 20 tokens equal those of one process\n")


def test_a_store_that_is_none_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a store")
    done = run("--store", tmp_path / "text", "--only", "prefill")
    assert done.returncode == 1
    assert done.stderr == (
        f"prefill_elsewhere.py: path must be a file that a FileStore made, or none yet, got {tmp_path / 'text'}\n"
    )


def test_a_store_in_no_folder_is_refused_in_one_line(tmp_path):
    done = run("--store", tmp_path / "none" / "blocks", "--only", "prefill", "--max-new-tokens", 250)
    assert done.returncode == 1
    message = r"prefill_elsewhere\.py: path must be in a folder that is there, got .*: make the folder first\n"
    assert re.fullmatch(message, done.stderr)


@pytest.mark.long
def test_loading_a_long_prompt_is_five_times_as_fast_as_computing_it():
    from prefill_elsewhere import generate, make_cache

    model, _ = load(context=8200)
    prompt = np.random.default_rng(0).integers(0, 1000, 8192).tolist()
    store = HostStore(2**27, 2**17)
    seconds = {}
    for what in ("compiled", "computed", "loaded"):
        cache = make_cache(model)
        with StoredPrefixes(cache, store, what if what == "compiled" else "a model") as prefixes:
            begin = time.perf_counter()
            num_loaded = prefixes.load(prompt)
            _, num_computed = generate(model, cache, prompt, 1)
            seconds[what] = time.perf_counter() - begin
            prefixes.store(prompt)
        assert (num_loaded > 0) == (num_computed == 1) == (what == "loaded")
    assert 5 * seconds["loaded"] < seconds["computed"]
