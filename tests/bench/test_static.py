"""The static report: what it says of one variant of each kernel, of machine code, and of what is to be reached."""

import json
from dataclasses import replace

import pytest

from pagedkv.__main__ import main
from pagedkv.bench import static
from pagedkv.bench.sass import Loads, code_of, copies_of, loads_of, loop_of
from pagedkv.bench.variants import NUM_HEADS, WORK, Variant, quick_variants, variants
from pagedkv.cuda.compiler.compile import compile_kernel
from pagedkv.cuda.compiler.link import link
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.split.config import SplitConfig
from pagedkv.kernels.split.kernel import make_split

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry loads(.param .u64 p)
{{
    .reg .b64 %a;
    .reg .b32 %r<17>;
    ld.param.u64 %a, [p];
{body}
    st.global.v4.u32 [%a+64], {{%r1, %r2, %r3, %r4}};
    ret;
}}
"""
LOAD = "    ld.global.v4.u32 {{%r{0}, %r{1}, %r{2}, %r{3}}}, [%a+{4}];"
LOADS = [LOAD.format(*range(4 * i + 1, 4 * i + 5), 16 * i) for i in range(4)]
SUMS = [f"    xor.b32 %r1, %r1, %r{i};" for i in range(2, 17)]
TOGETHER = "\n".join([*LOADS, *SUMS])
ONE_BY_ONE = "\n".join(
    [LOADS[0], "    cvt.u64.u32 %a, %r1;", LOADS[1], "    cvt.u64.u32 %a, %r5;", "    ld.global.u32 %r1, [%a];"]
)
TWO_STRETCHES = "\n".join([LOADS[0], "    xor.b32 %r1, %r1, %r4;", "    bar.sync 0;", LOADS[1], *SUMS[:7]])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize(
    ("body", "narrowest", "loads"),
    [
        (TOGETHER, 1, [Loads(64, 16, 16)]),
        (ONE_BY_ONE, 1, [Loads(16, 4, 16)]),
        (ONE_BY_ONE, 8, [Loads(16, 16, 16)]),
        (TOGETHER, 17, []),
    ],
)
def test_loads_in_flight_are_those_before_the_first_use(capability, body, narrowest, loads):
    target = PTX.replace("sm_80", f"sm_{capability[0]}{capability[1]}").replace("8.0", "8.7")
    cubin = link(target.format(body=body), capability).cubin
    assert loads_of(code_of(cubin, "loads"), narrowest) == loads


def test_a_barrier_ends_a_stretch():
    cubin = link(PTX.replace("sm_80", "sm_90").format(body=TWO_STRETCHES), (9, 0)).cubin
    assert len(loads_of(code_of(cubin, "loads"))) == 2


COPIES = """
    .shared .align 16 .b8 copied[128];
    mov.u32 %r1, copied;
    cp.async.cg.shared.global [%r1+0], [%a], 16;
    cp.async.cg.shared.global [%r1+16], [%a+16], 16;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+32], [%a+32], 8;
    cp.async.commit_group;
    cp.async.wait_group 1;
    cp.async.cg.shared.global [%r1+48], [%a+48], 16;
    cp.async.cg.shared.global [%r1+64], [%a+64], 16;
    cp.async.ca.shared.global [%r1+80], [%a+80], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
"""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_copies_are_in_flight_until_their_group_is_waited_for(capability):
    target = PTX.replace("sm_80", f"sm_{capability[0]}{capability[1]}").replace("8.0", "8.7")
    code = code_of(link(target.format(body=COPIES), capability).cubin, "loads")
    assert copies_of(code, capability) == Loads(8 + 16 + 16 + 4, 4, 16)
    assert copies_of(code_of(link(target.format(body=TOGETHER), capability).cubin, "loads"), capability) is None


LOOP = """
again:
    ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%a];
    ld.global.v2.u32 {%r5, %r6}, [%a+16];
    xor.b32 %r1, %r1, %r5;
    setp.eq.u32 %q, %r1, %r6;
    @%q bra onward;
    st.global.u32 [%a+8], %r3;
    atom.global.add.u32 %r9, [%a+12], %r4;
    add.u32 %r3, %r3, %r9;
    st.global.u32 [%a+128], %r3;
    atom.global.add.u32 %r9, [%a+32], %r3;
    st.global.u32 [%a+256], %r9;
