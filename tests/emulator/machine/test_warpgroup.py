"""wgmma in hand-written PTX, compared with NumPy, and every rule that it may break."""

import numpy as np
import pytest

from pagedkv.emulator import EmulatorError, MemoryFault, RaceFault, SyncFault, UnsupportedInstructionError

from . import wgmma_kernels as W

RNG = np.random.default_rng(5)


def product_of(a, b, c=0):
    """Accumulators of a @ b.T + c, and the sums of the magnitudes."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return W.accumulators(a @ b.T + c), W.accumulators(np.abs(a) @ np.abs(b).T + np.abs(c))


def random(shape, kind="f16"):
    return RNG.standard_normal(shape).astype(W.DTYPES[kind])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("a_from", ["registers", "shared"])
@pytest.mark.parametrize("n", [8, 24, 256])
def test_k_major_operands(kind, a_from, n, launch, assert_sums):
    """The third step of 16 dims of rows of 64, with and without what was there."""
    a, b, c = random((64, 64), kind), random((n, 64), kind), random((64, n)).astype(np.float32)
    image = np.concatenate([W.k_major(b), W.k_major(a)])
    extra = W.set_descriptor("%db", 64) + W.set_descriptor("%da", n * 128 + 64)
    args = image, W.fragments(a[:, 32:48]), W.accumulators(c)
    majors = "0" if a_from == "registers" else "0, 0"
    for adds, before in (("%yes", c), ("%no", 0)):
        product = W.product(n, kind, a_from, adds=adds, majors=majors)
        d = W.run(W.text_of(n, [product], len(image), extra=extra), *args, launch=launch)
        assert_sums(d, *product_of(a[:, 32:48], b[:, 32:48], before), 16)


@pytest.mark.parametrize(("a_from", "kind"), [("registers", "bf16"), ("shared", "f16")])
def test_mn_major_operands(a_from, kind, launch, assert_sums):
    """The second step of 16 rows of k; panels of 64 along M and N lie one after the other."""
    n, k = 128, 32
    a, b, c = random((64, k), kind), random((n, k), kind), np.zeros((64, n), np.float32)
    image = np.concatenate([W.mn_major(b), W.mn_major(a)])
    extra = W.set_descriptor("%db", 2048, lbo=k * 128) + W.set_descriptor("%da", n * k * 2 + 2048)
    product = W.product(n, kind, a_from, signs="-1, 1", majors="1" if a_from == "registers" else "1, 1")
    args = image, W.fragments(a[:, 16:]), W.accumulators(c)
    d = W.run(W.text_of(n, [product], len(image), extra=extra), *args, launch=launch)
    assert_sums(d, *product_of(-a[:, 16:], b[:, 16:]), 16)


def test_products_one_after_the_other_in_two_warpgroups_in_any_schedule(launch, assert_sums):
    """Of the same shape they may share accumulators in flight; each is rounded to float32."""
    a, b = random((64, 64)), random((16, 64))
    image = np.concatenate([W.k_major(b), W.k_major(a)])
    steps = [
        W.set_descriptor("%db", 32 * i)
        + W.set_descriptor("%da", 2048 + 32 * i)
        + W.product(16, a="shared", adds="%yes" if i else "%no", majors="0, 0")
        for i in range(4)
    ]
    text = W.text_of(16, steps, len(image), threads=256)
    c = np.zeros((256, 8), np.float32)
    d = W.run(text, image, np.zeros((256, 4), np.uint32), c, threads=256, launch=launch)
    expected = np.zeros((64, 16), np.float32)
    for i in range(4):
        part = slice(16 * i, 16 * i + 16)
        expected = (expected + a[:, part].astype(np.float64) @ b[:, part].astype(np.float64).T).astype(np.float32)
    of_both = (np.tile(x, (2, 1)) for x in (W.accumulators(expected), product_of(a, b)[1]))
    assert_sums(d, *of_both, 64)
    again = W.run(text, image, np.zeros((256, 4), np.uint32), c, threads=256, launch=launch, seed=3)
    np.testing.assert_array_equal(again, d)


N = 16
B = random((N, 64))
IMAGE = np.concatenate([W.k_major(B), W.k_major(random((64, 64)))])
FROM_A = W.fragments(random((64, 16)))
DESCRIPTORS = W.set_descriptor("%db", 0) + W.set_descriptor("%da", 2048)


def run_faulty(products=None, extra=DESCRIPTORS, threads=128, **parts):
    """The kernel with some parts exchanged, on 16 columns; its warps in several schedules."""
    run_with = {name: parts.pop(name) for name in ("seed", "race") if name in parts}
    text = W.text_of(N, products or [W.product(N)], len(IMAGE), extra=extra, threads=threads, **parts)
    a, c = np.resize(FROM_A, (threads, 4)), np.zeros((threads, N // 2), np.float32)
    return W.run(text, IMAGE, a, c, threads=threads, **run_with)


def test_nothing_is_wrong_with_the_kernel_that_the_faults_are_made_from():
    for seed in (None, 1, 2):
        run_faulty(seed=seed)
        run_faulty([W.product(N, a="shared", majors="0, 0")], seed=seed)


# What stands between the commit and the wait, and what the message says.
IN_FLIGHT = {
    "an accumulator is read": ("add.f32 %e0, %d3, %d3;", r"reads %d3, an accumulator of a wgmma in flight \(PTX line"),
    "an accumulator is written": ("mov.f32 %d3, 0f00000000;", "writes %d3, an accumulator of a wgmma in flight"),
    "A is written": ("add.u32 %a2, %who, 1;", "writes %a2, a part of A of a wgmma in flight"),
    "a copy of an accumulator is read": ("mov.f32 %e1, %d3; add.f32 %e0, %e1, %e1;", "reads %e1, an accumulator of"),
    "some lanes read an accumulator": (
        "setp.gt.u32 %p, %who, 40; @%p add.f32 %e0, %d3, %d3;",
        r"reads %d3, .*thread \(41, 0, 0\)",
    ),
}


@pytest.mark.parametrize("case", IN_FLIGHT)
def test_registers_in_flight_are_not_touched(case):
    body, message = IN_FLIGHT[case]
    with pytest.raises(RaceFault, match=f"{message}.*") as caught:
        run_faulty(running=body)
    assert "wgmma.wait_group must come first" in caught.value.what
    assert caught.value.text in body
    run_faulty(end=body)  # after the wait all of them are allowed


def test_a_move_renames_an_accumulator_in_flight():
    """It is how compilers hand accumulators from one inline assembly to the next."""
    run_faulty(running="mov.f32 %e0, %d3;", end="add.f32 %e0, %e0, %e0;")


def test_a_group_that_was_not_waited_for_is_in_flight():
    later = "wgmma.commit_group.sync.aligned;"
    for wait in ("", "wgmma.wait_group.sync.aligned 1;"):
        with pytest.raises(RaceFault, match="reads %d0, an accumulator"):
            run_faulty(wait=wait)
    run_faulty(wait=f"{later} wgmma.wait_group.sync.aligned 1;")
    with pytest.raises(RaceFault, match="reads %d0, an accumulator"):
        run_faulty(commit="")  # a group that is still open


def test_accumulators_of_another_shape_are_in_flight():
    narrow = W.product(N).replace(f"m64n{N}", "m64n8").replace(W.registers("d", 8), W.registers("d", 4))
    with pytest.raises(RaceFault, match="wgmma writes %d0, an accumulator of a wgmma in flight"):
        run_faulty([W.product(N), narrow])


def test_a_wgmma_fence_stands_between_registers_and_wgmma():
    with pytest.raises(RaceFault, match=r"no wgmma\.fence before the first wgmma"):
        run_faulty(fence="")
    touched = [
        ("add.u32 %a1, %who, 1;", r"wgmma uses %a1, touched by PTX line \d+ \(add\.u32 %a1, %who, 1\)"),
        ("mov.f32 %d2, 0f3F800000;", "wgmma uses %d2, touched by PTX line"),
        ("add.f32 %e0, %d2, %d2;", "wgmma uses %d2, touched by PTX line"),
    ]
    for body, message in touched:
        with pytest.raises(RaceFault, match=f"{message}.*no wgmma.fence in between"):
            run_faulty(fence=f"{W.PARTS['fence']} {body}")
    run_faulty(fence=f"{W.PARTS['fence']} add.u32 %r4, %who, 1;")


def test_a_wgmma_fence_on_one_of_two_paths_is_not_enough():
    body = f"{W.PARTS['fence']} setp.gt.u32 %p, %who, 63; @%p bra over; mov.f32 %d2, 0f3F800000; over:"
    with pytest.raises(RaceFault, match=r"wgmma uses %d2, .*no wgmma\.fence in between"):
        run_faulty(fence=body)


def test_stores_are_fenced_for_the_asynchronous_proxy():
    message = r"wgmma reads what was written \(PTX line \d+: st\.shared\.b64.*\) with no fence\.proxy\.async since"
    with pytest.raises(RaceFault, match=message):
        run_faulty(proxy_fence="")
    with pytest.raises(RaceFault, match=message):
        run_faulty(proxy_fence="fence.proxy.async.global;")
    with pytest.raises(RaceFault, match=message):
        run_faulty(proxy_fence="setp.ne.u32 %p, %who, 75; @%p fence.proxy.async;")  # thread 75 leaves its own
    fence = W.PARTS["proxy_fence"]
    run_faulty(proxy_fence="", barrier=f"bar.sync 0; {fence}")  # on the way, too
    run_faulty(proxy_fence="", barrier=f"bar.sync 0; setp.eq.u32 %p, %who, 0; @%p {fence} bar.sync 0;")
    with pytest.raises(RaceFault, match=message):
        run_faulty(proxy_fence="", barrier=f"bar.sync 0; setp.lt.u32 %p, %who, 32; @%p {fence}")
    again = "mov.u32 %r2, buf; mad.lo.u32 %r2, %who, 8, %r2; mov.u64 %x, 0; st.shared.b64 [%r2], %x;"
    with pytest.raises(RaceFault, match=message):
        run_faulty(proxy_fence=f"{fence} {again}")  # it is there for what comes before it


def test_asynchronous_copies_are_fenced_too():
    """Behind the wait: before it, nothing has been written."""
    copy = W.LOAD.replace(
        "ld.global.b64 %x, [%ad]; st.shared.b64 [%r0], %x;", "cp.async.ca.shared.global [%r0], [%ad], 8;"
    )
    done = "cp.async.commit_group; cp.async.wait_group 0;"
    fence = W.PARTS["proxy_fence"]
    run_faulty(load=copy, proxy_fence=f"{done} {fence}")
    for wrong in (done, f"{fence} {done}"):
        with pytest.raises(RaceFault, match=r"written \(PTX line \d+: cp\.async.*no fence\.proxy\.async since"):
            run_faulty(load=copy, proxy_fence=wrong)
    with pytest.raises(RaceFault, match=r"cp\.async still in flight"):
        run_faulty(load=copy, proxy_fence=fence)


def test_a_barrier_stands_between_stores_and_wgmma():
    with pytest.raises(RaceFault, match=r"wgmma's load of a location written by thread .* no barrier in between"):
        run_faulty(barrier="")


STORE = "mov.u32 %r2, buf; mad.lo.u32 %r2, %who, 16, %r2; mov.u64 %x, 0; st.shared.b64 [%r2], %x;"


def test_operands_in_flight_are_not_overwritten():
    message = r"store to what a wgmma in flight may still read \(PTX line \d+: wgmma.mma_async.*\): wgmma.wait_group"
    for products in (None, [W.product(N, a="shared", majors="0, 0")]):
        with pytest.raises(RaceFault, match=message):
            run_faulty(products, running=STORE)
    with pytest.raises(RaceFault, match=message):
        run_faulty(running="mov.u32 %r2, buf; ld.param.u64 %ad, [image]; cp.async.ca.shared.global [%r2], [%ad], 8;")
    run_faulty(end=f"bar.sync 0; {STORE}")
    with pytest.raises(RaceFault, match="store of a location read by"):  # other warps may not have waited
        run_faulty(end=STORE)
    with pytest.raises(RaceFault, match="store of a location read by"):  # and this barrier is too early
        run_faulty(running="bar.sync 0;", end=STORE)
    with pytest.raises(RaceFault, match=message):
        run_faulty(wait=f"wgmma.wait_group.sync.aligned 1; bar.sync 0; {STORE}")


def test_bytes_that_nothing_has_written_are_not_read():
    with pytest.raises(MemoryFault, match="uninitialised shared load"):
        run_faulty(load="", barrier=f"{STORE} fence.proxy.async; bar.sync 0;")


MALFORMED = {
    "unused bits": ({"start": 0}, 1 << 55, "bits 14, 15, 30, 31, 46 to 48 and 52 to 61 must be 0"),
    "a base offset": ({"start": 0}, 1 << 49, "with a base offset of 0"),
    "a row in the middle": ({"start": 256}, 0, "rows must start at a multiple of 1024 bytes"),
    "past a row": ({"start": 112}, 0, "must not reach past a row of 128 bytes"),
    "stride": ({"start": 0, "sbo": 512}, 0, "the stride byte offset must be a multiple of 1024, got 512"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_descriptors(case):
    fields, bits, message = MALFORMED[case]
    extra = f"mov.u64 %db, {W.descriptor(**fields) | bits:#x};"
    with pytest.raises(MemoryFault, match=rf"malformed descriptor of B \(0x[0-9a-f]+\): .*{message}"):
        run_faulty(extra=extra)


def test_malformed_descriptors_of_mn_major_operands():
    wide = [W.product(128, majors="1")]
    args = np.zeros(128 * 128, np.uint8), FROM_A, np.zeros((128, 64), np.float32)
    for fields, message in (({"lbo": 16}, "leading byte offset"), ({"start": 64, "lbo": 1024}, "past a row")):
        extra = W.set_descriptor("%db", **{"start": 0, **fields})
        with pytest.raises(MemoryFault, match=message):
            W.run(W.text_of(128, wide, 128 * 128, extra=extra), *args)


def test_operands_past_the_end_of_shared_memory():
    with pytest.raises(MemoryFault, match="out of bounds shared load"):
        run_faulty(extra=W.set_descriptor("%db", 0, sbo=1 << 17))


def test_another_swizzle_is_not_modelled():
    with pytest.raises(UnsupportedInstructionError, match=r"swizzles of 128 bytes.*PTX line"):
        run_faulty(extra="mov.u64 %db, 0x4000010000;")


@pytest.mark.parametrize("name", ["f32.f16.f16.sp", "f16.f16.f16", "f32.tf32.tf32", "s32.s8.s8"])
def test_other_products_are_not_modelled(name):
    with pytest.raises(UnsupportedInstructionError, match=r"wgmma\.mma_async"):
        run_faulty([W.product(N).replace("f32.f16.f16", name)])


DIFFERING = {
    "in a warp": ("setp.eq.u32 %p, %who, 5;", r"in lane 0 of its warp.*thread \(5, 0, 0\)"),
    "between warps": ("setp.gt.u32 %p, %who, 95;", r"in warp 0 of its warpgroup.*thread \(96, 0, 0\)"),
}


@pytest.mark.parametrize("case", DIFFERING)
def test_the_threads_of_a_warpgroup_have_the_same_descriptors(case):
    condition, message = DIFFERING[case]
    other = f"{condition} @%p mov.u64 %db, {W.descriptor(2048):#x};"
    with pytest.raises(SyncFault, match=f"descriptor of B must be the same in all threads of a warpgroup, .*{message}"):
        run_faulty(extra=f"{DESCRIPTORS} {other}")
    by_warpgroup = "setp.gt.u32 %p, %who, 127; @%p mov.u64 %db, " + f"{W.descriptor(2048):#x};"
    run_faulty(extra=f"{DESCRIPTORS} {by_warpgroup}", threads=256)
    with pytest.raises(SyncFault, match="scale-d must be the same"):
        run_faulty(extra=f"{DESCRIPTORS} {condition.replace('%p', '%yes')}")


def test_all_warps_of_a_warpgroup_take_part():
    some = "setp.gt.u32 %p, %who, 31; @%p bra over; {} over:"
    with pytest.raises(SyncFault, match=r"wgmma\.commit_group run by 1 of the 4 warps of a warpgroup"):
        run_faulty(end=some.format("wgmma.commit_group.sync.aligned;"))
    with pytest.raises(SyncFault, match=r"warps of a warpgroup run different instructions: warp . is at PTX line"):
        run_faulty(barrier=f"bar.sync 0; {some.format(W.PARTS['fence'])}", seed=4)
    with pytest.raises(SyncFault, match="whole warpgroups of 128 threads, the thread block has 160"):
        run_faulty(threads=160)
    with pytest.raises(EmulatorError, match=r"31 of 32 lanes|lanes that have exited"):
        run_faulty(barrier="bar.sync 0; setp.eq.u32 %p, %who, 9; @%p exit;")


def test_statistics_count_a_wgmma_as_mma():
    from pagedkv.emulator import Device, Module

    device = Device(1 << 20)
    text = W.text_of(N, [W.product(N)], len(IMAGE), extra=DESCRIPTORS)
    arrays = [device.upload(x) for x in (IMAGE, FROM_A, np.zeros((128, N // 2), np.float32))]
    d = device.alloc((128, N // 2), np.float32)
    stats = device.launch(Module(text).entry(), 1, 128, [*arrays, d], stats=True)
    assert stats.warp_instructions["mma"] == 4 * 4  # with the fence, the commit and the wait
