"""The command line: each bench with its own options, in an installation without any extra too."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import pagedkv
from pagedkv.__main__ import BENCHES, COMMANDS, main
from pagedkv.bench.cpu import run as cpu
from pagedkv.cpu import threads
from pagedkv.extras import pip_install

# Hides what no plain install has from import and from find_spec, and then is one command line after the other; prints
# how each ended and what it wrote.
WITHOUT_EXTRAS = """
import contextlib, io, json, sys
EXTRAS = {"cuda", "cupy", "matplotlib", "numba_cuda", "onnx", "onnxruntime", "openvino", "scipy"}
EXTRAS |= {"hypothesis", "ray", "starlette", "torch", "transformers", "triton", "uvicorn", "vllm"}
class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in EXTRAS else self.finder.find_spec(name, *rest)
sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path if "numba_cuda" not in type(finder).__module__]
from pagedkv.__main__ import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code
    assert not EXTRAS & set(sys.modules), EXTRAS & set(sys.modules)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def without_extras(*command_lines):
    """How command lines end in an installation without any extra, and what they print: (code, stdout, stderr) each."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(command_lines)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("what", ["cpu", "memory"])
def test_benches_that_need_no_extra_run_without_any(what):
    [(code, out, err)] = without_extras(["bench", what, "--quick", "--repeats", "1", "--json"])
    assert code == 0, err
    assert json.loads(out)["rows"]


def test_other_commands_need_no_extra():
    [(code, out, err)] = without_extras(["trace", "--requests", "5", "--json"])
    assert code == 0, err
    assert len(json.loads(out)["rows"]) > 5


def test_a_missing_extra_is_named_in_one_line():
    others = [["bench", what] for what in BENCHES if what not in ("cpu", "memory")]
    more = [["bench", "decode", "--plot", "here.png"], ["serve", "folder"], ["fuzz", "--help"]]
    *of_benches, plot, serve, fuzz = without_extras(*others, *more)
    assert len(of_benches) == len(others)
    for code, out, err in of_benches:
        assert (code, out) == (1, "")
        [line] = err.splitlines()
        assert re.search(r': pip install .*\[(cu13|emulator|transformers)\]"', line)
    assert plot == [1, "", f"plots are drawn by matplotlib, which is not installed: {pip_install('plot')}\n"]
    assert serve == [1, "", f"the server needs starlette and uvicorn: {pip_install('serve')}\n"]
    code, out, err = fuzz
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "drawn problems of every operation" in said
    assert said.endswith(f"which is not installed: {pip_install('testing')}")


OWN = {
    "cpu": {"--quick", "--one-thread"},
    "memory": {"--quick"},
    "transformers": {"--quick"},
    "decode": {"--quick", "--only", "--subjects", "--plot"},
    "prefill": {"--quick", "--only", "--subjects"},
    "write": {"--quick"},
}


@pytest.mark.parametrize("what", BENCHES)
def test_help_shows_the_options_of_one_bench(what, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", what, "--help"])
    assert left.value.code == 0
    shown = {word.strip("[],") for word in capsys.readouterr().out.split() if word.strip("[],").startswith("--")}
    assert shown == {"--help", "--repeats", "--json", "--csv"} | OWN[what]


@pytest.mark.parametrize("what", BENCHES)
def test_options_of_other_benches_are_refused(what, monkeypatch, capsys):
    monkeypatch.setattr("pagedkv.__main__._run", lambda *_, **__: pytest.fail("it is measured"))
    for option in set.union(*OWN.values()) - OWN[what]:
        with pytest.raises(SystemExit) as left:
            main(["bench", what, option, *(["x"] if option in ("--only", "--subjects", "--plot") else [])])
        assert left.value.code == 2
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "cpu", "--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["bench", "cpu", "--repeats", "many"], "--repeats: must be at least 1, got many"),
        (["bench", "cpu", "--json", "--csv"], "not allowed with argument --json"),
        (["bench", "cpu", "memory"], "unrecognized arguments: memory"),
        (["bench", "gpu"], "usage: python -m pagedkv bench [-h] what"),
        (["bench", "gpu"], "invalid choice: 'gpu'"),
        (["bench", "memory", "--one-thread"], "usage: python -m pagedkv bench memory [-h] [--repeats"),
        (["info", "--quick"], "usage: python -m pagedkv info [-h] [--json]"),
        (["info", "--quick"], "python -m pagedkv info: error: unrecognized arguments: --quick"),
    ],
)
def test_refusals(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("called", "name"),
    [("/bin/pagedkv", "pagedkv"), ("pagedkv.exe", "pagedkv"), ("pagedkv/__main__.py", "python -m pagedkv")],
)
def test_usage_calls_the_program_as_it_was_called(called, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [called, "bench", "cpu", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith(f"usage: {name} bench cpu [-h]")


@pytest.mark.parametrize("what", BENCHES)
def test_a_wrong_number_of_threads_is_reported_in_one_line(what, monkeypatch, capsys):
    monkeypatch.setattr("pagedkv.__main__._run", lambda *_, **__: pytest.fail("it is measured"))
    monkeypatch.setattr(threads._state, "count", None)
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "abc")
    assert main(["bench", what]) == 2
    message = "PAGEDKV_NUM_THREADS must be an integer in 1..1024, got 'abc'\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(("words", "listed"), [([], ["serve", *COMMANDS]), (["bench"], BENCHES)])
def test_without_arguments_it_lists_the_commands(words, listed, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    first_words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {*listed} <= first_words


def test_the_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"pagedkv {pagedkv.__version__}\n"


def test_command_line_prints_the_form_that_was_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "run", lambda *, repeats, progress, quick, one_thread: [{"repeats": repeats}])
    assert main(["bench", "cpu", "--json", "--repeats", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"repeats": 2}]
    assert main(["bench", "--json", "--repeats", "2", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"repeats": 2}]
    assert main(["bench", "cpu", "--csv"]) == 0
    assert capsys.readouterr().out == "repeats\n9\n"


def test_command_line_survives_ctrl_c(monkeypatch, capsys):
    def interrupted(**kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu, "run", interrupted)
    assert main(["bench", "cpu"]) == 130
    assert "interrupted" in capsys.readouterr().err


def writing_to(stdout):
    command = [sys.executable, "-m", "pagedkv", "bench", "memory", "--quick", "--repeats", "1", "--csv"]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe without a reader is another error there")
def test_a_reader_that_leaves_ends_the_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        assert writing_to(stdout) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_reported_in_one_line():
    with open("/dev/full", "w") as stdout:
        assert writing_to(stdout) == (1, "the results cannot be written: No space left on device\n")


def test_info_needs_no_extra():
    [(code, out, err)] = without_extras(["info"])
    assert code == 0, err
    lines = [line.strip() for line in out.splitlines()]
    missing = dict(re.split(r"  +no  +", line) for line in lines if "  no  " in line)
    assert missing == {
        "torch tensors": pip_install("torch"),
        "models of transformers": pip_install("transformers"),
        "plots": pip_install("plot"),
        "pagedkv.testing": pip_install("testing"),
        "pagedkv serve": pip_install("serve"),
        "examples/replicas.py": pip_install("replicas"),
        "CuPy and torch arrays, on a GPU": missing["CuPy and torch arrays, on a GPU"],  # depends on the machine
        'backend="emulator"': pip_install("emulator"),
    }


def test_without_a_terminal_a_command_reports_progress_now_and_then(monkeypatch, capsys):
    def run(progress):
        for seconds in range(7):
            progress(f"after {seconds} s")
        return [{"what": "pagedkv"}]

    clock = iter([100, *range(100, 107)])
    monkeypatch.setattr("pagedkv.__main__.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("pagedkv.info.command.run", run)
    assert main(["info"]) == 0
    assert capsys.readouterr().err == "after 3 s\nafter 6 s\n"


def test_a_process_without_stderr_runs_the_commands_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr("pagedkv.info.command.run", lambda progress: progress("looking") or [{"what": "pagedkv"}])
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["info"]) == 0
    assert "pagedkv" in capsys.readouterr().out