onward:
    setp.ne.u32 %q, %r2, 7;
    @%q bra again;
"""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_a_loop_is_counted_on_its_shortest_way(capability):
    target = PTX.replace("sm_80", f"sm_{capability[0]}{capability[1]}").replace("8.0", "8.7")
    body = "    .reg .pred %q;\n" + LOOP
    code = code_of(link(target.replace("{body}", "@").format().replace("@", body), capability).cubin, "loads")
    loop = loop_of(code, capability, 8)
    assert (loop.bytes_loaded, loop.widest) == (24, 16)
    whole = loop_of(
        code_of(
            link(
                target.replace("{body}", "@").format().replace("@", body.replace("@%q bra onward;", "")), capability
            ).cubin,
            "loads",
        ),
        capability,
        8,
    )
    assert 5 <= loop.instructions <= whole.instructions - 4
    assert loop_of(code, capability, 17) is None


def test_the_loop_of_tensor_cores_is_told_from_one_that_loads_more():
    kernel = compile_kernel(make_split, SplitConfig(64, 48, 16, "float16", "fp8_e4m3"))
    loop = loop_of(code_of(kernel.cubin, kernel.entry), (9, 0), 8)
    assert (loop.bytes_loaded, loop.widest) == (32, 16)  # the loop that adds splits loads 128


def test_code_of_another_kernel_is_refused():
    cubin = link(PTX.format(body=TOGETHER), (8, 0)).cubin
    with pytest.raises(ValueError, match=r"cubin must have the kernel load$"):
        code_of(cubin, "load")


@pytest.fixture(scope="module")
def rows():
    told = []
    rows = static.run(repeats=1, progress=told.append, capabilities=[(9, 0)], quick=True, processes=1)
    assert len(told) == len(quick_variants())
    return rows


def test_rows(rows):
    kernels = {row["kernel"]: row for row in rows if "kernel" in row}
    assert list(kernels) == [variant.kernel for variant in quick_variants()]
    assert set(kernels) == set(WORK)
    for row in kernels.values():
        assert row["cc"] == "9.0"
        assert row["external"] == row["spill B"] == row["stack B"] == 0
        assert 16 <= row["registers"] <= 168
        assert 1 <= row["blocks/SM"] <= 16
        assert row["limit"]
        assert row["disk ms"] < 30
        assert row["instr/512B"] > 4


def test_split_is_within_its_targets(rows):
    (row,) = (row for row in rows if row.get("kernel") == "split")
    assert row["KV sectors"] == 1
    assert row["KV in flight KiB"] == row["blocks/SM"] * 32
    assert row["wavefronts"] <= 1.1
    assert row["loop instr/512B"] <= 14
    assert row["instr/512B"] <= 30
    assert 0 < row["partials"] <= 0.04


@pytest.mark.parametrize(
    "variant",
    [Variant("split", "float16", "fp8_e4m3", 64, 1, "", 24), Variant("split", "float16", "float16", 256, 16, "", 48)],
    ids=["G24-fp8-D64-P1", "G48-float16-D256-P16"],
)
def test_many_query_heads_ask_for_each_row_once(variant):
    row = static.measure(variant, (9, 0), 1)
    assert row["spill B"] == row["stack B"] == 0
    assert row["KV sectors"] <= 1.01
    assert row["KV in flight KiB"] >= 64
    assert row["KV load B"] == 16
    assert row["wavefronts"] <= 1.1
    assert row["loop instr/512B"] <= 120
    assert row["partials"] <= 0.04


@pytest.mark.parametrize(("kernel", "dynamic", "v_bytes"), [("v1", 8192, 8), ("v2", 2048, 16)])
def test_attention_reads_what_it_needs_once(rows, kernel, dynamic, v_bytes):
    (row,) = (row for row in rows if row.get("kernel") == kernel)
    assert row["dynamic B"] == dynamic
    assert row["static B"] == 4 * (row["D"] + 8)
    assert (row["K load B"], row["V load B"]) == (16, v_bytes)
    assert row["K sectors"] == row["V sectors"] == 1
    assert row["wavefronts"] >= 1
    # Each lane of 4 warps has asked for a vector, at the least.
    assert min(row["K in flight KiB"], row["V in flight KiB"]) >= row["blocks/SM"] * 128 * v_bytes / 1024


def test_helpers_move_what_they_need(rows):
    for row in rows:
        if row.get("kernel") in ("write_kv", "gather_kv", "copy_blocks", "merge_states"):
            assert row["read load B"] == 16
            assert 1 <= row["read sectors"] <= 2
            assert 1 <= row["written sectors"] <= 2


def test_targets(rows):
    named = {row["target"]: row for row in static.targets([row for row in rows if "kernel" in row])}
    assert named == {row["target"]: row for row in rows if "target" in row}
    assert {"spill B", "stack B", "K sectors", "V sectors", "K load B", "external", "disk ms"} <= set(named)
    # Seconds are those of a machine that may be busy.
    assert {row["reached"] for name, row in named.items() if not name.endswith("compile s")} == {"yes"}
    assert named["external"]["rows"] == len(WORK)


def test_a_target_that_is_missed_is_named():
    row = {"kernel": "v1", "q": "float16", "kv": "float16", "D": 64, "P": 8, "case": "-", "cc": "9.0"}
    row |= {"spill B": 0, "stack B": 0, "K sectors": 1.0, "V sectors": None, "K load B": 16}
    split = row | {"kernel": "split", "G": 9, "cc": "9.0", "loop instr/512B": 20.5, "KV in flight KiB": 63}
    bad = row | {"D": 128, "spill B": 8, "K load B": 4, "K sectors": 1.06}
    exempt = row | {"D": 512, "spill B": 16}
    named = {row["target"]: row for row in static.targets([row, bad, exempt, split])}
    for target in ("split: loop, 16 bits, G 9 to 16", "split: KV in flight KiB"):
        assert (named[target]["reached"], named[target]["misses"], named[target]["rows"]) == ("no", 1, 1)
    assert "split: loop, 16 bits, G 1 to 8" not in named
    assert "V sectors" not in named
    assert (named["stack B"]["reached"], named["stack B"]["misses"], named["stack B"]["rows"]) == ("yes", 0, 2)
    for target, worst in (("spill B", 8), ("K load B", 4), ("K sectors", 1.06)):
        assert (named[target]["worst"], named[target]["reached"], named[target]["misses"]) == (worst, "no", 1)
        assert named[target]["worst row"] == "v1 float16 float16 128 8 - 9.0"


def test_a_cold_run_times_the_compiler_and_leaves_the_cache_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    one = Variant("copy_blocks", "float16", "float16", 128, 16, "NHD")
    monkeypatch.setattr(static, "quick_variants", lambda: [one])
    run = {"repeats": 1, "progress": print, "capabilities": [(8, 0)], "quick": True, "processes": 1}
    (row, *_) = static.run(**run, cold=True)
    assert row["compile s"] > 0.01
    assert row["read sectors"] is None
    assert not any(tmp_path.rglob("*.cubin"))


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


def test_arrays_are_aligned_as_on_a_gpu():
    with EmulatorDevice() as device:
        strided = static._aligned(WORK["v1"](Variant("v1", "float16", "float16", 8, 8, "strided")).call.args[1])
        assert device.address("k_cache", strided) % 256 == 0


def test_command_line(monkeypatch, capsys):
    monkeypatch.setattr(static, "run", lambda *, progress, **options: [options])
    assert main(["bench", "static", "--json", "--cc", "8.0", "10.0", "--quick"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row == {"repeats": 9, "capabilities": [[8, 0], [10, 0]], "quick": True, "cold": False}
    with pytest.raises(SystemExit):
        main(["bench", "static", "--cc", "7.5"])
