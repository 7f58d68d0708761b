"""The disk cache of compiled kernels: found again, never trusted when damaged, never in the way."""

import os
import stat
import subprocess
import sys

import numpy as np
import pytest

import pagedkv
from pagedkv.cpu import compile as kernels

PROGRAM = """
import numpy as np
from pagedkv.cpu.compile import compile_kernel
def double(values):
    for i in range(values.size):
        values[i] *= 2
kernel = compile_kernel(double, ("config", 1), keep=True)
values = np.arange(3.0)
kernel(values)
assert values.tolist() == [0, 2, 4]
print("hits" if kernel.stats.cache_hits else "compiled")
"""


@pytest.fixture
def run(tmp_path):
    def run(directory=tmp_path / "kernels", program=PROGRAM):
        environment = {**os.environ, "PAGEDKV_CACHE_DIR": str(directory)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def test_the_second_process_does_not_compile(run, tmp_path):
    assert run() == ["compiled"]
    (file,) = (tmp_path / "kernels" / "cpu").iterdir()
    assert file.suffix == kernels.SUFFIX
    assert run() == ["hits"]
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "kernels" / "cpu").stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_file_is_compiled_again(run, tmp_path, damage):
    run()
    (file,) = (tmp_path / "kernels" / "cpu").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert run() == ["compiled"]
    assert run() == ["hits"]


def test_a_directory_that_cannot_be_written_costs_nothing_but_time(run, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert run(blocked) == ["compiled"]
    assert blocked.read_text() == "not a directory"


def test_another_config_or_source_is_another_file(monkeypatch):
    def compile_with(config):
        def kernel(values):
            values[0] = 1

        return kernels.compile_kernel(kernel, config, keep=True)

    def keys():
        compiled = [compile_with(config) for config in ("a", "b")]
        for function in compiled:
            function(np.zeros(1))
        codegen = next(iter(compiled[0].overloads.values())).library.codegen
        return [function._cache._key("signature", codegen) for function in compiled]

    first = keys()
    assert first[0] != first[1]
    assert keys() == first
    monkeypatch.setattr(kernels, "SOURCES", b"other sources")
    assert not set(keys()) & set(first)


def test_what_is_not_to_be_kept_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))

    def kernel(values):
        values[0] = 1

    kernels.compile_kernel(kernel, "config", keep=False)(np.zeros(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, *rest: str(score),
        lambda score, q_pos, k_pos, head, seq: None,
        lambda score, q_pos, k_pos, head, seq: score * 1j,
        lambda score: score,
        print,
    ],
    ids=["a string", "nothing", "complex", "one argument", "built in"],
)
def test_a_score_mod_that_cannot_be_used_says_so_and_writes_nothing(score_mod):
    k = np.zeros((1, 16, 1, 64), np.float32)
    out = np.full((1, 1, 64), np.nan, np.float32)
    arguments = (out.copy(), k, k, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    expected = "made by def or lambda" if score_mod is print else r"of \(score, q_pos, k_pos, head, seq\)"
    with pytest.raises(TypeError, match=f"score_mod must be a function {expected}"):
        pagedkv.decode_attention(*arguments, score_mod=score_mod, out=out)
    assert np.isnan(out).all()
