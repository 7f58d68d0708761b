"""The command line, and what its benches count and hand to other libraries."""

from .mutant import Mutant

MAIN = ("tests/test_main.py",)

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
        "from .report import Row\n",
        "from .report import Row\nfrom .transformers import VOCAB\n",
        MAIN,
    ),
    Mutant(
        "bench prefill: products past the diagonal count",
        "bench/problem.py",
        "n * (length - n) + n * (n + 1) // 2 if self.causal else n * length",
        "n * length",
        ("tests/bench/test_problem.py",),
    ),
    Mutant(
        "bench prefill: SDPA's causal mask begins at the first key",
        "bench/gpu/decode_peers.py",
        "causal_lower_right(q.shape[2], k.shape[2])",
        "causal_lower_right(q.shape[2], q.shape[2])",
        ("tests/bench/gpu/test_subjects.py::test_sdpa_is_right_on_dense_keys_and_refuses_the_rest",),
    ),
]
