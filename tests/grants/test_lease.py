"""Leases in one process, with real locks, and what a nested run inherits."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import GPUS, PATIENCE, SIZES, A, B, C, D, Forked, GiB, Say, forever, is_free, until, waiting_for

from pytest_cudaenv.grants import holder as holder_module
from pytest_cudaenv.grants import lease_table
from pytest_cudaenv.grants.holder import Holder
from pytest_cudaenv.grants.lease_table import LeaseTable, LeaseTimeout, inherited


class TestLease:
    """One process, real locks."""

    def test_holds_and_gives_back(self, table: LeaseTable) -> None:
        lease = table.acquire(GPUS, 2)
        assert lease.uuids == (A, B)
        assert len(lease.filenos()) == 2
        assert not is_free(table, A)
        assert is_free(table, C, D)
        lease.release()
        lease.release()
        assert lease.filenos() == ()
        assert is_free(table, *GPUS)

    def test_no_devices_are_a_lease_too(self, table: LeaseTable, folder: Path) -> None:
        assert table.acquire(GPUS, 0).uuids == ()
        assert not folder.exists()

    @pytest.mark.parametrize(
        ("candidates", "count", "memory"), [((A,), 2, None), ((A, A), 2, None), ((A,), -1, None), ((A,), 1, 0)]
    )
    def test_what_can_never_be_met_is_a_mistake(
        self, table: LeaseTable, candidates: tuple[str, ...], count: int, memory: int | None
    ) -> None:
        with pytest.raises(ValueError):
            table.acquire(candidates, count, memory=memory, total=SIZES)

    def test_memory_budgets_share_a_device(self, table: LeaseTable) -> None:
        with ExitStack() as sharers:
            for _ in range(4):
                lease = sharers.enter_context(table.acquire([A], 1, memory=5 * GiB, total=SIZES))
                assert lease.uuids == (A,)
            with pytest.raises(LeaseTimeout):
                table.acquire([A], 1, memory=5 * GiB, total=SIZES, timeout=0)
            with table.acquire([A, B], 1, memory=5 * GiB, total=SIZES, timeout=0) as beside:
                assert beside.uuids == (B,)
            assert not is_free(table, A)
        assert is_free(table, A)

    def test_a_killed_sharer_gives_its_budget_back(self, table: LeaseTable) -> None:
        def share(say: Say) -> None:
            table.acquire([A], 1, memory=20 * GiB, total=SIZES)
            say("held")
            forever()

        with Forked(share) as child, table.acquire([A], 1, memory=2 * GiB, total=SIZES, timeout=PATIENCE):
            assert child.line() == "held"
            with pytest.raises(LeaseTimeout):
                table.acquire([A], 1, memory=20 * GiB, total=SIZES, timeout=0)
            child.kill()
            table.acquire([A], 1, memory=20 * GiB, total=SIZES, timeout=PATIENCE).release()

    def test_a_timeout_names_the_holders(self, folder: Path) -> None:
        table = LeaseTable(folder, run="run-1")
        lease = table.acquire([A], 1, test="tests/test_a.py::test_one")
        lease.note("tests/test_a.py::test_two")
        with pytest.raises(LeaseTimeout) as caught:
            LeaseTable(folder, run="run-2").acquire([A, B], 2, timeout=0.1)
        (holder,) = caught.value.holders
        assert (holder.uuid, holder.pid, holder.run) == (A, os.getpid(), "run-1")
        assert holder.test == "tests/test_a.py::test_two"
        assert abs(time.time() - (holder.since or 0)) < PATIENCE
        for word in (A, f"pid {os.getpid()}", "run run-1", "test tests/test_a.py::test_two", "since 20", "0.1 s"):
            assert word in str(caught.value)
        lease.release()

    def test_our_own_run_is_waited_for_without_limit(self, folder: Path) -> None:
        table = LeaseTable(folder, run="mine")
        looks: list[float] = []
        lease = table.acquire([A], 1)

        def waits(seconds: float, holders: Sequence[Holder]) -> None:
            assert [h.run for h in holders] == ["mine"]
            looks.append(seconds)
            if len(looks) == 8:
                lease.release()

        with table.acquire([A], 1, timeout=0, waiting=waits):
            assert looks == sorted(looks)

    def test_what_the_callback_raises_ends_the_request(self, table: LeaseTable) -> None:
        def stop(seconds: float, holders: Sequence[Holder]) -> None:
            raise KeyboardInterrupt

        with table.acquire([A], 1):
            before = set(os.listdir("/proc/self/fd"))
            with pytest.raises(KeyboardInterrupt):
                table.acquire([A, B], 2, waiting=stop)
            assert set(os.listdir("/proc/self/fd")) == before
            assert not table.waited_for([B])

    def test_a_holder_learns_that_others_wait(self, table: LeaseTable) -> None:
        with table.acquire([A], 1):
            assert not table.waited_for([A])
            with Forked(waiting_for(table, [A, B], 2)) as child:
                assert child.line() == "waits"
                assert table.waited_for([A])
                assert not table.waited_for([C])
            assert not table.waited_for([A])

    def test_a_stopped_waiter_reserves_nothing(self, table: LeaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
        def stops(say: Say) -> None:
            # Not at the gate, which it would shut.
            table.acquire([A, B], 2, waiting=lambda *_: os.kill(os.getpid(), signal.SIGSTOP))

        with table.acquire([A], 1), Forked(stops) as child:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            assert not is_free(table, B)
            monkeypatch.setattr(holder_module, "STALE_AFTER", 0.05)
            until(lambda: is_free(table, B))

    def test_a_stopped_process_at_the_gate_is_named(
        self, table: LeaseTable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_free(table, A)
        monkeypatch.setattr(lease_table, "GATE_PATIENCE", 0.05)
        told: list[Holder] = []

        def waits(seconds: float, holders: Sequence[Holder]) -> None:
            told.extend(holders)

        with (folder / "gate").open("r+") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            with pytest.raises(LeaseTimeout, match=f"gate: pid {os.getpid()}"):
                table.acquire([A], 1, timeout=0.3, waiting=waits)
        assert {holder.pid for holder in told} == {os.getpid()}

    def test_the_order_of_descriptors_and_uuids_with_odd_names(self, table: LeaseTable, folder: Path) -> None:
        odd = ["MIG-GPU-1/1/0", "MIG-GPU-1/1/0.", "../x", "."]
        with table.acquire(odd, 4) as lease:
            assert lease.uuids == tuple(odd)
            assert len({name for name in os.listdir(folder) if name.startswith("device.")}) == 4
        assert os.listdir(folder.parent) == ["leases"]


class TestInheritance:
    def test_reading(self) -> None:
        assert inherited({}) == frozenset()
        assert inherited({"CUDAENV_LEASE": f" {A}, {B},"}) == {A, B}

    def test_inherited_devices_are_granted_already(self, folder: Path, table: LeaseTable) -> None:
        with table.acquire([A], 1) as lease:
            nested = LeaseTable(folder, inherited=inherited({"CUDAENV_LEASE": ",".join(lease.uuids)}))
            again = nested.acquire([B, A], 1, timeout=0)
            assert again.uuids == (A,)
            assert again.filenos() == ()
            again.release()
            assert not is_free(table, A)

    def test_further_ones_are_taken_but_not_waited_for(self, folder: Path, table: LeaseTable) -> None:
        nested = LeaseTable(folder, inherited=frozenset({A}))
        with nested.acquire([A, B], 2) as more:
            assert more.uuids == (A, B)
            assert len(more.filenos()) == 1
            with pytest.raises(LeaseTimeout, match="CUDAENV_LEASE"):
                nested.acquire([B, A], 2)

    def test_a_program_inherits_the_variable_and_no_lock(self, folder: Path, table: LeaseTable) -> None:
        code = (
            "import sys; from pathlib import Path; from os import environ\n"
            "from pytest_cudaenv.grants.lease_table import LeaseTable, inherited\n"
            "table = LeaseTable(Path(sys.argv[1]), inherited=inherited(environ))\n"
            "print(*table.acquire([sys.argv[2]], 1, timeout=0).uuids, flush=True); input()"
        )
        lease = table.acquire([A], 1)
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), A],
            env={**os.environ, "CUDAENV_LEASE": A},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline().strip() == A
        lease.release()
        assert is_free(table, A)
        child.communicate("\n", timeout=PATIENCE)
        assert child.returncode == 0
