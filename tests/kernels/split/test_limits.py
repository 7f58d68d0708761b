"""Every row of limits/, on variants that it is for: nothing spills, and nothing lies in local memory."""

import pytest

from pagedkv.kernels.split.config import SplitConfig
from pagedkv.kernels.split.cuda_cores import RowShape
from pagedkv.kernels.split.limits import LIMITS, row_shape, split_config, tensor_shape
from pagedkv.kernels.split.shape import TensorShape

from ..decode_cases import FORMS
from . import variants
from .variants import check_registers, config_of

OF_STAGES = (tensor_shape.keeps_places, tensor_shape.in_flight)


def variant(head_dim, group_size, q_kind="float16", kv_kind="float16", architecture=9, **fields):
    fields["hardware_fp8"] = kv_kind != "fp8_e4m3" or architecture > 8
    return SplitConfig(head_dim, group_size, 16, q_kind, kv_kind, architecture=architecture, **fields)


# Those that the reasons of rows name.
VARIANTS = [
    variant(512, 8),
    variant(256, 16),
    variant(512, 8, architecture=10),
    variant(256, 16, architecture=10, modified=True),
    variant(128, 16, "bfloat16", "bfloat16", 10),
    variant(256, 16, "float32", modified=True),
    variant(512, 8, architecture=8, modified=True),
    variant(512, 8, "float32", architecture=8, modified=True),
    variant(512, 8, "bfloat16", "bfloat16", 8, modified=True),
    variant(256, 8, "float32", "bfloat16", 8, checked=True),
    variant(64, 16, architecture=8, modified=True),
    variant(128, 16, architecture=8, modified=True),
    variant(256, 8, architecture=8, modified=True),
    variant(128, 8, architecture=8),
    variant(72, 8, "float16", "fp8_e5m2", 8),
    variant(72, 8, "bfloat16", "fp8_e5m2", 8),
    variant(128, 48, architecture=8),
    variant(256, 48, architecture=8),
    variant(256, 48),
    variant(256, 24, modified=True),
    variant(128, 48),
    variant(128, 48, "bfloat16", "bfloat16", 10),
    variant(128, 24),
    variant(128, 24, "float32"),
    variant(128, 8),
    variant(128, 8, checked=True),
    variant(128, 8, "float32"),
    variant(128, 8, "float32", "fp8_e4m3"),
    variant(128, 16),
    variant(128, 16, "float32"),
    variant(192, 8),
    variant(256, 8),
    variant(256, 8, "float32"),
    variant(64, 8),
    variant(64, 16, "bfloat16", "fp8_e4m3", 10),
    variant(64, 48, "float16", "fp8_e4m3", 10),
    variant(8, 8, "float16", "fp8_e4m3"),
    variant(64, 8, "float16", "fp8_e4m3"),
    variant(64, 16, "float16", "fp8_e4m3"),
    variant(64, 16, "float32", "fp8_e4m3"),
    variant(64, 8, "float16", "fp8_e4m3", modified=True),
    variant(64, 16, "float16", "fp8_e4m3", checked=True),
    variant(256, 16, "float16", "fp8_e4m3", checked=True),
    variant(256, 16, "bfloat16", "fp8_e4m3", checked=True),
    variant(256, 16, "float32", "fp8_e4m3", checked=True),
    variant(64, 4, "float32", "float32", 8, modified=True),
    variant(256, 4, "float32", "float32", 8, modified=True),
    variant(256, 2, "float32", "float32", 8, checked=True),
    variant(512, 2, "float32", "float32", 8, checked=True),
    variant(512, 2, "float32", "float32", 8, modified=True, checked=True),
    variant(512, 2, "float32", "float32", checked=True),
    variant(40, 2, "float32", "float32"),
    variant(128, 4, "float32", "float32"),
    variant(128, 4, "float32", "float32", modified=True),
    variant(256, 4, "float32", "float32"),
    variant(256, 4, "float32", "float32", modified=True),
    variant(64, 4, "float32", "float32"),
    variant(64, 2, "float32", "float32"),
    variant(64, 2, "float32", "float32", modified=True),
    variant(64, 2, "float32", "float32", checked=True),
]
# Those that have a row to themselves in the short run; the other rows are met by one of these, or in the emulator.
SHORT = [
    variant(128, 48, architecture=8),
    variant(512, 2, "float32", "float32", 8, modified=True, checked=True),
    variant(256, 16, "float32", modified=True),
    variant(64, 8, "float16", "fp8_e4m3", modified=True),
    variant(64, 48, "float16", "fp8_e4m3", 10),
    variant(64, 2, "float32", "float32", modified=True),
    variant(64, 4, "float32", "float32", 8, modified=True),
    variant(8, 4, "float32", "float32"),  # whose loop test_split_plan.py looks at
    variant(72, 8, "bfloat16", "fp8_e5m2", 8),
    variant(64, 3, "float32", "float32", checked=True),  # which ../test_decode.py runs
    variant(64, 4, checked=True),  # too
    variant(256, 16, "bfloat16", "fp8_e4m3", checked=True),
]
# Each spilled where ptxas did not know that all lanes of a warp enter its loop together; the first one is in VARIANTS
# of variants.py.
MODIFIED = [
    variant(256, 8, architecture=8, modified=True),
    variant(128, 16, architecture=8, modified=True),
    variant(128, 12, "float32", architecture=8, modified=True),
    variant(64, 16, architecture=8, modified=True),
    variant(128, 16, "float32", "bfloat16", 8, modified=True),
    variant(128, 16, "float16", "fp8_e4m3", 8, modified=True),
]


def row_of(limit, config):
    """The row of a limit that a variant meets, or None if it never asks for it."""
    if limit in vars(split_config).values():
        return limit.row(config)
    on_cuda_cores = limit in vars(row_shape).values()
    if config.on_tensor_cores == on_cuda_cores or (limit in OF_STAGES and not config.staged):
        return None
    if limit is row_shape.wide_distances and not config.modified:
        return None
    return limit.row(RowShape(config) if on_cuda_cores else TensorShape(config))


ROWS = pytest.mark.parametrize(("name", "i"), [(n, i) for n, limit in LIMITS.items() for i in range(len(limit.rows))])


@pytest.fixture(scope="module")
def in_the_emulator():
    """What other tests compile anyway, without those with a score_mod, which are not kept on disk."""
    ours = [
        variant
        for variant in (*variants.VARIANTS, *variants.CODES, variants.FOUR_BLOCKS, *FORMS.values())
        if variant.kernel == "split"
    ]
    capped = {True: 2.0, False: None}
    return [config_of(v, v.capability, softcap=capped[v.modified]) for v in ours if not v.score_mod]


@ROWS
def test_a_row_leaves_no_spills(name, i, in_the_emulator):
    limit = LIMITS[name]
    config = next(config for config in (*SHORT, *in_the_emulator) if row_of(limit, config) is limit.rows[i])
    check_registers(config, (config.architecture, 0))


@ROWS
def test_a_row_is_for_one_of_the_variants(name, i):
    limit = LIMITS[name]
    assert any(row_of(limit, config) is limit.rows[i] for config in VARIANTS)


@pytest.mark.long
@pytest.mark.parametrize("config", VARIANTS)
def test_a_variant_that_a_reason_names_leaves_no_spills(config):
    check_registers(config, (config.architecture, 0))


@pytest.mark.parametrize("config", [MODIFIED[0], *(pytest.param(x, marks=pytest.mark.long) for x in MODIFIED[1:])])
def test_options_leave_no_spills_before_9(config):
    check_registers(config, (8, 0))
