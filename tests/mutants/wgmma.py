"""wgmma: the emulator's rules."""

from .mutant import Mutant

WARPGROUP = "tests/emulator/machine/test_warpgroup.py::"
PROXY = (WARPGROUP + "test_stores_are_fenced_for_the_asynchronous_proxy",)
ASYNC = (WARPGROUP + "test_asynchronous_copies_are_fenced_too",)
GROUPS = (WARPGROUP + "test_a_group_that_was_not_waited_for_is_in_flight",)
STORES = (WARPGROUP + "test_operands_in_flight_are_not_overwritten",)

REGISTERS, RACES = "emulator/ptx/wgmma.py", "emulator/state/races.py"
PROXIES, OPERANDS = "emulator/state/proxies.py", "emulator/state/operands.py"
MACHINE = "emulator/machine/warpgroup.py"

MUTANTS = [
    Mutant(
        "emulator, wgmma: a wait leaves nothing in flight",
        REGISTERS,
        "if not x.age > keep}",
        "if False}",
        GROUPS,
        ci=True,
    ),
    Mutant(
        "emulator, wgmma: a wait is for groups that are still open, too",
        REGISTERS,
        "if not x.age > keep}",
        "if not x.age >= keep}",
        GROUPS,
    ),
    Mutant(
        "emulator, wgmma: of two paths one decides what is touched",
        REGISTERS,
        "            self.touched.setdefault(name, ins)\n",
        "            pass\n",
        (WARPGROUP + "test_a_wgmma_fence_on_one_of_two_paths_is_not_enough",),
    ),
    Mutant(
        "emulator, wgmma: a fence of the proxy is for what other threads wrote",
        PROXIES,
        "m[writer]",
        "np.ones(len(open_), np.bool_)",
        PROXY,
    ),
    Mutant(
        "emulator, wgmma: a fence of the proxy behind the barrier counts for nobody",
        PROXIES,
        "            self._seen[slot, number] = order.seen[slot, number]\n",
        "            pass\n",
        PROXY,
    ),
    Mutant(
        "emulator, wgmma: what a cp.async has brought needs no fence",
        RACES,
        "self.reads[g] = -1\n            if self.fences is not None:",
        "self.reads[g] = -1\n            if False:",
        ASYNC,
    ),
    Mutant(
        "emulator, wgmma: operands are read at the beginning only",
        MACHINE,
        "            self._read(operands)  # as late as now\n",
        "            pass\n",
        STORES,
    ),
    Mutant(
        "emulator, wgmma: a group that is kept is done",
        OPERANDS,
        "(operands.groups < oldest_kept[operands.warps])",
        "(operands.groups < oldest_kept[operands.warps] + 2)",
        STORES,
    ),
]
