"""The checks of a public operation on one problem."""

from __future__ import annotations

from typing import Any

from ..calls import check_merge, check_write, run
from ..error_rule import assert_close
from ..problems.attention import Spec, build
from ..problems.merges import MergeSpec
from ..problems.writes import WriteSpec


class Moved(AssertionError):
    """A result has other bits although only blocks have moved; `spec` is the problem with the blocks elsewhere."""

    def __init__(self, spec: Spec) -> None:
        super().__init__("other bits where only blocks have moved, and other poison is around them")
        self.spec = spec


def check(spec: Spec | WriteSpec | MergeSpec, **changes: Any) -> None:
    """Raise AssertionError unless the operation computes this problem correctly.

    Results of attention must be within the error bound, and keep their bits when blocks lie elsewhere among other
    poison; writes must have the bits of the reference.

    Parameters
    ----------
    spec : Spec, WriteSpec or MergeSpec
    **changes
        More arguments of the call, as backend="emulator".
    """
    if isinstance(spec, WriteSpec):
        check_write(spec, **changes)
    elif isinstance(spec, MergeSpec):
        check_merge(spec, **changes)
    else:
        problem = build(spec)
        result = run(problem, **changes)
        assert_close(problem, *result)
        if spec.fingerprint:  # fingerprints change with the placement
            return
        moved = spec.replace(placement_seed=spec.placement_seed + 1, poison="huge" if spec.poison == "nan" else "nan")
        again = run(build(moved, like=problem), **changes)
        if [x.tobytes() for x in result] != [x.tobytes() for x in again]:
            raise Moved(moved)
