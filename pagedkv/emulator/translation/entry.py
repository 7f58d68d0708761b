"""The kernels of a PTX module, each translated on its first launch."""

from __future__ import annotations

from ...cached_property import cached_property
from ..errors import EmulatorError
from ..ptx.parse import ParsedModule
from ..ptx.program import Program
from .translate import Translation


class Entry(Program):
    """One kernel, ready to launch; `Module.entry` makes it."""

    @cached_property
    def translation(self) -> Translation:
        """The kernel in Python."""
        return Translation(self)

    @cached_property
    def traced(self) -> Translation:
        """The kernel in Python that reports each instruction to a tracer."""
        return Translation(self, traced=True)

    def unsupported_instructions(self) -> dict[int, str]:
        """The instructions that raise UnsupportedInstructionError when they are executed, by PTX line."""
        return dict(self.translation.unsupported)


class Module:
    """A PTX module.

    Parameters
    ----------
    ptx : str
        PTX text from numba-cuda's compiler.

    Raises
    ------
    EmulatorError
        The text is not PTX, or has something that the parser does not know.

    Examples
    --------
    >>> from numba import cuda, types
    >>> from pagedkv.emulator import Module
    >>> def double(x):
    ...     x[cuda.threadIdx.x] *= 2
    >>> ptx, _ = cuda.compile_ptx(double, types.void(types.CPointer(types.float32)), cc=(9, 0))
    >>> entry = Module(ptx).entry("double")
    >>> entry.unsupported_instructions()
    {}
    """

    def __init__(self, ptx: str) -> None:
        self._parsed = ParsedModule(ptx)
        self.version, self.target = self._parsed.version, self._parsed.target
        self._entries: dict[str, Entry] = {}

    @property
    def entry_names(self) -> list[str]:
        """Symbols of the kernels in the module."""
        return [function.name for function in self._parsed.functions.values() if function.is_entry]

    def entry(self, name: str | None = None) -> Entry:
        """The kernel with this symbol, else the only one whose symbol contains it; without a name, the only kernel.

        Raises
        ------
        EmulatorError
            No kernel matches, or several do.
        """
        names = self.entry_names
        hits = [n for n in names if n == name] or [n for n in names if name is None or name in n]
        if len(hits) != 1:
            raise EmulatorError(f"{len(hits)} entries match {name!r}; the module has {names}")
        if hits[0] not in self._entries:
            self._entries[hits[0]] = Entry(self._parsed, self._parsed.functions[hits[0]])
        return self._entries[hits[0]]
