"""A run of `--dist cuda` without processes: workers as xdist's are, leases as `decide` gives them."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_cudaenv.grants.demand import Demand, decide
from pytest_cudaenv.grants.scheduling import Schedule, Work


@dataclass
class Ran:
    """What happened."""

    started: list[tuple[float, int, int]] = field(default_factory=list)
    """(when, worker, test), in order."""
    ended: dict[int, float] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Tests whose worker was killed."""
    idle_with_devices: list[int] = field(default_factory=list)
    """Workers that waited for a message while they held devices."""

    @property
    def makespan(self) -> float:
        return max(self.ended.values(), default=0.0)

    def by_worker(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for _, worker, test in self.started:
            found.setdefault(worker, []).append(test)
        return found


class Run:
    """Workers that run the tests of a schedule; `seconds` are what each really takes."""

    def __init__(self, works: Sequence[Work], seconds: Sequence[float], workers: int, kills: Sequence[float] = ()):
        self.works, self.seconds = works, seconds
        self.schedule = Schedule[int](works, workers)
        self.queue: dict[int, deque[int]] = {}
        self.told_to_end: set[int] = set()
        self.running: dict[int, int] = {}
        self.waiting: dict[int, Demand] = {}
        self.held: dict[int, tuple[Demand, tuple[str, ...]]] = {}
        self.kills = deque(sorted(kills))
        self.events: list[tuple[float, int, int]] = []
        self.order = itertools.count()
        self.now = 0.0
        self.ran = Ran()
        self.names = itertools.count()
        for _ in range(workers):
            self.join()
        self.serve(list(self.queue))

    def join(self) -> int:
        name = next(self.names)
        self.queue[name] = deque()
        self.schedule.add(name)
        return name

    def serve(self, workers: Sequence[int]) -> None:
        for worker in workers:
            order = self.schedule.give(worker, self.now)
            assert worker not in self.told_to_end or order == ([], False)
            self.queue[worker] += order.tests
            if order.ends:
                self.told_to_end.add(worker)
            self.begin(worker)

    def begin(self, worker: int) -> None:
        """What a worker does: it starts a test once it knows the next one, or that there is none."""
        queue = self.queue[worker]
        if worker in self.running or worker in self.waiting:
            return
        if not queue or (len(queue) < 2 and worker not in self.told_to_end):
            if worker in self.held and queue:
                self.ran.idle_with_devices.append(worker)
            return
        demand = self.works[queue[0]].demand
        if demand is not None and worker not in self.held:
            self.waiting[worker] = demand
            self.grant()
        else:
            self.start(worker)

    def start(self, worker: int) -> None:
        test = self.running[worker] = self.queue[worker][0]
        self.ran.started.append((self.now, worker, test))
        heapq.heappush(self.events, (self.now + self.seconds[test], next(self.order), worker))

    def grant(self) -> None:
        """The lease table: in turn, past those that wait longer where they do not need the same devices."""
        ahead: list[Demand] = []
        for worker, demand in list(self.waiting.items()):
            budgets: dict[str, list[int | None]] = {}
            for other, uuids in self.held.values():
                for uuid in uuids:
                    budgets.setdefault(uuid, []).append(other.budget(uuid))
            found = decide(demand, ahead, budgets)
            if found is None:
                ahead.append(demand)
                continue
            del self.waiting[worker]
            self.held[worker] = (demand, found)
            self.start(worker)

    def keeps(self, worker: int, test: int, nexttest: int) -> bool:
        """Whether the devices of a test are those of the next: the same request, or a CPU test of its group."""
        if worker not in self.held:
            return True
        demand, group = self.works[nexttest].demand, self.works[nexttest].group
        if demand is None:
            return self.works[nexttest].together and self.works[test].group == group
        return demand == self.held[worker][0]

    def let_go(self, worker: int) -> None:
        self.held.pop(worker, None)
        self.waiting.pop(worker, None)
        self.grant()

    def kill(self) -> None:
        """Kill the worker that has run for longest; xdist reports its test and starts another worker."""
        worker = next(iter(self.running), None)
        if worker is None:
            return
        assert self.schedule.remove(worker, self.now) == self.running[worker]
        self.ran.lost.append(self.running.pop(worker))
        self.events = [event for event in self.events if event[2] != worker]
        heapq.heapify(self.events)
        del self.queue[worker]
        self.let_go(worker)
        self.serve(list(self.queue))
        self.serve([self.join()])

    def to_the_end(self) -> Ran:
        while self.events:
            if self.kills and self.kills[0] <= self.events[0][0]:
                self.now = self.kills.popleft()
                self.kill()
                continue
            self.now, _, worker = heapq.heappop(self.events)
            test = self.running.pop(worker)
            assert self.queue[worker].popleft() == test
            self.ran.ended[test] = self.now
            queue = self.queue[worker]
            if not queue or not self.keeps(worker, test, queue[0]):
                self.let_go(worker)
            self.schedule.complete(worker, test, self.now, self.seconds[test])
            self.serve([worker, *(other for other in self.queue if other != worker)])
        assert not self.waiting
        return self.ran
