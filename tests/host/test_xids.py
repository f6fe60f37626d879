"""Xid errors as NVML's events tell them, each case in a process of its own against the fake library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.host.nvml import Xid
from tests.native.build import FakeGpu, FakeInstance, client_environment, nvml_environment

FIRST = FakeGpu()
SECOND = replace(FIRST, uuid="GPU-22222222-2222-4333-8444-555555555555", pci=(0, 2, 0))
ONE = FakeInstance(uuid="MIG-5a5a5a5a-0000-4000-8000-000000000001", ids=(7, 0))
OTHER = FakeInstance(uuid="MIG-5a5a5a5a-0000-4000-8000-000000000002", ids=(9, 0), slot=1)
SPLIT = replace(FIRST, mig=[ONE, OTHER])

Watch = Callable[..., list[str]]

CLIENT = """
import sys
from pytest_cudaenv.host.nvml import XidWatch, read_nvml
events, *uuids = sys.argv[1:]
devices = [device for device in read_nvml().devices if device.uuid in uuids]
assert len(devices) == len(uuids)
watch = XidWatch.start(devices)
if watch is None: print("silent")
while watch is not None and (line := sys.stdin.readline()):
    with open(events, "a") as file: file.write(line.replace(",", "\\n") + "\\n")
    print([[xid.code for xid in watch.seen() if xid.concerns(device)] for device in devices])
if watch is not None: watch.close()
"""


@pytest.fixture
def watch(nvml_folder: Path, tmp_path: Path) -> Watch:
    def watch(
        gpus: list[FakeGpu], uuids: list[str], *lines: str, folder: Path = nvml_folder, **settings: object
    ) -> list[str]:
        """What a watch of these devices has seen of each after each line of events: `GPU TYPE XID INSTANCE, ...`."""
        events, log = tmp_path / "events", tmp_path / "log"
        for left in (events, log):
            left.unlink(missing_ok=True)
        environ = client_environment(folder, **nvml_environment(gpus, events=events, log=log, **settings))
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", CLIENT, str(events), *uuids],
            env=environ, input="\n".join(lines), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        noted = log.read_text().split()
        assert noted.count("init") == noted.count("shutdown"), "NVML is left as it was"
        assert noted.count("listen") == noted.count("unlisten")
        return done.stdout.split("\n")[:-1]

    return watch


def test_what_comes_after_the_start_is_told_each_once(watch: Watch) -> None:
    told = watch([FIRST, SECOND], [FIRST.uuid, SECOND.uuid], "0 8 43 -1", "1 8 79 -1,0 8 43 -1", "0 8 13 -1")
    assert told == ["[[43], []]", "[[43], [79]]", "[[43, 13], [79]]"]


def test_other_devices_and_other_events_are_not_told(watch: Watch) -> None:
    assert watch([FIRST, SECOND], [SECOND.uuid], "0 8 43 -1,1 16 1 -1,1 8 31 -1") == ["[[31]]"]


def test_instances_of_a_gpu(watch: Watch) -> None:
    """Events come from the whole GPU, and name an instance where it is known."""
    assert watch([SPLIT], [ONE.uuid, OTHER.uuid], "0 8 43 7", "0 8 79 -1") == ["[[43], []]", "[[43, 79], [79]]"]
    assert watch([SPLIT], [OTHER.uuid], "0 8 43 7") == ["[[]]"]


@pytest.mark.parametrize(
    ("gpu", "settings"),
    [
        (replace(FIRST, events=16), {}),
        (replace(FIRST, codes={"events": 3}), {}),
        (replace(FIRST, codes={"events": 4}), {}),
        (FIRST, {"event_set": 999}),
    ],
    ids=["no such events", "not supported", "no permission", "no set"],
)
def test_where_they_are_not_supported_nothing_is_said(watch: Watch, gpu: FakeGpu, settings: dict[str, int]) -> None:
    assert watch([gpu], [gpu.uuid], "0 8 43 -1", **settings) == ["silent"]


def test_one_of_two_that_cannot(watch: Watch) -> None:
    deaf = replace(FIRST, codes={"events": 3})
    assert watch([deaf, SECOND], [deaf.uuid, SECOND.uuid], "0 8 43 -1,1 8 79 -1") == ["[[], [79]]"]


def test_an_old_library(watch: Watch, old_nvml_folder: Path) -> None:
    assert watch([FIRST], [FIRST.uuid], "0 8 43 -1", folder=old_nvml_folder) == ["silent"]


def test_no_gpu(watch: Watch) -> None:
    assert watch([], []) == ["silent"]


def test_whom_it_concerns() -> None:
    whole = CudaDevice(index=0, uuid="GPU-1", name="x", capability=(9, 0), total_memory=None)
    part = replace(whole, uuid="MIG-1", mig_parent="GPU-1", mig_ids=(7, 0))
    assert Xid(43, "GPU-1", None).concerns(whole)
    assert Xid(43, "GPU-1", None).concerns(part)
    assert Xid(43, "GPU-1", 7).concerns(part)
    assert Xid(43, "GPU-1", 7).concerns(replace(part, mig_ids=None)), "which instance this is was not told"
    assert not Xid(43, "GPU-1", 9).concerns(part)
    assert not Xid(43, "GPU-2", None).concerns(whole)
