"""`pagedkv fuzz`: it counts what it tried, and a failure leaves a script that fails by itself."""

import itertools
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np
import pytest

import pagedkv
from pagedkv import reference
from pagedkv.__main__ import main
from pagedkv.emulator import EmulatorDevice
from pagedkv.errors import BackendUnavailableError
from pagedkv.extras import pip_install
from pagedkv.testing import Spec
from pagedkv.testing.fuzzing import checks
from pagedkv.testing.fuzzing import command as fuzz
from pagedkv.testing.fuzzing.cases import draw_case
from pagedkv.testing.fuzzing.script import script
from pagedkv.testing.problems.merges import MergeSpec
from pagedkv.testing.problems.strategies import fade
from pagedkv.testing.problems.writes import WriteSpec

SMALL = Spec(seq_lens=(3,), head_dim=64, num_kv_heads=1, block_size=2, strides="strided")
SPECS = {
    "decode": SMALL,
    "score_mod": SMALL.replace(score_mod=fade, alibi=True),
    "prefill": SMALL.replace(query_lens=(2,), padding_rows=1),
    "write": WriteSpec(Spec(seq_lens=(0, 9), kv_dtype="fp8_e4m3", kv_scales="per head"), "float16", 5, True),
    "merge": MergeSpec(as_list=True),
}


def of(operation, seed=0):
    return next(n for n in range(100) if draw_case("cpu", seed, n).operation == operation)


@pytest.fixture
def only_merges(monkeypatch):
    """Forms that compile nothing."""
    monkeypatch.setattr(fuzz, "draw_case", lambda backend, seed, number: draw_case(backend, 0, of("merge")))
    monkeypatch.setitem(fuzz.TURN, "cpu", 20)
    seconds = itertools.count()
    monkeypatch.setattr(fuzz, "time", SimpleNamespace(time=lambda: next(seconds), monotonic=time.monotonic))


@pytest.mark.usefixtures("only_merges")
def test_rows_count_what_was_tried(capsys):
    progress = []
    rows = fuzz.run(minutes=0.1, seed=5, processes=1, progress=progress.append)
    assert [row["operation"] for row in rows] == ["merge", "all"]
    assert rows[1]["problems"] == rows[0]["problems"] > 0
    assert (rows[1]["failed"], rows[1]["seed"]) == (0, 5)
    assert progress[-1].startswith("fuzz cpu, seed 5: ")
    assert main(["fuzz", "--minutes", "0.1", "--processes", "1"]) == 0
    assert "merge" in capsys.readouterr().out


@pytest.mark.usefixtures("only_merges")
@pytest.mark.parametrize(
    ("words", "minutes"), [(["--minutes", "0.001"], 0.001), (["--minutes", "0.02"], 0.02), (["--seconds", "1"], 0.0167)]
)
def test_a_search_that_tries_nothing_does_not_pass(words, minutes, monkeypatch):
    """The time may be up before the first turn, or before a turn's first problem."""
    monkeypatch.setattr(fuzz, "play", lambda *arguments: fuzz.Turn("merge", 0))
    said = f"^no problem was tried in {minutes:g} minutes, which the start took: give --minutes more$"
    with pytest.raises(SystemExit, match=said):
        main(["fuzz", *words, "--processes", "1"])


@pytest.mark.usefixtures("only_merges")
def test_a_failure_ends_it_and_leaves_a_script(monkeypatch, tmp_path):
    def wrong(spec, **changes):
        assert spec.num_states < 3, "three states are too many"

    monkeypatch.setattr(fuzz, "check", wrong)
    path = tmp_path / "failure.py"
    with pytest.raises(SystemExit) as left:
        fuzz.run(minutes=1, seed=0, processes=1, script=str(path), progress=lambda text: None)
    assert "merge failed after" in str(left.value)
    assert "three states are too many" in str(left.value)
    assert f"python {path}" in str(left.value)
    assert "num_states=3" in path.read_text()


