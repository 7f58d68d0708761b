"""The variants that are counted, and what each has to read."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

from pagedkv.cuda.plans import prefill

from .__main__ import CAPABILITIES
from .measure import emulated_on
from .variants import LOGITS, NUM_HEADS, STRETCHES, WGMMA, WORK, Variant, variants


def test_variants_are_different_and_cover_every_kernel():
    found = variants()
    assert len(set(found)) == len(found)
    assert {variant.kernel for variant in found} == set(WORK)


def test_work_beside_the_grid_counts_the_bytes_that_are_visible():
    usual = Variant("v1", "float16", "float16", 128, 16)
    bytes_of = {options: WORK["v1"](replace(usual, options=options)).read["K"][1] for options in ("", LOGITS)}
    token = 2 * NUM_HEADS * 128 * 2
    assert list(bytes_of.values()) == [1024 * token, 512 * token]


def test_a_variant_of_prefill_launches_its_kernel_wherever_it_suits():
    """Compiles nothing: a kernel is the name of what makes it."""
    launched = []
    names = {kernel: f"make_{kernel}" for kernel in ("prefill", "prefill_split", WGMMA, *STRETCHES)}
    device = SimpleNamespace(
        lineinfo=False,
        scratch=lambda name, nbytes: 0,
        address=lambda name, array: 0,
        launch=lambda kernel, *_: launched.append(kernel),
        blocks_at_once=lambda *_: 1,
    )
    suited = []
    with (
        emulated_on(lambda: nullcontext(device)),
        patch.object(prefill, "compile_for", lambda _, make, config: make.__name__),
    ):
        for variant, capability in itertools.product(variants(), CAPABILITIES):
            if variant.kernel in names and variant.suits(capability):
                suited.append((variant.kernel, variant.head_dim, capability))
                device.capability = capability
                launched.clear()
                WORK[variant.kernel](variant).call()
                assert names[variant.kernel] in launched, (variant, capability)
    assert {kernel for kernel, *_ in suited} == names.keys()
    assert {dim for kernel, dim, (major, _) in suited if kernel == "prefill_split" and major == 8} == {64, 128}
