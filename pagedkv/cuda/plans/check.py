"""The launch of check=True before attention, and the lengths that it leaves for the kernels of attention."""

from __future__ import annotations

from ...calls import AttentionCall
from ...kernels.check import CheckConfig, make_check_batch
from ...kernels.device.bad_entries import NUM_BYTES
from ..device import REPORT, Device
from .plan import Launch, Workspaces, compile_for, max_seq_len_of

_CHECKED_LENS = "checked_lens"


def lens_of(call: AttentionCall) -> str:
    """The name of the lengths that kernels of attention read."""
    return _CHECKED_LENS if call.checked else "seq_lens"


def workspaces_of_check(call: AttentionCall) -> Workspaces:
    """The workspaces in which a checked call keeps bad entries and lengths."""
    return ((REPORT, NUM_BYTES), (_CHECKED_LENS, 4 * len(call.seq_lens))) if call.checked else ()


def with_check(device: Device, call: AttentionCall, *launches: Launch) -> tuple[Launch, ...]:
    """Launches of attention, after one of the check if the call is checked."""
    if not call.checked:
        return launches
    spec = call.spec
    check = Launch(
        compile_for(device, make_check_batch, CheckConfig()),
        (len(call.seq_lens), 1, 1),
        (_CHECKED_LENS, "block_tables", "seq_lens", "query_starts", "leftpad", REPORT),
        (
            *(call.q.shape[0], spec.num_blocks, max_seq_len_of(call), spec.block_size),
            *(*call.options.visible.scalars, call.block_tables.strides[0]),
        ),
    )
    return check, *launches