@pytest.mark.usefixtures("only_merges")
def test_a_failure_is_reported_even_if_the_script_cannot_be_written(monkeypatch, tmp_path):
    def wrong(spec, **changes):
        raise AssertionError("planted")

    monkeypatch.setattr(fuzz, "check", wrong)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match="planted") as left:
        fuzz.run(minutes=1, seed=0, processes=1, script=str(tmp_path / "none" / "x.py"), progress=lambda text: None)
    [path] = tmp_path.iterdir()
    assert f"python {path}" in str(left.value)
    assert "planted" in path.read_text()


@pytest.mark.usefixtures("only_merges")
def test_a_missing_backend_is_no_failure_of_the_kernel(monkeypatch, tmp_path, capsys):
    def missing(spec, **changes):
        raise BackendUnavailableError("install it")

    monkeypatch.setattr(fuzz, "check", missing)
    path = tmp_path / "failure.py"
    assert main(["fuzz", "--processes", "1", "--script", str(path)]) == 1
    assert capsys.readouterr().err == "install it\n"
    assert not path.exists()


@pytest.fixture
def processes(monkeypatch):
    """What a process does is the list's first item; and the one process that there is, for a while."""

    class Process:
        def terminate(self):
            running.remove(self)

    done, process = [], Process()
    running = [process]

    class Executor:
        def __init__(self, *arguments):
            pass

        def submit(self, play, backend, seed, number, end):
            future = Future()
            outcome = done[0]
            future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)
            return future

        def shutdown(self, wait=True, **options):
            assert wait, "at the end of Python its thread would write to a pipe that is closed meanwhile"
            assert not running, "it would wait for the turns that they are in"

    children = iter([[], running])
    monkeypatch.setattr(fuzz, "ProcessPoolExecutor", Executor)
    monkeypatch.setattr(fuzz, "active_children", lambda: list(next(children)), raising=False)
    return done, running


def test_a_dead_process_is_reported_with_its_seed(processes):
    done, running = processes
    done.append(BrokenProcessPool())
    with pytest.raises(SystemExit, match="a process died with seed 7 in turn 0 or 1") as left:
        fuzz.run(minutes=1, seed=7, processes=2, progress=lambda text: None)
    assert "--seed 7 --processes 1" in str(left.value)
    assert not running


def test_a_failure_ends_the_other_processes(processes, tmp_path):
    done, running = processes
    done.append(fuzz.Turn("decode", 3, "planted", "a script"))
    with pytest.raises(SystemExit, match="planted"):
        fuzz.run(minutes=1, processes=2, script=str(tmp_path / "x.py"), progress=lambda text: None)
    assert not running


def test_a_missing_backend_ends_the_other_processes(processes):
    done, running = processes
    done.append(BackendUnavailableError("install it"))
    with pytest.raises(BackendUnavailableError, match=r"^install it$"):
        fuzz.run(minutes=1, processes=2, progress=lambda text: None)
    assert not running


@pytest.mark.long
def test_processes_end_without_a_word():
    command = [sys.executable, "-m", "pagedkv", "fuzz", "--minutes", "0.05", "--seed", "1", "--processes", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0
    assert all(line.startswith(("pagedkv: compiling", "fuzz cpu")) for line in ended.stderr.splitlines())
    assert "failed" in ended.stdout


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "x"], ["--seconds", "0"], ["--backend", "cuda"]])
def test_refusals(words):
    with pytest.raises(SystemExit) as left:
        main(["fuzz", *words])
    assert left.value.code == 2
    with pytest.raises(ValueError, match=r"^--processes must be at least 1, got 0$"):
        fuzz.run(processes=0)


@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_forms_of_a_seed_are_the_same_each_time(backend):
    for number in range(20):
        first, again = (repr(draw_case(backend, 3, number)) for _ in range(2))
        assert first == again
    assert {draw_case(backend, 3, n).operation for n in range(40)} == {"decode", "prefill", "write", "merge"}


