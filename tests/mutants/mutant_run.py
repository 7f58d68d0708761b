"""One run of tests on a copy of the sources, in a process that has imported all that is not ours.

Each is forked from the process of `import_libraries`: that import takes longer than most tests of a mutant.
"""

import gc
import importlib
import os
import shutil
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

from .mutant import Mutant, sources

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
# What the tests import, and then what the package does: a conftest sets the environment of libraries.
LIBRARIES = (
    "tests.conftest",
    "hypothesis.extra.numpy",
    "hypothesis.stateful",
    "numba.cuda.compiler",
    "torch",
)
OPTIONS = (
    *("-q", "-x", "-m", "", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"),
    *("-W", "ignore:Module already imported"),  # those of plugins, in which nobody looks at an assertion
)


def import_libraries() -> None:
    """Import what runs of tests need, but for the package itself."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert "pagedkv" not in sys.modules
    gc.freeze()


def run_tests(mutant: Mutant | None, tests: tuple[str, ...], compiled: Path) -> tuple[int | None, str]:
    """The exit status of pytest on a copy with the mutant, None if it took too long, and what it printed.

    Without a mutant the kernels that the tests compile are kept in `compiled`; each mutant has a folder of its own
    with them.
    """
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "copy").resolve()
        # With its bytecode, which a file that is changed does not use.
        shutil.copytree(ROOT / "pagedkv", copy / "pagedkv")
        if mutant:
            texts = sources(copy / "pagedkv")
            [path] = mutant.files(texts)
            path.write_text(texts[path].replace(mutant.old, mutant.new))
            compiled = shutil.copytree(compiled, Path(directory, "compiled"), copy_function=os.link)
        output = Path(directory, "output")
        process = get_context("fork").Process(target=_pytest, args=(copy, compiled, tests, output))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None, f"{output.read_text()}\n{tests} took longer than {TIMEOUT_S} s"
        return process.exitcode, output.read_text()


def _pytest(copy: Path, compiled: Path, tests: tuple[str, ...], output: Path) -> None:
    """End this process with the status of pytest.

    The copy is what is tested, though the package may be installed too; the examples are the same every time, and a
    failing one is reported without looking for the smallest.
    """
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(ROOT)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    os.environ |= {
        # Processes that tests start in the root would import the checkout: safe paths leave the current folder out.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join((str(copy), str(ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PAGEDKV_CACHE_DIR": str(compiled),
    }
    import pagedkv

    assert Path(pagedkv.__file__).is_relative_to(copy), pagedkv.__file__
    settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=50,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    sys.exit(pytest.main([*OPTIONS, *tests]))
