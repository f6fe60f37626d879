"""NVML as real clients see it: every case in a process of its own, against a library built for it."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv.host.devices import DeviceUsage
from pytest_cudaenv.host.nvml import NvmlAnswer, read_nvml
from pytest_cudaenv.host.problems import PROBLEMS
from tests.native.build import FakeGpu, FakeInstance, build_nvml, client_environment, nvml_environment, usage_line

MiB = 1024**2

H100 = FakeGpu()
T4 = FakeGpu(
    uuid="GPU-22222222-2222-4333-8444-555555555555", name="Tesla T4", capability=(7, 5), mib=15360, pci=(0, 2, 0)
)
GB10 = FakeGpu(name="NVIDIA GB10", capability=(12, 1), mib=0, pci=(15, 1, 0), codes={"mem": 3})

ReadNvml = Callable[..., NvmlAnswer]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       127600748 kB\nMemFree:        1024 kB\n")
    return tmp_path


@pytest.fixture
def read(ask: Callable[..., Any], nvml_folder: Path, root: Path) -> ReadNvml:
    def read(*gpus: FakeGpu, folder: Path = nvml_folder, **settings: object) -> NvmlAnswer:
        environ = client_environment(folder, **nvml_environment(gpus, **settings))
        answer = ask(f"read_nvml(Path({str(root)!r}))", environ)
        assert isinstance(answer, NvmlAnswer)
        return answer

    return read


def test_what_a_working_nvml_tells(read: ReadNvml) -> None:
    answer = read(H100)
    (device,) = answer.devices
    assert (device.uuid, device.name, device.capability) == (H100.uuid, "NVIDIA H100 80GB HBM3", (9, 0))
    assert (device.total_memory, device.unified_memory) == (81559 * MiB, False)
    assert device.pci_bus_id == "00000000:01:00.0"
    # No query of NVML's counts the multiprocessors of a whole GPU.
    assert device.multiprocessors is None
    assert not device.is_mig
    assert (answer.driver, answer.driver_cuda) == ("580.159.04", (13, 0))
    assert answer.found_library
    assert (answer.problem, answer.notes) == (None, ())


def test_order_is_that_of_the_pci_bus(read: ReadNvml) -> None:
    # ORD-1 and NVML's own words: its index order is not guaranteed.
    far = FakeGpu(uuid="GPU-aa", pci=(1, 0, 0))
    late = FakeGpu(uuid="GPU-bb", pci=(0, 0xA0, 0))
    early = FakeGpu(uuid="GPU-cc", pci=(0, 0x1F, 1))
    first = FakeGpu(uuid="GPU-dd", pci=(0, 0x1F, 0))
    nowhere = FakeGpu(uuid="GPU-ee", pci=None)
    answer = read(nowhere, far, late, early, first)
    assert [d.uuid for d in answer.devices] == ["GPU-dd", "GPU-cc", "GPU-bb", "GPU-aa", "GPU-ee"]
    assert [d.index for d in answer.devices] == [0, 1, 2, 3, 4]
    assert [str(d) for d in answer.devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    assert answer.devices[2].pci_bus_id == "00000000:A0:00.0"
    assert answer.devices[4].pci_bus_id is None


def test_no_gpu_is_not_a_problem(read: ReadNvml) -> None:
    answer = read()
    assert (answer.devices, answer.problem, answer.found_library) == ((), None, True)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        pytest.param(4, "nvml-permission", id="4-no-permission"),
        pytest.param(9, "driver-not-loaded", id="9-driver-not-loaded"),
        pytest.param(13, "nvml-too-old", id="13-function-not-found"),
        pytest.param(15, "gpu-lost", id="15-gpu-is-lost"),
        pytest.param(17, "nvml-permission", id="17-operating-system"),
        pytest.param(18, "nvml-mismatch", id="NVML-1-mismatch"),
        pytest.param(999, "nvml-unknown", id="NVML-2-unknown"),
    ],
)
def test_failing_init_is_a_problem_of_its_own(read: ReadNvml, code: int, problem: str) -> None:
    answer = read(H100, init=code)
    assert answer == NvmlAnswer(problem=PROBLEMS[problem], found_library=True)


def test_mismatch_says_to_reboot_or_reload() -> None:
    # NVML-1
    remedy = PROBLEMS["nvml-mismatch"].remedy
    assert "reboot" in remedy
    assert "reload" in remedy
    assert "kernel module" in remedy


def test_unfamiliar_code_is_quoted(read: ReadNvml) -> None:
    answer = read(H100, init=7)
    assert answer.problem is not None
    assert (answer.problem.code, answer.problem.have) == ("nvml-unknown", "NVML, which fails with code 7")


def test_problems_are_short_and_say_what_to_do() -> None:
    for code, problem in PROBLEMS.items():
        assert problem.code == code
        assert len(problem.have) <= 32, problem.have
        assert problem.remedy.endswith("."), problem.remedy


def test_missing_library(ask: Callable[..., Any], tmp_path: Path) -> None:
    # An empty file of that name can't be loaded: the same answer on a machine that has a real one.
    (tmp_path / "libnvidia-ml.so.1").touch()
    answer = ask("read_nvml()", client_environment(tmp_path))
    assert (answer.found_library, answer.devices) == (False, ())
    assert answer.problem == PROBLEMS["nvml-missing"]


def test_failing_count_is_a_problem(read: ReadNvml) -> None:
    answer = read(H100, count=999)
    assert (answer.devices, answer.problem) == ((), PROBLEMS["nvml-unknown"])
    assert answer.driver == "580.159.04"


@pytest.mark.parametrize("call", ["handle", "uuid"])
def test_lost_gpu_does_not_hide_the_others(read: ReadNvml, call: str) -> None:
    lost = FakeGpu(uuid="GPU-33", pci=(0, 3, 0), codes={call: 15})
    answer = read(lost, H100, T4)
    assert [d.uuid for d in answer.devices] == [H100.uuid, T4.uuid]
    assert answer.problem is None
    (note,) = answer.notes
    assert "NVML index 0" in note
    assert "gpu-lost" in note


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        ({"handle": 15}, "gpu-lost"),
        ({"handle": 4}, "nvml-permission"),
        ({"handle": 999}, "nvml-unknown"),
        ({"uuid": 15}, "gpu-lost"),
        ({"uuid": 3}, "gpu-no-uuid"),
        ({"uuid": 999}, "gpu-no-uuid"),
    ],
)
def test_only_gpu_that_fails_is_a_problem(read: ReadNvml, codes: dict[str, int], problem: str) -> None:
    answer = read(FakeGpu(codes=codes))
    assert answer.devices == ()
    assert answer.problem == PROBLEMS[problem]
    assert len(answer.notes) == 1


@pytest.mark.parametrize("uuid", [None, "", "GPU-", b"GPU-\xf8\x91"])
def test_uuid_that_names_nothing(read: ReadNvml, uuid: Any) -> None:
    answer = read(FakeGpu(uuid=uuid))
    assert (answer.devices, answer.problem) == ((), PROBLEMS["gpu-no-uuid"])


def test_uuid_without_prefix_gets_one(read: ReadNvml) -> None:
    # NVML-4: Jetson's NVML leaves the prefix out, which CUDA wants in a mask.
    answer = read(FakeGpu(uuid="54d0709b-75ef-5d86-8d2a-000000000000"))
    assert [d.uuid for d in answer.devices] == ["GPU-54d0709b-75ef-5d86-8d2a-000000000000"]


def test_nvml_that_dies_in_the_middle(read: ReadNvml) -> None:
    # NVML-2: what was answered stays, what was not is a problem and never "no GPU".
    answer = read(H100, T4, alive=0)
    assert (answer.devices, answer.problem) == ((), PROBLEMS["nvml-unknown"])
    assert len(answer.notes) == 2
    # A handle and a UUID are answered, nothing after them.
    answer = read(H100, T4, alive=3)
    (device,) = answer.devices
    assert device.uuid == H100.uuid
    assert (device.name, device.capability, device.total_memory) == ("unknown GPU", None, None)


@pytest.mark.parametrize("call", ["name", "cap", "mem", "pci", "mig", "sms"])
def test_failing_query_makes_one_fact_unknown(read: ReadNvml, call: str) -> None:
    # NVML-8
    answer = read(FakeGpu(codes={call: 3 if call == "sms" else 999}))
    (device,) = answer.devices
    facts = {"name": device.name, "cap": device.capability, "mem": device.total_memory, "pci": device.pci_bus_id}
    known = {"name": "NVIDIA H100 80GB HBM3", "cap": (9, 0), "mem": 81559 * MiB, "pci": "00000000:01:00.0"}
    unknown = {"name": "unknown GPU"}
    assert facts == {**known, **({call: unknown.get(call)} if call in known else {})}


def test_memory_version_2_then_1(read: ReadNvml, old_nvml_folder: Path) -> None:
    # NVML-14, and a library that has the function and refuses it.
    for answer in (read(H100, folder=old_nvml_folder), read(FakeGpu(codes={"mem2": 25}))):
        (device,) = answer.devices
        assert (device.total_memory, device.unified_memory) == (81559 * MiB, False)
        assert answer.driver_cuda == (13, 0)


def test_zero_bytes_are_unknown(read: ReadNvml) -> None:
    # MIG-4: an error that is counted as 0 bytes skips every large test.
    (device,) = read(FakeGpu(mib=0)).devices
    assert device.total_memory is None


def test_unified_memory_is_the_hosts(read: ReadNvml) -> None:
    # NVML-5
    (device,) = read(GB10).devices
    assert (device.total_memory, device.unified_memory) == (127600748 * 1024, True)
    assert device.pci_bus_id == "0000000F:01:00.0"


@pytest.mark.parametrize(
    ("name", "capability"), [("Orin (nvgpu)", (8, 7)), ("NVIDIA Thor", (11, 0)), ("NVIDIA GB10", None)]
)
def test_carve_out_is_not_what_cuda_can_use(read: ReadNvml, name: str, capability: tuple[int, int] | None) -> None:
    (device,) = read(FakeGpu(name=name, capability=capability, mib=2048)).devices
    assert (device.total_memory, device.unified_memory) == (127600748 * 1024, True)


def test_unified_part_without_meminfo_keeps_what_nvml_says(read: ReadNvml, root: Path) -> None:
    (root / "proc/meminfo").unlink()
    (device,) = read(FakeGpu(name="NVIDIA GB10", capability=(12, 1), mib=2048)).devices
    assert (device.total_memory, device.unified_memory) == (2048 * MiB, True)
    (device,) = read(GB10).devices
    assert (device.total_memory, device.unified_memory) == (None, True)


def test_part_of_an_unknown_family_without_memory_query_is_unified(read: ReadNvml) -> None:
    (device,) = read(FakeGpu(name="NVIDIA N9", capability=(17, 1), codes={"mem": 3})).devices
    assert (device.total_memory, device.unified_memory) == (127600748 * 1024, True)


@pytest.mark.parametrize("code", [3, 4, 999])
def test_silent_memory_of_a_discrete_part_is_unknown(read: ReadNvml, code: int) -> None:
    (device,) = read(FakeGpu(name="NVIDIA L40S-48C", capability=(8, 9), codes={"mem": code})).devices
    assert (device.total_memory, device.unified_memory) == (None, False)


def test_grace_blackwell_is_not_gb10(read: ReadNvml) -> None:
    (device,) = read(FakeGpu(name="NVIDIA GB100", capability=(10, 0), mib=189471)).devices
    assert (device.total_memory, device.unified_memory) == (189471 * MiB, False)


@pytest.mark.parametrize(
    ("name", "text"), [(b"\xf8\x91\xa2", "\ufffd\ufffd\ufffd"), (b"Tesla \xe2\x84\xa2 T4", "Tesla \u2122 T4")]
)
def test_undecodable_name(read: ReadNvml, name: bytes, text: str) -> None:
    # NVML-9
    (device,) = read(FakeGpu(name=name)).devices
    assert (device.name, device.uuid) == (text, H100.uuid)


class TestMig:
    ONE = FakeInstance()
    TWO = FakeInstance(
        uuid="MIG-6b6b6b6b-0000-4000-8000-000000000002", name="A100 MIG 2g.10gb", mib=9856, ids=(3, 1), slot=4, sms=28
    )

    def a100(self, *instances: FakeInstance, **changes: Any) -> FakeGpu:
        gpu: dict[str, Any] = {"name": "NVIDIA A100-SXM4-40GB", "capability": (8, 0), "mib": 40960, "pci": (0, 1, 0)}
        return FakeGpu(mig=instances, **{**gpu, **changes})

    def test_instances_stand_for_their_gpu(self, read: ReadNvml) -> None:
        # MIG-1; the slots have gaps, and T4 comes after on the bus.
        answer = read(T4, self.a100(self.ONE, self.TWO))
        one, two, t4 = answer.devices
        assert (one.uuid, two.uuid, t4.uuid) == (self.ONE.uuid, self.TWO.uuid, T4.uuid)
        assert (one.mig_parent, two.mig_parent, t4.mig_parent) == (H100.uuid, H100.uuid, None)
        assert (one.mig_ids, two.mig_ids, t4.mig_ids) == ((7, 0), (3, 1), None)
        assert (one.name, two.name) == ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100 MIG 2g.10gb")
        assert (one.total_memory, two.total_memory) == (4864 * MiB, 9856 * MiB)
        assert (one.capability, two.capability) == ((8, 0), (8, 0))
        assert (one.multiprocessors, two.multiprocessors) == (14, 28)
        assert (one.pci_bus_id, two.pci_bus_id) == ("00000000:01:00.0", "00000000:01:00.0")
        assert (one.is_mig, two.is_mig, t4.is_mig) == (True, True, False)
        assert (answer.problem, answer.notes) == (None, ())

    def test_forbidden_memory_of_the_gpu_is_not_needed(self, read: ReadNvml) -> None:
        # MIG-3
        (device,) = read(self.a100(self.ONE, codes={"mem": 4})).devices
        assert device.total_memory == 4864 * MiB

    def test_memory_is_never_that_of_the_gpu(self, read: ReadNvml) -> None:
        # MIG-3, MIG-4
        (device,) = read(self.a100(FakeInstance(codes={"mem": 4}))).devices
        assert device.total_memory is None

    def test_unified_gpu_gives_its_instances_no_memory_of_the_host(self, read: ReadNvml) -> None:
        silent = FakeInstance(codes={"mem": 3})
        (device,) = read(self.a100(silent, name="NVIDIA Thor", capability=(11, 0))).devices
        assert (device.total_memory, device.unified_memory) == (None, True)

    def test_what_an_instance_does_not_tell_is_unknown(self, read: ReadNvml) -> None:
        bare = FakeInstance(codes={"gi": 999, "sms": 999, "name": 999})
        (device,) = read(self.a100(bare)).devices
        assert (device.mig_ids, device.multiprocessors) == (None, None)
        assert device.name == "NVIDIA A100-SXM4-40GB MIG"

    def test_parent_without_uuid(self, read: ReadNvml) -> None:
        (device,) = read(self.a100(self.ONE, codes={"uuid": 4})).devices
        assert (device.uuid, device.mig_parent, device.is_mig) == (self.ONE.uuid, None, True)

    def test_driver_that_does_not_count_slots(self, read: ReadNvml) -> None:
        answer = read(self.a100(self.ONE, self.TWO, codes={"slots": 13}))
        assert [d.uuid for d in answer.devices] == [self.ONE.uuid, self.TWO.uuid]

    def test_gpu_without_instances_is_left_out(self, read: ReadNvml) -> None:
        answer = read(self.a100(), T4)
        assert [d.uuid for d in answer.devices] == [T4.uuid]
        assert answer.problem is None
        assert "mig-empty" in answer.notes[0]
        assert read(self.a100()).problem == PROBLEMS["mig-empty"]

    def test_instance_that_fails_does_not_hide_the_other(self, read: ReadNvml) -> None:
        answer = read(self.a100(FakeInstance(codes={"handle": 15}), self.TWO))
        assert [d.uuid for d in answer.devices] == [self.TWO.uuid]
        (note,) = answer.notes
        assert "gpu-lost" in note
        assert read(self.a100(FakeInstance(codes={"uuid": 15}))).problem == PROBLEMS["gpu-lost"]


class TestUsage:
    """What is in use of a device now."""

    MIG = FakeGpu(uuid="GPU-33333333-2222-4333-8444-555555555555", mig=[FakeInstance()], pci=(0, 3, 0))

    @pytest.fixture
    def usage(self, ask: Callable[..., Any], nvml_folder: Path, tmp_path: Path) -> Callable[..., Any]:
        def usage(gpus: list[FakeGpu], *lines: str, folder: Path = nvml_folder, **settings: object) -> Any:
            (tmp_path / "usage").write_text("".join(lines))
            environ = nvml_environment(gpus, usage=tmp_path / "usage", **settings)
            uuids = [device.uuid for gpu in gpus for device in (gpu.mig or [gpu])]
            return ask(f"read_usage({uuids!r})", client_environment(folder, **environ))

        return usage

    def test_memory_and_processes(self, usage: Callable[..., Any]) -> None:
        line = usage_line(str(H100.uuid), 41000, 559, {77: 40000, 78: None})
        found = usage([H100, T4], line)
        total = 81559 * MiB
        processes = ((77, 40000 * MiB), (78, None))
        assert found == {
            H100.uuid: DeviceUsage(total, 41000 * MiB, 40000 * MiB, processes),
            T4.uuid: DeviceUsage(15360 * MiB, 0, 15360 * MiB, ()),
        }

    def test_an_instance_has_its_own(self, usage: Callable[..., Any]) -> None:
        uuid = FakeInstance().uuid
        found = usage([self.MIG], usage_line(str(self.MIG.uuid), 9000), usage_line(uuid, 64, 0, {5: 64}))
        assert found == {uuid: DeviceUsage(4864 * MiB, 64 * MiB, 4800 * MiB, ((5, 64 * MiB),))}

    @pytest.mark.parametrize("call", ["handle", "mem"])
    def test_what_nvml_does_not_tell_is_left_out(self, usage: Callable[..., Any], call: str) -> None:
        lost = FakeGpu(codes={call: 15})
        assert list(usage([lost, T4])) == [T4.uuid]

    def test_processes_that_are_not_told_are_unknown(self, usage: Callable[..., Any]) -> None:
        assert usage([FakeGpu(codes={"processes": 4})])[H100.uuid].processes is None

    def test_an_old_driver_counts_what_it_keeps_as_used(self, usage: Callable[..., Any], old_nvml_folder: Path) -> None:
        found = usage([H100], usage_line(str(H100.uuid), 1000, 559), folder=old_nvml_folder)
        assert found[H100.uuid].used == 1559 * MiB

    def test_a_nvml_that_fails_tells_nothing(self, usage: Callable[..., Any]) -> None:
        assert usage([H100], init=999) == {}

    def test_unified_memory_is_not_judged(self, usage: Callable[..., Any]) -> None:
        assert usage([GB10]) == {}


@pytest.mark.parametrize(("cuda", "version"), [(13000, (13, 0)), (12080, (12, 8)), (11040, (11, 4)), (0, None)])
def test_cuda_version_of_the_driver(read: ReadNvml, cuda: int, version: tuple[int, int] | None) -> None:
    # DRV-1
    assert read(H100, cuda=cuda).driver_cuda == version


def test_cuda_version_that_fails_is_unknown(read: ReadNvml) -> None:
    answer = read(H100, cuda_rc=12)
    assert (answer.driver_cuda, len(answer.devices)) == (None, 1)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        pytest.param({}, ["init", "shutdown"], id="works"),
        pytest.param({"count": 999}, ["init", "shutdown"], id="count-fails"),
        pytest.param({"alive": 2}, ["init", "shutdown"], id="dies"),
        pytest.param({"init": 18}, ["init"], id="init-fails"),
    ],
)
def test_every_init_that_succeeds_is_shut_down(
    read: ReadNvml, tmp_path: Path, settings: dict[str, object], lines: list[str]
) -> None:
    read(H100, log=tmp_path / "log", **settings)
    assert (tmp_path / "log").read_text().splitlines() == lines


class TestWsl:
    """NVML-3: the first library on the path is the wrong one."""

    @pytest.fixture
    def wrong_first(self, nvml_folder: Path, root: Path) -> dict[str, str]:
        build_nvml(root / "usr/lib/wsl/lib")
        broken = root / "distribution"
        broken.mkdir()
        (broken / "libnvidia-ml.so.1").touch()
        return client_environment(broken, **nvml_environment([T4]))

    def test_windows_library_goes_first(self, ask: Callable[..., Any], wrong_first: dict[str, str], root: Path) -> None:
        (root / "proc/version").write_text("Linux version 5.15.167.4-microsoft-standard-WSL2 (gcc)\n")
        answer = ask(f"read_nvml(Path({str(root)!r}))", wrong_first)
        assert [d.uuid for d in answer.devices] == [T4.uuid]

    def test_elsewhere_it_is_not_looked_for(
        self, ask: Callable[..., Any], wrong_first: dict[str, str], root: Path
    ) -> None:
        (root / "proc/version").write_text("Linux version 6.8.0-45-generic (gcc)\n")
        assert not ask(f"read_nvml(Path({str(root)!r}))", wrong_first).found_library

    def test_unusable_windows_library_is_passed_over(
        self, ask: Callable[..., Any], nvml_folder: Path, root: Path
    ) -> None:
        (root / "proc/version").write_text("Microsoft\n")
        (root / "usr/lib/wsl/lib").mkdir(parents=True)
        (root / "usr/lib/wsl/lib/libnvidia-ml.so.1").touch()
        answer = ask(f"read_nvml(Path({str(root)!r}))", client_environment(nvml_folder, **nvml_environment([T4])))
        assert [d.uuid for d in answer.devices] == [T4.uuid]


class BytesBinding(types.ModuleType):
    """The module `pynvml` as old releases are: bytes for texts, and few functions."""

    NVMLError = type("NVMLError", (Exception,), {"value": 3})

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-11111111"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"Tesla T4"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(total=15360 * MiB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (7, 5)


def test_binding_that_answers_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # NVML-10
    monkeypatch.setitem(sys.modules, "pynvml", BytesBinding("pynvml"))
    answer = read_nvml(tmp_path)
    (device,) = answer.devices
    assert (device.uuid, device.name) == ("GPU-11111111", "Tesla T4")
    assert (device.total_memory, device.capability) == (15360 * MiB, (7, 5))
    assert (answer.driver, answer.driver_cuda, answer.problem) == (None, None, None)


def test_binding_that_warns_at_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # NVML-11
    source = "import warnings\nwarnings.warn('The pynvml package is deprecated', FutureWarning)\nnvmlInit = None\n"
    (tmp_path / "pynvml.py").write_text(source)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr("pytest_cudaenv.host.nvml._is_library_missing", lambda _: False)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = read_nvml(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml")
    assert answer.problem == PROBLEMS["nvml-too-old"]


def test_binding_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    answer = read_nvml(tmp_path)
    assert (answer.found_library, answer.problem) == (False, PROBLEMS["nvml-missing"])
    assert "pynvml" in answer.notes[0]


def test_importing_the_host_package_is_light() -> None:
    code = (
        "import sys; from pytest_cudaenv.host import catalog, detect, driver, mask, nvml, software\n"
        "print(sorted({'pynvml', 'torch', 'pytest', 'packaging'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=client_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
