"""The command line, and what its benches count and hand to other libraries."""

from .mutant import Mutant

MAIN = ("tests/test_main.py",)
PREFILL = "tests/bench/gpu/prefill/"

INFO = ("tests/info/test_command.py",)

MUTANTS = [
    Mutant(
        "info ends with the first thing that is broken",
        "info/command.py",
        """    except Exception as error:
        return f"{type(error).__name__}: {error}"
""",
        "",
        INFO,
    ),
    Mutant(
        "info believes what it finds and does not import",
        "info/command.py",
        "    import_module(ours or module)\n    return None\n",
        "    return None\n",
        INFO,
    ),
    Mutant(
        "options of other benches are ignored",
        "__main__.py",
        "_parser(chosen, module, missing).parse_args(words)",
        "_parser(chosen, module, missing).parse_known_args(words)[0]",
        MAIN,
    ),
    Mutant(
        "one bench imports another",
        "bench/memory.py",
        "from .report import Row, median, spread\n",
        "from .gpu.timing import contest\nfrom .report import Row, median, spread\n",
        MAIN,
    ),
    Mutant(
        "bench prefill: products past the diagonal count",
        "bench/gpu/prefill/workloads.py",
        "n * (length - n) + n * (n + 1) // 2 if self.causal else n * length",
        "n * length",
        (PREFILL + "test_workloads.py",),
    ),
    Mutant(
        "bench prefill: SDPA's causal mask begins at the first key",
        "bench/gpu/prefill/peers.py",
        "causal_lower_right(q.shape[2], k.shape[2])",
        "causal_lower_right(q.shape[2], q.shape[2])",
        (PREFILL + "test_peers.py::test_sdpa_is_right_on_dense_keys_and_refuses_the_rest",),
    ),
]
