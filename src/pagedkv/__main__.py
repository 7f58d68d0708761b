"""``python -m pagedkv bench cpu | memory``."""

from __future__ import annotations

import argparse
import sys


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagedkv", description="Paged KV cache and paged attention.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure this machine", description="Measure on this machine.")
    bench.add_argument("what", choices=("cpu", "memory"), help="the CPU kernels, or the memory manager")
    bench.add_argument("--repeats", type=int, default=9, help="timed calls of each contestant (default: 9)")
    form = bench.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.repeats < 1:
        print("--repeats must be at least 1", file=sys.stderr)
        return 2
    from .bench import cpu, memory, report

    try:
        measure = cpu.run if options.what == "cpu" else memory.run
        rows = measure(repeats=options.repeats, progress=_progress)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    _progress("")
    form = report.as_json if options.json else report.as_csv if options.csv else report.as_table
    print(form(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
