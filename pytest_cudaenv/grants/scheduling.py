"""Which worker runs which test next, as `--dist cuda` decides it. Knows neither pytest nor xdist.

A worker starts a test only when it knows the one after it, and what it was sent cannot be taken back. So each is sent
single tests, the next one when it starts one; and the next one is what a forecast of the run says that it would get
once it is free: the *forecast* follows the leases' own rules and the last durations. Nothing is ever withheld from a
worker that has a test to start, so none waits with devices in its hands.

Tests that share fixtures are a *block*, run by one worker in the collected order: those of a module with the same
request, or an xdist group, whatever it requests. The next block is one of those whose devices are free: of the largest
request, and of those the longest; a block that would end the run later than all else goes first. A module is divided
where it is longer than the whole run has to be, and where a worker would otherwise have nothing left to do sooner;
not where setting its fixtures up again would take as long. A group never is.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from pytest_cudaenv.grants.demand import Demand, decide

LOOKAHEAD = 0.25
"""Seconds of tests that a worker knows of beyond the one it runs, where they share a block: short ones go in threes."""

FIRST_GUESS = 1.0
"""Seconds of a test, while nothing is known of any like it."""

LOOKAHEAD_TESTS = 64
"""As many of them at most."""

LATE = 0.7
"""A block that takes this part of what the whole run still has to take goes before larger requests."""

LONG = 0.1
"""A test that takes this part of the run is a block of its own, where its module is divided anyway."""

AT_ONCE = 0.05
"""Seconds within which devices count as free when a worker is."""

_CPU = -1


@dataclass(frozen=True)
class Work:
    """One test, as far as its place in the run depends on it."""

    group: str
    """The module, or the name of its xdist group."""
    together: bool = False
    """The group is never divided."""
    demand: Demand | None = None
    """What it leases; None: it needs no device."""
    seconds: float | None = None
    """How long it took last; None: not known."""
    setup: float = 0.0
    """How much of that was setting up."""


class Order(NamedTuple):
    """What a worker is to be told now."""

    tests: list[int]
    """The tests that it runs next, after those that it knows of already."""
    ends: bool
    """There is nothing further for it: it ends after those."""


def lower_bound(works: Sequence[Work], workers: int, seconds: Sequence[float] | None = None) -> float:
    """Seconds that the run takes at least, however it is scheduled; `seconds` are those of each test."""
    times = [work.seconds or 0.0 for work in works] if seconds is None else seconds
    devices = {uuid for work in works if work.demand is not None for uuid in work.demand.candidates}
    used = sum(_part(work.demand) * time for work, time in zip(works, times, strict=True) if work.demand is not None)
    return max(max(times, default=0.0), sum(times) / max(workers, 1), used / max(len(devices), 1))


def _part(demand: Demand) -> float:
    """How many devices a request takes, one that is shared by its part."""
    parts = [1.0 if (b := demand.budget(uuid)) is None else b / demand.total[uuid] for uuid in demand.candidates]
    return demand.count * min(parts, default=1.0)


class _Times:
    """How long each test takes: as it did last time, or as others with the same request do."""

    def __init__(self, works: Sequence[Work], kinds: Sequence[int]) -> None:
        self.known = [work.seconds for work in works]
        self.kinds = kinds
        self._seen: dict[int, tuple[float, int]] = {}
        for test, seconds in enumerate(self.known):
            if seconds is not None:
                self._note(test, seconds)

    def of(self, test: int) -> float:
        """Seconds of one test."""
        known = self.known[test]
        return self.guess(self.kinds[test]) if known is None else known

    def guess(self, kind: int) -> float:
        """Seconds of a test with this request of which nothing is known."""
        total, count = self._seen.get(kind, (0.0, 0))
        return total / count if count else FIRST_GUESS

    def learn(self, test: int, seconds: float) -> None:
        """A test took so long, in this run."""
        if self.known[test] is None:
            self._note(test, seconds)

    def _note(self, test: int, seconds: float) -> None:
        total, count = self._seen.get(self.kinds[test], (0.0, 0))
        self._seen[self.kinds[test]] = (total + seconds, count + 1)


class _Block:
    """Tests that one worker runs, one after the other: those of them that it has not been sent yet."""

    def __init__(self, kind: int, group: str, together: bool, tests: Iterable[int], times: _Times) -> None:
        self.kind = kind
        """Which request: an index, or _CPU."""
        self.group = group
        self.together = together
        self.tests = deque(tests)
        self._times = times
        self._known = 0.0
        self._unknown: dict[int, int] = {}
        for test in self.tests:
            self._count(test, 1)

    def _count(self, test: int, sign: int) -> None:
        known, kind = self._times.known[test], self._times.kinds[test]
        if known is None:
            self._unknown[kind] = self._unknown.get(kind, 0) + sign
        else:
            self._known += sign * known

    @property
    def seconds(self) -> float:
        """How long they take together."""
        return self._known + sum(count * self._times.guess(kind) for kind, count in self._unknown.items())

    def first(self) -> int:
        """Take the first test out."""
        self._count(self.tests[0], -1)
        return self.tests.popleft()

    def last(self) -> int:
        """Take the last test out."""
        self._count(self.tests[-1], -1)
        return self.tests.pop()


W = TypeVar("W", bound=Hashable)


@dataclass
class _Worker:
    """What a worker has been told, and what is meant for it."""

    sent: deque[tuple[int, _Block]] = field(default_factory=deque)
    """Not yet complete; the first of them is running, once `began` is set."""
    block: _Block | None = None
    began: float | None = None
    ends: bool = False

    @property
    def rest(self) -> deque[int]:
        """Of its block, what it has not been sent."""
        return deque() if self.block is None else self.block.tests


class _Devices(Generic[W]):
    """Who holds which devices, as far as this run knows, and who waits for them in turn."""

    def __init__(self) -> None:
        self.holders: dict[W, tuple[Demand, tuple[str, ...]]] = {}
        self.waiting: dict[W, Demand] = {}
        self.budgets: dict[str, list[int | None]] = {}

    def copy(self) -> _Devices[W]:
        other = _Devices[W]()
        other.holders, other.waiting = dict(self.holders), dict(self.waiting)
        other.budgets = {uuid: list(budgets) for uuid, budgets in self.budgets.items()}
        return other

    def demand(self, worker: W) -> Demand | None:
        """What a worker holds, or waits for; in an xdist group a CPU test may run meanwhile."""
        return self.holders[worker][0] if worker in self.holders else self.waiting.get(worker)

    def fit(self, demand: Demand | None) -> bool:
        """Whether a request would be met at once."""
        return demand is None or decide(demand, list(self.waiting.values()), self.budgets) is not None

    def take(self, worker: W, demand: Demand | None) -> bool:
        """Meet a worker's request, or have it wait; whether it was met."""
        if demand is None:
            return True
        uuids = decide(demand, list(self.waiting.values()), self.budgets)
        if uuids is None:
            self.waiting[worker] = demand
            return False
        self._hold(worker, demand, uuids)
        return True

    def release(self, worker: W) -> list[W]:
        """Take back what a worker holds or waits for; those whose requests are met by that."""
        self.waiting.pop(worker, None)
        demand, uuids = self.holders.pop(worker, (None, ()))
        for uuid in uuids:
            assert demand is not None
            self.budgets[uuid].remove(demand.budget(uuid))
        met: list[W] = []
        ahead: list[Demand] = []
        for waiting, wanted in list(self.waiting.items()):
            if (found := decide(wanted, ahead, self.budgets)) is None:
                ahead.append(wanted)
                continue
            del self.waiting[waiting]
            self._hold(waiting, wanted, found)
            met.append(waiting)
        return met

    def _hold(self, worker: W, demand: Demand, uuids: tuple[str, ...]) -> None:
        self.holders[worker] = (demand, uuids)
        for uuid in uuids:
            self.budgets.setdefault(uuid, []).append(demand.budget(uuid))


