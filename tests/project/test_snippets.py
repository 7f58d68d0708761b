"""The code in the README, the docs and docstrings: every snippet runs and gives what stands there."""

import contextlib
import doctest
import importlib
import io
import re

import pytest
import torch
import transformers

from pagedkv.emulator import RaceFault

from ..integrations.transformers.byte_tokenizer import byte_tokenizer
from ..integrations.transformers.models import make_model
from . import pages
from .pages import FENCE, PAGES, ROOT, blocks, name

# The first line of a block that the tests execute where there is a GPU, and compile everywhere.
NEEDS_GPU = "# needs a GPU\n"


def run_snippets(path, *, on_gpu=False):
    """Run the python blocks of a page in order, in one namespace; returns how many there are.

    A block with prompts is a doctest. What another one prints must be the block marked `output` behind it. One that
    needs a GPU is only compiled, unless there is one.
    """
    text, namespace, printed, count = path.read_text(), {"__name__": "__main__"}, "", 0
    for fence in FENCE.finditer(text):
        language, body = fence.groups()
        line = text.count("\n", 0, fence.start()) + 1
        if language == "output":
            assert printed == body, f"{name(path)}:{line}"
            printed = ""
        elif language == "python":
            count += 1
            assert printed == "", f"{name(path)}:{line}: the block before prints what no output block shows"
            if body.startswith(">>>"):
                run_doctest(body, namespace, path, line)
            else:
                code = compile("\n" * line + body, name(path), "exec")
                if body.startswith(NEEDS_GPU) and not on_gpu:
                    continue
                with contextlib.redirect_stdout(io.StringIO()) as stdout:
                    exec(code, namespace)
                printed = stdout.getvalue()
    assert printed == "", f"{name(path)}: the last block prints what no output block shows"
    return count


def run_doctest(body, namespace, path, line):
    test = doctest.DocTestParser().get_doctest(body, namespace, name(path), name(path), line)
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    report = io.StringIO()
    runner.run(test, out=report.write, clear_globs=False)
    namespace.update(test.globs)
    assert runner.tries
    assert not runner.failures, report.getvalue()


@pytest.mark.usefixtures("without_lines")
@pytest.mark.parametrize("path", [path for path in PAGES if "```python" in path.read_text()], ids=name)
def test_snippets(path):
    assert run_snippets(path)


GPU_PAGES = [path for path in PAGES if f"```python\n{NEEDS_GPU}" in path.read_text()]


@pytest.mark.gpu
@pytest.mark.parametrize("path", GPU_PAGES, ids=name)
def test_snippets_on_a_gpu(path):
    for module in set(re.findall(r"^import (cupy|torch)\b", path.read_text(), re.MULTILINE)):
        pytest.importorskip(module)
    assert run_snippets(path, on_gpu=True)


def test_the_snippets_that_must_be_there():
    with_snippets = {name(path) for path in PAGES if "```python" in path.read_text()}
    assert {"README.md", "docs/index.md", "docs/memory.md"} <= with_snippets
    assert {"docs/howto/chunked-prefill.md", "docs/howto/speculative-decoding.md"} <= with_snippets
    assert {"docs/howto/device-arrays.md", "docs/development/testing-on-a-gpu.md"} <= {name(path) for path in GPU_PAGES}


def test_a_block_that_needs_a_gpu_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{NEEDS_GPU}assert False\n```\n")
    assert run_snippets(page)
    with pytest.raises(AssertionError):
        run_snippets(page, on_gpu=True)
    page.write_text(f"```python\n{NEEDS_GPU}assert False)\n```\n")
    with pytest.raises(SyntaxError):
        run_snippets(page)


WRONG = [
    "```python\n>>> 1 + 1\n3\n```\n",
    "```python\nprint(1)\n```\n",
    "```python\nprint(1)\n```\n\n```output\n2\n```\n",
    "```python\nprint(1)\n```\n\n```python\nx = 1\n```\n",
    "```python\nassert False\n```\n",
]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_snippets_are_noticed(tmp_path, monkeypatch, text):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 0\n```\n\n" + text)
    with pytest.raises(AssertionError):
        run_snippets(page)


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted(ROOT.glob("pagedkv/**/*.py"))
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
]


@pytest.mark.usefixtures("without_lines")
@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed


