"""What counts as in the way of a test: cases, and that nothing unknown ever does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import A, B, GiB

from pytest_cudaenv.grants.demand import Holding
from pytest_cudaenv.grants.occupancy import CONTEXT, NORMAL, foreign_memory, is_in_the_way, is_returned, occupied
from pytest_cudaenv.host.catalog import CATALOG, simulated_host
from pytest_cudaenv.host.devices import DeviceUsage

TOTAL = 80 * GiB


def using(used: float, *processes: tuple[int, int | None], total: int = TOTAL) -> DeviceUsage:
    return DeviceUsage(total, int(used * GiB), int(total - used * GiB), processes)


def foreign(usage: DeviceUsage, budgets: Any = (), unleased: Any = (), other: DeviceUsage | None = None) -> float:
    usages = {A: usage} if other is None else {A: usage, B: other}
    return foreign_memory(usages, A, Holding(budgets, unleased)) / GiB


class TestForeignMemory:
    def test_what_no_lease_explains(self) -> None:
        assert foreign(using(40)) == 40
        assert foreign(using(40), budgets=[10 * GiB, 5 * GiB]) == 40 - 15 - 2 * CONTEXT / GiB
        assert foreign(using(3), budgets=[10 * GiB]) == 0

    def test_a_device_that_is_held_whole_is_its_holders(self) -> None:
        assert foreign(using(40), budgets=[None]) == 0

    def test_a_device_that_was_not_told_about(self) -> None:
        assert foreign_memory({}, A, Holding()) == 0

    def test_unmarked_tests_of_this_run_are_no_strangers(self) -> None:
        assert foreign(using(40, (7, 30 * GiB), (8, 10 * GiB)), unleased=[7]) == 10

    def test_those_on_another_device_explain_nothing_here(self) -> None:
        assert foreign(using(40, (8, 40 * GiB)), unleased=[7], other=using(1, (7, GiB))) == 40

    @pytest.mark.parametrize("processes", [(), ((4711, 40 * GiB),), ((7, None),)], ids=["none", "the host's", "size"])
    def test_where_they_cannot_be_told_apart_nothing_is_foreign(self, processes: Any) -> None:
        """A container whose NVML lists no process, or ids of the host's."""
        assert foreign(using(40, *processes), unleased=[7]) == 0

    @given(st.floats(0, 80), st.lists(st.none() | st.integers(1, 20), max_size=4), st.booleans())
    def test_it_is_never_negative_and_never_more_than_is_used(
        self, used: float, budgets: list[int | None], own: bool
    ) -> None:
        found = foreign(using(used, (7, GiB)), [b and b * GiB for b in budgets], [7] if own else [])
        assert 0 <= found <= used


class TestInTheWay:
    @pytest.mark.parametrize("kind", sorted(CATALOG))
    @pytest.mark.parametrize("memory", ["none", "half", "all"])
    def test_a_device_at_rest_is_everybodys(self, kind: str, memory: str) -> None:
        """A display server and an idle context or two, on the smallest card and for the largest declaration."""
        [device] = simulated_host(kind).devices
        assert device.total_memory is not None
        declared = {"none": 0, "half": device.total_memory // 2, "all": device.total_memory}[memory]
        assert not is_in_the_way(device.total_memory, NORMAL, declared)

    def test_a_test_that_declares_memory_lacks_what_is_not_there(self) -> None:
        assert not is_in_the_way(TOTAL, 40 * GiB, 40 * GiB)
        assert not is_in_the_way(TOTAL, 42 * GiB, 40 * GiB)  # within the usual 7 %
        assert is_in_the_way(TOTAL, 44 * GiB, 40 * GiB)
        assert is_in_the_way(TOTAL, 30 * GiB, 40 * GiB, [20 * GiB])

    def test_one_that_does_not_lets_others_have_a_tenth(self) -> None:
        assert not is_in_the_way(TOTAL, 7 * GiB, 0)
        assert is_in_the_way(TOTAL, 9 * GiB, 0)

    @given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 80))
    def test_more_strangers_never_help(self, less: int, more: int, memory: int) -> None:
        low, high = sorted((less, more))
        if is_in_the_way(TOTAL, low * GiB, memory * GiB):
            assert is_in_the_way(TOTAL, high * GiB, memory * GiB)


def test_an_occupied_device_names_its_processes() -> None:
    first, second = simulated_host("h100:2").devices
    usage = {first.uuid: using(41, (77, 40 * GiB), (7, GiB)), second.uuid: using(1)}
    found = occupied([first, second], usage, {u: Holding((), [7]) for u in usage}, 0)
    assert list(found) == [first.uuid]
    text = found[first.uuid].describe({77: "python"}.get)
    assert text == f"40.0 GiB of {first.name} {first.uuid} in use by pid 77 (python) 40.0 GiB"


def test_processes_that_are_not_listed_are_said_to_be() -> None:
    [device] = simulated_host("h100").devices
    found = occupied([device], {device.uuid: using(41)}, {}, 0)
    assert "by processes that NVML does not list" in found[device.uuid].describe(lambda pid: None)


def test_what_counts_as_returned() -> None:
    before = using(3)
    assert is_returned(before, using(3.2))
    assert not is_returned(before, using(6))
    assert is_returned(before, None)
