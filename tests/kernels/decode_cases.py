"""The harness of the decode kernels: what they are compiled for, and calls on an emulator with all checks on."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from pagedkv.calls import AttentionArguments, AttentionCall
from pagedkv.cuda.plans import attention
from pagedkv.emulator import EmulatorDevice
from pagedkv.emulator.machine.access import Access
from pagedkv.validation.attention import attention_call

from ..support.devices import emulator, with_capability
from ..support.problems import Problem, Spec
from .block_cases import SparseDevice


class Variant(NamedTuple):
    """What a kernel is compiled for: a second or two for each of v1 and v2, a few for each of split.

    The group size is a constant of split alone; to v1 and v2 it is an argument of the launch.
    """

    kernel: str
    head_dim: int
    block_size: int
    q_dtype: str
    kv_dtype: str
    strides: str = "own"
    group_size: int | None = None
    modified: bool = False
    score_mod: Any = None
    capability: tuple[int, int] = (9, 0)

    def __str__(self) -> str:
        parts = [self.kernel, f"D{self.head_dim}"]
        parts += [f"G{self.group_size}"] if self.group_size else []
        parts += [f"P{self.block_size}", self.q_dtype, self.kv_dtype]
        parts += [self.strides] if self.strides != "own" else []
        parts += ["modified"] if self.modified else []
        parts += [self.score_mod.__name__] if self.score_mod else []
        parts += ["cc{}.{}".format(*self.capability)] if self.capability != (9, 0) else []
        return "-".join(parts)

    def spec(self, **fields: Any) -> Spec:
        """A problem for this variant."""
        own = {name: value for name, value in self._asdict().items() if name in Spec.__dataclass_fields__}
        own["layout"] = "NHD" if self.kernel == "split" else "vllm"
        if self.group_size is None:
            del own["group_size"]
        return Spec(**{**own, **fields})


# Each boundary of the table below is met by both kernels of the paper, and by each form of split: operands on tensor
# cores, on CUDA cores, and rows in shared memory.
V1 = Variant("v1", 64, 16, "float32", "float32")
V2 = Variant("v2", 64, 8, "float16", "float16")
TENSOR = Variant("split", 64, 16, "float16", "float16", group_size=4)
CUDA_CORES = Variant("split", 64, 16, "float32", "float32", group_size=3)
MANY_HEADS = Variant("split", 64, 16, "float16", "float16", group_size=17)
FORMS = {"v1": V1, "v2": V2, "tensor cores": TENSOR, "CUDA cores": CUDA_CORES, "many heads": MANY_HEADS}


def checked_call(problem: Problem, kernel: str = "auto", check: bool = False) -> AttentionCall:
    """The call of a problem as the public operation validates it."""
    ragged, ours = len(problem.args) > 5, {"kernel": kernel, "backend": "emulator", "check": check}
    ours |= {"out": problem.out, "return_lse": True}
    return attention_call(AttentionArguments(*problem.args, ragged=ragged, **problem.options, **ours))


def with_tables_apart(call: AttentionCall) -> AttentionCall:
    """The call, its tables the first columns of wider ones: a device's are read where they are, a host's are copied."""
    own = np.full((len(call.block_tables), call.block_tables.shape[1] + 3), -1, np.int32)[:, :-3]
    own[...] = call.block_tables
    return call._replace(block_tables=own)


def decode(
    problem: Problem, variant: Variant, open_device: Callable[..., Any] = emulator, *, device: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a problem, and that nothing beside the rows of `out` was written.

    On `device`, or on a new one. An emulator is said to have the variant's capability; a GPU has its own.
    """
    call = checked_call(problem, variant.kernel)
    problem.out_buffer[...] = np.nan
    lse = np.full(problem.q.shape[:2], np.nan, np.float32)
    with with_capability(device or open_device(global_race=True), variant.capability) as device:
        attention.decode_attention(device, call, problem.out, lse)
    written = problem.out.copy()
    problem.out[...] = np.nan
    assert np.isnan(problem.out_buffer.astype(np.float32)).all()
    return written, lse


def after_changing_lengths(
    device: EmulatorDevice,
    call: AttentionCall,
    attend: Callable[..., Any],
    counters: str | None,
    lengths: list[int],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a call that comes after two in which each lane that loads a length finds another one.

    Each of them leaves the workspace `counters` zero, if the call counts.
    """
    where, load, rng = device.address("seq_lens", call.seq_lens), Access.ld_global, np.random.default_rng(seed)

    def changing(access: Access, op: Any, addresses: np.ndarray, view: str, lanes: Any, registers: Any) -> None:
        load(access, op, addresses, view, lanes, registers)
        if where <= addresses.flat[0] < where + call.seq_lens.nbytes:
            np.copyto(
                registers[0], rng.choice(lengths, len(registers[0])), casting="unsafe", where=lanes is None or lanes
            )

    for each in (changing, changing, load):
        result = np.full_like(call.q, np.nan), np.full(call.q.shape[:2], np.nan, np.float32)
        with mock.patch.object(Access, "ld_global", each):
            attend(device, call, *result)
        assert counters is None or not device.take(counters).any()
    return result


def assert_same_bits(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    """Equal outputs and LSEs, bit by bit."""
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


class LargeCaches(SparseDevice):
    """Holds the last blocks of caches past 4 GiB, and nothing of the rest."""

    def __init__(self, num_blocks):
        super().__init__()
        self.num_blocks = num_blocks

    def address(self, name, array):
        is_new = name not in self.large
        where = super().address(name, array)
        if is_new and name in self.large:
            used = slice(len(array) - self.num_blocks, None)
            self.large[name].view()[used] = array[used]
            self.large[name].mark(True, used)
        return where


def move_past_4_gib(problem):
    """Move a problem's blocks to the end of caches that are larger than 2**32 bytes and take no memory else."""
    first = 2**32 // problem.k_cache[0].nbytes + 1
    used = np.arange(problem.block_tables.shape[1]) < -(-problem.seq_lens[:, None] // problem.spec.block_size)
    problem.block_tables = np.where(used, problem.block_tables + np.int32(first) * used, problem.block_tables)
    for name in ("k_cache", "v_cache"):
        small = getattr(problem, name)
        large = np.empty((first + len(small), *small.shape[1:]), small.dtype)
        large[first:] = small
        setattr(problem, name, large)
