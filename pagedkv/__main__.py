"""``python -m pagedkv serve | info | trace | kv-bytes | fuzz | bench ...``, also as ``pagedkv``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import __version__
from .cpu.threads import get_num_threads
from .errors import BackendUnavailableError
from .extras import pip_install
from .kernel_cache.progress import is_terminal

# The module of each bench, and what it measures. Only the chosen one is imported: others may need missing packages.
BENCHES = {
    "cpu": ("cpu.run", "decode and prefill on the CPU, beside the speed of its memory and other libraries"),
    "memory": ("memory", "the memory manager, beside one of Python lists"),
    "transformers": ("transformers", "a small model of transformers, beside its own attention"),
    "decode": ("gpu.decode", "decode_attention on a GPU, beside other libraries"),
    "prefill": ("gpu.prefill", "prefill_attention on a GPU, beside other libraries"),
    "write": ("gpu.write", "write_kv on a GPU"),
}
# The module of each other command, and what it prints.
COMMANDS = {
    "info": ("info.command", "what is installed here, what of pagedkv works, and what to install for the rest"),
    "trace": ("trace.command", "how much of a KV cache paging wastes on a trace of requests, beside contiguous memory"),
    "kv-bytes": ("trace.model", "how many bytes the K and V of a model take"),
    "fuzz": ("testing.fuzzing.command", "whether drawn problems of every operation give what the reference gives"),
}
SERVE = ("server.command", "a model of transformers, with OpenAI's protocol")


class _Progress:
    """Reports progress on stderr: a terminal shows one line that changes, a log gets a new line now and then."""

    PAUSE_S = 3.0

    def __init__(self) -> None:
        self._next = time.monotonic() + self.PAUSE_S

    def __call__(self, text: str) -> None:
        if is_terminal():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif text and sys.stderr is not None and (now := time.monotonic()) >= self._next:
            self._next = now + self.PAUSE_S
            print(text, file=sys.stderr, flush=True)


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _parser(chosen: str | None, module: Any, missing: str | None) -> argparse.ArgumentParser:
    """Build the parser; the chosen command adds its own options, and `missing` says why it cannot."""
    name = "pagedkv" if Path(sys.argv[0]).stem == "pagedkv" else "python -m pagedkv"
    parser = argparse.ArgumentParser(prog=name, description="Paged KV cache and paged attention.")
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    serve = commands.add_parser("serve", help=f"serve {SERVE[1]}", description=f"Serves {SERVE[1]}.", epilog=missing)
    serve.set_defaults(parser=serve)
    if chosen == "serve" and module:
        module.add_options(serve)
    for name, (_, text) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"Says {text}.", epilog=missing)
        one.set_defaults(parser=one)
        one.add_argument(
            "--json", action="store_const", const="as_json", default="as_tables", dest="form", help="print JSON"
        )
        if name == chosen and hasattr(module, "add_options"):
            module.add_options(one)
    bench = commands.add_parser("bench", help="measure this machine", description="Measure on this machine.")
    benches = bench.add_subparsers(metavar="what", required=True)
    for name, (_, text) in BENCHES.items():
        one = benches.add_parser(name, help=text, description=f"Measures {text}.", epilog=missing)
        one.set_defaults(parser=one)
        one.add_argument("--repeats", type=_repeats, default=9, help="timed calls of each contestant (default: 9)")
        form = one.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_const", const="as_json", dest="form", help="print JSON")
        form.add_argument("--csv", action="store_const", const="as_csv", dest="form", help="print CSV")
        if name == chosen and hasattr(module, "add_options"):
            module.add_options(one)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words in ([], ["bench"]):
        words.append("--help")
    chosen = place = missing = None
    if words[:1] == ["bench"] and (chosen := next((word for word in words if word in BENCHES), None)):
        place = f".bench.{BENCHES[chosen][0]}"
        words.remove(chosen)
        words.insert(1, chosen)  # options may come before it
    elif words and words[0] in {"serve", *COMMANDS}:
        chosen = words[0]
        place = f".{(SERVE if chosen == 'serve' else COMMANDS[chosen])[0]}"
    try:
        module = import_module(place, __package__) if place else None
    except BackendUnavailableError as error:
        if not {"-h", "--help"} & {*words}:
            print(error, file=sys.stderr)
            return 1
        module, missing = None, f"It has more options where it can run: {error}"
    parsed, unknown = _parser(chosen, module, missing).parse_known_args(words)
    options = vars(parsed)
    parser = options.pop("parser")
    if unknown:  # parse_args would show the usage without the command's own options
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if chosen == "serve" and module:
        return int(module.run(**options))
    if chosen in BENCHES:
        try:
            get_num_threads()
        except ValueError as error:  # about the environment
            print(error, file=sys.stderr)
            return 2
    # An exception of a bench is a defect; other commands raise for options that do not go together.
    refusals = (ValueError, OSError, MemoryError) if chosen in COMMANDS else ()
    return _run(module, refusals, **options)


def _run(
    module: Any, refusals: tuple[type[Exception], ...], form: str | None, plot: str | None = None, **options: Any
) -> int:
    """Run a bench or another command and print its rows; returns the exit code."""
    from .bench import report

    drawing = import_module(".plot", module.__package__) if plot else None
    group = getattr(drawing, "GROUP", None)
    if group and group not in (options["groups"] or [group]):
        print(f"--plot draws the group {group}: name it with --only", file=sys.stderr)
        return 2
    code, progress = 0, _Progress()
    try:
        if drawing and find_spec("matplotlib") is None:
            raise BackendUnavailableError(
                f"plots are drawn by matplotlib, which is not installed: {pip_install('plot')}"
            )
        rows = module.run(progress=progress, **options)
    except KeyboardInterrupt as interruption:
        print("\ninterrupted", file=sys.stderr)
        code, rows = 130, interruption.rows if isinstance(interruption, report.Interrupted) else []
    except BackendUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    except refusals as error:
        print(error, file=sys.stderr)
        return 2
    progress("")
    written = _write(getattr(report, form or "as_table")(rows)) if rows else 0
    if drawing and not code:
        try:
            drawing.draw(rows, plot)
            print(f"drawn in {plot}", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"the plot cannot be written: {error}", file=sys.stderr)
            return 1
    return code or written


def _write(text: str) -> int:
    """Print the results; returns the exit code, 141 if the reader has left, as for a tool that SIGPIPE ends."""
    try:
        print(text, flush=True)
    except OSError as error:
        # At exit Python would try to flush the rest again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"the results cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
