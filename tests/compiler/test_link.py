"""PTX to machine code without a driver, and what is read out of both."""

import sys
from types import ModuleType

import pytest

from pagedkv.compiler import link as linking
from pagedkv.compiler.link import link, link_without_spills, load_or_link
from pagedkv.compiler.occupancy import occupancy
from pagedkv.compiler.ptx import is_specific, specific, with_lowest_version
from pagedkv.errors import BackendUnavailableError

from ..emulator.machine import wgmma_kernels as W

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
# 256 bytes of static shared memory, one 16-byte load.
SMALL = f"""{HEAD}
.visible .entry small(.param .u64 p)
{{
    .reg .b64 %rd<3>; .reg .b32 %r<6>;
    .shared .align 16 .b8 buffer[256];
    ld.param.u64 %rd1, [p];
    ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1];
    st.shared.v4.u32 [buffer], {{%r1, %r2, %r3, %r4}};
    bar.sync 0;
    ld.shared.u32 %r5, [buffer + 8];
    st.global.u32 [%rd1], %r5;
    ret;
}}
"""
# An array of local memory with an index that is not known: 400 bytes of stack.
STACK = f"""{HEAD}
.visible .entry stack(.param .u64 p)
{{
    .local .align 4 .b8 depot[400];
    .reg .b64 %rd<6>; .reg .b32 %r<5>;
    ld.param.u64 %rd1, [p];
    ld.global.u32 %r1, [%rd1];
    mov.u64 %rd2, depot;
    mul.wide.u32 %rd3, %r1, 4;
    add.u64 %rd4, %rd2, %rd3;
    st.local.u32 [%rd4], %r1;
    ld.global.u32 %r2, [%rd1 + 4];
    mul.wide.u32 %rd3, %r2, 4;
    add.u64 %rd5, %rd2, %rd3;
    ld.local.u32 %r3, [%rd5];
    st.global.u32 [%rd1], %r3;
    ret;
}}
"""
UNKNOWN = f"""{HEAD}
.extern .func nobody();
.visible .entry caller() {{ call nobody, (); ret; }}
"""


def crowded(count=400, bounds=""):
    """A kernel with so many values alive at once, and at most 255 registers for them."""
    loads = "\n".join(f"ld.volatile.global.u32 %r{i}, [%rd1 + {4 * i}];" for i in range(count))
    stores = "\n".join(f"st.volatile.global.u32 [%rd1 + {4 * i}], %r{i};" for i in reversed(range(count)))
    return f"""{HEAD}
.visible .entry crowded(.param .u64 p) {bounds}
{{
    .reg .b64 %rd<2>; .reg .b32 %r<{count}>;
    ld.param.u64 %rd1, [p];
    {loads}
    bar.sync 0;
    {stores}
    ret;
}}
"""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_resources_are_those_of_the_kernel(capability):
    found = link(SMALL, capability).resources()
    assert 4 <= found.registers <= 32
    assert (found.stack_bytes, found.spill_bytes, found.shared_bytes) == (0, 0, 256)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_stack_and_spills_are_seen(capability):
    assert link(STACK, capability).resources().stack_bytes >= 400
    found = link(crowded(), capability).resources()
    assert found.spill_bytes > 400
    assert found.registers >= 250
    assert found.shared_bytes == 0


@pytest.mark.parametrize(("count", "blocks"), [(100, 4), (150, 3), (200, 2), (400, 2)])
def test_as_many_thread_blocks_as_asked_for_share_a_multiprocessor_unless_that_spills(count, blocks):
    """Four leave a thread 128 registers, three 168, two 255; fewer are never tried."""
    ptx = crowded(count, ".maxntid 128 .minnctapersm 4")
    found = link_without_spills(ptx, (9, 0)).resources()
    assert occupancy((9, 0), found.registers, 128, 0) == blocks
    assert (found.spill_bytes > 0) == (count == 400)


@pytest.mark.parametrize(
    ("ptx", "capability", "reason"),
    [
        ("not PTX", (9, 0), "sm_90"),
        (SMALL, (3, 0), "sm_30"),
        (SMALL.replace("sm_80", "sm_90"), (8, 0), "sm_80"),
        (SMALL.replace(".version 8.0", ".version 99.0"), (9, 0), "sm_90"),
    ],
    ids=["garbage", "old device", "PTX of a newer device", "PTX of a newer toolkit"],
)
def test_what_cannot_be_linked_says_why(ptx, capability, reason):
    with pytest.raises(BackendUnavailableError, match=rf"nvJitLink \d+\.\d+ cannot make code for (.|\n)*{reason}"):
        link(ptx, capability)
    assert link(SMALL, (9, 0)).cubin


