"""Leases: the decisions as properties, the locks with real processes, and the folder under attack."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import PATIENCE, Forked, forever, until

from pytest_cudaenv.grants import lease as lease_module
from pytest_cudaenv.grants.lease import (
    SHARED_DIRECTORY,
    Demand,
    Holder,
    Lease,
    LeaseError,
    LeaseTable,
    LeaseTimeout,
    decide,
    inherited,
    lease_directory,
    waits_for_others,
)

GPUS = tuple(f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(4))
A, B, C, D = GPUS
GiB = 1024**3
SIZES = dict.fromkeys(GPUS, 24 * GiB)
Say = Callable[[str], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture
def table(folder: Path) -> LeaseTable:
    return LeaseTable(folder)


def is_free(table: LeaseTable, *uuids: str) -> bool:
    """Whether all these devices could be held whole now."""
    try:
        table.acquire(uuids, len(uuids), timeout=0).release()
    except LeaseTimeout:
        return False
    return True


def holding(table: LeaseTable, *uuids: str) -> Callable[[Say], None]:
    """The work of a child that holds devices until it is killed."""

    def work(say: Say) -> None:
        with table.acquire(uuids, len(uuids)):
            say("held")
            forever()

    return work


def waiting_for(table: LeaseTable, candidates: Sequence[str], count: int) -> Callable[[Say], None]:
    """The work of a child that says that it waits, and then what it was given."""

    def work(say: Say) -> None:
        told: list[float] = []

        def waits(seconds: float, holders: Sequence[Holder]) -> None:
            if not told:
                say("waits")
            told.append(seconds)

        with table.acquire(candidates, count, waiting=waits) as lease:
            say(" ".join(lease.uuids))
            forever()

    return work


class TestDecide:
    """Who may take what, as a pure function."""

    def test_prefers_the_order_of_the_candidates(self) -> None:
        assert decide(Demand((C, A, B), 2), (), {C: [None]}) == (A, B)

    def test_all_or_none(self) -> None:
        assert decide(Demand((A, B), 2), (), {A: [None]}) is None

    def test_budgets_share_a_device_while_they_fit(self) -> None:
        five = Demand((A,), 1, 5 * GiB, SIZES)
        assert decide(five, (), {A: [5 * GiB] * 3}) == (A,)
        assert decide(replace(five, memory=20 * GiB), (), {A: [5 * GiB]}) is None
        assert decide(five, (), {A: [None]}) is None

    def test_whole_does_not_join_sharers(self) -> None:
        assert decide(Demand((A,), 1), (), {A: [1]}) is None

    @pytest.mark.parametrize("total", [{}, {A: 5 * GiB}, {A: 4 * GiB}], ids=["unknown", "equal", "smaller"])
    def test_a_budget_of_all_there_is_takes_the_device_whole(self, total: dict[str, int]) -> None:
        demand = Demand((A,), 1, 5 * GiB, total)
        assert demand.budget(A) is None
        assert decide(demand, (), {}) == (A,)
        assert decide(demand, (), {A: [1]}) is None

    def test_passes_an_earlier_request_that_needs_other_devices(self) -> None:
        assert decide(Demand((C,), 1), (Demand((A, B), 2),), {A: [None]}) == (C,)

    def test_takes_nothing_that_an_earlier_request_collects(self) -> None:
        assert decide(Demand((A, B), 1), (Demand((A, B), 2),), {A: [None]}) is None

    def test_takes_what_is_left_when_an_earlier_request_is_served(self) -> None:
        assert decide(Demand((A, B), 1), (Demand((A, B), 1),), {}) == (B,)

    def test_sharers_do_not_starve_one_who_wants_the_device_whole(self) -> None:
        small = Demand((A, B), 1, GiB, SIZES)
        whole = Demand((A, B), 1)
        assert decide(small, (whole,), {A: [GiB, GiB], B: [GiB]}) == (A,)  # B, with fewer sharers, is being emptied
        assert decide(replace(small, candidates=(B,)), (whole,), {A: [GiB, GiB], B: [GiB]}) is None

    def test_a_budget_that_waits_keeps_its_room(self) -> None:
        large = Demand((A,), 1, 20 * GiB, SIZES)
        assert decide(Demand((A,), 1, 4 * GiB, SIZES), (large,), {A: [10 * GiB]}) is None

    def test_other_runs_are_to_blame_only_where_our_own_would_not_do(self) -> None:
        one = Demand((A, B), 1)
        assert not waits_for_others(one, (), {A: [None]})  # B is held by our own run
        assert waits_for_others(one, (), {A: [None], B: [None]})

    def test_another_run_that_waits_is_to_blame_only_if_it_waits_for_others(self) -> None:
        pair = Demand((A, B), 2)
        assert not waits_for_others(Demand((A,), 1), (pair,), {})
        assert waits_for_others(Demand((A,), 1), (pair,), {B: [None]})


budgets = st.none() | st.integers(1, 30)
demands = st.builds(
    lambda uuids, count, memory: Demand(tuple(uuids), min(count, len(uuids)), memory, dict.fromkeys(GPUS, 24)),
    st.lists(st.sampled_from(GPUS), min_size=1, unique=True),
    st.integers(1, 4),
    budgets,
)


def legal(budgets: Sequence[int | None]) -> bool:
    return len(budgets) <= 1 or (None not in budgets and sum(b or 0 for b in budgets) <= 24)


held_states = st.fixed_dictionaries(
    {}, optional={u: st.lists(st.none() | st.integers(1, 23), max_size=4).filter(legal) for u in GPUS}
)


@given(demands, st.lists(demands, max_size=4), held_states)
def test_a_decision_is_legal(demand: Demand, ahead: list[Demand], held: dict[str, list[int | None]]) -> None:
    chosen = decide(demand, ahead, held)
    if chosen is None:
        return
    assert len(set(chosen)) == demand.count
    assert list(chosen) == [uuid for uuid in demand.candidates if uuid in chosen]
    assert all(legal([*held.get(uuid, []), demand.budget(uuid)]) for uuid in chosen)


@given(demands, st.lists(demands, max_size=4), held_states)
def test_a_decision_delays_nobody_ahead(demand: Demand, ahead: list[Demand], held: dict[str, list[int | None]]) -> None:
    """Each of those ahead, asked in turn, has as many fitting devices after the decision as before it."""
    chosen = decide(demand, ahead, held)
    if chosen is None:
        return
    before, after = dict(held), {u: [*held.get(u, []), *([demand.budget(u)] if u in chosen else [])] for u in GPUS}
    for earlier in ahead:
        fits = earlier.fitting(before)
        assert len(earlier.fitting(after)) >= len(fits)
        for state in (before, after):
            for uuid in fits:
                state[uuid] = [*state.get(uuid, []), earlier.budget(uuid)]


@given(demands, held_states)
def test_without_a_queue_whatever_fits_is_taken_at_once(demand: Demand, held: dict[str, list[int | None]]) -> None:
    fits = sum(legal([*held.get(uuid, []), demand.budget(uuid)]) for uuid in demand.candidates)
    assert (decide(demand, (), held) is not None) == (fits >= demand.count)


@given(st.lists(demands, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_everybody_is_served_however_many_come_after(requests: list[Demand], chance: random.Random) -> None:
    """Small requests keep coming for ever; each of the first ones is served while they do."""
    queue = list(enumerate(requests))
    running: list[tuple[Demand, tuple[str, ...], int]] = []
    small = Demand(GPUS, 1, 1, dict.fromkeys(GPUS, 24))
    waited_for = {n for n, _ in queue}
    for now in range(2000):
        running = [(d, uuids, end) for d, uuids, end in running if end > now]
        queue.append((len(requests) + now, small))
        for entry in chance.sample(queue, len(queue)):
            ahead = [demand for number, demand in queue if number < entry[0]]
            held = {u: [d.budget(u) for d, uuids, _ in running if u in uuids] for u in GPUS}
            chosen = decide(entry[1], ahead, held)
            if chosen is not None:
                assert all(legal([*held[u], entry[1].budget(u)]) for u in chosen)
                running.append((entry[1], chosen, now + chance.randint(1, 4)))
                queue.remove(entry)
                waited_for.discard(entry[0])
        if not waited_for:
            return
    pytest.fail(f"starved: {waited_for}")


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
            monkeypatch.setattr(lease_module, "STALE_AFTER", 0.05)
            until(lambda: is_free(table, B))

    def test_a_stopped_process_at_the_gate_is_named(
        self, table: LeaseTable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_free(table, A)
        monkeypatch.setattr(lease_module, "GATE_PATIENCE", 0.05)
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
            "from pytest_cudaenv.grants.lease import LeaseTable, inherited\n"
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


class TestProcesses:
    """What forks, descriptors and signals do to a lock."""

    def test_kill_gives_back_at_once_and_nobody_asks_for_the_pid(self, table: LeaseTable, folder: Path) -> None:
        with Forked(holding(table, A, B)) as child:
            assert child.line() == "held"
            assert not is_free(table, A)
            child.kill()
            child.wait()
            # The file still names a process, here one that lives: it does not matter.
            record = folder / f"device.{A}"
            record.write_text(json.dumps({"pid": os.getpid(), "run": "another"}))
            assert is_free(table, A, B)

    def test_a_child_that_drops_its_copy_leaves_the_parents_lock(self, table: LeaseTable) -> None:
        lease = table.acquire([A], 1)

        def drop(say: Say) -> None:
            say(str(lease.filenos()))
            with os.fdopen(os.open(os.devnull, os.O_RDONLY)):  # has the number that the lease had
                lease.release()
            lease.note("not ours")
            say(str(is_free(table, A)))

        with Forked(drop) as child:
            assert child.line() == "()"
            assert child.line() == "False"
            assert child.wait() == 0
        assert not is_free(table, A)
        lease.release()
        assert is_free(table, A)

    def test_a_grandchild_does_not_keep_the_lock(self, table: LeaseTable) -> None:
        """As a DataLoader's worker that outlives the process that started it."""

        def parent(say: Say) -> None:
            table.acquire([A], 1)
            if os.fork() == 0:
                say(str(os.getpid()))
                forever()
            forever()

        with Forked(parent) as child:
            orphan = int(child.line())
            assert not is_free(table, A)
            child.kill()
            child.wait()
            try:
                assert is_free(table, A)
                os.kill(orphan, 0)
            finally:
                os.kill(orphan, signal.SIGKILL)

    def test_a_child_that_is_told_to_keep_it_does_and_its_children_do_not(self, table: LeaseTable) -> None:
        lease = table.acquire([A], 1)

        def keep(say: Say) -> None:
            say(str(len(lease.filenos())))
            with Forked(lambda tell: tell(str(len(lease.filenos())))) as grandchild:
                say(grandchild.line())
            forever()

        with lease.kept():
            child = Forked(keep)
        with child:
            assert [child.line(), child.line()] == ["1", "0"]
            lease.release()
            assert not is_free(table, A)
            child.kill()
            child.wait()
            assert is_free(table, A)

    def test_a_sent_lease_lives_until_its_last_holder_closes_it(self, table: LeaseTable) -> None:
        ours, theirs = socket.socketpair()

        def device_process(say: Say) -> None:
            ours.close()
            _, descriptors, _, _ = socket.recv_fds(theirs, 16, 16, socket.MSG_CMSG_CLOEXEC)
            lease = Lease.adopt(descriptors, (A, B))
            say("adopted")
            theirs.recv(1)
            lease.release()
            say("released")
            forever()

        with Forked(device_process) as child, ours, theirs:
            lease = table.acquire([A, B], 2, memory=GiB, total={A: 2 * GiB})  # A shared, B whole
            assert len(lease.filenos()) == 3
            socket.send_fds(ours, [b"lease"], lease.filenos())
            assert child.line() == "adopted"
            lease.release()
            assert not is_free(table, A)
            assert not is_free(table, B)
            table.acquire([A], 1, memory=GiB, total={A: 2 * GiB}, timeout=0).release()
            ours.send(b".")
            assert child.line() == "released"
            assert is_free(table, A, B)

    def test_adopted_descriptors_close_on_exec(self, table: LeaseTable) -> None:
        with table.acquire([A], 1) as lease:
            copy = os.dup(lease.filenos()[0])
            os.set_inheritable(copy, True)
            with Lease.adopt([copy], [A]) as adopted:
                assert not os.get_inheritable(copy)
                adopted.note("who adopted it has no say")
                lease.release()
                assert not is_free(table, A)
        assert is_free(table, A)

    def test_descriptors_close_on_exec_unless_passed(self, table: LeaseTable) -> None:
        with table.acquire([A], 1) as lease:
            assert not any(os.get_inheritable(d) for d in lease.filenos())
            holder = subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=lease.filenos()
            )
        assert not is_free(table, A)
        holder.communicate(b"\n", timeout=PATIENCE)
        assert is_free(table, A)

    def test_a_killed_waiter_leaves_no_reservation(self, table: LeaseTable) -> None:
        with table.acquire([A], 1), Forked(waiting_for(table, [A, B], 2)) as child:
            assert child.line() == "waits"
            assert not is_free(table, B)
            child.kill()
            child.wait()
            assert is_free(table, B)

    def test_first_come_first_served(self, table: LeaseTable) -> None:
        lease = table.acquire([A], 1)
        with ExitStack() as stack:
            children: list[Forked] = []
            for _ in range(3):
                children.append(stack.enter_context(Forked(waiting_for(table, [A], 1))))
                assert children[-1].line() == "waits"
            lease.release()
            for child in children:
                assert child.line() == A
                child.kill()

    def test_a_free_device_is_not_waited_for_behind_others(self, table: LeaseTable) -> None:
        with table.acquire([A], 1), Forked(waiting_for(table, [A, B], 2)) as child:
            assert child.line() == "waits"
            assert is_free(table, C)

    def test_a_large_request_is_served_among_many_small_ones(self, table: LeaseTable, tmp_path: Path) -> None:
        """Six processes take one device again and again, also by budget; one that wants all four gets them."""

        def small(n: int) -> Callable[[Say], None]:
            def work(say: Say) -> None:
                chance = random.Random(n)
                say("starts")
                while True:
                    memory = chance.choice([None, 5 * GiB])
                    with table.acquire(chance.sample(GPUS, 4), 1, memory=memory, total=SIZES):
                        time.sleep(chance.uniform(0, 0.01))

            return work

        with ExitStack() as stack:
            for n in range(6):
                assert stack.enter_context(Forked(small(n))).line() == "starts"
            for _ in range(3):
                with table.acquire(GPUS, 4, timeout=PATIENCE) as lease:
                    assert lease.uuids == GPUS

    def test_two_runs_never_overlap(self, folder: Path, tmp_path: Path) -> None:
        """Two runs of three workers, interpreters of their own: an event log in which no device is held twice."""
        code = (
            "import os, random, sys, time; from pathlib import Path\n"
            "from pytest_cudaenv.grants.lease import LeaseTable\n"
            "folder, log, run, seed, *gpus = sys.argv[1:]\n"
            "table, chance = LeaseTable(Path(folder), run=run), random.Random(seed)\n"
            "log = os.open(log, os.O_WRONLY | os.O_APPEND)\n"
            "for _ in range(15):\n"
            "    with table.acquire(chance.sample(gpus, 4), chance.choice([1, 1, 2, 3])) as lease:\n"
            "        for word in '+-':\n"
            "            os.write(log, ''.join(f'{word} {u} {run}-{seed}\\n' for u in lease.uuids).encode())\n"
            "            time.sleep(chance.uniform(0, 0.004) if word == '+' else 0)\n"
        )
        log = tmp_path / "log"
        log.touch()
        workers = [
            subprocess.Popen([sys.executable, "-c", code, str(folder), str(log), run, str(n), *GPUS])
            for run in ("run-1", "run-2")
            for n in range(3)
        ]
        assert [worker.wait(PATIENCE) for worker in workers] == [0] * 6
        holder: dict[str, str] = {}
        events = [line.split() for line in log.read_text().splitlines()]
        assert len(events) >= 6 * 15 * 2
        for word, uuid, worker in events:
            if word == "+":
                assert uuid not in holder, f"{worker} was given {uuid}, which {holder[uuid]} holds"
                holder[uuid] = worker
            else:
                assert holder.pop(uuid) == worker

    def test_a_storm_of_kills(self, table: LeaseTable, tmp_path: Path) -> None:
        """200 processes, holding or waiting, are killed at random moments: nothing overlaps, nothing stays locked."""
        witnesses = [tmp_path / f"witness-{i}" for i in range(4)]
        for path in witnesses:
            path.touch()

        def worker(seed: int) -> Callable[[Say], None]:
            def work(say: Say) -> None:
                # Opened before the leases: a killed process closes these first, as the lower numbers.
                files = {uuid: os.open(path, os.O_RDWR) for uuid, path in zip(GPUS, witnesses, strict=True)}
                chance = random.Random(seed)
                while True:
                    count, memory = chance.choice([(1, None), (2, None), (4, None), (1, 10 * GiB), (2, 10 * GiB)])
                    with table.acquire(chance.sample(GPUS, 4), count, memory=memory, total=SIZES) as lease:
                        how = fcntl.LOCK_EX if memory is None else fcntl.LOCK_SH
                        for uuid in lease.uuids:
                            fcntl.flock(files[uuid], how | fcntl.LOCK_NB)  # BlockingIOError: two hold it
                        say(f"{count}")
                        time.sleep(chance.uniform(0, 0.01))
                        for uuid in lease.uuids:
                            fcntl.flock(files[uuid], fcntl.LOCK_UN)

            return work

        chance = random.Random(7)
        said: list[str] = []
        workers = [Forked(worker(n)) for n in range(6)]
        try:
            for n in range(200):
                time.sleep(chance.uniform(0, 0.04))
                victim = chance.randrange(len(workers))
                with workers[victim] as killed:
                    killed.kill()
                    assert killed.wait() == -signal.SIGKILL, killed.line()
                    while line := killed.line():
                        said.append(line)
                workers[victim] = Forked(worker(100 + n))
        finally:
            for one in workers:
                with one:
                    one.kill()
                    assert one.wait() == -signal.SIGKILL, one.line()
        assert set(said) <= {"1", "2", "4"}
        assert set(said) >= {"1", "4"}
        assert table.acquire(GPUS, 4, timeout=0).uuids == GPUS


