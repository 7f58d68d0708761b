"""v1 with one line of its source changed, or given a wrong block id: a fault that names the line and the array."""

import importlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pagedkv import kernels
from pagedkv.cuda.plans import paged
from pagedkv.emulator import EmulatorDevice, MemoryFault, RaceFault, SyncFault

from ..attention.kernels import V1
from ..support.problems import assert_close

LENGTHS = (37, 5)


class Edit(NamedTuple):
    """A line of the source and what it becomes, the fault, what it says, and the line that it names."""

    file: str
    old: str
    new: str
    fault: Any
    message: str
    line: str


EDITS = [
    Edit(
        "paged/attention.py",
        "cuda.threadIdx.x)\n        cuda.syncthreads()",
        "cuda.threadIdx.x)",
        RaceFault,
        "shared-memory race: load of a location written by",
        "seq_len = int64(agreed[0])",
    ),
    Edit(
        "paged/attention.py",
        "seq_idx * out_seq_stride + head_idx * out_head_stride",
        "seq_idx * out_seq_stride",
        RaceFault,
        r"global-memory race: store of a location written by thread block .* in out, at out\[",
        "store_4(out + row_idx * 4, bits)",
    ),
    Edit(
        "paged/attention.py",
        "logits[token_idx - start_token] = qk",
        "pass",
        MemoryFault,
        "uninitialised shared load",
        "val = exp_minus(logits[i], qk_max)",
    ),
    Edit(
        "paged/attention.py",
        "        reduce_rows(accs",
        "        if lane < 7:\n            cuda.syncthreads()\n        reduce_rows(accs",
        SyncFault,
        "barrier",
        "cuda.syncthreads()",
    ),
]


def edited(edit, directory):
    """The factory of v1 from a copy of the kernels in a directory, with the edit."""
    package = directory / directory.name
    shutil.copytree(Path(kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / edit.file).read_text()
    assert text.count(edit.old) == 1
    (package / edit.file).write_text(text.replace(edit.old, edit.new))
    return importlib.import_module(f"{package.name}.paged.attention").make_v1


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.line)
def test_the_line_that_does_it_is_named(edit, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    problem, own = V1.build(seq_lens=LENGTHS), paged.make_v1
    monkeypatch.setattr(paged, "make_v1", edited(edit, tmp_path))
    with pytest.raises(edit.fault, match=edit.message) as caught:
        V1.attend(problem, device=EmulatorDevice(global_race=True))
    monkeypatch.setattr(paged, "make_v1", own)
    fault = caught.value
    assert fault.kernel.startswith("v1[head_dim=64, block_size=16, ")
    assert Path(fault.source.file).parent.parent == tmp_path / tmp_path.name
    assert fault.source.text == Path(fault.source.file).read_text().splitlines()[fault.source.line - 1].strip()
    assert fault.source.text.startswith(edit.line)
    assert f"at {fault.source}" in str(fault)
    assert "def paged_attention(" in Path((fault.source, *fault.callers)[-1].file).read_text()
    # Nothing has come back from the copies that the kernel worked on, and nothing stays behind.
    assert np.isnan(problem.out).all()
    assert_close(problem, *V1.attend(problem))


@pytest.mark.parametrize("bad", [7, 10**6, 2**31 - 1])
def test_a_block_id_that_is_not_there_is_out_of_the_bounds_of_its_cache(bad):
    problem = V1.build(seq_lens=LENGTHS)
    assert len(problem.k_cache) < 8
    tables = problem.block_tables.copy()
    tables[1, 0] = bad
    call = V1.call(problem)._replace(block_tables=tables)  # as on a device, where nobody looks at the values
    with pytest.raises(MemoryFault, match="out of bounds global load") as caught, EmulatorDevice() as device:
        V1.launch(device, call, problem.out, None)
    fault = caught.value
    assert fault.thread_block[0] // problem.q.shape[1] == 1
    assert "qk = query_key(" in str(fault)
    assert fault.source.text.startswith("k_vecs[4 * j]")
    if bad < 10:
        assert "k_cache" in fault.place
    assert_close(problem, *V1.attend(problem))