@pytest.mark.parametrize("result", ["", "(.param .b32 result) "])
def test_a_call_of_an_external_function_is_refused(result):
    with pytest.raises(ValueError, match="got calls of nobody"):
        link(UNKNOWN.replace("nobody()", f"{result}nobody()"), (9, 0))


def test_a_driver_of_another_major_version_links_nothing(monkeypatch):
    """cuda.core would take its linker, which refuses options of ptxas and may be older than the PTX."""
    import cuda.core

    def refused(*args, **options):
        raise ValueError("ptxas_options option is not supported by the driver API")

    monkeypatch.setattr(cuda.core, "Linker", refused)
    assert link(SMALL, (9, 0)).resources().shared_bytes == 256


def wgmma(**parts):
    extra = W.set_descriptor("%db", 0)
    return W.text_of(64, [W.product(64)], 8192, extra=extra, **parts)


def test_what_is_for_one_capability_alone_is_linked_for_it():
    assert link(wgmma(), (9, 0)).resources().shared_bytes == 8192
    with pytest.raises(BackendUnavailableError, match="cannot make code for sm_90 "):
        link(wgmma().replace("sm_90a", "sm_90"), (9, 0))
    assert specific(SMALL) == SMALL.replace("sm_80", "sm_80a")
    assert is_specific(specific(SMALL))
    assert not is_specific(SMALL)


@pytest.mark.parametrize("parts", [{"running": "add.f32 %d3, %d3, %d3;"}, {"wait": ""}])
def test_a_wgmma_that_ptxas_makes_wait_is_refused(parts):
    """The emulator refuses the same."""
    with pytest.raises(BackendUnavailableError, match=r"adds waits to the wgmma .*\(C75\d\d\).* function 'test'"):
        link(wgmma(**parts), (9, 0))


def test_a_wgmma_that_waits_at_a_call_is_refused():
    """Of what the driver brings, too."""
    print_nothing = "{ .param .b64 x; .param .b64 y; .param .b32 z; st.param.b64 [x], 0; st.param.b64 [y], 0; "
    ptx = wgmma(running=f"{print_nothing} call.uni (z), vprintf, (x, y); }}")
    declared = ".extern .func (.param .b32 z) vprintf(.param .b64 x, .param .b64 y);\n.visible"
    with pytest.raises(BackendUnavailableError, match=r"adds waits to the wgmma .* Extern calls in the function"):
        link(ptx.replace(".visible", declared), (9, 0))


def test_the_message_has_the_reason_of_ptxas():
    with pytest.raises(
        BackendUnavailableError, match=r"cannot make code for(.|\n)*Unsupported \.version 99(.|\n)*pip install"
    ):
        link(SMALL.replace(".version 8.0", ".version 99.0"), (9, 0))


@pytest.mark.parametrize(
    ("capability", "before", "after"),
    [
        ((8, 0), "9.5", "8.0"),
        ((8, 9), "9.5", "8.1"),
        ((9, 0), "9.5", "8.0"),
        ((10, 0), "9.5", "8.6"),
        ((10, 3), "9.5", "8.8"),
        ((12, 0), "9.5", "8.7"),
        ((12, 0), "10.0", "8.7"),
        ((9, 0), "7.8", "7.8"),
        ((13, 0), "9.9", "9.9"),
    ],
)
def test_ptx_names_the_lowest_version_that_it_needs(capability, before, after):
    module = f"// .version 1.0\n.version {before}\n.target sm_90 // .version 9.5\n"
    assert with_lowest_version(module, capability) == module.replace(f"\n.version {before}", f"\n.version {after}")


def test_code_from_the_cache_of_the_driver_is_not_taken(monkeypatch):
    """It would come without ptxas's log, and without a driver there is no such cache."""
    from cuda.bindings import nvjitlink

    create, found = nvjitlink.create, []
    monkeypatch.setattr(nvjitlink, "create", lambda n, options: found.append(options) or create(n, options))
    assert link(SMALL, (9, 0)).resources().registers
    assert "-no-cache" in found[0]


@pytest.mark.gpu
def test_a_module_that_is_linked_again_has_a_log():
    assert link(SMALL, (9, 0)).resources() == link(SMALL, (9, 0)).resources()


