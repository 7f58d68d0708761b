"""The cache of compiled kernels, the thread that compiles, and what a score_mod may be."""

from .mutant import Mutant

FOLDER = "tests/compiling/test_private_folder.py::"
THREAD = "tests/compiling/test_compile_thread.py::"
CPU = "tests/cpu/test_compile.py::"

SOURCE = "tests/kernels/device/test_source.py::"

PROGRESS = ("tests/compiling/test_progress.py",)

MUTANTS = [
    Mutant(
        "the line of a compilation stays after an error",
        "compiling/progress.py",
        """    try:
        yield
    finally:
        if terminal:
            _write(_END)
""",
        """    yield
    if terminal:
        _write(_END)
""",
        PROGRESS,
    ),
    Mutant(
        "a log file gets the line of a compilation",
        "compiling/progress.py",
        'sys.stderr.isatty() and os.environ.get("TERM") != "dumb"',
        "sys.stderr is not None",
        PROGRESS,
    ),
    Mutant(
        "device functions with other constants are taken for one",
        "kernels/device/source.py",
        "_content((*constants, function.__defaults__))",
        "_content(function.__defaults__)",
        (SOURCE + "test_other_code_or_constants_are_another_function",),
    ),
    Mutant(
        "0.0 is taken for -0.0",
        "kernels/device/source.py",
        "repr(constant) if isinstance(constant, Real) else constant",
        "constant",
        (SOURCE + "test_other_code_or_constants_are_another_function",),
    ),
    Mutant(
        "device functions of a score_mod are kept",
        "kernels/device/source.py",
        "    made.is_passing = True\n",
        "",
        (SOURCE + "test_what_calls_a_score_mod_is_not_kept[Steps]",),
    ),
    Mutant(
        "others may swap a folder above the cache",
        "compiling/private_folder.py",
        "if of_others and not (is_above and facts.st_mode & stat.S_ISVTX):",
        "if of_others and not is_above:",
        (FOLDER + "test_a_folder_that_others_may_have_made_or_may_replace_is_not_used",),
        ci=True,
    ),
    Mutant(
        "links are followed",
        "compiling/private_folder.py",
        'getattr(os, "O_NOFOLLOW", 0) | ',
        "",
        (FOLDER + "test_a_file_that_another_may_have_made_is_not_loaded",),
    ),
    Mutant(
        "a file that others may write to is loaded",
        "compiling/private_folder.py",
        "        _require_own(facts, path)\n",
        "",
        (FOLDER + "test_a_file_that_another_may_have_made_is_not_loaded",),
    ),
    Mutant(
        "what is no file is loaded",
        "compiling/private_folder.py",
        'raise RefusedError(path, "is no regular file")',
        "pass",
        (FOLDER + "test_a_file_that_another_may_have_made_is_not_loaded",),
    ),
    Mutant(
        "a refusal is said again and again",
        "compiling/kernel_cache.py",
        "        _said.add(about)\n",
        "",
        (FOLDER + "test_a_folder_that_others_may_have_made_or_may_replace_is_not_used",),
    ),
    Mutant(
        "signals arrive where kernels are compiled",
        "compiling/compile_thread.py",
        "start_new_thread(_do, (wanted, answers))",
        "_do(wanted, answers)",
        (THREAD + "test_what_was_interrupted_is_finished_for_the_next_call",),
        ci=True,
    ),
    Mutant(
        "what an interrupted caller asked for is made again",
        "compiling/compile_thread.py",
        "if args not in self.made:",
        "if args:",
        (THREAD + "test_what_was_interrupted_is_finished_for_the_next_call", THREAD + "test_threads_make_it_once"),
    ),
    Mutant(
        "what was interrupted before it began is made all the same",
        "compiling/compile_thread.py",
        "        wanted.clear()\n",
        "",
        (THREAD + "test_what_was_interrupted_before_it_began_is_dropped",),
    ),
    Mutant(
        "a fork does not wait for a compilation",
        "compiling/compile_thread.py",
        "before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release",
        "before=int",
        (THREAD + "test_a_child_forked_in_the_middle_of_a_compilation_compiles",),
    ),
    Mutant(
        "the process ends in the middle of a compilation",
        "compiling/compile_thread.py",
        "@atexit.register\n",
        "",
        (THREAD + "test_a_process_that_ends_in_the_middle_of_a_compilation_waits_for_it",),
    ),
    Mutant(
        "kernels compiled without optimization are loaded with it",
        "cpu/compile.py",
        "facts, processor, chosen)",
        "facts, processor)",
        (CPU + "test_another_config_signature_source_or_setting_is_another_key",),
    ),
    Mutant(
        "a score_mod that can raise is compiled for the CPU",
        "cpu/attention/logits.py",
        'raise can_raise(" or ".join(exceptions))',
        "pass",
        (CPU + "test_a_score_mod_that_can_raise_is_refused",),
    ),
    Mutant(
        "a score_mod that can raise is compiled for a GPU",
        "compiler/compile.py",
        "if not returns_0(ptx):",
        "if not ptx:",
        ("tests/compiler/test_user_functions.py::test_a_score_mod_that_can_raise_is_refused",),
    ),
]
