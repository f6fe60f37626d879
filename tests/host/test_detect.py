"""What a machine has: proven none, present and unusable, or devices; by fabricated answers and then by real clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv.host import detect
from pytest_cudaenv.host.catalog import simulated_device
from pytest_cudaenv.host.detect import detect_host
from pytest_cudaenv.host.devices import CudaDevice, Host, renumbered
from pytest_cudaenv.host.driver import DriverAnswer
from pytest_cudaenv.host.nvml import NvmlAnswer
from pytest_cudaenv.host.problems import PROBLEMS
from pytest_cudaenv.host.software import Software, TorchBuild
from tests.native.build import FakeGpu, client_environment, cuda_environment, nvml_environment

MISSING = NvmlAnswer(problem=PROBLEMS["nvml-missing"])
NOT_LOADED = NvmlAnswer(problem=PROBLEMS["driver-not-loaded"], found_library=True)
NO_CUDA = DriverAnswer(None, "libcuda.so.1 can't be loaded")

H100, H100_TOO, T4 = simulated_device("h100", 0), simulated_device("h100", 1), simulated_device("t4", 2)


def working(*devices: CudaDevice) -> NvmlAnswer:
    return NvmlAnswer(renumbered(devices), "580.159.04", (13, 0), found_library=True)


@dataclass
class Machine:
    """A machine with fabricated answers, which notes what CUDA is asked."""

    root: Path
    nvml: NvmlAnswer = MISSING
    cuda: DriverAnswer = NO_CUDA
    asked: list[Mapping[str, str]] = field(default_factory=list)

    def add(self, path: str, text: str = "") -> Machine:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def add_pci(self, *devices: tuple[str, str]) -> Machine:
        for number, (vendor, kind) in enumerate(devices):
            self.add(f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", f"{vendor}\n")
            self.add(f"sys/bus/pci/devices/0000:0{number}:00.0/class", f"{kind}\n")
        return self

    def ask_driver(self, environ: Mapping[str, str], timeout: float = 60) -> DriverAnswer:
        self.asked.append(environ)
        return self.cuda

    def detect(self, **environ: str) -> Host:
        host = detect_host(environ, self.root)
        # The invariant that callers build on: devices that can be used, or a problem.
        assert not (host.devices and host.problem)
        return host


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(detect, "read_nvml", lambda root: machine.nvml)
    monkeypatch.setattr(detect, "ask_driver", machine.ask_driver)
    return machine


class TestWorkingNvml:
    def test_alike_gpus_cost_no_process(self, machine: Machine) -> None:
        machine.nvml = working(H100, H100_TOO)
        host = machine.detect(CUDA_VISIBLE_DEVICES="1", HF_HUB_OFFLINE="1")
        assert [d.uuid for d in host.devices] == [H100.uuid, H100_TOO.uuid]
        assert (host.driver, host.driver_cuda) == ("580.159.04", (13, 0))
        assert (host.problem, host.fastest_first, host.simulated, host.notes) == (None, None, None, ())
        assert host.software.environ == {"CUDA_VISIBLE_DEVICES": "1", "HF_HUB_OFFLINE": "1"}
        assert machine.asked == []

    @pytest.mark.parametrize("nodes", [(), ("nvidiactl",), ("nvidia-uvm", "nvidia-caps"), ("dxg",)])
    def test_no_gpu_is_none(self, machine: Machine, nodes: tuple[str, ...]) -> None:
        machine.nvml = working()
        for node in nodes:
            machine.add(f"dev/{node}")
        host = machine.detect()
        assert (host.devices, host.problem, machine.asked) == ((), None, [])

    def test_node_that_no_gpu_answers_is_a_problem(self, machine: Machine) -> None:
        machine.nvml = working()
        host = machine.add("dev/nvidia0").detect()
        assert host.problem == PROBLEMS["gpu-missing"]

    def test_notes_of_nvml_are_kept(self, machine: Machine) -> None:
        machine.nvml = replace(working(H100), notes=("one is lost",))
        assert machine.detect().notes == ("one is lost",)

    def test_every_gpu_lost_is_a_problem(self, machine: Machine) -> None:
        machine.nvml = NvmlAnswer(problem=PROBLEMS["gpu-lost"], found_library=True, notes=("it is lost",))
        host = machine.detect()
        assert (host.devices, host.problem) == ((), PROBLEMS["gpu-lost"])
        assert host.notes[0] == "it is lost"

    def test_stub_is_completed_by_cuda(self, machine: Machine) -> None:
        # NVML-4: Jetson's library answers little.
        orin = replace(simulated_device("orin", 0), capability=None, total_memory=None, multiprocessors=None)
        machine.nvml = replace(working(orin), driver_cuda=None)
        machine.cuda = DriverAnswer(0, version=(12, 6), devices=(simulated_device("orin", 0),))
        host = machine.detect()
        (device,) = host.devices
        assert (device.capability, device.multiprocessors) == ((8, 7), 16)
        assert device.total_memory == simulated_device("orin", 0).total_memory
        assert (host.driver_cuda, host.notes) == ((12, 6), ())

    def test_what_nobody_tells_stays_unknown(self, machine: Machine) -> None:
        machine.nvml = working(replace(H100, capability=None))
        host = machine.detect()
        assert [d.capability for d in host.devices] == [None]
        assert "libcuda.so.1 can't be loaded" in host.notes[0]


class TestMissingNvml:
    def test_bare_machine_is_proven_to_have_none(self, machine: Machine) -> None:
        # CPU-1, CPU-2
        host = machine.detect()
        assert (host.devices, host.problem, host.notes, host.driver) == ((), None, (), None)
        assert machine.asked == []

    @pytest.mark.parametrize(
        "path",
        [
            *(f"dev/{node}" for node in ("nvidia0", "nvidiactl", "nvhost-gpu", "nvgpu", "nvmap", "dxg")),
            "proc/driver/nvidia/version",
        ],
    )
    def test_trace_of_a_driver_asks_cuda(self, machine: Machine, path: str) -> None:
        machine.add(path)
        host = machine.detect(CUDA_VISIBLE_DEVICES="3", LD_LIBRARY_PATH="/opt")
        assert host.problem == PROBLEMS["nvml-missing"]
        assert host.notes == ("CUDA has no device either: libcuda.so.1 can't be loaded",)
        assert machine.asked == [{"LD_LIBRARY_PATH": "/opt", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}]

    def test_devices_come_from_cuda(self, machine: Machine) -> None:
        # NVML-15, NVML-4
        machine.cuda = DriverAnswer(0, version=(12, 8), devices=renumbered([H100, H100_TOO]))
        host = machine.add("dev/nvidia0").detect()
        assert [d.uuid for d in host.devices] == [H100.uuid, H100_TOO.uuid]
        assert (host.problem, host.driver_cuda) == (None, (12, 8))
        assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in host.notes[0]
        assert len(machine.asked) == 1

    def test_cuda_that_lists_nothing_proves_nothing(self, machine: Machine) -> None:
        machine.cuda = DriverAnswer(0)
        host = machine.add("dev/nvidia0").detect()
        assert host.problem == PROBLEMS["nvml-missing"]
        assert host.notes == ("CUDA has no device either: it counts none",)

    def test_other_nodes_prove_nothing(self, machine: Machine) -> None:
        host = machine.add("dev/dri/card0").add("dev/nvme0").add("dev/nvram").add("dev/nvidia-uvm").detect()
        assert (host.problem, machine.asked) == (None, [])

    def test_windows_laptop_without_nvidia(self, machine: Machine) -> None:
        # Every WSL has /dev/dxg; Windows puts the libraries of the vendors it has beside its own.
        machine.add("dev/dxg").add("usr/lib/wsl/lib/libdxcore.so")
        assert machine.detect().problem is None
        machine.add("usr/lib/wsl/lib/libcuda.so.1")
        assert machine.detect().problem == PROBLEMS["nvml-missing"]

    def test_gpu_without_its_driver_is_said(self, machine: Machine) -> None:
        # A container on a GPU host sees the bus, and no GPU is meant for it.
        host = machine.add_pci(("0x8086", "0x060000"), ("0x10de", "0x030200")).detect()
        assert host.problem is None
        assert "NVIDIA GPU" in host.notes[0]


class TestFailingNvml:
    def test_mismatch_asks_nothing(self, machine: Machine) -> None:
        # NVML-1: CUDA is as broken.
        machine.nvml = NvmlAnswer(problem=PROBLEMS["nvml-mismatch"], found_library=True)
        machine.cuda = DriverAnswer(0, devices=(H100,))
        host = machine.detect()
        assert (host.devices, host.problem, machine.asked) == ((), PROBLEMS["nvml-mismatch"], [])

    @pytest.mark.parametrize("code", ["nvml-permission", "nvml-unknown", "nvml-too-old"])
    def test_cuda_may_work_all_the_same(self, machine: Machine, code: str) -> None:
        machine.nvml = NvmlAnswer(problem=PROBLEMS[code], found_library=True)
        host = machine.detect()
        assert (host.devices, host.problem) == ((), PROBLEMS[code])
        machine.cuda = DriverAnswer(0, version=(13, 0), devices=(H100,))
        host = machine.detect()
        assert ([d.uuid for d in host.devices], host.problem) == ([H100.uuid], None)
        assert code in host.notes[0]

    def test_image_for_gpus_on_a_machine_without(self, machine: Machine) -> None:
        machine.nvml = NOT_LOADED
        host = machine.add_pci(("0x8086", "0x060000"), ("0x1002", "0x030000")).detect()
        assert (host.problem, machine.asked) == (None, [])

    def test_nvidias_bridges_are_no_gpus(self, machine: Machine) -> None:
        machine.nvml = NOT_LOADED
        assert machine.add_pci(("0x10de", "0x068000"), ("0x10de", "0x040300")).detect().problem is None

    @pytest.mark.parametrize(
        "prepare",
        [
            pytest.param(lambda m: m, id="no-bus-to-see"),
            pytest.param(lambda m: m.add_pci(("0x10de", "0x030000")), id="gpu-on-the-bus"),
            pytest.param(lambda m: m.add("sys/bus/pci/devices/0000:00:00.0/vendor", "0x10de"), id="unknown-class"),
            pytest.param(lambda m: m.add_pci(("0x8086", "0x060000")).add("dev/nvidia0"), id="node"),
            pytest.param(lambda m: m.add_pci(("0x8086", "0x060000")).add("dev/dxg"), id="NVML-3"),
        ],
    )
    def test_driver_that_is_not_loaded_is_a_problem(
        self, machine: Machine, prepare: Callable[[Machine], Machine]
    ) -> None:
        machine.nvml = NOT_LOADED
        assert prepare(machine).detect().problem == PROBLEMS["driver-not-loaded"]


class TestFastestFirst:
    """ORD-1"""

    FASTEST = (H100.uuid, T4.uuid)

    @pytest.fixture
    def mixed(self, machine: Machine) -> Machine:
        machine.nvml = working(T4, H100)
        machine.cuda = DriverAnswer(0, devices=renumbered([H100, T4]))
        return machine

    @pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
    def test_mixed_host_asks_cuda(self, mixed: Machine, order: str | None) -> None:
        environ = {"CUDA_VISIBLE_DEVICES": "0", **({} if order is None else {"CUDA_DEVICE_ORDER": order})}
        host = mixed.detect(**environ)
        assert [d.uuid for d in host.devices] == [T4.uuid, H100.uuid]
        assert (host.fastest_first, host.notes) == (self.FASTEST, ())
        assert mixed.asked == [{"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}]

    @pytest.mark.parametrize("order", ["PCI_BUS_ID", "pci_bus_id"])
    def test_order_that_is_known_is_not_asked(self, mixed: Machine, order: str) -> None:
        assert mixed.detect(CUDA_DEVICE_ORDER=order).fastest_first is None
        assert mixed.asked == []

    def test_same_name_with_less_memory_is_another_model(self, machine: Machine) -> None:
        machine.nvml = working(H100, replace(H100_TOO, total_memory=40 * 1024**3))
        machine.detect()
        assert len(machine.asked) == 1

    def test_mig_tells_no_order(self, machine: Machine) -> None:
        machine.nvml = working(T4, replace(H100, uuid="MIG-1", mig_parent=H100.uuid))
        assert machine.detect().fastest_first is None
        assert machine.asked == []

    @pytest.mark.parametrize(
        "answer", [DriverAnswer(None, "CUDA did not answer"), DriverAnswer(0, devices=renumbered([H100]))]
    )
    def test_order_that_cuda_does_not_tell(self, mixed: Machine, answer: DriverAnswer) -> None:
        mixed.cuda = answer
        host = mixed.detect()
        assert (host.fastest_first, len(host.devices)) == (None, 2)
        assert host.notes[0].endswith("Set CUDA_DEVICE_ORDER=PCI_BUS_ID")


class TestAmd:
    """ROCM-1"""

    def test_kfd_counts_nodes_with_a_gpu(self, machine: Machine) -> None:
        for node, gpu_id in enumerate(("0", "29312", "51156", "")):
            machine.add(f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", f"{gpu_id}\n")
        host = machine.add("dev/kfd").detect()
        assert (host.amd_devices, host.devices, host.problem) == (2, (), None)

    def test_cards_where_kfd_tells_nothing(self, machine: Machine) -> None:
        for card, vendor in (("card0", "0x1002"), ("card1", "0x8086"), ("card10", "0x1002"), ("card0-DP-1", "0x1002")):
            machine.add(f"sys/class/drm/{card}/device/vendor", f"{vendor}\n")
        assert machine.add("dev/kfd").detect().amd_devices == 2

    def test_display_of_a_laptop_is_not_counted(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.add("sys/class/drm/card0/device/vendor", "0x1002\n")
        monkeypatch.setattr(
            detect, "installed_software", lambda: Software(torch=TorchBuild("2.11.0+cu130", cuda="13.0"))
        )
        assert machine.detect().amd_devices == 0
        monkeypatch.setattr(
            detect, "installed_software", lambda: Software(torch=TorchBuild("2.11.0+rocm6.4", hip="6.4"))
        )
        assert machine.detect().amd_devices == 1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Apr 1 00:00:00\nGCC version: 13\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (a@b)\n", "570.86.15"),
        ("nonsense\n", None),
    ],
)
def test_version_of_the_kernel_module(machine: Machine, text: str, version: str | None) -> None:
    assert machine.add("proc/driver/nvidia/version", text).detect().driver == version


def test_nothing_raises(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: Path) -> NvmlAnswer:
        raise RuntimeError("never seen before")

    monkeypatch.setattr(detect, "read_nvml", fail)
    host = machine.detect(HOME="/root")
    assert host.problem == PROBLEMS["detection-failed"]
    assert "never seen before" in host.notes[0]
    assert host.software.environ == {"HOME": "/root"}


class TestRealClients:
    """The whole way: pynvml, ctypes and a child process, against libraries built for it."""

    SLOW = FakeGpu(uuid="GPU-11111111-1111-4111-8111-111111111111", name="Tesla T4", capability=(7, 5), mib=15360)
    FAST = FakeGpu(uuid="GPU-22222222-2222-4222-8222-222222222222", pci=(0, 2, 0))

    def detect(self, ask: Callable[..., Any], root: Path, environ: Mapping[str, str]) -> Host:
        host = ask(f"__import__('dataclasses').replace(detect_host(root=Path({str(root)!r})), software=None)", environ)
        assert isinstance(host, Host)
        return host

    def test_alike_gpus_never_initialise_cuda(
        self, ask: Callable[..., Any], tmp_path: Path, nvml_folder: Path, cuda_folder: Path
    ) -> None:
        # MEM-3, AVAIL-4
        gpus = [self.FAST, replace(self.FAST, uuid="GPU-33333333-3333-4333-8333-333333333333", pci=(0, 3, 0))]
        log = tmp_path / "log"
        variables = {**nvml_environment(gpus), **cuda_environment(gpus, log=log)}
        host = self.detect(ask, tmp_path, client_environment(nvml_folder, cuda_folder, **variables))
        assert [d.uuid for d in host.devices] == [g.uuid for g in gpus]
        assert not log.exists()

    def test_mixed_gpus(self, ask: Callable[..., Any], tmp_path: Path, nvml_folder: Path, cuda_folder: Path) -> None:
        log = tmp_path / "log"
        variables = {
            **nvml_environment([self.SLOW, self.FAST]),
            **cuda_environment([self.FAST, self.SLOW], log=log),
            "CUDA_VISIBLE_DEVICES": "1",
        }
        host = self.detect(ask, tmp_path, client_environment(nvml_folder, cuda_folder, **variables))
        assert [d.uuid for d in host.devices] == [self.SLOW.uuid, self.FAST.uuid]
        assert host.fastest_first == (self.FAST.uuid, self.SLOW.uuid)
        assert log.read_text().splitlines() == ["unset FASTEST_FIRST"]

    def test_container_without_nvml(self, ask: Callable[..., Any], tmp_path: Path, cuda_folder: Path) -> None:
        # NVML-15
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "libnvidia-ml.so.1").touch()
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidia0").touch()
        variables = cuda_environment([self.SLOW, self.FAST], version=12080)
        host = self.detect(ask, tmp_path, client_environment(broken, cuda_folder, **variables))
        assert [d.capability for d in host.devices] == [(7, 5), (9, 0)]
        assert (host.problem, host.driver, host.driver_cuda) == (None, None, (12, 8))

    def test_mismatch(self, ask: Callable[..., Any], tmp_path: Path, nvml_folder: Path) -> None:
        # NVML-1
        environ = client_environment(nvml_folder, **nvml_environment([self.FAST], init=18))
        host = self.detect(ask, tmp_path, environ)
        assert (host.devices, host.problem) == ((), PROBLEMS["nvml-mismatch"])
