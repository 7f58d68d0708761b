"""Kernel merge_states and its plan; the tests run in the emulator."""

from ..mutant import Mutant

NO_KEYS = ("tests/kernels/test_merge_states.py::test_states_without_keys[emulator-2]",)
MANY_STATES = ("tests/kernels/test_merge_states.py::test_states_without_keys[emulator-9]",)

MUTANTS = [
    Mutant(
        "merge_states: outputs of states without keys are multiplied by 0",
        "kernels/merge_states.py",
        "if weight != float32(0):",
        "if weight >= float32(0):",
        NO_KEYS,
        ci=True,
    ),
    Mutant(
        "merge_states: no key at all is not a number",
        "kernels/merge_states.py",
        "float32(0) if top == float32(-math.inf) else top",
        "top",
        NO_KEYS,
    ),
    Mutant(
        "merge_states: the result of a launch is not among the states of the next",
        "cuda/plans/merge.py",
        "states = [target, *states]",
        "states = [states[0], *states]",
        MANY_STATES,
    ),
]
