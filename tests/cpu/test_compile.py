"""The disk cache of compiled kernels: found again, never trusted when damaged, never in the way."""

import json
import math
import os
import pickle
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
from numba import float64, njit, typeof

import pagedkv
from pagedkv.cpu import compile as kernels
from pagedkv.cpu.attention import decode, launch, prefill
from pagedkv.cpu.attention.logits import make_modify
from pagedkv.kernel_cache.files import DIGEST_BYTES

from ..support.programs import ROOT
from . import doubling


def printed(program, directory, **variables):
    """The words that a process prints whose kernels are kept in a directory."""
    environment = {**os.environ, "PAGEDKV_CACHE_DIR": str(directory), **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that makes the kernel of `doubling` in this process."""

    def run(directory=tmp_path / "kernels", **variables):
        with monkeypatch.context() as patch:
            for name, value in {"PAGEDKV_CACHE_DIR": str(directory), **variables}.items():
                patch.setenv(name, value)
            return doubling.make()

    return run


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compiled") / "kernels"
    assert printed("from tests.cpu import doubling; print(doubling.make())", directory) == ["compiled"]
    return directory


@pytest.fixture
def file(compiled, tmp_path):
    """The kernel that another process has compiled, in the directory of `run`."""
    shutil.copytree(compiled, tmp_path / "kernels")
    (file,) = (tmp_path / "kernels" / "cpu").iterdir()
    return file


def test_the_second_process_does_not_compile(run, file):
    assert file.suffix == kernels.SUFFIX
    assert run() == "loaded"
    if os.name == "posix":
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_damaged_file_is_compiled_again(run, file):
    """Every kind of damage is in tests/kernel_cache/test_files.py and test_private_folder.py."""
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert run() == "compiled"
    assert run() == "loaded"


def test_a_directory_that_cannot_be_written_costs_nothing_but_time(run, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert run(blocked) == "compiled"
    assert blocked.read_text() == "not a directory"


def test_nothing_in_a_file_is_a_pickle(file):
    header, code = file.read_bytes()[DIGEST_BYTES:].split(b"\n", 1)
    assert set(json.loads(header)) == {"library", "entry", "environment"}
    assert code[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe") or sys.platform == "win32"


@pytest.mark.parametrize("form", [pickle.dumps, lambda x: b"{}\n" + pickle.dumps(x), lambda x: b"[1]\n", lambda x: b""])
def test_a_file_of_another_form_is_compiled_again(monkeypatch, tmp_path, form):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    body = form(Planted())
    monkeypatch.setattr(kernels.Store, "load", lambda self, key: body)
    monkeypatch.setattr(kernels.Store, "save", lambda self, key, body: None)
    values = np.ones(1)
    kernels.compile_kernel(write_2, SIGNATURE, "config", keep=True)(values)
    assert values == 2
    assert not (tmp_path / "planted").exists()


SIGNATURE = (float64[::1],)


def write_2(values):
    values[0] = 2


def test_another_config_signature_source_or_setting_is_another_key(monkeypatch):
    first = kernels._key("name[config]", SIGNATURE)
    assert kernels._key("name[config]", SIGNATURE) == first
    others = [kernels._key("name[other]", SIGNATURE), kernels._key("name[config]", (float64[:],))]
    monkeypatch.setenv("NUMBA_OPT", "1")
    others.append(kernels._key("name[config]", SIGNATURE))
    monkeypatch.setenv("NUMBA_OPT", "max")
    others.append(kernels._key("name[config]", SIGNATURE))
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    others.append(kernels._key("name[config]", SIGNATURE))
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "SOURCES", b"other sources")
    others.append(kernels._key("name[config]", SIGNATURE))
    monkeypatch.undo()
    assert len({first, *others}) == 7
    assert kernels._key("name[config]", SIGNATURE) == first


def test_slow_kernels_of_one_run_are_not_those_of_the_next(run):
    assert run(NUMBA_OPT="0") == "compiled"
    assert run() == "compiled"
    assert run(NUMBA_OPT="0") == "loaded"


def test_what_is_not_to_be_kept_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    kernels.compile_kernel(write_2, SIGNATURE, "config", keep=False)(np.zeros(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", [decode, prefill], ids=["decode", "prefill"])
def test_kernels_get_what_they_are_compiled_for(monkeypatch, module):
    """Machine code looks at no argument: those of calls must have the types of the signature."""
    seen = []
    monkeypatch.setattr(module, "_make_kernel", lambda config, score_mod: None)
    monkeypatch.setattr(launch, "run_items", lambda kernel, num_items, args, **how: seen.append((0, num_items, *args)))
    k = np.zeros((2, 16, 2, 64), np.float32)
    tokens = 1 if module is decode else 20  # of a sequence: few of them are not for prefill
    q, table, read_only = (
        np.zeros((3 * tokens, 4, 64), np.float32),
        np.zeros((3, 2), np.int32),
        np.full(3, 20, np.int32),
    )
    wide = np.zeros((3, 4), np.int32)
    read_only.flags.writeable = False
    starts = np.arange(0, 4 * tokens, tokens, np.int32) if module is prefill else None
    vector = np.ones(4, np.float32)
    plain = {"scale": 1, "window": None, "softcap": None, "alibi_slopes": None, "sinks": None}
    chosen = {"scale": np.float64(2), "window": np.int32(7), "softcap": 3, "alibi_slopes": vector, "sinks": vector}
    for options in (plain, chosen):
        for lens, some in ((read_only.copy(), table), (read_only, wide[:, :2])):
            arguments = (q, k, k, some, lens) if starts is None else (q, k, k, some, lens, starts)
            call = pagedkv.decode_attention if starts is None else pagedkv.prefill_attention
            call(*arguments, **options)
            call(q[:0], k, k, some[:0], lens[:0], *([] if starts is None else [starts[:1]]), **options)
    assert {tuple(map(typeof, args)) for args in seen} == {module.SIGNATURE}


def test_without_a_compiler_the_message_says_what_to_do(tmp_path):
    program = """
import numpy as np, pagedkv
k = np.zeros((1, 16, 1, 64), np.float32)
for call in (pagedkv.decode_attention, pagedkv.prefill_attention):
    starts = [] if call is pagedkv.decode_attention else [np.array([0, 1], np.int32)]
    try:
        call(k[0, :1], k, k, np.zeros((1, 1), np.int32), np.ones(1, np.int32), *starts)
    except pagedkv.BackendUnavailableError as error:
        print("unset it" in str(error) and "NUMBA_DISABLE_JIT" in str(error))
"""
    assert printed(program, tmp_path, NUMBA_DISABLE_JIT="1") == ["True", "True"]


def _before_its_bias():
    def score_mod(score, q_pos, k_pos, head, seq):
        return score + bias

    return score_mod
    bias = 1


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, *rest: str(score),
        lambda score, q_pos, k_pos, head, seq: None,
        lambda score, q_pos, k_pos, head, seq: score * 1j,
        lambda score: score,
        _before_its_bias(),
        print,
    ],
    ids=["a string", "nothing", "complex", "one argument", "a name without a value", "built in"],
)
def test_a_score_mod_that_cannot_be_used_says_so_and_writes_nothing(score_mod):
    k = np.zeros((1, 16, 1, 64), np.float32)
    out = np.full((1, 1, 64), np.nan, np.float32)
    arguments = (out.copy(), k, k, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    expected = "made by def or lambda" if score_mod is print else r"of \(score, q_pos, k_pos, head, seq\)"
    with pytest.raises(TypeError, match=f"score_mod must be a function {expected}"):
        pagedkv.decode_attention(*arguments, score_mod=score_mod, out=out)
    assert np.isnan(out).all()


def _checked(score):
    if score > 1e30:
        raise ValueError("too large")
    return score


CHECKED = njit(_checked)
PAIR = (1.0, 2.0)


def _asserts():
    scope = {}  # pytest writes other code for what it finds in a file
    exec("def asserts(score, q_pos, k_pos, head, seq):\n    assert score < 1e30\n    return score", scope)
    return scope["asserts"]


def _steps(score, q_pos, k_pos, head, seq):
    for i in range(0, k_pos, head):
        score += i
    return score


@pytest.mark.parametrize(
    ("score_mod", "exception"),
    [
        (lambda score, q_pos, k_pos, head, seq: CHECKED(score), "ValueError"),
        (_asserts(), "AssertionError"),
        (_steps, "ValueError"),
        (lambda score, q_pos, k_pos, head, seq: PAIR[head], "IndexError"),
        (lambda score, q_pos, k_pos, head, seq: score * 0.5 ** (q_pos - k_pos), "ZeroDivisionError"),
        (lambda score, q_pos, k_pos, head, seq: np.zeros(head + 1)[0], "MemoryError or ValueError"),
    ],
    ids=["a function that raises", "assert", "a step of 0", "a tuple", "an int power", "memory"],
)
def test_a_score_mod_that_can_raise_is_refused(score_mod, exception):
    with pytest.raises(TypeError, match=f"^score_mod must be .* it can raise {exception}, and a kernel cannot: return"):
        make_modify(score_mod)


def _loops(score, q_pos, k_pos, head, seq):
    for i in range(0, k_pos, 2):
        score += math.sin(i) / (k_pos - q_pos) + score % head + k_pos // head + TABLE[i % 8]
    print(score)
    return score if score < 3 else 0.5 ** float(k_pos)


TABLE = np.arange(8.0)


def test_a_score_mod_that_cannot_raise_is_compiled():
    make_modify(_loops)