class Schedule(Generic[W]):
    """The tests of one run, each given to one worker once. Times are seconds of any one clock."""

    def __init__(self, works: Sequence[Work], workers: int) -> None:
        self.works = works
        self.workers: dict[W, _Worker] = {}
        self._devices = _Devices[W]()
        self._demands = _distinct(work.demand for work in works)
        kinds = [_CPU if work.demand is None else self._demands.index(work.demand) for work in works]
        self._times = _Times(works, kinds)
        self._costs = _costs(works)
        self._fresh: dict[int, list[_Block]] = {kind: [] for kind in (*range(len(self._demands)), _CPU)}
        """Blocks that no worker has, by request, the largest first."""
        self._divide(workers)

    @property
    def unsent(self) -> bool:
        """Whether some test has not been given to a worker."""
        return any(self._fresh.values()) or any(state.rest for state in self.workers.values())

    def _demand(self, kind: int) -> Demand | None:
        return None if kind == _CPU else self._demands[kind]

    # Blocks ----------------------------------------------------------------------------------------------------

    def _divide(self, workers: int) -> None:
        """Make the blocks."""
        kinds = self._times.kinds
        bound = lower_bound(self.works, workers, [self._times.of(test) for test in range(len(self.works))])
        self._long = LONG * bound
        groups: dict[tuple[str, int | None], list[int]] = {}
        for test, work in enumerate(self.works):
            groups.setdefault((work.group, None if work.together else kinds[test]), []).append(test)
        for (group, kind), tests in groups.items():
            if kind is None:
                # The whole group counts as its largest request; those stand in that order.
                self._add(min({kinds[test] for test in tests} - {_CPU}, default=_CPU), group, tests, together=True)
            else:
                for part in self._parts(group, tests, bound):
                    self._add(kind, group, part)

    def _parts(self, group: str, tests: list[int], bound: float) -> list[list[int]]:
        """The tests of a module that have one request, in parts of which each can be run within the bound."""
        times, cost = self._times, self._costs.get(group, 0.0)
        count = _times_over(sum(map(times.of, tests)), bound)
        if cost:
            count = min(count, int(sum(map(times.of, tests)) / (2 * cost)))
        long = sorted((t for t in tests if times.of(t) - cost > self._long), key=lambda test: -times.of(test))
        others = [test for test in tests if test not in long]
        if count <= 1:
            return [[*long, *others]]
        parts = [[test] for test in long]
        others = [test for test in tests if test not in long]
        total, passed = sum(map(times.of, others)), 0.0
        count = _times_over(total, bound)
        cut: list[list[int]] = [[] for _ in range(count)]
        for test in others:
            # By where its middle lies.
            cut[min(int((passed + times.of(test) / 2) * count / total), count - 1) if total else 0].append(test)
            passed += times.of(test)
        return parts + [part for part in cut if part]

    def _add(self, kind: int, group: str, tests: Iterable[int], *, together: bool = False) -> None:
        """Have tests run as one block."""
        blocks = self._fresh[kind]
        blocks.append(_Block(kind, group, together, tests, self._times))
        blocks.sort(key=self._rank)

    def _rank(self, block: _Block) -> tuple[float, int]:
        """Where a block stands among those of the same request: first what is long, and cannot be divided."""
        whole = block.seconds if block.together else max(map(self._times.of, block.tests))
        return -block.seconds - whole, block.tests[0]

    # What happens ----------------------------------------------------------------------------------------------

    def add(self, worker: W) -> None:
        """A worker is there, and knows of no test."""
        self.workers[worker] = _Worker()

    def complete(self, worker: W, test: int, now: float, seconds: float | None = None) -> None:
        """A worker has run a test, which took so long; it is to be given another one at once."""
        state = self.workers[worker]
        if seconds is not None:
            self._times.learn(test, seconds)
        state.sent = deque(pair for pair in state.sent if pair[0] != test)
        state.began = None
        demand = self._devices.demand(worker)
        if demand is not None and not (state.sent and self._demand(state.sent[0][1].kind) is demand):
            self._release(worker, now)
        self._begin(worker, now)

    def remove(self, worker: W, now: float) -> int | None:
        """A worker has gone. The test that it had begun, if any; others run what else it was to run."""
        state = self.workers.pop(worker)
        self._release(worker, now)
        begun = state.sent.popleft()[0] if state.sent and state.began is not None else None
        back: dict[_Block, list[int]] = {}
        for test, block in state.sent:
            back.setdefault(block, []).append(test)
        if state.block is not None and state.rest:
            back.setdefault(state.block, []).extend(state.rest)
        for block, tests in back.items():
            self._add(block.kind, block.group, tests, together=block.together)
        return begun

    def put_back(self, test: int) -> None:
        """A test is to be run again, by any worker."""
        self._add(self._times.kinds[test], self.works[test].group, [test])

    def give(self, worker: W, now: float) -> Order:
        """What a worker is to run next, and whether that is its last."""
        state = self.workers[worker]
        tests: list[int] = []
        if state.ends:
            return Order(tests, False)
        known = sum(self._times.of(test) for test, _ in list(state.sent)[1:])
        while len(state.sent) < 2 or (state.rest and known < LOOKAHEAD and len(state.sent) < LOOKAHEAD_TESTS):
            if not state.rest and not self._next_block(worker, now):
                state.ends = bool(state.sent) or not self.unsent
                break
            assert state.block is not None
            test = state.block.first()
            known += self._times.of(test) if state.sent else 0.0
            state.sent.append((test, state.block))
            tests.append(test)
        self._begin(worker, now)
        return Order(tests, state.ends)

    def _begin(self, worker: W, now: float) -> None:
        """Note that a worker starts the first of its tests, where it knows the one after it, or that it is the last."""
        state = self.workers[worker]
        if state.began is None and (len(state.sent) > 1 or (state.sent and state.ends)):
            state.began = now
            if self._devices.demand(worker) is None:
                self._devices.take(worker, self._demand(state.sent[0][1].kind))

    def _release(self, worker: W, now: float) -> None:
        for met in self._devices.release(worker):
            self.workers[met].began = now

    # What comes next -------------------------------------------------------------------------------------------

    def _next_block(self, worker: W, now: float) -> bool:
        """Choose the block that a worker runs next; False where there is none for it (now, if it has no test)."""
        state = self.workers[worker]
        free = now + sum(seconds for _, seconds in self._ahead(worker, now))
        found = self._forecast(worker, now, math.inf if state.sent else now)
        if (found is None or found.start > free + AT_ONCE) and self._take_over(worker, free, now):
            return True
        if found is None:
            return False
        blocks = self._fresh[found.kind]
        block = blocks[found.place]
        if state.block is not None:
            # Rather one whose fixtures the worker has set up already.
            group = state.block.group
            block = next((b for b in blocks if b.group == group), block)
        blocks.remove(block)
        state.block = block
        return True

    def _ahead(self, worker: W, now: float) -> list[tuple[int, float]]:
        """What a worker has before it: requests, and for how many seconds each."""
        state = self.workers[worker]
        found = [(block.kind, self._times.of(test)) for test, block in state.sent]
        if found and state.began is not None and worker not in self._devices.waiting:
            kind, seconds = found[0]
            passed = now - state.began
            # What takes longer than it should is expected to take as long again.
            found[0] = (kind, seconds - passed if passed < seconds else passed)
        if state.block is not None and state.rest:
            found.append((state.block.kind, state.block.seconds))
        joined: list[tuple[int, float]] = []
        for kind, seconds in found:
            if joined and joined[-1][0] == kind:
                joined[-1] = (kind, joined[-1][1] + seconds)
            else:
                joined.append((kind, seconds))
        return joined

    def _forecast(self, me: W, now: float, until: float) -> _Forecast | None:
        """The block that `me` would get, if every worker that is free takes the first one whose devices are."""
        outlook = self._outlook(now)
        lengths = {kind: [block.seconds for block in blocks] for kind, blocks in self._fresh.items()}
        places = dict.fromkeys(self._fresh, 0)
        late = LATE * self._bound_left(lengths, outlook.ahead)
        free = deque(sorted(outlook.idle(), key=lambda worker: worker != me))
        while True:
            while free and (kind := self._first_fitting(outlook.devices, places, lengths, late)) is not None:
                worker = free.popleft()
                if worker == me:
                    return _Forecast(kind, places[kind], outlook.time)
                if not self.workers[worker].ends:
                    outlook.run(worker, kind, lengths[kind][places[kind]])
                    places[kind] += 1
            if not outlook.goes_on(until):
                break
            if (worker := outlook.next()) is not None:  # type: ignore[assignment]
                free.appendleft(worker) if worker == me else free.append(worker)
        if math.isfinite(until):
            return None
        # What nobody was seen to take (its devices are in other hands, for all one knows) is waited for.
        left = ((kind, place) for kind, place in places.items() if place < len(lengths[kind]))
        return next((_Forecast(kind, place, outlook.time) for kind, place in left), None)

    def _outlook(self, now: float) -> _Outlook[W]:
        ahead = {worker: deque(self._ahead(worker, now)) for worker in self.workers}
        return _Outlook(self._devices.copy(), self._demands, ahead, now)

    def _first_fitting(
        self, devices: _Devices[W], places: dict[int, int], lengths: dict[int, list[float]], late: float
    ) -> int | None:
        """The request of the block that goes first, of those whose devices are free."""
        there = [kind for kind, place in places.items() if place < len(lengths[kind])]
        there.sort(key=lambda kind: lengths[kind][places[kind]] < late)  # stable: otherwise the largest first
        return next((kind for kind in there if devices.fit(self._demand(kind))), None)

    def _bound_left(self, lengths: dict[int, list[float]], ahead: dict[W, deque[tuple[int, float]]]) -> float:
        """Seconds that the run goes on at least."""
        times = {kind: sum(seconds) for kind, seconds in lengths.items()}
        for kind, seconds in itertools.chain.from_iterable(ahead.values()):
            times[kind] += seconds
        uuids = {uuid for demand in self._demands for uuid in demand.candidates}
        used = sum(_part(demand) * times[kind] for kind, demand in enumerate(self._demands))
        return max(sum(times.values()) / max(len(self.workers), 1), used / max(len(uuids), 1))

    def _take_over(self, worker: W, free: float, now: float) -> bool:
        """Give a worker, which is free then, the last tests of another's block, where they end sooner with it."""
        mine = self.workers[worker]
        start = {_CPU: free}
        found: list[tuple[bool, float, _Block]] = []
        for other, state in self.workers.items():
            block = state.block
            if other == worker or block is None or block.together or not block.tests:
                continue
            if block.kind not in start:
                start[block.kind] = self._outlook(now).when(worker, block.kind)
            waits = start[block.kind] > free + AT_ONCE
            if not waits or mine.sent:
                found.append((waits, now + sum(seconds for _, seconds in self._ahead(other, now)), block))
        for _, end, block in sorted(found, key=lambda one: (one[0], -one[1])):
            known = mine.block is not None and mine.block.group == block.group
            cost = 0.0 if known else self._costs.get(block.group, 0.0)
            here = start[block.kind] + cost
            if (end - here) / 2 < cost:
                continue  # it would be setting up for longer than it runs tests
            taken: list[int] = []
            moved = 0.0
            while block.tests and here + moved + self._times.of(block.tests[-1]) < end - moved:
                taken.append(block.last())
                moved += self._times.of(taken[-1])
            if taken:
                mine.block = _Block(block.kind, block.group, False, reversed(taken), self._times)
                return True
        return False


