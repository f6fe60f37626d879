"""Devices that strangers fill, and memory that does not come back, with real locks and a told NVML."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Forked, GiB, Say, forever, is_free, until

from pytest_cudaenv.grants import leasing
from pytest_cudaenv.grants.lease_table import LeaseTable, LeaseTimeout
from pytest_cudaenv.grants.leasing import Demanded, DeviceOccupied, Leasing
from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.devices import DeviceUsage

DEVICES = simulated_host("h100:3").devices
A, B, C = (device.uuid for device in DEVICES)
TOTAL = DEVICES[0].total_memory or 0
ONE = Demanded(DEVICES, 1, test="test_a")
ALL = Demanded(DEVICES, 3, test="test_all")


class Nvml:
    """An NVML that answers what it is told; `then` holds what happens at a given question."""

    def __init__(self) -> None:
        self.used = dict.fromkeys((A, B, C), 0.5)
        self.processes: dict[str, tuple[tuple[int, int | None], ...]] = {}
        self.asked = 0
        self.then: dict[int, Callable[[], object]] = {}

    def __call__(self, uuids: Iterable[str]) -> dict[str, DeviceUsage]:
        self.asked += 1
        self.then.get(self.asked, bool)()
        return {
            u: DeviceUsage(TOTAL, int(self.used[u] * GiB), int(TOTAL - self.used[u] * GiB), self.processes.get(u, ()))
            for u in uuids
            if u in self.used
        }


@pytest.fixture
def nvml() -> Nvml:
    return Nvml()


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def table(folder: Path) -> LeaseTable:
    return LeaseTable(folder, run="run-1")


@pytest.fixture
def other(folder: Path) -> LeaseTable:
    """The table as another run sees it, which waits for ours no longer than it is told to."""
    return LeaseTable(folder, run="run-2")


@pytest.fixture
def leases(table: LeaseTable, nvml: Nvml, warned: list[str], monkeypatch: pytest.MonkeyPatch) -> Leasing:
    monkeypatch.setattr(leasing, "RECHECK", 0.02)
    monkeypatch.setattr(leasing, "RETURN", 0.2)
    return Leasing(table, 30.0, nvml, warned.append)


class TestStrangers:
    def test_a_host_at_rest_gives_the_first_device(self, leases: Leasing) -> None:
        assert leases.acquire(ONE).uuids == (A,)

    def test_what_they_fill_is_taken_last(self, leases: Leasing, nvml: Nvml) -> None:
        nvml.used[A] = 40
        assert leases.acquire(ONE).uuids == (B,)

    def test_what_they_use_a_little_is_taken_late(self, leases: Leasing, nvml: Nvml) -> None:
        nvml.used.update({A: 5, B: 40})
        assert leases.acquire(ONE).uuids == (C,)
        assert leases.acquire(replace(ONE, devices=DEVICES[:2])).uuids == (A,)

    def test_memory_that_is_there_is_enough(self, leases: Leasing, nvml: Nvml) -> None:
        nvml.used.update({A: 60, B: 40, C: 60})
        assert leases.acquire(replace(ONE, memory=30 * GiB, budget=30 * GiB)).uuids == (B,)

    def test_they_are_waited_for_while_the_device_stays_free_for_others(
        self, leases: Leasing, nvml: Nvml, other: LeaseTable
    ) -> None:
        nvml.used[B] = 40
        free: list[bool] = []
        nvml.then = {3: lambda: free.append(is_free(other, A, B, C)), 4: lambda: nvml.used.update({B: 0.5})}
        assert leases.acquire(ALL).uuids == (A, B, C)
        assert free == [True]
        assert leases.waited["test_all"].seconds > 0
        assert leases.waited["test_all"].whole

    def test_then_it_is_an_error_that_names_them(self, other: LeaseTable, nvml: Nvml, table: LeaseTable) -> None:
        leases = Leasing(table, 0.1, nvml)
        nvml.used[B] = 40
        nvml.processes[B] = ((os.getpid(), 30 * GiB), (2**30, None))
        with pytest.raises(DeviceOccupied) as caught:
            leases.acquire(replace(ALL, memory=60 * GiB))
        assert caught.value.code == "device-occupied"
        name = Path("/proc/self/comm").read_text().strip()
        for word in (
            "needs 3 of 3 device(s) with 60.0 GiB free",
            f"40.0 GiB of {DEVICES[1].name} {B} in use by pid {os.getpid()} ({name}) 30.0 GiB",
            f"pid {2**30} (not visible here) ?",
            "--cuda-wait",
        ):
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)
        assert is_free(other, A, B, C)

    def test_those_who_stay_are_waited_for_once(
        self, table: LeaseTable, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        leases = Leasing(table, 1.0, nvml)
        nvml.used.update({A: 40, B: 40, C: 40})
        for _ in range(2):
            with pytest.raises(DeviceOccupied):
                leases.acquire(ONE)
        assert sum(slept) == pytest.approx(1.0)
        nvml.used[A] = 1
        assert leases.acquire(ONE).uuids == (A,)

    def test_one_who_comes_while_the_device_is_taken_is_seen(self, leases: Leasing, nvml: Nvml) -> None:
        nvml.then = {2: lambda: nvml.used.update({A: 40})}
        assert leases.acquire(ONE).uuids == (B,)

    def test_one_who_leaves_while_others_are_waited_for_is_seen(
        self, leases: Leasing, nvml: Nvml, table: LeaseTable
    ) -> None:
        """The devices without strangers are held by our own run, for ever; the other one becomes free."""
        nvml.used[A] = 40
        with table.acquire([B, C], 2):
            nvml.then = {3: lambda: nvml.used.update({A: 1})}
            assert leases.acquire(ONE).uuids == (A,)

    def test_what_another_lease_uses_is_no_strangers(self, leases: Leasing, nvml: Nvml, other: LeaseTable) -> None:
        nvml.used[A] = 21
        twenty = Demanded(DEVICES[:1], 1, 20 * GiB, 20 * GiB)
        with other.acquire([A], 1, memory=20 * GiB, total={A: TOTAL}):
            assert leases.acquire(twenty).uuids == (A,)

    def test_a_sharer_finds_what_no_budget_explains(self, table: LeaseTable, nvml: Nvml, folder: Path) -> None:
        nvml.used[A] = 70
        other = LeaseTable(folder, run="run-2")
        with (
            other.acquire([A], 1, memory=20 * GiB, total={A: TOTAL}),
            pytest.raises(DeviceOccupied, match=r"49\.0 GiB"),
        ):
            Leasing(table, 0, nvml).acquire(Demanded(DEVICES[:1], 1, 20 * GiB, 20 * GiB))

    def test_another_run_that_holds_a_device_whole_is_busy_not_occupied(
        self, table: LeaseTable, nvml: Nvml, other: LeaseTable
    ) -> None:
        nvml.used[A] = 70
        with other.acquire([A], 1), pytest.raises(LeaseTimeout):
            Leasing(table, 0, nvml).acquire(replace(ONE, devices=DEVICES[:1]))

    def test_pytest_processes_of_this_run_are_no_strangers(
        self, leases: Leasing, table: LeaseTable, other: LeaseTable, nvml: Nvml
    ) -> None:
        """Unmarked tests use CUDA in one; in a container, NVML lists it under another number, or not at all."""
        nvml.used = {A: 30.0}

        def unmarked(say: Say) -> None:
            kept = table.announce()
            say("announced")
            forever(kept)

        one = replace(ONE, devices=DEVICES[:1])
        with Forked(unmarked) as child:
            assert child.line() == "announced"
            leases.release(leases.acquire(one))
            with pytest.raises(DeviceOccupied):
                Leasing(other, 0, nvml).acquire(one)
        until(lambda: not table.survey([A])[A].unleased)
        with pytest.raises(DeviceOccupied):
            Leasing(table, 0, nvml).acquire(one)

    @pytest.mark.parametrize("usage", [None, lambda uuids: {}], ids=["simulated", "silent"])
    def test_unknown_is_not_occupied(
        self, table: LeaseTable, other: LeaseTable, usage: leasing.ReadUsage | None
    ) -> None:
        leases = Leasing(table, 0, usage)
        leases.release(leases.acquire(ALL), DEVICES)
        assert is_free(other, A, B, C)

    def test_inherited_and_unified_devices_are_not_judged(self, folder: Path, nvml: Nvml) -> None:
        nvml.used.update({A: 70, B: 70})
        unified = replace(DEVICES[1], unified_memory=True)
        nested = LeaseTable(folder, inherited=frozenset({A}))
        leases = Leasing(nested, 0, nvml)
        assert leases.acquire(Demanded((DEVICES[0], unified), 2)).uuids == (A, B)

    def test_mig_instances_are_devices(self, table: LeaseTable, nvml: Nvml) -> None:
        instances = [replace(d, uuid=d.uuid.replace("GPU", "MIG"), mig_parent="GPU-1") for d in DEVICES]
        nvml.used = {d.uuid: 70 if n == 0 else 0 for n, d in enumerate(instances)}
        leases = Leasing(table, 0, nvml)
        assert leases.acquire(Demanded(tuple(instances), 1)).uuids == (instances[1].uuid,)


class TestReturn:
    def test_is_immediate_where_the_memory_is_back(self, leases: Leasing, nvml: Nvml, warned: list[str]) -> None:
        lease = leases.acquire(ONE)
        asked = nvml.asked
        leases.release(lease, DEVICES[:1])
        assert nvml.asked == asked + 1
        assert not warned

    def test_the_device_is_held_until_then(
        self, leases: Leasing, nvml: Nvml, other: LeaseTable, warned: list[str]
    ) -> None:
        lease = leases.acquire(ONE)
        nvml.used[A] = 70
        free: list[bool] = []
        nvml.then = {
            nvml.asked + 2: lambda: free.append(is_free(other, A)),
            nvml.asked + 3: lambda: nvml.used.update({A: 0.5}),
        }
        leases.release(lease, DEVICES[:1])
        assert free == [False]
        assert is_free(other, A)
        assert not warned

    def test_memory_that_never_comes_back_is_told(
        self, leases: Leasing, nvml: Nvml, other: LeaseTable, warned: list[str]
    ) -> None:
        lease = leases.acquire(ONE)
        nvml.used[A] = 70.5
        leases.release(lease, DEVICES[:1])
        assert is_free(other, A)
        [text] = warned
        assert text.startswith(f"[device-memory] {DEVICES[0].name} {A}: 70.0 GiB more in use 0.2 s after")

    def test_a_stranger_who_was_there_before_is_not_waited_for(self, leases: Leasing, nvml: Nvml) -> None:
        nvml.used[A] = 5
        lease = leases.acquire(replace(ONE, devices=DEVICES[:1]))
        asked = nvml.asked
        leases.release(lease, DEVICES[:1])
        assert nvml.asked == asked + 1

    def test_of_a_shared_device_is_the_business_of_the_next(self, leases: Leasing, nvml: Nvml) -> None:
        leases.release(leases.acquire(ONE), DEVICES[:1])
        lease = leases.acquire(replace(ONE, budget=GiB, memory=GiB))
        nvml.used[A] = 70
        asked = nvml.asked
        leases.release(lease, DEVICES[:1])
        assert nvml.asked == asked
