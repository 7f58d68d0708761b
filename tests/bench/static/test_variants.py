"""The variants that are counted, and what each has to read."""

from dataclasses import replace

from pagedkv.bench.static.variants import NUM_HEADS, WORK, Variant, variants


def test_variants_are_different_and_cover_the_grid():
    found = variants()
    assert len(set(found)) == len(found)
    assert {variant.kernel for variant in found} == set(WORK)
    grid = {(v.kernel, v.kv_kind, v.head_dim, v.block_size) for v in found if v.kernel in ("v1", "v2")}
    for kernel in ("v1", "v2"):
        for kind in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
            assert {(kernel, kind, d, p) for d in (64, 128, 256) for p in (8, 16, 32)} <= grid


def test_work_beside_the_grid_counts_the_bytes_that_are_visible():
    usual = Variant("v1", "float16", "float16", 128, 16)
    bytes_of = {
        options: WORK["v1"](replace(usual, options=options)).read["K"][1]
        for options in ("", "ALiBi, softcap, window, sinks", "L=999", "strided")
    }
    token = 2 * NUM_HEADS * 128 * 2
    assert list(bytes_of.values()) == [1024 * token, 512 * token, 999 * token, 1024 * token]