def test_without_nvjitlink_the_message_says_what_to_install(monkeypatch):
    from cuda.bindings import nvjitlink

    def missing():
        raise RuntimeError("libnvJitLink.so was not found\n  listdir of many folders")

    monkeypatch.setattr(nvjitlink, "version", missing)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(BackendUnavailableError, match=r'nvJitLink.*was not found\): pip install .*\[cu13\]"'):
        link(SMALL, (9, 0))


def test_an_old_nvjitlink_of_torch_is_named(monkeypatch):
    """Before 12.3 it has no nvJitLinkVersion."""
    from cuda.bindings import nvjitlink
    from cuda.bindings._internal.utils import FunctionNotFoundError

    def too_old():
        raise FunctionNotFoundError("function nvJitLinkVersion is not found")

    monkeypatch.setattr(nvjitlink, "version", too_old)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    message = r"nvJitLinkVersion is not found\): torch was imported, .* update torch, or call pagedkv\.warmup before"
    with pytest.raises(BackendUnavailableError, match=message):
        link(SMALL, (9, 0))


def test_machine_code_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    calls = []
    monkeypatch.setattr(linking, "link", lambda *args: calls.append(args) or link(*args))
    first = load_or_link(SMALL, (9, 0))
    assert load_or_link(SMALL, (9, 0)) == first
    assert first.resources().shared_bytes == 256
    assert len(calls) == 1
    load_or_link(SMALL, (8, 0))
    load_or_link(SMALL + "\n", (9, 0))
    assert len(calls) == 3
    with monkeypatch.context() as patch:
        patch.setattr(linking, "SOURCE", b"another version of the code that links")
        load_or_link(SMALL, (9, 0))
    assert len(calls) == 4
    with monkeypatch.context() as patch:
        patch.setattr("cuda.bindings.nvjitlink.version", lambda: (13, 0))  # torch has loaded another one
        load_or_link(SMALL, (9, 0))
    assert len(calls) == 5
    for path in (tmp_path / "cuda").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert load_or_link(SMALL, (9, 0)).resources() == first.resources()
    assert len(calls) == 6


@pytest.mark.parametrize("content", [b"", b"{}\ncubin", b"[]\ncubin", b"\xff\ncubin", b"{"])
def test_a_file_of_another_form_is_linked_again(monkeypatch, content):
    monkeypatch.setattr(linking.Store, "load", lambda self, key: content)
    monkeypatch.setattr(linking.Store, "save", lambda self, key, body: None)
    assert load_or_link(SMALL, (9, 0)).resources().shared_bytes == 256


@pytest.mark.parametrize(
    ("registers", "num_threads", "shared_bytes", "blocks"),
    [
        # By the formulas of cuda_occupancy.h, by hand, for 8.0, 9.0 and 10.0.
        (32, 128, 0, (16, 16, 16)),  # warps: 64 / 4
        (32, 32, 0, (32, 32, 32)),  # blocks
        (33, 128, 0, (12, 12, 12)),  # 33 * 32 -> 1280 a warp: 12 warps in each partition
        (128, 128, 0, (4, 4, 4)),
        (168, 128, 0, (3, 3, 3)),
        (255, 256, 0, (1, 1, 1)),
        (64, 1024, 0, (1, 1, 1)),
        (65, 1024, 0, (0, 0, 0)),  # 2304 * 32 registers are more than 65536
        (168, 96, 0, (4, 4, 4)),  # 12 warps / 3
        (32, 128, 48 * 1024, (3, 4, 4)),
        (32, 128, 40 * 1024, (4, 5, 5)),  # 41 KiB each of 164, 228
        (32, 128, 40 * 1024 + 1, (3, 5, 5)),  # 41 KiB and 128 bytes
        (32, 128, 163 * 1024, (1, 1, 1)),
        (32, 128, 163 * 1024 + 1, (0, 1, 1)),
        (32, 128, 227 * 1024, (0, 1, 1)),
        (32, 128, 227 * 1024 + 1, (0, 0, 0)),
        (32, 1056, 0, (0, 0, 0)),
    ],
)
def test_thread_blocks_that_fit_a_multiprocessor(registers, num_threads, shared_bytes, blocks):
    devices = [(8, 0), (9, 0), (10, 0)]
    assert tuple(occupancy(device, registers, num_threads, shared_bytes) for device in devices) == blocks
