"""Recordings: what each of several commits launches in some cells, compiled for 9.0 without a GPU."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagedkv.bench.gpu.decode import KERNELBENCH
from pagedkv.bench.problem import Cell
from pagedkv.compiler.compile import CompiledKernel
from pagedkv.compiler.link import Linked

ROOT, FOLDER, SUFFIX = Path(__file__).parents[2], Path(".gpu", "variants"), ".json.gz"
CAPABILITY = (9, 0)
ENTRIES_OF_FEW = ("pagedkv_prefill_split", "pagedkv_prefill_merge")


def prompt(num_seqs: int, length: int, queries: int = 0, group: str = "prompt", **sizes: Any) -> Cell:
    return Cell(group, (length,) * num_seqs, query_lens=(queries or length,) * num_seqs, **sizes)


BF16 = {"dtype": "bfloat16"}
FP8 = {"kv_dtype": "fp8_e4m3", **BF16}
MIXED = Cell("mixed", (8192, *(4096,) * 64), query_lens=(2048, *(1,) * 64))
CELLS = {
    "decode": [
        *(Cell("kernelbench", (n,) * b, h, hkv, d, p, **BF16) for b, h, hkv, d, n, p in KERNELBENCH),
        *(Cell("decode", (n,) * b, **BF16) for b, n in ((32, 8192), (1, 1024), (1, 8192), (2, 32768))),
        *(Cell("decode", (n,) * b, **FP8) for b, n in ((32, 2048), (32, 8192), (8, 1024))),
    ],
    "prefill": [
        *(prompt(16384 // n, n) for n in (1024, 4096, 16384)),
        prompt(8, 4096, group="long"),
        prompt(4, 4096, group="dims", num_heads=16, num_kv_heads=4, head_dim=256, **BF16),
        prompt(4, 4096, group="dims", head_dim=64),
        *(
            prompt(1, cached + 512, 512, group="chunk", num_heads=4 * heads, num_kv_heads=heads)
            for heads in (8, 1)
            for cached in (8192, 32768)
        ),
        prompt(1, 34816, 2048, group="chunk"),
        MIXED,
        prompt(1, 16384, group="full", causal=False),
    ],
    "few": [
        Cell("few rows", (n,) * b, 8 * group_size, **kind)
        for b, n, kind in (
            *((b, n, BF16) for b, n in ((32, 2048), (32, 8192), (1, 4096), (1, 32768), (8, 1024))),
            (32, 8192, FP8),
        )
        for group_size in (4, 8, 16)
    ],
    # Small enough for a sanitizer: each inner loop, ragged lengths, several splits, and more units than run at once.
    "same": [
        *(
            Cell("same", (9000, 17, 530, *(40,) * 5), 4 * g, 4, d, **kind)
            for g, d, kind in ((4, 128, BF16), (8, 128, BF16), (4, 64, {}))
        ),
        Cell("same", (9000, 17, 530, *(40,) * 5), 16, 4, **FP8),
        *(
            Cell("same", (900, 7, 700, 500), 16, 4, d, query_lens=(700, 7, 150, 500), **kind)
            for d, kind in ((64, {}), (128, {}), (128, BF16), (256, BF16), (128, FP8))
        ),
        Cell("same", (9000, 40), 16, 4, query_lens=(3, 2)),
    ],
}
DRY = {
    "decode": [Cell("decode", (40, 40), 8, 2, 64)],
    "few": [Cell("few rows", (530, 530), 8, 2, 64)],
    "prefill": [prompt(1, n, num_heads=8, num_kv_heads=2, head_dim=64) for n in (40, 70, 100)],
    "same": [Cell("same", (300, 7), 8, 2, 64)],
}


def operations(cell: Cell) -> list[str]:
    """What is recorded of a cell: of the group "few rows" decode, and prefill's kernel for few rows."""
    if max(cell.query_lens) > 1:
        return ["prefill"]
    return ["decode", "prefill"] if cell.group == "few rows" else ["decode"]


def recorded_of(cells: Sequence[Cell]) -> list[tuple[str, str, dict[str, Any]]]:
    """What `record.py` takes."""
    return [(repr(cell), operation, asdict(cell)) for cell in cells for operation in operations(cell)]


def folder_of(is_dry: bool) -> Path:
    """Where recordings are, and those of dry runs."""
    return FOLDER / "dry" if is_dry else FOLDER


def record(commits: Sequence[str], cells: Sequence[Cell], folder: Path) -> None:
    """Write what each commit launches, in place of what has been recorded there before."""
    given = recorded_of(cells)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"*{SUFFIX}"):
        old.unlink()
    for i, commit in enumerate(commits):
        name = subprocess.check_output(["git", "log", "-1", "--format=%h %s", commit], text=True, cwd=ROOT).strip()
        with tempfile.TemporaryDirectory() as checkout:
            packed = subprocess.run(["git", "archive", commit, "pagedkv"], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", checkout], input=packed.stdout, check=True)
            made, environment = Path(checkout, "made"), os.environ | {"PYTHONPATH": checkout}
            command = [sys.executable, str(ROOT / "tests/gpu/record.py"), str(made)]
            subprocess.run(command, input=json.dumps(given), text=True, env=environment, check=True)
            with gzip.open(made, "rt") as file:
                recording = json.load(file)
            if not recording["package"].startswith(checkout):
                raise RuntimeError(f"{recording['package']} was recorded in place of {name}")
        with gzip.open(folder / f"{i}-{name.split()[0]}{SUFFIX}", "wt") as file:
            json.dump({"name": name, **recording}, file)
        print(f"recorded {name}", flush=True)


class Variant:
    """What a commit launches.

    Attributes
    ----------
    name : str
        The commit's hash and subject.
    kernels : list of CompiledKernel
    """

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") as file:
            recording = json.load(file)
        self.name, self._cells = recording["name"], recording["cells"]
        self._kernels = {key: _kernel(of) for key, of in recording["kernels"].items()}
        self.kernels = list(self._kernels.values())

    def of(self, cell: Cell, operation: str) -> dict[str, Any]:
        """The launches and workspaces of an operation on a cell; KeyError if they were not recorded.

        Of prefill beside decode, only the launches that split keys: the thread blocks of the other find nothing to do.
        """
        recorded = self._cells[repr(cell)][operation]
        if operation == operations(cell)[0]:
            return recorded
        few = [launch for launch in recorded["launches"] if self._kernels[launch[0]].entry in ENTRIES_OF_FEW]
        return recorded | {"launches": few or recorded["launches"]}

    def bind(self, recorded: dict[str, Any], addresses: dict[str, int]) -> list[tuple[Any, ...]]:
        """The arguments of `device.launch` for each launch."""
        made = []
        for key, grid, args, shared_bytes in recorded["launches"]:
            values = [addresses.get(x[0], -x[1]) + x[1] if isinstance(x, list) else x for x in args]
            made.append((self._kernels[key], tuple(grid), values, shared_bytes))
        return made


def _kernel(of: dict[str, Any]) -> CompiledKernel:
    kernel = CompiledKernel(of["name"], of["entry"], of["ptx"], of["num_threads"], CAPABILITY)
    kernel._linked = Linked(CAPABILITY, base64.b64decode(of["cubin"]), "")
    return kernel


def recorded_variants(folder: Path) -> list[Variant]:
    """What has been recorded, in the order in which the commits were given."""
    paths = folder.glob(f"*{SUFFIX}")
    return [Variant(path) for path in sorted(paths, key=lambda path: int(path.name.split("-")[0]))]
