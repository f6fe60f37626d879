"""What forks, descriptors, signals and storms of kills do to leases."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from processes import GPUS, PATIENCE, SIZES, A, B, C, Forked, GiB, Say, forever, holding, is_free, until, waiting_for

from pytest_cudaenv.grants.lease import Lease
from pytest_cudaenv.grants.lease_table import LeaseTable


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

    def test_a_stuck_device_process_keeps_the_lease_of_its_killed_run(self, table: LeaseTable) -> None:
        """The run sends the descriptors to its zygote, which forks: once both are gone, the last one still holds."""
        ours, theirs = socket.socketpair()

        def run(say: Say) -> None:
            theirs.close()
            with table.acquire([A, B], 2, memory=GiB, total={A: 2 * GiB}) as lease:
                socket.send_fds(ours, [b"lease"], lease.filenos())
                forever()

        def zygote(say: Say) -> None:
            ours.close()
            _, descriptors, _, _ = socket.recv_fds(theirs, 16, 16, socket.MSG_CMSG_CLOEXEC)
            if os.fork() == 0:
                lease = Lease.adopt(descriptors, (A, B))
                if os.fork() == 0:  # a worker of a DataLoader
                    say(f"{os.getppid()} {os.getpid()} {len(lease.filenos())}")
                    forever()
                forever(lease)
            for descriptor in descriptors:
                os.close(descriptor)
            forever()

        with Forked(run) as first, Forked(zygote) as second:
            ours.close()
            theirs.close()
            device_process, worker, held_by_worker = map(int, second.line().split())
            try:
                for one in (first, second):
                    one.kill()
                    one.wait()
                assert held_by_worker == 0
                assert not is_free(table, A)
                assert not is_free(table, B)
                os.kill(device_process, signal.SIGKILL)
                until(lambda: is_free(table, A, B))
            finally:
                for pid in (device_process, worker):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

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
            "from pytest_cudaenv.grants.lease_table import LeaseTable\n"
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
