"""Device processes against the real driver: masks, broken contexts, memory, and a pytest process without CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_cudaenv import CudaDevice, requires_cuda
from pytest_cudaenv.host.detect import detect_host
from pytest_cudaenv.host.nvml import XidWatch


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("--cuda-isolation", "session", "-p", "no:randomly", *arguments)


@requires_cuda
def test_cuda_sees_exactly_the_grant_and_the_pytest_process_has_none(pytester: pytest.Pytester) -> None:
    host = detect_host({})
    pytester.makepyfile(
        f"""
        import os
        import torch
        from pytest_cudaenv.host.driver import is_cuda_initialised
        COUNT, HERE = torch.cuda.device_count(), os.getpid()

        def test_device(cuda_device):
            assert os.getpid() != HERE
            assert torch.cuda.device_count() == 1
            assert "GPU-" + str(torch.cuda.get_device_properties(0).uuid) == cuda_device.uuid
            assert cuda_device.uuid == {host.devices[0].uuid!r}
            assert torch.ones(3, device=cuda_device).sum().item() == 3

        def test_backward_on_both(cuda_device):
            for device in ("cpu", cuda_device):
                x = torch.ones(4, device=device, requires_grad=True)
                (x * x).sum().backward()
                assert x.grad.tolist() == [2.0] * 4

        def test_the_pytest_process_has_no_cuda():
            assert os.getpid() == HERE
            assert is_cuda_initialised() is False
            assert COUNT == {len(host.devices)}
        """
    )
    run(pytester).assert_outcomes(passed=3)


@requires_cuda
def test_a_broken_context_harms_nobody_else(pytester: pytest.Pytester) -> None:
    """An out-of-range index is an assert on the device: every later CUDA call of that process fails."""
    pytester.makepyfile(
        """
        import torch
        def test_before(cuda_device): torch.ones(1, device=cuda_device)
        def test_asserts(cuda_device):
            torch.zeros(4, device=cuda_device)[torch.tensor([99], device=cuda_device)]
            torch.cuda.synchronize()
        def test_after(cuda_device): assert torch.ones(2, device=cuda_device).sum().item() == 2
        def test_leaves_it_unseen(cuda_device):
            torch.zeros(4, device=cuda_device)[torch.tensor([99], device=cuda_device)]
        def test_last(cuda_device): assert torch.ones(2, device=cuda_device).sum().item() == 2
        """
    )
    result = run(pytester)
    # A warning tells where another process took memory of the device meanwhile, as under `-n`.
    assert {k: v for k, v in result.parseoutcomes().items() if k != "warnings"} == {
        "passed": 4,
        "failed": 1,
        "errors": 1,
    }
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_leaves_it_unseen*", "[[]cuda-sticky[]] this test left CUDA broken*"]
    )


@requires_cuda
def test_a_second_look_finds_the_line(pytester: pytest.Pytester) -> None:
    """Kernels run behind Python's back: without blocking launches the error comes up later than its cause."""
    pytester.makepyfile(
        """
        import torch
        def test_asserts(cuda_device):
            index = torch.tensor([99], device=cuda_device)
            bad = torch.zeros(4, device=cuda_device)[index]  # the cause
            torch.cuda.synchronize()  # where it comes up
        """
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    first, second = text.split("With CUDA_LAUNCH_BLOCKING=1 it is raised here", 1)
    assert ">       torch.cuda.synchronize()  # where it comes up" in first
    assert ">       bad = torch.zeros(4, device=cuda_device)[index]  # the cause" in second


@requires_cuda
def test_cuda_in_the_pytest_process_sends_device_tests_to_fresh_interpreters(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a="""
        import torch
        HERE = torch.ones(1, device="cuda")
        def test_a(cuda_device): assert torch.ones(2, device=cuda_device).sum().item() == 2
        """,
        test_b="""
        import os, torch
        def test_b(cuda_device):
            x = torch.ones(4, device=cuda_device, requires_grad=True)
            (x * x).sum().backward()
            assert x.grad.tolist() == [2.0] * 4
            assert "GPU-" + str(torch.cuda.get_device_properties(0).uuid) == cuda_device.uuid
        """,
    )
    result = run(pytester)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*[[]no-fork[]] CUDA was initialised while collecting test_a.py*"])


@requires_cuda(memory="60GB")
def test_memory_comes_back_with_the_end_of_a_process(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from pytest_cudaenv import cuda_isolated
        KEPT = []
        @cuda_isolated
        @pytest.mark.parametrize("again", range(3))
        def test_takes_most_of_it(cuda_device, again):
            free, total = torch.cuda.mem_get_info()
            assert free > 0.9 * total
            KEPT.append(torch.empty(int(0.8 * total), dtype=torch.uint8, device=cuda_device))
        """
    )
    run(pytester).assert_outcomes(passed=3)


@requires_cuda(devices=2)
def test_each_test_sees_its_devices(pytester: pytest.Pytester) -> None:
    host = detect_host({})
    uuids = [d.uuid for d in host.devices[:2]]
    pytester.makepyfile(
        f"""
        import torch
        from pytest_cudaenv import requires_cuda
        def seen():
            every = range(torch.cuda.device_count())
            return ["GPU-" + str(torch.cuda.get_device_properties(i).uuid) for i in every]
        def test_one(cuda_device): assert seen() == {uuids[:1]!r}
        @requires_cuda(devices=2)
        def test_two(cuda_devices):
            assert seen() == [d.uuid for d in cuda_devices] == {uuids!r}
            a, b = (torch.ones(2, device=d) for d in cuda_devices)
            assert (a + b.to(a.device)).sum().item() == 4
        def test_one_again(cuda_device): assert seen() == {uuids[:1]!r}
        """
    )
    run(pytester).assert_outcomes(passed=3)


STRANGER = """
import os, torch
kept = torch.empty(100 * 2**30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", os.getpid(), flush=True)
input()
"""


@requires_cuda(memory="110GB")
def test_a_stranger_is_waited_for_and_named(
    pytester: pytest.Pytester, cuda_device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cuda_device.uuid)
    pytester.makepyfile(
        """
        import torch
        def test_it(cuda_device): assert torch.ones(2, device=cuda_device).sum().item() == 2
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        ready = stranger.stdout.readline().split()
        result = run(pytester, "--cuda-wait", "2")
        stranger.stdin.write("\n")
        stranger.stdin.flush()
    result.assert_outcomes(errors=1)
    assert ready[0] == "ready"
    result.stdout.fnmatch_lines([f"*[[]device-occupied[]]*{cuda_device.uuid}*pid {ready[1]} (python*"])
    run(pytester, "--cuda-wait", "2").assert_outcomes(passed=1)


MIXED = """
    import os, pytest, torch
    import torch.distributed as dist
    from pytest_cudaenv import cuda_isolated, requires_cuda, requires_nccl

    def seen():
        return ["GPU-" + str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]

    @pytest.mark.parametrize("n", range(8))
    def test_one(cuda_device, n):
        assert seen() == [cuda_device.uuid]
        assert torch.full((4,), n, device=cuda_device).sum().item() == 4 * n

    @pytest.mark.parametrize("n", range(3))
    @requires_cuda(devices=2)
    def test_two(cuda_devices, n):
        assert seen() == [d.uuid for d in cuda_devices]
        a, b = (torch.ones(2, device=d) for d in cuda_devices)
        assert (a + b.to(a.device)).sum().item() == 4

    def rank(number, rendezvous, answers):
        torch.cuda.set_device(number)
        dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=number, world_size=2)
        value = torch.full((1024,), number + 1.0, device="cuda")
        dist.all_reduce(value)
        torch.cuda.synchronize()
        answers.put((number, value.unique().tolist(), seen()))
        dist.destroy_process_group()

    @requires_nccl
    def test_all_reduce(cuda_devices, tmp_path):
        context = torch.multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        ranks = [context.Process(target=rank, args=(n, tmp_path / "rendezvous", answers)) for n in range(2)]
        for process in ranks: process.start()
        for process in ranks: process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
        uuids = [d.uuid for d in cuda_devices]
        assert sorted([answers.get(), answers.get()]) == [(0, [3.0], uuids), (1, [3.0], uuids)]

    KEPT = []

    @pytest.mark.parametrize("n", range(2))
    @cuda_isolated
    @requires_cuda(memory="110GB")
    def test_leaks(cuda_device, n):
        free, _ = torch.cuda.mem_get_info()
        assert free > 100 * 2**30
        KEPT.append(torch.empty(100 * 2**30, dtype=torch.uint8, device=cuda_device))

    def test_asserts(cuda_device):
        torch.zeros(4, device=cuda_device)[torch.tensor([99], device=cuda_device)]
        torch.cuda.synchronize()
"""


@requires_cuda(devices=2, memory="110GB")
def test_one_and_two_devices_mixed_over_four_workers(pytester: pytest.Pytester) -> None:
    """Devices by UUID as CUDA tells it, NCCL between two, a leak of 100 GiB, and an assert that harms nobody else."""
    pytester.makepyfile(MIXED)
    result = run(pytester, "-n", "4")
    assert {k: v for k, v in result.parseoutcomes().items() if k != "warnings"} == {"passed": 14, "failed": 1}
    result.stdout.fnmatch_lines(["FAILED *::test_asserts*"])


@requires_cuda
def test_a_kernel_that_does_not_end_is_a_timeout_that_shows_where_python_waits(pytester: pytest.Pytester) -> None:
    """Python waits inside the driver, where no signal handler of Python's runs."""
    pytester.makepyfile(
        """
        import pytest, torch
        @pytest.mark.timeout(2)
        def test_waits(cuda_device):
            torch.cuda._sleep(10**13)
            torch.cuda.synchronize()
        def test_after(cuda_device): assert torch.ones(2, device=cuda_device).sum().item() == 2
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*did not end within 5 s of its deadline and was killed during call*", "*- Python stack -*", "*in test_waits*"]
    )


@requires_cuda
def test_listening_for_xid_errors_leaves_nvml_as_it_was() -> None:
    host = detect_host({})
    watch = XidWatch.start(host.devices)
    if watch is not None:  # some virtual machines do not tell
        assert watch.seen() == ()
        watch.close()
    assert detect_host({}).devices == host.devices
