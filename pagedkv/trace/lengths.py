"""Requests: lengths of prompts and outputs, drawn or read from a file."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory.arguments import as_int, as_ints

# The columns of prompt and output lengths: ours, those of the Azure LLM inference traces, and BurstGPT's.
COLUMNS = (
    ("prompt_tokens", "output_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("Request tokens", "Response tokens"),
)
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Requests:
    """The lengths of requests in the order of arrival; all of them wait from the beginning.

    Attributes
    ----------
    prompt_lens, output_lens : (num_requests,) int64
        Tokens of each prompt, and tokens generated for it, at least 1 each.

    Raises
    ------
    TypeError, ValueError
        A length is not as described, or there is no request.

    Examples
    --------
    >>> from pagedkv import trace
    >>> trace.Requests(prompt_lens=[5, 3], output_lens=[2, 4]).seq_lens
    array([7, 7])
    """

    prompt_lens: npt.NDArray[np.int64]
    output_lens: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        prompt_lens = as_ints("prompt_lens", self.prompt_lens, symbol="num_requests")
        output_lens = as_ints("output_lens", self.output_lens, len(prompt_lens), "num_requests")
        if not len(prompt_lens):
            raise ValueError("requests must be at least one, got none")
        for name, lens in (("prompt_lens", prompt_lens), ("output_lens", output_lens)):
            if lens.min() < 1 or lens.max() > MAX_TOKENS:
                raise ValueError(f"{name} must be from 1 to 2**31 - 1, got {lens.min()} to {lens.max()}")
            object.__setattr__(self, name, lens)

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        """Tokens of each request when it ends, (num_requests,) int64."""
        return self.prompt_lens + self.output_lens


def log_normal(
    num_requests: int,
    *,
    prompt_mean: float = 160.0,
    output_mean: float = 340.0,
    sigma: float = 1.0,
    max_len: int = 2048,
    seed: int = 0,
) -> Requests:
    """Draw requests with independent log-normal prompt and output lengths.

    Many are short and a few are long, as in chats. The means are about those of ShareGPT in the vLLM paper, figure 11.

    Parameters
    ----------
    num_requests : int
        At least 1.
    prompt_mean, output_mean : float
        Mean lengths, before `max_len` cuts the longest; at least 1.
    sigma : float
        Standard deviation of the logarithm of a length, from 0 to 10.
    max_len : int
        Prompt and output together are cut to this, at least 2.
    seed : int
        The seed of NumPy's default generator.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described.

    Examples
    --------
    >>> from pagedkv import trace
    >>> requests = trace.log_normal(1000, prompt_mean=50, output_mean=100, max_len=512)
    >>> len(requests.seq_lens), requests.seq_lens.max() <= 512
    (1000, np.True_)
    """
    num_requests = as_int("num_requests", num_requests, minimum=1)
    max_len = as_int("max_len", max_len, minimum=2, maximum=MAX_TOKENS)
    for name, value, least, most in (
        ("prompt_mean", prompt_mean, 1, MAX_TOKENS),
        ("output_mean", output_mean, 1, MAX_TOKENS),
        ("sigma", sigma, 0, 10),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    rng = np.random.default_rng(as_int("seed", seed))

    def draw(mean: float) -> npt.NDArray[Any]:
        return np.rint(np.minimum(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_requests), max_len))

    prompt_lens = draw(prompt_mean).astype(np.int64).clip(1, max_len - 1)
    return Requests(prompt_lens, draw(output_mean).astype(np.int64).clip(1, max_len - prompt_lens))


def read_csv(path: str | PathLike[str], num_requests: int | None = None) -> Requests:
    """Read requests from a CSV file with a header, in the order of its rows.

    Parameters
    ----------
    path : path
        Its columns are ``prompt_tokens`` and ``output_tokens``; or ``ContextTokens`` and ``GeneratedTokens``, as in the
        Azure LLM inference traces; or ``Request tokens`` and ``Response tokens``, as in BurstGPT. Others are ignored.
    num_requests : int or None
        How many of the first rows to read; None for all.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It has no such columns or no rows, or a length is not an int from 1 to 2**31 - 1; the message names the line.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from pagedkv import trace
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "trace.csv")
    ...     _ = path.write_text("prompt_tokens,output_tokens\\n5,2\\n3,4\\n")
    ...     requests = trace.read_csv(path)
    >>> requests.prompt_lens
    array([5, 3])
    """
    most = None if num_requests is None else as_int("num_requests", num_requests, minimum=1)
    lens: list[list[int]] = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            header = rows.fieldnames or []
            columns = next((pair for pair in COLUMNS if set(pair) <= set(header)), None)
            if columns is None:
                known = ", or ".join(" and ".join(pair) for pair in COLUMNS)
                raise ValueError(
                    f"{path}: the first line must name the columns {known}, got {', '.join(header) or 'none'}"
                )
            for row in rows:
                if len(lens) == most:
                    break
                lens.append([_length(f"{path}, line {rows.line_num}", name, row[name]) for name in columns])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file in UTF-8: {error}") from error
    if not lens:
        raise ValueError(f"{path} has no row below its header: one for each request is needed")
    prompt_lens, output_lens = np.array(lens, np.int64).T
    return Requests(prompt_lens, output_lens)


def _length(where: str, name: str, text: str | None) -> int:
    digits = (text or "").strip()
    if not (digits.isascii() and digits.isdigit() and 1 <= int(digits[:20]) <= MAX_TOKENS):
        raise ValueError(f"{where}: {name} must be an int from 1 to 2**31 - 1, got {text!r}: mend or leave out the row")
    return int(digits)
