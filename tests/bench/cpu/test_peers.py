"""Installed peers agree with the reference; the others name what is missing in one line."""

import sys

import pytest

from pagedkv.bench.contest import NOT_INSTALLED
from pagedkv.bench.cpu import run
from pagedkv.bench.cpu.peers import COMPILED, SUBJECTS, HostProblem
from pagedkv.bench.cpu.run import CACHES, decode_cell

QUICK = [name for name in SUBJECTS if name not in COMPILED]


def held(name, *sizes):
    problem = HostProblem(decode_cell(*sizes))
    return run.compare(problem, {name: lambda: SUBJECTS[name](problem, 1)}, {}, 1)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", QUICK)
def test_a_peer_agrees_or_says_why_it_cannot_run(name, cache):
    result = held(name, cache, 4, 2, 64)
    if name not in result.samples:
        why = (NOT_INSTALLED, "no fp8 K and V", "no int8 K and V", "float32 and float16 only, on the CPU")
        assert result.notes[name].endswith(why)


@pytest.mark.parametrize(
    ("name", "package"), [("onnxruntime", "onnxruntime"), ("OpenVINO", "openvino"), ("SDPA", "torch"), ("vLLM", "vllm")]
)
def test_a_peer_that_is_not_installed(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    if package == "vllm":
        monkeypatch.setattr("pagedkv.bench.cpu.peers.find_spec", lambda name: None)
    assert held(name, "float32", 1, 1, 32).notes == {name: f"{package} is not installed"}


def test_flex_attention_without_a_compiler(monkeypatch):
    monkeypatch.setattr("pagedkv.bench.cpu.peers.shutil.which", lambda name: None)
    assert held("FlexAttention", "float32", 1, 1, 32).notes == {"FlexAttention": "needs a C++ compiler"}
