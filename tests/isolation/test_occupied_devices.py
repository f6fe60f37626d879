"""Whole runs on devices that strangers fill, as an NVML built for the tests tells."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pytest_cudaenv.grants.lease_table import LeaseTable
from tests.native.build import FakeGpu, FakeInstance, build_nvml, client_environment, nvml_environment, usage_line

FIRST, SECOND = FakeGpu(), FakeGpu(uuid="GPU-22222222-2222-4333-8444-555555555555", pci=(0, 2, 0))
UUIDS = (str(FIRST.uuid), str(SECOND.uuid))

Run = Callable[..., str]


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def run(pytester: pytest.Pytester, nvml_folder: Path) -> Run:
    """The output of a run on two H100s, or other GPUs, of which the file `usage` says what is in use."""

    def run(*arguments: str, gpus: Sequence[FakeGpu] = (FIRST, SECOND), **variables: str) -> str:
        environ = nvml_environment(gpus, usage=pytester.path / "usage")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--cuda-isolation", "session", *arguments]
        done = subprocess.run(
            [*command, "--cuda-assume", "torch==2.11.0+cu130"],
            env=client_environment(nvml_folder, **environ, **variables),
            cwd=pytester.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout

    return run


@pytest.fixture
def says(pytester: pytest.Pytester) -> Callable[..., None]:
    return lambda *lines: (pytester.path / "usage").write_text("".join(lines))


def test_a_device_that_strangers_fill_is_taken_last(
    pytester: pytest.Pytester, run: Run, says: Callable[..., None]
) -> None:
    says(usage_line(UUIDS[0], 40000, processes={4711: 40000}), usage_line(UUIDS[1], 600))
    pytester.makepyfile(f"def test_it(cuda_device): assert cuda_device.uuid == {UUIDS[1]!r}")
    output = run("-W", "error", "--cuda-wait", "0")
    assert "1 passed" in output, output


def test_where_there_is_no_other_it_is_an_error_that_names_them(
    pytester: pytest.Pytester, run: Run, says: Callable[..., None]
) -> None:
    says(usage_line(UUIDS[0], 40000, processes={os.getpid(): 39000}))
    pytester.makepyfile(
        """
        from pytest_cudaenv import requires_cuda
        @requires_cuda(devices=2)
        def test_both(cuda_devices): pass
        @requires_cuda(devices=2, memory="30GiB")
        def test_both_with_room(cuda_devices): pass
        def test_cpu(): pass
        """
    )
    output = run("--cuda-wait", "1")
    assert "2 passed, 1 error" in output, output
    assert f"[device-occupied] needs 2 of 2 device(s); have 39.1 GiB of {FIRST.name} {UUIDS[0]}" in output
    assert f"pid {os.getpid()}" in output


def test_unmarked_tests_of_the_run_are_no_strangers(
    pytester: pytest.Pytester, run: Run, says: Callable[..., None]
) -> None:
    """In this container NVML lists the pytest process, whose tests use CUDA, under another number."""
    says()
    line = usage_line(UUIDS[0], 40000, processes={4711: 40000})
    pytester.makepyfile(
        f"""
        import pathlib, sys, types
        from pytest_cudaenv import requires_cuda
        def test_unmarked():
            sys.modules["torch"] = types.ModuleType("torch")
            sys.modules["torch"].cuda = types.SimpleNamespace(
                is_initialized=lambda: True, device_count=lambda: 1, memory_stats=lambda index: {{}}
            )
            pathlib.Path("usage").write_text({line!r})
        @requires_cuda(devices=2)
        def test_both(cuda_devices): pass
        """
    )
    output = run("--cuda-wait", "0", "-p", "no:randomly")
    assert "2 passed" in output, output
    assert "used CUDA without declaring it, and without a lease: 1" in output


def test_memory_that_stays_after_a_device_process_is_told(
    pytester: pytest.Pytester, run: Run, says: Callable[..., None]
) -> None:
    says()
    line = usage_line(UUIDS[0], 70000)
    pytester.makepyfile(
        f"""
        import pathlib
        def test_leaves_a_server_behind(cuda_device): pathlib.Path("usage").write_text({line!r})
        def test_cpu(): pass
        """
    )
    output = run("-W", "error")
    assert "2 passed, 1 warning" in output, output
    assert f"[device-memory] {FIRST.name} {UUIDS[0]}: 68.4 GiB more in use" in output


def test_mig_instances_of_one_gpu_are_leased_and_judged_apart(
    pytester: pytest.Pytester, run: Run, says: Callable[..., None]
) -> None:
    pair = [FakeInstance(slot=n, uuid=f"MIG-5a5a5a5a-0000-4000-8000-00000000000{n}") for n in (1, 2)]
    gpu = FakeGpu(uuid="GPU-33333333-2222-4333-8444-555555555555", mig=pair)
    pytester.makepyfile(
        """
        import os
        def test_it(cuda_device):
            names = ("CUDA_VISIBLE_DEVICES", "CUDAENV_LEASE", "IT")
            assert [os.environ[name] for name in names] == [cuda_device.uuid] * 3
        """
    )

    def on(instance: FakeInstance) -> str:
        variables = {"CUDA_VISIBLE_DEVICES": instance.uuid, "IT": instance.uuid}
        return run("--cuda-wait", "0", gpus=[gpu], **variables)

    says()
    with LeaseTable(Path(os.environ["CUDAENV_LEASE_DIR"]), run="another").acquire([pair[0].uuid], 1):
        assert f"{pair[0].uuid}: pid {os.getpid()} of run another" in on(pair[0])
        assert "1 passed" in on(pair[1])
    says(usage_line(pair[1].uuid, 4000))
    assert "1 passed" in on(pair[0])
    assert f"[device-occupied] needs 1 of 1 device(s); have 3.9 GiB of {pair[1].name} {pair[1].uuid}" in on(pair[1])