def called_by_users():
    """The functions and classes of the API page, without classes whose objects users only get: `autoclass:: Name()`."""
    module = ""
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if match := re.match(r"\.\. (?:currentmodule|automodule):: (\S+)", line):
            module = match[1]
        elif match := re.match(r"\.\. auto(?:function|class):: (\w+)$", line):
            yield f"{module}.{match[1]}", getattr(importlib.import_module(module), match[1])


def test_what_users_call_has_an_example():
    documented = dict(called_by_users())
    assert len(documented) > 50
    assert [name for name, x in documented.items() if ">>> " not in x.__doc__] == []


def readme_program():
    """The README prints one program, and says in words what changes for other arrays and for the emulator."""
    [program] = blocks(ROOT / "README.md", "python")
    assert program.startswith("import numpy as xp\n")
    return program


def changed(program, old, new):
    """The program with one place replaced, and what it prints."""
    assert program.count(old) == 1
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(program.replace(old, new), "README.md", "exec"), {"__name__": "__main__"})
    return stdout.getvalue()


def says(words):
    """Whether the README tells its readers about a change, wherever its lines break."""
    return words in " ".join((ROOT / "README.md").read_text().split())


def test_the_decode_loop_of_cupy_runs_with_numpy():
    """Its blocks need a GPU for CuPy alone."""
    program = "".join(blocks(ROOT / "docs" / "howto" / "device-arrays.md", "python"))
    namespace = {}
    exec(compile(program.replace("import cupy as xp", "import numpy as xp"), "device-arrays.md", "exec"), namespace)
    assert namespace["texts"].shape == (2, 21)
    assert namespace["cache"].num_seqs == 1  # the first one of the page


RIGHT = "largest difference from plain attention: 0.00000\n"


def test_readme_program_with_torch():
    assert says("For torch, change the first line to `import torch as xp`")
    assert changed(readme_program(), "import numpy as xp", "import torch as xp") == RIGHT


@pytest.mark.usefixtures("without_lines")
def test_readme_program_in_the_emulator():
    """With as many heads as other tests compile split for."""
    assert says('`backend="emulator"` in the attention call')
    program = readme_program().replace("kv[:4].reshape(1, 8, 64)", "kv[:3].reshape(1, 6, 64)")
    assert changed(program, "batch.seq_lens)", 'batch.seq_lens, backend="emulator")') == RIGHT


@pytest.mark.gpu
def test_readme_program_with_cupy():
    pytest.importorskip("cupy")
    assert says("for CuPy to `import cupy as xp`")
    assert changed(readme_program(), "import numpy as xp", "import cupy as xp") == RIGHT


def test_readme_streams_text(monkeypatch):
    """With a small model in place of the one that is downloaded."""
    model = make_model("Llama", vocab_size=256, eos_token_id=None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_: byte_tokenizer())
    stream, _ = blocks(ROOT / "README.md", "py")
    assert len(changed(stream, '"4GiB"', '"1MiB"')) > 20


def test_readme_keeps_a_call():
    [diff] = blocks(ROOT / "README.md", "diff")
    before, after, call = diff.splitlines()
    assert before[1:] == after[1:].replace("pagedkv.compat.", "")
    k_cache, v_cache = torch.randn(2, 4, 16, 2, 8)
    table, n = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    arrays = {"q": torch.randn(1, 1, 4, 8), "k_cache": k_cache, "v_cache": v_cache, "table": table, "n": n}
    exec(f"{after[1:]}\n{call[1:]}", arrays)
    assert arrays["out"].shape == arrays["q"].shape


def test_readme_shows_what_the_emulator_says(tmp_path):
    _, program = blocks(ROOT / "README.md", "py")
    [shown] = blocks(ROOT / "README.md", "text")
    file = tmp_path / "reverse.py"
    file.write_text(program)
    with pytest.raises(RaceFault) as fault:
        exec(compile(program, file, "exec"), {"__name__": "__main__"})
    said = f"RaceFault: {fault.value}".replace(f"{tmp_path}/", "")
    # What this process compiled before moves the shared array, and numbers it.
    said, shown = (re.sub(r"0x[0-9a-f]+|smem_\d+", "...", " ".join(text.split())) for text in (said, shown))
    assert said.startswith(shown.removesuffix(" ..."))