def as_user(uid: int, work: Callable[[Say], None]) -> Callable[[Say], None]:
    """The work, done by another user."""

    def changed(say: Say) -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        work(say)

    return changed


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
ALICE, BOB = 61001, 61002


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A place as `/tmp`, which `tmp_path` is not: that is closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        yield Path(name)


class TestFolder:
    def test_which(self) -> None:
        assert lease_directory(None, {}) == SHARED_DIRECTORY
        assert lease_directory(None, {"TMPDIR": "/scratch/job-1"}) == SHARED_DIRECTORY
        assert lease_directory(None, {"CUDAENV_LEASE_DIR": "/a/../b"}) == Path("/b")
        assert lease_directory("/given", {"CUDAENV_LEASE_DIR": "/b"}) == Path("/given")
        assert lease_directory("here", {}) == Path.cwd() / "here"

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_everybody_may_use_it_whatever_the_umask(self, table: LeaseTable, folder: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            table.acquire([A], 1, memory=1, total=SIZES).release()
            with table.acquire([A], 1), pytest.raises(LeaseTimeout):
                table.acquire([A], 1, timeout=0)
        finally:
            os.umask(before)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
        files = list(folder.iterdir())
        assert {f.name.partition(".")[0] for f in files} == {"gate", "device", "share", "queue"}
        assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o666}

    def test_a_folder_of_ones_own_stays_private(self, table: LeaseTable, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        table.acquire([A], 1).release()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    @needs_root
    @pytest.mark.parametrize("umask", [0o022, 0o077])
    def test_two_users_exclude_each_other(self, shared_place: Path, umask: int) -> None:
        """Also with fs.protected_regular, which refuses O_CREAT on a file of another user in such a folder."""
        table = LeaseTable(shared_place / "leases")

        def alice(say: Say) -> None:
            os.umask(umask)
            holding(table, A)(say)

        def bob(say: Say) -> None:
            say(f"{is_free(table, A)} {is_free(table, B)}")
            table.acquire([A], 1)
            say("held")

        with Forked(as_user(ALICE, alice)) as first:
            assert first.line() == "held"
            with Forked(as_user(BOB, bob)) as second:
                assert second.line() == "False True"
                first.kill()
                assert second.line() == "held"
                assert second.wait() == 0

    @needs_root
    def test_a_private_folder_of_another_user_is_refused(self, shared_place: Path) -> None:
        mine = shared_place / "leases"
        mine.mkdir(mode=0o755)
        os.chown(mine, ALICE, ALICE)
        with Forked(as_user(BOB, lambda say: LeaseTable(mine).acquire([A], 1).release())) as child:
            line = child.line()
            assert line.startswith("LeaseError: ")
            for word in (str(mine), f"uid {ALICE}", "another user's", "CUDAENV_LEASE_DIR"):
                assert word in line
        with pytest.raises(LeaseError, match="another user's"):  # root too: Alice could swap it
            LeaseTable(mine).acquire([A], 1)

    @needs_root
    def test_a_place_where_another_user_could_swap_the_folder_is_refused(self, shared_place: Path) -> None:
        os.chown(shared_place, ALICE, ALICE)
        os.chmod(shared_place, 0o755)
        with pytest.raises(LeaseError, match=f"{shared_place} .*uid {ALICE}"):
            LeaseTable(shared_place / "leases").acquire([A], 1)

    @needs_root
    def test_an_unwritable_folder_is_a_clear_error(self, shared_place: Path) -> None:
        closed = shared_place / "leases"
        closed.mkdir(mode=0o755)
        with Forked(as_user(BOB, lambda say: LeaseTable(closed).acquire([A], 1).release())) as child:
            line = child.line()
            assert line.startswith("LeaseError: ")
            for word in (str(closed), "gate", "Permission denied", "uid 0", "open it to you", "CUDAENV_LEASE_DIR"):
                assert word in line

    def test_a_folder_that_cannot_be_made_is_a_clear_error(self, tmp_path: Path) -> None:
        with pytest.raises(LeaseError, match=f"{tmp_path} .*a/b.*No such file.*make the folders above it"):
            LeaseTable(tmp_path / "a" / "b").acquire([A], 1)

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc to refuse")
    def test_a_file_system_that_refuses_is_a_clear_error(self) -> None:
        with pytest.raises(LeaseError, match=r"/proc .*leases"):
            LeaseTable(Path("/proc/leases")).acquire([A], 1)

    def test_a_folder_whose_files_all_may_swap_is_refused(self, table: LeaseTable, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(LeaseError, match=r"mode 0777.*swap.*owner: .*chmod \+t"):
            table.acquire([A], 1)

    @pytest.mark.parametrize("what", ["link", "dangling", "file"])
    def test_what_is_no_folder_is_refused(self, table: LeaseTable, folder: Path, tmp_path: Path, what: str) -> None:
        if what == "file":
            folder.write_text("mine")
        else:
            folder.symlink_to(tmp_path / "elsewhere")
            if what == "link":
                (tmp_path / "elsewhere").mkdir()
        with pytest.raises(LeaseError, match="is not a folder" if what == "file" else "is a symbolic link"):
            table.acquire([A], 1)
        assert not (tmp_path / "elsewhere" / "gate").exists()

    @pytest.mark.parametrize("name", ["gate", f"device.{A}", f"share.{A}.0", "queue.0"])
    def test_links_to_the_files_of_others_are_not_followed(
        self, table: LeaseTable, folder: Path, tmp_path: Path, name: str
    ) -> None:
        treasure = tmp_path / "treasure"
        treasure.write_text("precious")
        folder.mkdir()
        for plant in (os.symlink, os.link):
            plant(treasure, folder / name)
            with pytest.raises(LeaseError, match=rf"{name}.*(symbolic|hard) link.*owner.*remove it"):
                self.use_every_file(table)
            (folder / name).unlink()
        assert treasure.read_text() == "precious"
        os.mkfifo(folder / name)
        with pytest.raises(LeaseError, match="is not a plain file"):
            self.use_every_file(table)

    @staticmethod
    def use_every_file(table: LeaseTable) -> None:
        with table.acquire([A], 1, memory=1, total=SIZES), pytest.raises(LeaseTimeout):
            table.acquire([A], 1, timeout=0)
        table.acquire([A], 1).release()

    @pytest.mark.parametrize(
        "garbage",
        [
            b"",
            b"\0" * 5000,
            b"\xff\xfe{",
            b"[" * 60000,
            b"null\n",
            b'{"pid": "x", "since": NaN, "memory": -5, "turn": 1e999, "test": 7}\n',
            b'{"pid": true, "since": 1'
            + b"0" * 400
            + b', "memory": 1e9, "looked": NaN, "turn": 1, "count": 1, "of": {}}',
            b'{"run": "\\u001b[2J\\n", "test": "' + b"x" * 100000,
        ],
        ids=["empty", "zeros", "bytes", "deep", "null", "types", "numbers", "long"],
    )
    def test_garbage_in_the_files_changes_nothing(self, table: LeaseTable, folder: Path, garbage: bytes) -> None:
        self.use_every_file(table)
        for path in folder.iterdir():
            path.write_bytes(garbage)
        assert not table.waited_for([A])
        with table.acquire([A], 1):
            (folder / f"device.{A}").write_bytes(garbage)
            with pytest.raises(LeaseTimeout) as caught:
                table.acquire([A], 1, timeout=0)
            assert "\x1b" not in str(caught.value)
        with table.acquire([A], 1, memory=GiB, total=SIZES):
            (folder / f"share.{A}.0").write_bytes(garbage)
            with pytest.raises(LeaseTimeout):  # its budget is unknown, so the device is full
                table.acquire([A], 1, memory=GiB, total=SIZES, timeout=0)
        with (folder / "queue.0").open("r+") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            (folder / "queue.0").write_bytes(garbage)
            assert is_free(table, A)

    def test_what_others_write_is_fit_for_a_terminal(self, table: LeaseTable, folder: Path) -> None:
        with table.acquire([A], 1):
            (folder / f"device.{A}").write_text(json.dumps({"pid": 7, "run": "\x1b[2J\n", "test": "x" * 9999}) + "\n")
            with pytest.raises(LeaseTimeout, match=r"pid 7 of run \?\[2J\?, test x{300}$"):
                table.acquire([A], 1, timeout=0)

    def test_a_sharer_without_a_budget_counts_as_whole(self, table: LeaseTable, folder: Path) -> None:
        table.acquire([A], 1).release()
        with (folder / f"device.{A}").open("r+") as device:
            fcntl.flock(device, fcntl.LOCK_SH)
            with pytest.raises(LeaseTimeout, match="unknown process"):
                table.acquire([A], 1, memory=1, total=SIZES, timeout=0)

    def test_existing_files_are_opened_without_creating(
        self, table: LeaseTable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """fs.protected_regular refuses O_CREAT on an existing file of another user in a sticky folder."""
        self.use_every_file(table)

        def protected(path: str, flags: int, *args: int, **kwargs: int) -> int:
            if flags & os.O_CREAT and os.path.exists(folder / path):
                raise PermissionError(13, "Permission denied")
            return real(path, flags, *args, **kwargs)

        real = os.open
        monkeypatch.setattr(os, "open", protected)
        self.use_every_file(table)

    def test_a_file_that_is_removed_while_it_is_locked_is_made_again(
        self, table: LeaseTable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table.acquire([A], 1).release()
        path = folder / f"device.{A}"
        removed: list[int] = []

        def clean(descriptor: int, how: int) -> None:
            real(descriptor, how)
            is_ours = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
            if how == fcntl.LOCK_EX | fcntl.LOCK_NB and is_ours and len(removed) < 2:
                removed.append(descriptor)
                path.unlink()

        real = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", clean)
        with table.acquire([A], 1):  # its first look at the file, and the lock, come too late
            assert len(removed) == 2
            assert not is_free(table, A)

    def test_files_are_never_truncated(self, table: LeaseTable, folder: Path) -> None:
        table.acquire([A], 1).release()
        path = folder / f"device.{A}"
        path.write_bytes(b"x" * 5000)
        table.acquire([A], 1).release()
        assert path.stat().st_size == 5000

    @pytest.mark.parametrize("what", ["files", "folder"])
    def test_a_cleaner_that_removes_everything_is_survived(self, table: LeaseTable, folder: Path, what: str) -> None:
        table.acquire([A], 1).release()
        for path in folder.iterdir():
            path.unlink()
        if what == "folder":
            folder.rmdir()
        with table.acquire([A], 1):
            assert not is_free(table, A)