class _Outlook(Generic[W]):
    """How the run goes on, if each worker does what it has before it."""

    def __init__(
        self, devices: _Devices[W], demands: Sequence[Demand], ahead: dict[W, deque[tuple[int, float]]], now: float
    ) -> None:
        self.devices, self.ahead, self.time = devices, ahead, now
        self._demands = demands
        self._ends: list[tuple[float, int, W]] = []
        self._order = itertools.count()
        for worker, before in ahead.items():
            if before and worker not in devices.waiting:
                self._start(worker)

    def _start(self, worker: W) -> None:
        """Begin what a worker has next before it, or wait for the devices."""
        kind, _ = self.ahead[worker][0]
        if worker in self.devices.holders or self.devices.take(worker, None if kind == _CPU else self._demands[kind]):
            self._started(worker)

    def _started(self, worker: W) -> None:
        heapq.heappush(self._ends, (self.time + self.ahead[worker][0][1], next(self._order), worker))

    def idle(self) -> list[W]:
        """The workers that have nothing before them."""
        return [worker for worker, before in self.ahead.items() if not before]

    def run(self, worker: W, kind: int, seconds: float) -> None:
        """Have a worker, which has nothing before it, do this."""
        self.ahead[worker].append((kind, seconds))
        self._start(worker)

    def goes_on(self, until: float = math.inf) -> bool:
        """Whether anything ends, by then."""
        return bool(self._ends) and self._ends[0][0] <= until

    def next(self) -> W | None:
        """Go on to what ends next; the worker that has nothing before it any more, if that is so."""
        self.time, _, worker = heapq.heappop(self._ends)
        self.ahead[worker].popleft()
        for met in self.devices.release(worker):
            self._started(met)
        if not self.ahead[worker]:
            return worker
        self._start(worker)
        return None

    def when(self, worker: W, kind: int) -> float:
        """From when on a worker could run what makes this request, besides all the others; infinite for never."""
        while self.ahead[worker] or not self.devices.fit(self._demands[kind]):
            if not self.goes_on():
                return math.inf
            self.next()
        return self.time


class _Forecast(NamedTuple):
    """A block that a worker gets: its request, its place among those, and when."""

    kind: int
    place: int
    start: float


def _distinct(demands: Iterable[Demand | None]) -> list[Demand]:
    """The requests of a run, the largest first: more devices before fewer, whole ones before parts."""
    found: list[Demand] = []
    for demand in demands:
        if demand is not None and demand not in found:
            found.append(demand)
    return sorted(found, key=lambda demand: (-demand.count, -_part(demand)))


def _times_over(total: float, bound: float) -> int:
    """How often a bound is needed for a total."""
    return max(1, math.ceil(total / bound - 1e-9)) if bound else 1


def _costs(works: Sequence[Work]) -> dict[str, float]:
    """Seconds that the fixtures of each group take, which its tests share: what one test sets up beyond the others."""
    setups: dict[str, list[float]] = {}
    for work in works:
        if work.seconds is not None:
            setups.setdefault(work.group, []).append(work.setup)
    return {group: max(times) - sorted(times)[len(times) // 2] for group, times in setups.items()}