@pytest.fixture
def by_reference(monkeypatch):
    """The operations of the package are those of the reference, which compile nothing, and may be wrong."""

    def attention(operation, change):
        def attend(*args, backend, **options):
            out, lse = change(*operation(*args, **options))
            return out.astype(args[0].dtype), lse.astype(np.float32)

        return attend

    def replace(change=lambda out, lse: (out, lse)):
        for name in ("decode_attention", "prefill_attention"):
            monkeypatch.setattr(pagedkv, name, attention(getattr(reference, name), change))

    replace()
    return replace


def run_script(*args, **options):
    exec(compile(script(*args, **options, backend="cpu"), "script", "exec"), {})


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", SPECS)
def test_scripts_pass_where_nothing_is_wrong(name):
    run_script(SPECS[name], "nothing\nat all")


@pytest.mark.parametrize("name", SPECS)
def test_scripts_import_pagedkv_and_numpy_alone(name):
    lines = script(SPECS[name], "").splitlines()
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imported == {"base64", "math", "zlib", "numpy", "pagedkv"}


@pytest.mark.parametrize("name", ["decode", "score_mod", "prefill"])
@pytest.mark.parametrize(
    "change",
    [
        lambda out, lse: (out + 1, lse),
        lambda out, lse: (out, lse + 1),
        lambda out, lse: (out * np.nan, lse),
    ],
)
def test_scripts_fail_where_attention_is_wrong(name, change, by_reference):
    by_reference(change)
    with pytest.raises(AssertionError):
        run_script(SPECS[name], "")


@pytest.mark.usefixtures("only_merges")
def test_scripts_for_the_emulator_repeat_the_fuzzers_checks(monkeypatch, tmp_path):
    def wrong(spec, **changes):
        raise AssertionError("planted")

    monkeypatch.setattr(fuzz, "check", wrong)
    path, given = tmp_path / "failure.py", []
    with pytest.raises(SystemExit):
        fuzz.run(backend="emulator", minutes=1, processes=1, script=str(path), progress=lambda text: None)

    def noting(*arguments, backend):
        given.append(backend)
        return reference.merge_states(*arguments)

    monkeypatch.setattr(pagedkv, "merge_states", noting)
    exec(compile(path.read_text(), "script", "exec"), {})
    assert repr(given) == f"[{EmulatorDevice(global_race=True, seed=0)!r}]"
    assert "seed=0" in repr(given)
    assert "global_race=True" in repr(given)


def test_scripts_fail_where_writes_and_merges_are_wrong(monkeypatch):
    monkeypatch.setattr(pagedkv, "write_kv", lambda *args, **options: None)
    with pytest.raises(AssertionError, match="caches differ"):
        run_script(SPECS["write"], "")
    monkeypatch.setattr(pagedkv, "merge_states", lambda outs, lses, backend: (outs[0], lses[0]))
    with pytest.raises(AssertionError):
        run_script(SPECS["merge"], "")


def test_a_script_of_moved_blocks(by_reference, monkeypatch):
    moved = SMALL.replace(placement_seed=1, poison="huge")
    run_script(SMALL, "", moved=moved)
    right = pagedkv.decode_attention

    def by_table(*args, **options):
        out, lse = right(*args, **options)
        return out, lse + args[3][0, 0]

    monkeypatch.setattr(pagedkv, "decode_attention", by_table)
    with pytest.raises(AssertionError, match="other bits"):
        run_script(SMALL, "", moved=moved)


def test_moved_blocks_are_noticed(monkeypatch):
    right = checks.run

    def by_place(problem, **changes):
        out, lse = right(problem, **changes)
        return out + np.float32(1e-9 * problem.spec.placement_seed), lse + np.float32(problem.spec.placement_seed)

    checks.check(SMALL)
    monkeypatch.setattr(checks, "run", by_place)
    with pytest.raises(checks.Moved) as caught:
        checks.check(SMALL)
    assert caught.value.spec.placement_seed == 1


def test_without_hypothesis_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['hypothesis'] = None; import importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name: None if name == 'hypothesis' else find(name);"
        "from pagedkv.__main__ import main; sys.exit(main(['fuzz']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"pagedkv.testing draws problems with Hypothesis, which is not installed: {pip_install('testing')}"
    ]
