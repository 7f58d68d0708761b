"""``python -m pagedkv trace``: a table of how much contiguous memory, a buddy allocator and paging waste."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory.arguments import as_int
from ..memory.groups import LayerGroups, windows_in_words
from .lengths import Requests, log_normal, read_csv
from .managers import Buddy, Contiguous, Layers, Manager, Paged
from .simulate import KINDS, Run, simulate

NUM_REQUESTS, MEMORY, MAX_LEN, BLOCK_SIZES = 1000, 16384, 2048, (1, 8, 16, 32, 64, 128)
NUM_SAMPLES = 100  # of each series in JSON

Row = dict[str, Any]


def _block_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ArgumentTypeError(f"must be block sizes of at least 1, as in 8,16,32, got {text}")
    return tuple(dict.fromkeys(map(int, parts)))


def _windows(text: str) -> Layers:
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "all" or (part.isascii() and part.isdigit() and int(part)) for part in parts):
        raise ArgumentTypeError(f"must be a window or all for each layer, as in 1024,1024,all, got {text}")
    return tuple(None if part == "all" else int(part) for part in parts)


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line."""
    parser.epilog = (
        "Percentages are of the slots that are not idle: tokens; slots reserved for tokens to come; internal "
        "fragmentation, held and never used; external fragmentation, free where the next request does not fit. Waste is"
        ' the last three. "oracle": the manager knows how long each request will be, which no server does. With '
        "--windows a token that a window has passed is internal fragmentation in its layer, as long as it is held."
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"how many (default: {NUM_REQUESTS}, or all rows of --csv)"
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="their lengths: columns prompt_tokens and output_tokens, or those of Azure or BurstGPT",
    )
    drawn = parser.add_argument_group("log-normal lengths, without --csv")
    drawn.add_argument("--seed", type=int, metavar="N", help="of the random numbers (default: 0)")
    drawn.add_argument("--prompt-mean", type=float, metavar="T", help="mean tokens of a prompt (default: 160)")
    drawn.add_argument("--output-mean", type=float, metavar="T", help="mean tokens of an output (default: 340)")
    drawn.add_argument("--sigma", type=float, metavar="S", help="of the logarithm of a length (default: 1)")
    parser.add_argument(
        "--memory", type=int, default=MEMORY, metavar="SLOTS", help=f"tokens that fit in the memory (default: {MEMORY})"
    )
    parser.add_argument(
        "--max-len",
        type=int,
        metavar="T",
        help=f"tokens reserved for each request where memory is contiguous (default: {MAX_LEN}; of a CSV, its longest)",
    )
    sizes = ",".join(map(str, BLOCK_SIZES))
    parser.add_argument(
        "--block-sizes", type=_block_sizes, default=BLOCK_SIZES, metavar="P,P", help=f"of paging (default: {sizes})"
    )
    parser.add_argument(
        "--watermark", type=float, default=0.01, metavar="SHARE", help="of blocks, kept free to grow (default: 0.01)"
    )
    parser.add_argument(
        "--windows",
        type=_windows,
        default=(None,),
        metavar="W,W",
        help="tokens that each layer sees, or the layers that repeat: 128,all for every other layer (default: all)",
    )
    parser.add_argument(
        "--plot",
        nargs="?",
        const="trace.png",
        metavar="PATH",
        help="also draw it; the suffix says how: .png, .svg, .pdf (without a path: trace.png)",
    )


