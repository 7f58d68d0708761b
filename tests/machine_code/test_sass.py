"""What machine code says of loads, copies and loops."""

import pytest

from pagedkv.compiler.link import link

from ..emulator.machine import wgmma_kernels as W
from .sass import Loads, code_of, copies_of, loads_of, loop_of, moves_between, overlap_of, products_of

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


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_loads_of_what_others_have_written_are_told_apart(capability):
    target = PTX.replace("sm_80", f"sm_{capability[0]}{capability[1]}").replace("8.0", "8.7")
    body = "\n".join([LOADS[0], *(load.replace("ld.global", "ld.global.cg") for load in LOADS[1:]), *SUMS])
    code = code_of(link(target.format(body=body), capability).cubin, "loads")
    assert loads_of(code) == [Loads(16, 16, 16)]
    assert loads_of(code, strong=True) == [Loads(48, 16, 16)]


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


# Lanes that have diverged go another way. It lies behind the end of the kernel, and jumps back into the loop.
DIVERGING = """
    .reg .pred %q;
    mov.u32 %r9, %tid.x;
    mul.wide.u32 %a, %r9, 64;
again:
    ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%a];
    shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;
    xor.b32 %r2, %r2, %r5;
    shfl.sync.bfly.b32 %r6, %r2, 2, 31, -1;
    xor.b32 %r3, %r3, %r6;
    st.global.u32 [%a+48], %r3;
    add.u64 %a, %a, 64;
    setp.ne.u32 %q, %r3, 7;
    @%q bra again;
    ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%a];
    ld.global.v4.u32 {%r9, %r10, %r11, %r12}, [%a+16];
    xor.b32 %r1, %r1, %r5;
    xor.b32 %r2, %r2, %r6;
    xor.b32 %r3, %r3, %r7;
    xor.b32 %r4, %r4, %r8;
    xor.b32 %r1, %r1, %r9;
    xor.b32 %r2, %r2, %r10;
    xor.b32 %r3, %r3, %r11;
    xor.b32 %r4, %r4, %r12;
"""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_what_lies_behind_the_end_of_a_kernel_ends_no_loop(capability):
    target = PTX.replace("sm_80", f"sm_{capability[0]}{capability[1]}").replace("8.0", "8.7")
    cubin = link(target.replace("{body}", "@").format().replace("@", DIVERGING), capability).cubin
    loop = loop_of(code_of(cubin, "loads"), capability, 8)
    assert loop.bytes_loaded == 16
    assert loop.instructions <= 14


PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {F}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {F};".replace(
    "F", "%f1, %f2, %f3, %f4"
)
# The second loop loads more.
TWO_LOOPS = """
    .reg .pred %q;
    .reg .f32 %f<5>;
    mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
multiply:
    ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%a];
    PRODUCT
    add.u64 %a, %a, 64;
    setp.ne.u32 %q, %r2, 7;
    @%q bra multiply;
    st.global.v4.f32 [%a], {%f1, %f2, %f3, %f4};
add:
    ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%a+16];
    ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%a+32];
    xor.b32 %r1, %r1, %r5;
    xor.b32 %r2, %r2, %r6;
    xor.b32 %r3, %r3, %r7;
    xor.b32 %r4, %r4, %r8;
    st.global.v4.u32 [%a+48], {%r1, %r2, %r3, %r4};
    add.u64 %a, %a, 64;
    setp.ne.u32 %q, %r1, 7;
    @%q bra add;
"""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize(("product", "num_bytes"), [(PRODUCT, 16), ("", 32)])
def test_the_loop_of_tensor_cores_is_told_from_one_that_loads_more(capability, product, num_bytes):
    target = PTX.replace("sm_80", f"sm_{capability[0]}{capability[1]}").replace("8.0", "8.7")
    text = target.replace("{body}", "@").format().replace("@", TWO_LOOPS.replace("PRODUCT", product))
    loop = loop_of(code_of(link(text, capability).cubin, "loads"), capability, 8)
    assert (loop.bytes_loaded, loop.widest) == (num_bytes, 16)


@pytest.mark.parametrize(("a", "n"), [("registers", 16), ("shared", 64)])
def test_moves_of_operands_between_products_are_counted(a, n):
    """Accumulators that change places have to be moved; an index that counts up may be."""
    product = W.product(n, a=a, majors="0" if a == "registers" else "0, 0")
    wait = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    begin, end = "mov.u32 %r5, 0; again: wgmma.fence.sync.aligned;", "add.u32 %r5, %r5, 1; setp.lt.u32 %p, %r5, %r0;"
    moves = "mov.f32 %e0, %d0; mov.f32 %d0, %d1; mov.f32 %d1, %d7; mov.f32 %d7, %e0; wgmma.fence.sync.aligned;"
    for between, least in (("wgmma.fence.sync.aligned;", 0), (moves, 2)):
        body = [begin, product, wait, between, product, wait, end, "@%p bra again;", W.PARTS["fence"], product]
        text = W.text_of(n, body, 16384, extra=W.set_descriptor("%db", 0) + W.set_descriptor("%da", 8192))
        code = code_of(link(text, (9, 0)).cubin, "test")
        found = products_of(code, (9, 0)), moves_between(code, (9, 0))
        assert found[0].mma == 2
        assert least <= found[1] <= 2 * least


@pytest.mark.parametrize("number", ["0", "%r5"], ids=["constant", "register"])
def test_what_delays_products_and_what_does_not_run_beside_them_is_counted(number):
    product, fence, wait = W.product(64), W.PARTS["fence"], W.PARTS["commit"] + W.PARTS["wait"]
    begin, end = "mov.u32 %r5, 1; again:", "add.u32 %r5, %r5, 1; setp.lt.u32 %p, %r5, %r0; @%p bra again;"
    exponential = "ex2.approx.ftz.f32 %e0, %d0; st.volatile.shared.f32 [%r1], %e0;"
    slow = "st.shared.f32 [%r1], %e0; bar.warp.sync -1; ld.shared.f32 %e0, [%r1+4];" * 4
    found = {}
    for name, before, behind in (("good", "", ""), ("late", "", exponential), ("slow", slow, "")):
        turn = [f"bar.sync {number}, 128;", before, fence, product, wait, exponential, fence, product, wait, behind]
        body = [begin, *turn, end, fence, product]
        text = W.text_of(64, body, 16384, extra=W.set_descriptor("%db", 0) + W.set_descriptor("%da", 8192))
        found[name] = overlap_of(code_of(link(text, (9, 0)).cubin, "test"), (9, 0))
    assert [each.exponentials for each in found.values()] == [0, 1, 0]
    assert found["good"].before < found["slow"].before


def test_code_of_another_kernel_is_refused():
    cubin = link(PTX.format(body=TOGETHER), (8, 0)).cubin
    with pytest.raises(ValueError, match=r"cubin must have the kernel load$"):
        code_of(cubin, "load")
