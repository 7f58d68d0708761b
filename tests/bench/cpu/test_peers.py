"""Every peer that is installed computes the same as the reference; the others say in one line what is missing."""

import sys

import numpy as np
import pytest

from pagedkv.bench.cpu.peers import COMPILED, SUBJECTS
from pagedkv.bench.cpu.problem import DTYPES, TOLERANCE, Problem
from pagedkv.bench.cpu.run import as_numpy
from pagedkv.bench.cpu.timing import contest
from pagedkv.bench.reasons import NOT_INSTALLED

QUICK = [name for name in SUBJECTS if name not in COMPILED]


def held(name, problem):
    return contest({name: lambda: SUBJECTS[name](problem, 1)}, {}, lambda out: problem.error_of(as_numpy(out)), 1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", QUICK)
def test_outputs(name, dtype):
    problem = Problem(dtype, 4, 2, 64)
    result = held(name, problem)
    if name in result.errors:
        assert result.errors[name] <= TOLERANCE[dtype]
    else:
        assert result.notes[name].endswith((NOT_INSTALLED, "no fp8 K and V", "float32 and float16 only, on the CPU"))


@pytest.mark.parametrize(("name", "package"), [("onnxruntime", "onnxruntime"), ("SDPA", "torch"), ("vLLM", "vllm")])
def test_a_peer_that_is_not_installed(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    if package == "vllm":
        monkeypatch.setattr("pagedkv.bench.cpu.peers.find_spec", lambda name: None)
    problem = Problem("float32", 1, 1, 32)
    assert held(name, problem).notes == {name: f"{package} is not installed"}


def test_flex_attention_without_a_compiler(monkeypatch):
    monkeypatch.setattr("pagedkv.bench.cpu.peers.shutil.which", lambda name: None)
    assert held("FlexAttention", Problem("float32", 1, 1, 32)).notes == {"FlexAttention": "needs a C++ compiler"}


@pytest.mark.parametrize("sequence", [0, 1])
def test_an_error_in_the_first_or_the_last_sequence_is_seen(sequence):
    problem = Problem("float32", 2, 2, 32)
    out = np.stack([problem.expected[0], problem.expected[1]])
    assert problem.error_of(out) == 0
    out[sequence] *= 1.01
    assert problem.error_of(out) == pytest.approx(0.01, rel=0.1)
    out[sequence, 0, 0] = np.nan
    assert problem.error_of(out) == np.inf