def run(
    *,
    requests: int | None = None,
    csv: str | None = None,
    memory: int = MEMORY,
    max_len: int | None = None,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    watermark: float = 0.01,
    windows: Layers = (None,),
    progress: Callable[[str], Any] = print,
    **lengths: Any,
) -> list[Row]:
    """Simulate requests against every manager of the same memory.

    Parameters
    ----------
    requests : int or None
        How many; None for 1000 of log-normal lengths, or all rows of the file.
    csv : str or None
        A file for `read_csv`.
    memory : int
        Slots.
    max_len : int or None
        Slots that contiguous memory reserves for a request; None for 2048, and for the longest request of a file.
    block_sizes : sequence of int
        P of paging, one run for each.
    watermark : float
        Of `Paged`.
    windows : tuple of int or None
        The window of each layer. Only `Paged` releases what they have passed.
    progress : callable
        Called with what is being simulated.
    **lengths
        Arguments of `log_normal`; None for its defaults.

    Returns
    -------
    list of dict
        A row for the requests, and one for each manager: percent of the slots that are not idle, sequences at once,
        steps, and for paging preemptions and the entries of all block tables. Lists are series over `steps over time`.

    Raises
    ------
    OSError, TypeError, ValueError
        As `read_csv`, `log_normal`, the managers and `simulate` say.
    """
    given = {name: value for name, value in lengths.items() if value is not None}
    if csv is not None:
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{names} and --csv exclude each other: lengths are drawn or read")
        try:
            trace = read_csv(csv, requests)
        except OSError as error:
            raise OSError(
                f"--csv {csv} cannot be read ({error.strerror}): give a file with a row for each request, below the "
                "names prompt_tokens,output_tokens"
            ) from error
        max_len = int(trace.seq_lens.max()) if max_len is None else max_len
    else:
        max_len = MAX_LEN if max_len is None else max_len
        trace = log_normal(NUM_REQUESTS if requests is None else requests, max_len=max_len, **given)
    if as_int("memory", memory, minimum=1) < max_len:
        raise ValueError(f"--memory must be at least the {max_len} slots of --max-len, got {memory}")
    managers: list[tuple[str, Callable[[], Manager]]] = [
        (f"contiguous, {max_len} each", partial(Contiguous, memory, max_len, windows)),
        ("contiguous, oracle", partial(Contiguous, memory, None, windows)),
        ("buddy, oracle", partial(Buddy, memory, windows)),
        *(("paged", partial(_paged, trace, memory, P, watermark, windows)) for P in block_sizes),
    ]
    for _, make in managers:
        make()  # refuses wrong options before the first run
    rows: list[Row] = [_describe(trace, memory) | ({"layers": windows_in_words(windows)} if any(windows) else {})]
    for i, (name, make) in enumerate(managers):
        progress(f"trace: {name}, {i + 1} of {len(managers)}")
        manager = make()
        rows.append({"manager": name, **_row(simulate(trace, manager), manager)})
    return rows


def _paged(trace: Requests, memory: int, block_size: int, watermark: float, windows: Layers = (None,)) -> Paged:
    """Make a Paged manager with rows for as many sequences as can ever run at once."""
    if not 1 <= block_size <= memory:
        raise ValueError(f"--block-sizes must be from 1 to the {memory} slots of --memory, got {block_size}")
    groups = LayerGroups.of(windows, len(windows), block_size)
    least = np.cumsum(np.sort(groups.held(trace.prompt_lens + 1))) * groups.group_size
    max_seqs = max(1, int(np.searchsorted(least, memory * len(windows) // block_size, side="right")))
    options: dict[str, Any] = {"max_len": int(trace.seq_lens.max()), "max_seqs": max_seqs, "watermark": watermark}
    return Paged(memory, block_size, **options, windows=windows)


def _describe(trace: Requests, memory: int) -> Row:
    return {
        "requests": len(trace.seq_lens),
        "mean prompt": round(float(trace.prompt_lens.mean()), 1),
        "mean output": round(float(trace.output_lens.mean()), 1),
        "longest": int(trace.seq_lens.max()),
        "memory": memory,
    }


def _row(run: Run, manager: Manager) -> Row:
    block_size = manager.table.block_size if isinstance(manager, Paged) else None
    num_layers = len(manager.windows)
    row: Row = {"P": block_size, "waste %": 100 * run.waste}
    row |= {f"{kind} %": 100 * share for kind, share in run.shares.items()}
    row |= {"at once": run.at_once, "most": int(run.running.max()), "steps": run.num_steps}
    held = (run.tokens + run.reserved + run.internal).mean()
    of_paging: tuple[int | None, ...] = (None,) * 3
    if isinstance(manager, Paged):
        slots = manager.table.block_size * manager.groups.group_size  # of a block
        of_paging = run.preempted, run.recomputed, round(held / slots)
    row |= dict(zip(("preempted", "recomputed", "table entries"), of_paging, strict=True))
    at = np.unique(np.linspace(0, run.num_steps, NUM_SAMPLES, endpoint=False).astype(np.int64))
    row["steps over time"] = at.tolist()
    for name in KINDS:
        row[f"{name} over time"] = _means(getattr(run, name), at, num_layers)
    row["running over time"] = _means(run.running, at)
    return row


def _means(series: npt.NDArray[np.int64], at: npt.NDArray[np.int64], divisor: int = 1) -> list[float]:
    """Average a series over the stretches that begin at these steps, and divide it."""
    sums = np.add.reduceat(series, at) / divisor
    return [round(mean, 1) for mean in (sums / np.diff(at, append=len(series))).tolist()]
