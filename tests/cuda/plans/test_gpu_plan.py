"""Plans that callers keep, on a GPU: the launches of the calls, and what makes a prebuilt launch silently wrong."""

import threading
import time

import numpy as np
import pytest

import pagedkv

from ...support.device_fakes import ELSEWHERE, InterfaceArray, RecordingDevice, address_of, recording
from ..test_graphs import decode_of, launched
from .device_calls import HQ, B, D, N, P, host_arguments, launches


def planned(kind, given, **options):
    """A plan, and what its runs take: q, the caches and out."""
    arrays = {name: kind(x) for name, x in given.items()}
    out = arrays.pop("out")
    return pagedkv.plan_decode(**arrays, layout="vllm", kernel="v1", **options), [*arrays.values()][:3], out


def new(name):
    return np.zeros_like(host_arguments()[name])


@pytest.mark.usefixtures("nothing_planned")
class TestLaunches:
    def test_a_plan_launches_what_the_call_does_with_its_own_addresses(self, kind, devices):
        given = host_arguments() | {"sinks": np.ones(HQ, np.float32)}
        plan, brought, out = planned(kind, given)
        assert not launches(devices)
        plan.run(*brought, out=out)
        arrays = {name: kind(x) for name, x in given.items()}
        pagedkv.decode_attention(**arrays, layout="vllm", kernel="v1")
        once, by_call = launches(devices)
        assert repr(once) == repr(by_call)
        later = [new(name) for name in ("q", "k_cache", "v_cache", "out")]
        plan.refresh()  # does nothing
        for _ in range(2):
            plan.run(*map(kind, later[:3]), out=kind(later[3]))
        args = launches(devices)[-1][2]
        for x in (*later, given["block_tables"], given["seq_lens"], given["sinks"]):
            assert address_of(x) + ELSEWHERE in args
        assert launches(devices)[-1] == launches(devices)[-2]

    def test_results_are_new_arrays(self, kind, devices):
        plan, brought, _ = planned(kind, host_arguments(), return_lse=True)
        if kind is InterfaceArray:
            with pytest.raises(ValueError, match=r"^out can only be made for arrays of CuPy and torch"):
                plan.run(*brought)
            return
        out, lse = plan.run(*brought)
        assert type(out) is type(lse) is kind
        assert (tuple(out.shape), tuple(lse.shape)) == ((B, HQ, D), (B, HQ))

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"q": np.zeros((B + 1, HQ, D), np.float16)}, ValueError, "q must have shape as planned"),
            ({"q": np.zeros((B, HQ, D), np.float32)}, TypeError, "q must have dtype float16, as planned"),
            ({"k_cache": new("k_cache")[:-1]}, ValueError, "k_cache must have shape as planned"),
            ({"v_cache": np.zeros((N + 1, 2, D, P), np.float16)[1:, :, ::-1]}, ValueError, "v_cache must have strides"),
            ({"out": new("out")[:-1]}, ValueError, "out must have shape of q"),
            ({"out": np.zeros((B, HQ, 2 * D), np.float16)[..., :D]}, ValueError, "out must be C-contiguous"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_what_is_not_as_planned_is_refused(self, kind, devices, changes, error, message):
        plan, _, _ = planned(kind, host_arguments())
        given = {name: kind((host_arguments() | changes)[name]) for name in ("q", "k_cache", "v_cache", "out")}
        for _ in range(2):
            with pytest.raises(error, match=f"^{message}"):
                plan.run(**given)
        for name in given:
            with pytest.raises(ValueError, match=f"^{name} must be on a device, as the arrays that were planned$"):
                plan.run(**{x: kind(new(x)) for x in given} | {name: new(name)})
        assert not launches(devices)

    def test_out_is_compared_with_the_inputs_each_time(self, kind, devices):
        given, both = host_arguments(), np.zeros((2 * B, HQ, D), np.float16)
        plan, (_, *caches), _ = planned(kind, given)
        plan.run(kind(both[:B]), *caches, out=kind(both[B:]))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^out must not overlap q$"):
                plan.run(kind(both[:B]), *caches, out=kind(both[1 : B + 1]))
        plan.run(kind(both[B:]), *caches, out=kind(both[:B]))
        assert len(launches(devices)) == 2

    @pytest.mark.parametrize("kind", ["cupy", "torch"], indirect=True)
    def test_a_cache_in_other_memory_is_no_repetition(self, kind, devices):
        """The same objects again are known, unless their memory has moved."""
        plan, (q, k_cache, v_cache), out = planned(kind, host_arguments())
        plan.run(q, k_cache, v_cache, out=out)
        if hasattr(k_cache, "address"):
            k_cache.address = 0
        else:
            k_cache.data.ptr = 0
        with pytest.raises(ValueError, match=r"^k_cache must have memory, got the address 0"):
            plan.run(q, k_cache, v_cache, out=out)

    def test_a_plan_of_nothing_launches_nothing(self, kind, devices):
        given = host_arguments()
        given |= {name: given[name][:0] for name in ("q", "block_tables", "seq_lens", "out")}
        plan, brought, out = planned(kind, given)
        for wrong, error in ((new("out"), ValueError), (new("out")[:0].astype(np.float32), TypeError)):
            with pytest.raises(error, match=r"^out must have "):
                plan.run(*brought, out=kind(wrong))
        assert plan.run(*brought, out=out) is out
        assert not devices

    def test_a_closed_plan(self, kind, devices):
        plan, brought, out = planned(kind, host_arguments())
        plan.close()
        with pytest.raises(RuntimeError, match=r"^this plan is closed"):
            plan.run(*brought, out=out)


class SlowDevice(RecordingDevice):
    """Reads the parameters of a launch while other threads may want to write theirs."""

    def start(self, prepared, is_ready):
        time.sleep(1e-3)
        super().start(prepared, is_ready)


@pytest.mark.usefixtures("nothing_planned")
def test_two_threads_in_one_plan_do_not_mix_their_addresses():
    with recording(SlowDevice) as devices:
        given = host_arguments()  # whose addresses the arrays have: nobody else may get them
        plan, (_, *caches), _ = planned(InterfaceArray, given)
        pairs = [(new("q"), new("out")) for _ in range(4)]

        def work(q, out):
            for _ in range(5):
                plan.run(InterfaceArray(q), *caches, out=InterfaceArray(out))

        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = [set(args) for _, _, args, _ in launches(devices)]
    assert len(seen) == 20
    for q, out in pairs:
        wanted = {address_of(q) + ELSEWHERE, address_of(out) + ELSEWHERE}
        assert sum(wanted <= args for args in seen) == sum(bool(wanted & args) for args in seen) == 5


def plan_of(decode, **options):
    plan = pagedkv.plan_decode(*decode.arguments, check=True, **options)
    return lambda: plan.run(*decode.arguments[:3])


def test_a_workspace_that_has_moved_is_not_launched_with(cuda, torch):
    """The recorder looks whether the workspaces of a launch are freed."""
    run, larger = plan_of(decode_of(torch.Tensor)), decode_of(torch.Tensor, num_seqs=9)
    run()
    first = launched(cuda)
    cuda.calls.clear()
    larger.call()
    run()
    assert launched(cuda) - first
    assert pagedkv.release_workspaces() > 0
    cuda.calls.clear()
    run()
    assert len([call for call in cuda.calls if call[0] == "alloc"]) == 4, "all but the report were freed"
    cuda.calls.clear()
    run()
    assert [call[0] for call in cuda.calls] == ["launch"] * 2


def test_streams_and_graphs_have_workspaces_of_their_own(cuda, torch):
    run, graphs = plan_of(decode_of(torch.Tensor)), [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    run()
    used = launched(cuda)
    with torch.cuda.stream(torch.cuda.Stream()):
        cuda.calls.clear()
        run()
        assert not used & launched(cuda)
    for graph in graphs:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            run()
        assert len(graph.nodes) == 2
        graph.replay()
    assert not graphs[0].workspaces & graphs[1].workspaces
    assert not graphs[0].workspaces & used


def test_a_launch_that_fails_is_an_error(cuda, torch):
    run = plan_of(decode_of(torch.Tensor))
    run()
    cuda.fail["launch"] = 700
    with pytest.raises(RuntimeError, match=r"^cuLaunchKernelEx failed on GPU 0: CUDA_ERROR_ILLEGAL_ADDRESS$"):
        run()
