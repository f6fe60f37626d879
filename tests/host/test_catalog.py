"""Simulated hosts: the same everywhere, and told apart by the first digit of their UUIDs."""

from __future__ import annotations

import pytest

from pytest_cudaenv.host.catalog import (
    ALIASES,
    CATALOG,
    MAX_COUNT,
    UnknownDeviceError,
    parse_simulated,
    simulated_device,
    simulated_host,
)
from pytest_cudaenv.host.mask import read_mask
from pytest_cudaenv.host.software import Software, TorchBuild

GiB = 1024**3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100", ("h100", 1)),
        ("h100:2", ("h100", 2)),
        (" H100:16 ", ("h100", 16)),
        ("a100-40:3", ("a100", 3)),
        ("dgx-spark", ("gb10", 1)),
        ("l4:07", ("l4", 7)),
    ],
)
def test_parse(text: str, expected: tuple[str, int]) -> None:
    assert parse_simulated(text) == expected


@pytest.mark.parametrize("text", ["", "h900", "h100x2", ":2", "cuda"])
def test_unknown_name_lists_the_choices(text: str) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        parse_simulated(text)
    for key in CATALOG:
        assert key in str(caught.value)


@pytest.mark.parametrize(
    "text", ["h100:0", "h100:17", "h100:-1", "h100:", "h100:two", "h100:1.5", "h100:\u0662", "h100:1:1"]
)
def test_count_outside_its_bounds(text: str) -> None:
    with pytest.raises(UnknownDeviceError, match="a number from 1 to 16"):
        parse_simulated(text)


def test_aliases_lead_to_the_catalogue() -> None:
    assert set(ALIASES.values()) <= set(CATALOG)
    assert not set(ALIASES) & set(CATALOG)


def test_uuids_are_the_same_on_every_machine() -> None:
    assert simulated_device("h100", 0).uuid == "GPU-007a0128-e78b-3fb0-528c-d7c0334b3781"
    assert simulated_host("h100:2") == simulated_host("h100:2")


@pytest.mark.parametrize("key", CATALOG)
def test_one_digit_tells_devices_of_a_host_apart(key: str) -> None:
    devices = simulated_host(f"{key}:{MAX_COUNT}").devices
    assert [d.uuid[4] for d in devices] == list("0123456789abcdef")
    assert [d.index for d in devices] == list(range(MAX_COUNT))
    assert len({d.pci_bus_id for d in devices}) == MAX_COUNT
    assert [d.pci_bus_id for d in devices] == sorted(d.pci_bus_id or "" for d in devices)
    for device in devices:
        (seen,) = read_mask(device.uuid[:5], None, devices).devices
        assert seen.uuid == device.uuid


def test_uuids_of_different_models_differ() -> None:
    every = [simulated_device(key, i).uuid for key in CATALOG for i in range(MAX_COUNT)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("key", "capability", "gib", "unified"),
    [
        # MEM-1, and the parts that are easily mistaken for their neighbours
        ("t4", (7, 5), 15.0, False),
        ("l4", (8, 9), 22.494, False),
        ("h100", (9, 0), 79.647, False),
        ("gh200", (9, 0), 95.577, False),
        ("b300", (10, 3), 268.594, False),
        ("orin", (8, 7), 61.368, True),
        ("thor", (11, 0), 122.8, True),
        ("rtx5090", (12, 0), 31.843, False),
        ("gb10", (12, 1), 121.689, True),
    ],
)
def test_facts(key: str, capability: tuple[int, int], gib: float, unified: bool) -> None:
    device = simulated_device(key, 0)
    assert device.capability == capability
    assert device.total_memory == pytest.approx(gib * GiB, rel=1e-4)
    assert device.unified_memory is unified
    assert not device.is_mig


def test_host_is_marked_and_has_a_driver() -> None:
    host = simulated_host("A100-40:2")
    assert (host.simulated, host.driver, host.driver_cuda) == ("a100:2", "580.95.05", (13, 0))
    assert (host.problem, host.fastest_first, host.notes) == (None, None, ())


def test_torch_is_taken_to_be_a_build_that_fits() -> None:
    cpu = Software(torch=TorchBuild("2.13.0+cpu"))
    assert simulated_host("h100", cpu).software.torch == TorchBuild("2.13.0", cuda="13.0")
    assert simulated_host("h100").software.torch is None
    assumed = cpu.assuming({"torch": "2.13.0+cpu"})
    assert simulated_host("h100", assumed).software.torch == TorchBuild("2.13.0+cpu")
