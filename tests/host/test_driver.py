"""CUDA asked in a child process, against a driver library built for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv.host.driver import DriverAnswer, ask_driver, is_cuda_initialised
from tests.native.build import FakeGpu, FakeInstance, client_environment, cuda_environment

MiB = 1024**2

H100 = FakeGpu()
THOR = FakeGpu(
    uuid="GPU-abcdef01-2345-6789-abcd-ef0123456789",
    name="NVIDIA Thor",
    capability=(11, 0),
    mib=125747,
    pci=(1, 0, 2),
    sms=20,
    integrated=True,
)

AskDriver = Callable[..., DriverAnswer]


@pytest.fixture
def ask_cuda(cuda_folder: Path) -> AskDriver:
    def ask_cuda(*gpus: FakeGpu, timeout: float = 60, **settings: object) -> DriverAnswer:
        environ = client_environment(cuda_folder, **cuda_environment(gpus, **settings))
        return ask_driver(environ, timeout)

    return ask_cuda


def test_what_cuda_tells(ask_cuda: AskDriver) -> None:
    answer = ask_cuda(THOR, H100)
    assert (answer.cu_init, answer.error, answer.version) == (0, None, (13, 0))
    thor, h100 = answer.devices
    assert (thor.index, thor.uuid, thor.name, thor.capability) == (0, THOR.uuid, "NVIDIA Thor", (11, 0))
    assert (thor.total_memory, thor.unified_memory, thor.multiprocessors) == (125747 * MiB, True, 20)
    assert thor.pci_bus_id == "00000001:00:02.0"
    assert (h100.index, h100.uuid, h100.unified_memory, h100.multiprocessors) == (1, H100.uuid, False, 132)
    assert (h100.mig_parent, h100.is_mig) == (None, False)


def test_mig_instance_is_known_by_its_two_uuids(ask_cuda: AskDriver) -> None:
    instance = FakeInstance(name="NVIDIA A100-SXM4-40GB")
    (device,) = ask_cuda(FakeGpu(mig=[instance], capability=(8, 0))).devices
    assert (device.uuid, device.mig_parent) == (instance.uuid, H100.uuid)
    assert (device.total_memory, device.multiprocessors) == (4864 * MiB, 14)


def test_failing_init_is_named(ask_cuda: AskDriver) -> None:
    answer = ask_cuda(H100, init=100)
    assert answer == DriverAnswer(100, "cuInit fails with CUDA_ERROR_NO_DEVICE (100)", (13, 0))
    assert ask_cuda(H100, init=999) == DriverAnswer(999, "cuInit fails with 999", (13, 0))


def test_device_without_uuid_is_not_silently_absent(ask_cuda: AskDriver) -> None:
    answer = ask_cuda(FakeGpu(uuid=None), H100)
    assert [d.uuid for d in answer.devices] == [H100.uuid]
    assert answer.devices[0].index == 0
    assert answer.error == "CUDA has a device that does not tell its UUID"


def test_unknown_is_none(ask_cuda: AskDriver) -> None:
    (device,) = ask_cuda(FakeGpu(capability=None, mib=0, sms=0)).devices
    assert (device.capability, device.total_memory, device.multiprocessors) == (None, None, None)


def test_missing_library(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    answer = ask_driver(client_environment(tmp_path))
    assert (answer.cu_init, answer.version, answer.devices) == (None, None, ())
    assert answer.error is not None
    assert answer.error.startswith("libcuda.so.1 can't be loaded (")


def test_crash(ask_cuda: AskDriver) -> None:
    assert ask_cuda(H100, init="crash") == DriverAnswer(None, "the process that asked CUDA died of SIGABRT")


def test_hang(ask_cuda: AskDriver) -> None:
    started = time.monotonic()
    answer = ask_cuda(H100, init="hang", timeout=1)
    assert answer == DriverAnswer(None, "CUDA did not answer within 1 seconds")
    assert time.monotonic() - started < 30


def test_no_process_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    answer = ask_driver({})
    assert answer.cu_init is None
    assert "no process could be started" in (answer.error or "")


def test_child_has_exactly_the_environment(cuda_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    given = client_environment(cuda_folder, **cuda_environment([H100], log=tmp_path / "log"))
    ask_driver(given)
    ask_driver({**given, "CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert (tmp_path / "log").read_text().splitlines() == ["unset unset", "0 PCI_BUS_ID"]


def test_nothing_of_the_environment_runs_in_the_child(cuda_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('customized')")
    environ = client_environment(cuda_folder, **cuda_environment([H100]))
    answer = ask_driver({**environ, "PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": "/nowhere", "PYTHONHOME": "/nowhere"})
    assert [d.uuid for d in answer.devices] == [H100.uuid]


class TestIsCudaInitialised:
    @pytest.mark.parametrize(
        ("before", "expected"),
        [
            pytest.param("0", False, id="not-loaded"),
            pytest.param("__import__('ctypes').CDLL('libcuda.so.1')", False, id="loaded"),
            pytest.param("__import__('ctypes').CDLL('libcuda.so.1').cuInit(0)", True, id="initialised"),
            pytest.param("__import__('ctypes').CDLL({path!r}).cuInit(0)", True, id="loaded-by-path"),
        ],
    )
    def test_in_this_process(
        self, ask: Callable[..., Any], cuda_folder: Path, tmp_path: Path, before: str, expected: bool
    ) -> None:
        environ = client_environment(cuda_folder, **cuda_environment([H100], log=tmp_path / "log"))
        before = before.format(path=str(cuda_folder / "libcuda.so.1"))
        _, answer, loaded = ask(
            f"({before} and 0, is_cuda_initialised(), 'libcuda.so' in Path('/proc/self/maps').read_text())", environ
        )
        assert answer is expected
        # Asking neither loads nor initialises.
        assert loaded is (before != "0")
        assert (tmp_path / "log").exists() is ("cuInit" in before)

    def test_this_process(self) -> None:
        if "libcuda.so" in Path("/proc/self/maps").read_text():
            pytest.skip("something loaded CUDA into this pytest process")
        assert is_cuda_initialised() is False

    def test_unreadable_maps(self, tmp_path: Path) -> None:
        assert is_cuda_initialised(tmp_path / "maps") is None

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcudart.so.12", False),
            ("7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcuda.so.1-old", False),
            ("7f00-7f01 r-xp 00000000 08:01 12 /my libs/libcuda.so.580.159.04", None),
            ("7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcuda.so.1 (deleted)", None),
        ],
    )
    def test_mapped_names(self, tmp_path: Path, line: str, expected: bool | None) -> None:
        # None: the library is said to be there, and the loader of this process does not know it.
        if "libcuda.so" in Path("/proc/self/maps").read_text():
            pytest.skip("something loaded CUDA into this pytest process")
        (tmp_path / "maps").write_text(
            f"7e00-7e01 rw-p 00000000 00:00 0\n{line}\n7f02-7f03 rw-p 00000000 00:00 0 [heap]\n"
        )
        assert is_cuda_initialised(tmp_path / "maps") is expected


def test_asking_leaves_this_process_alone(ask_cuda: AskDriver) -> None:
    before = dict(os.environ), is_cuda_initialised()
    assert ask_cuda(H100).cu_init == 0
    assert (dict(os.environ), is_cuda_initialised()) == before
