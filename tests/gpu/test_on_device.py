"""Against the real driver: the facts, the masks and the fixtures agree with what CUDA says.

Run by the plugin itself: on a host without devices these tests skip, each with its reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaenv import requires_bf16, requires_cuda
from pytest_cudaenv.host.detect import detect_host
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.host.driver import ask_driver
from pytest_cudaenv.host.mask import DEVICE_ORDER, VISIBLE_DEVICES, read_mask


def unmasked() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in {VISIBLE_DEVICES, DEVICE_ORDER}}


@requires_cuda
def test_a_device_is_what_torch_says_it_is(cuda_device: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    properties = torch.cuda.get_device_properties(cuda_device)
    assert cuda_device.name == properties.name
    assert cuda_device.capability == (properties.major, properties.minor)
    assert cuda_device.uuid == f"GPU-{properties.uuid}"
    assert cuda_device.total_memory == pytest.approx(properties.total_memory, rel=0.05)
    tensor = torch.ones(4, device=cuda_device)
    assert tensor.device == torch.device("cuda", cuda_device.index)
    assert torch.nn.Linear(4, 1).to(cuda_device)(tensor).is_cuda


@requires_cuda
def test_nvml_and_the_driver_list_the_same_devices() -> None:
    host = detect_host({})
    answer = ask_driver({**unmasked(), DEVICE_ORDER: "PCI_BUS_ID"})
    assert answer.cu_init == 0
    assert answer.version == host.driver_cuda
    facts = [(d.uuid, d.name, d.capability, d.pci_bus_id) for d in host.devices]
    assert facts == [(d.uuid, d.name, d.capability, d.pci_bus_id) for d in answer.devices]


@requires_cuda
@pytest.mark.parametrize(
    ("mask", "order"),
    [
        (None, None), ("0", None), ("-1", None), ("", None), ("0,0", None), ("GPU", None), ("GPU-", None),
        ("MIG-", None), ("0-3", None), ("0,9", None), ("4294967296", None), ("[0]", None),
        ("{first}", None), ("{first}x", None),
        ("{last},{first}", None), ("{first},0", None), ("{first}", "PCI_BUS_ID"), ("0", ""), (None, "pci_bus_id"),
    ],
)  # fmt: skip
def test_masks_are_read_as_the_driver_reads_them(mask: str | None, order: str | None) -> None:
    host = detect_host({})
    if mask is not None:
        mask = mask.format(first=host.devices[0].uuid, last=host.devices[-1].uuid)
    environ = unmasked() | ({VISIBLE_DEVICES: mask} if mask is not None else {})
    answer = ask_driver(environ | ({DEVICE_ORDER: order} if order is not None else {}))
    reading = read_mask(mask, order, host.devices, host.fastest_first)
    assert (reading.cu_init, [d.uuid for d in reading.devices]) == (answer.cu_init, [d.uuid for d in answer.devices])


SUITE = """
import json, sys
import torch
import pytest
from pytest_cudaenv import requires_cuda
from pytest_cudaenv.host.driver import is_cuda_initialised

# What a suite asks before it has heard of the plugin.
CAPABILITY = torch.cuda.get_device_capability()
COUNT, NAME = torch.cuda.device_count(), torch.cuda.get_device_properties(0).name
BF16, FREE = torch.cuda.is_bf16_supported(), torch.cuda.mem_get_info()[0]

@pytest.mark.skipif(CAPABILITY < (1, 0), reason="never")
def test_collecting_left_cuda_alone():
    assert is_cuda_initialised() is False
    assert (CAPABILITY, COUNT, NAME) == (
        torch.cuda.get_device_capability(), torch.cuda.device_count(), torch.cuda.get_device_name()
    )
    assert FREE > 0

@requires_cuda(devices={count})
def test_devices(cuda_devices):
    seen = ["GPU-" + str(torch.cuda.get_device_properties(d).uuid) for d in cuda_devices]
    assert [d.uuid for d in cuda_devices] == seen == {uuids!r}
    assert torch.cuda.device_count() == {count}
"""


TWO = requires_cuda(devices=2)


@requires_cuda
@pytest.mark.parametrize(
    "mask",
    [
        "unset", "0", "first",
        pytest.param("1", marks=TWO), pytest.param("1,0", marks=TWO),
        pytest.param("last", marks=TWO), pytest.param("last,first", marks=TWO),
    ],
)  # fmt: skip
def test_fixtures_name_the_devices_that_cuda_gives(mask: str, tmp_path: Path) -> None:
    """A suite with questions at module level, under a mask: CUDA is left alone, and the devices are CUDA's."""
    host = detect_host({})
    words = {"0": 0, "1": 1, "first": 0, "last": len(host.devices) - 1}
    chosen = range(len(host.devices)) if mask == "unset" else [words[token] for token in mask.split(",")]
    uuids = [host.devices[i].uuid for i in chosen]
    (tmp_path / "test_suite.py").write_text(SUITE.format(count=len(chosen), uuids=uuids))
    environ = unmasked()
    if mask != "unset":
        environ[VISIBLE_DEVICES] = mask if mask[0].isdigit() else ",".join(uuids)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-o", "cuda_unmet=fail",
         str(tmp_path)],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "2 passed" in run.stdout, run.stdout + run.stderr
    assert "CUDA was initialised while collecting" not in run.stdout


@requires_cuda
def test_the_command_lists_what_cuda_lists() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest_cudaenv", "devices", "--json"], capture_output=True, text=True, check=True
    )
    answer = ask_driver(os.environ)
    assert [(d["index"], d["uuid"]) for d in json.loads(run.stdout)] == [(d.index, d.uuid) for d in answer.devices]


@requires_cuda
@pytest.mark.parametrize("again", [1, 2])
def test_cuda_numbers_depend_on_the_id_alone(
    cuda_device: CudaDevice, again: int, request: pytest.FixtureRequest
) -> None:
    torch = pytest.importorskip("torch")
    from pytest_cudaenv import current

    first = torch.rand(8, device=cuda_device)
    torch.cuda.manual_seed(current().seed)
    assert torch.equal(first, torch.rand(8, device=cuda_device))


@requires_bf16
def test_bf16_is_native_where_the_marker_lets_it_run(cuda_device: CudaDevice, mixed_precision: dict[str, bool]) -> None:
    torch = pytest.importorskip("torch")
    assert torch.cuda.is_bf16_supported(including_emulation=False)
    assert mixed_precision == {"bf16": True, "fp16": False}
    a = torch.randn(64, 64, device=cuda_device, dtype=torch.bfloat16)
    assert torch.allclose((a @ a).float(), a.float() @ a.float(), atol=1.0)


@requires_cuda(devices=2)
def test_two_devices_are_two(cuda_devices: tuple[CudaDevice, ...]) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.full((4,), float(i), device=d) for i, d in enumerate(cuda_devices)]
    assert tensors[0].device != tensors[1].device
    assert torch.equal(tensors[0].to(cuda_devices[1]) + 1, tensors[1])
