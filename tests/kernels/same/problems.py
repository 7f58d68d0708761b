"""Problems that were drawn once, for an emulator and a GPU to solve alike: ``python -m tests.kernels.same.problems``.

They are kept in problems.json, so that every machine solves the same ones, whatever its version of Hypothesis. Each
variant and form that the tests compile has three; one entry of the last one's lengths or tables is wrong, and the call
has ``check=True``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from ...attention.drawn import nothing_for_head_1, on_devices
from ...attention.kernels import Kernel
from ...support.problems import Spec
from ...support.strategies import fade, own_parity

FILE = Path(__file__).with_name("problems.json")
NUM_EACH = 3
APART = 10  # examples: Hypothesis draws some that are nearly the one before
SCORE_MODS = {function.__name__: function for function in (fade, own_parity, nothing_for_head_1)}
BAD_LENGTHS = (-1, 10**6, 2**31 - 1, -(2**31))
BAD_IDS = (-1, 10**6, 2**31 - 1)


class Wrong(NamedTuple):
    """An entry that `check` finds: of "seq_lens", whose column is 0, or of "block_tables"."""

    array: str
    sequence: int
    column: int
    value: int


class Drawn(NamedTuple):
    """A problem, by whom it is solved, and what is wrong with it.

    `kernel` is a decode kernel, "prefill" or "wgmma". The device at hand decides which prefill is on warpgroups.
    """

    kernel: str
    name: str
    spec: Spec
    wrong: Wrong | None
    stretch: int | None = None

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}".replace(" ", "_")

    def solver(self) -> Kernel:
        """The kernel that is compiled for it."""
        return Kernel(self.kernel, self.name, self.spec, stretch=self.stretch)


def sources() -> dict[Kernel, st.SearchStrategy[Spec]]:
    """What draws the problems of each kernel, for the compute capability at hand."""
    return {dataclasses.replace(source.kernel, capability=(9, 0)): source.specs for source in on_devices()}


@st.composite
def wrongs(draw: st.DrawFn, spec: Spec) -> Wrong:
    """A wrong entry for a problem that uses some blocks."""
    used = [(i, -(-n // spec.block_size)) for i, n in enumerate(spec.seq_lens) if n and spec.window is None]
    if not used or draw(st.booleans()):
        sequence = draw(st.integers(0, len(spec.seq_lens) - 1))
        return Wrong("seq_lens", sequence, 0, draw(st.sampled_from(BAD_LENGTHS)))
    sequence, num_blocks = draw(st.sampled_from(used))
    return Wrong("block_tables", sequence, draw(st.integers(0, num_blocks - 1)), draw(st.sampled_from(BAD_IDS)))


def draw(kernel: Kernel, specs: st.SearchStrategy[Spec], number: int) -> list[Drawn]:
    """NUM_EACH problems of a kernel; the same ones for a number."""
    right, wrong = [], []

    @seed(number)
    @settings(max_examples=APART * NUM_EACH, database=None, phases=[Phase.generate], deadline=None)
    @given(st.data())
    def collect(data: Any) -> None:
        spec = data.draw(specs)
        num_busy = sum(map(bool, spec.query_lens or spec.seq_lens))
        if num_busy:
            right.append((spec, None))
        if num_busy > 1:  # of which one stays right
            wrong.append((spec, data.draw(wrongs(spec))))

    collect()
    chosen = [*right[:: -len(right) // (NUM_EACH - 1)][: NUM_EACH - 1], wrong[-1]]
    return [Drawn(kernel.kernel, f"{kernel.name}-{i}", *one, kernel.stretch) for i, one in enumerate(chosen)]


def read() -> list[Drawn]:
    """The problems of the file."""
    return [
        Drawn(**{**each, "spec": _spec(each["spec"]), "wrong": Wrong(*each["wrong"]) if each["wrong"] else None})
        for each in json.loads(FILE.read_text())
    ]


def _spec(fields: dict[str, Any]) -> Spec:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    mod = {"score_mod": SCORE_MODS[fields["score_mod"]]} if "score_mod" in fields else {}
    return Spec(**{**fields, **lists, **mod})


def _fields(spec: Spec) -> dict[str, Any]:
    changed = {f.name: x for f in dataclasses.fields(spec) if (x := getattr(spec, f.name)) != f.default}
    return {name: getattr(x, "__name__", x) for name, x in changed.items()}


def main() -> None:
    lines = [
        json.dumps({**drawn._asdict(), "spec": _fields(drawn.spec)})
        for number, (kernel, specs) in enumerate(sources().items())
        for drawn in draw(kernel, specs, number)
    ]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
