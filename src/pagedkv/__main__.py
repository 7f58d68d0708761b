"""``python -m pagedkv bench cpu | memory | launch | emulator | static | decode | write``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

BENCHES = ("cpu", "memory", "launch", "emulator", "static", "decode", "write")
CAPABILITIES = ("8.0", "9.0", "10.0")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    from .bench.gpu.decode import CHOICES, SUBJECTS

    parser = argparse.ArgumentParser(prog="python -m pagedkv", description="Paged KV cache and paged attention.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure this machine", description="Measure on this machine.")
    measured = (
        "CPU kernels, the memory manager, launches, the emulator, CUDA kernels without running them on a GPU; "
        "on a GPU, decode_attention beside other libraries, or write_kv"
    )
    bench.add_argument("what", choices=BENCHES, help=measured)
    bench.add_argument("--repeats", type=int, default=9, help="timed calls of each contestant (default: 9)")
    static = bench.add_argument_group("static")
    static.add_argument(
        "--cc", nargs="+", choices=CAPABILITIES, default=CAPABILITIES, help="compute capabilities (default: all)"
    )
    static.add_argument("--cold", action="store_true", help="compile all, and take nothing from the cache on disk")
    bench.add_argument(
        "--quick", action="store_true", help="static: one variant of a kernel; decode, write: small cells"
    )
    decode = bench.add_argument_group("decode")
    decode.add_argument("--only", nargs="+", choices=CHOICES, metavar="GROUP", help=f"of {', '.join(CHOICES)}")
    decode.add_argument("--subjects", nargs="+", choices=SUBJECTS, metavar="NAME", help=f"of {', '.join(SUBJECTS)}")
    decode.add_argument("--plot", metavar="PATH", help="also draw bandwidth over length, as PNG")
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
    if options.plot and (options.what != "decode" or "lengths" not in (options.only or ["lengths"])):
        print("--plot draws the group lengths of bench decode", file=sys.stderr)
        return 2
    from .bench import cpu, emulator, launch, memory, report
    from .bench.gpu import decode, plot, write
    from .bench.static import run as static
    from .errors import BackendUnavailableError

    modules = (cpu, memory, launch, emulator, static, decode, write)
    benches: dict[str, Any] = dict(zip(BENCHES, modules, strict=True))
    own: dict[str, Any] = {}
    code = 0
    if options.what == "static":
        capabilities = [(int(major), int(minor)) for major, minor in (cc.split(".") for cc in options.cc)]
        own = {"capabilities": capabilities, "quick": options.quick, "cold": options.cold}
    elif options.what == "write":
        own = {"quick": options.quick}
    elif options.what == "decode":
        own = {"quick": options.quick, "groups": options.only, "subjects": options.subjects}
    try:
        if options.plot:
            plot.require()
        rows = benches[options.what].run(repeats=options.repeats, progress=_progress, **own)
    except KeyboardInterrupt as interruption:
        print("\ninterrupted", file=sys.stderr)
        code, rows = 130, interruption.rows if isinstance(interruption, report.Interrupted) else []
    except BackendUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    _progress("")
    form = report.as_json if options.json else report.as_csv if options.csv else report.as_table
    if rows:
        print(form(rows))
    if options.plot and not code:
        plot.draw(rows, options.plot)
    return code


if __name__ == "__main__":
    sys.exit(main())
