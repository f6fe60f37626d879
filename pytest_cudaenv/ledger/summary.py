"""The summary: what did not run, grouped by reason, and what passed on which kind of device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_cudaenv.requirements.reason import Rank, Reason


@dataclass
class Group:
    """The tests that one unmet need kept from running."""

    remedy: str
    rank: int
    tests: set[str] = field(default_factory=set)


@dataclass
class Finding:
    """What was found of some tests, in the same words."""

    code: str
    text: str
    remedy: str
    tests: set[str] = field(default_factory=set)


NAMED = 10
"""Tests that a summary names, of many that have the same in common."""

MESSAGES = 5
"""Different messages of one code that a summary prints."""

LONG_WAIT = 5.0
"""Seconds of waiting for devices, over all tests, below which a run is not told of them."""

LONG_SHARE = 0.1
"""The part of a run's time (that of the workers which waited) likewise."""


@dataclass
class Waiting:
    """How long the tests of a run waited for their devices."""

    seconds: float = 0.0
    tests: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    """Tests that declare no memory, and so take their devices whole."""
    workers: set[str] = field(default_factory=set)

    def add(self, nodeid: str, waited: Mapping[str, Any]) -> None:
        """Count one test's waiting."""
        self.seconds += waited["seconds"]
        self.tests.add(nodeid)
        self.workers.add(waited["worker"])
        if waited["whole"]:
            self.whole.add(nodeid)

    def lines(self, elapsed: float) -> list[str]:
        """How long, and what to declare; none where a run of `elapsed` seconds did not wait long."""
        share = self.seconds / max(elapsed * len(self.workers), 1e-9)
        if self.seconds < LONG_WAIT or share < LONG_SHARE:
            return []
        if self.whole:
            remedy = (
                f"{len(self.whole)} of them declare no memory= and take devices whole: declare it, or set "
                "cuda_default_memory, so that more share a device."
            )
        else:
            remedy = "Declare less memory= where it is too much, or run fewer workers (-n)."
        tests = f"{len(self.tests)} test{'s' if len(self.tests) > 1 else ''}"
        time = "the run" if len(self.workers) == 1 else f"the time of {len(self.workers)} workers"
        return [
            f"waited for devices: {self.seconds:.0f} s in {tests}, {100 * min(share, 1):.0f} % of {time}",
            f"       {remedy}",
        ]


@dataclass
class Summary:
    """Counts over the reports of a run; the same on one process and over xdist's workers."""

    passed: Counter[str] = field(default_factory=Counter)
    """Kind of device (`NVIDIA H200`, `CPU`) -> number of tests that passed there."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Reason line -> the tests that it kept from running."""
    errors: set[str] = field(default_factory=set)
    """Tests that are errors because a device is present and unusable."""
    waiting: Waiting = field(default_factory=Waiting)
    unmarked: set[str] = field(default_factory=set)
    """Tests that declare no device and used CUDA."""
    idle: set[str] = field(default_factory=set)
    """Tests that asked for a device and passed without using CUDA."""
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    """(code, text) -> what was found of tests, even of those that passed."""
    written: dict[str, set[str]] = field(default_factory=dict)
    """Test -> names of the golden values that it has written."""
    breaches: dict[str, set[str]] = field(default_factory=dict)
    """What the runner promised -> the tests that did not run all the same."""

    def add(self, nodeid: str, when: str, outcome: str, record: Mapping[str, Any] | None) -> None:
        """Count one report (setup, call or teardown) of a test that uses the plugin."""
        if record is None:
            return
        if record.get("unmarked"):
            self.unmarked.add(nodeid)
        if record.get("idle"):
            self.idle.add(nodeid)
        for data in record.get("findings", ()):
            one = Finding(data["code"], data["text"], data["remedy"])
            self.findings.setdefault((one.code, one.text), one).tests.add(nodeid)
        if written := record.get("written"):
            self.written.setdefault(nodeid, set()).update(written)
        if (promise := record.get("breach")) is not None:
            self.breaches.setdefault(promise, set()).add(nodeid)
        if (waited := record.get("waited")) is not None:
            self.waiting.add(nodeid, waited)
        if when == "call" and outcome == "passed" and record.get("ran_on"):
            self.passed[record["ran_on"]] += 1
        if when == "teardown" or outcome == "passed":
            return
        for data in record.get("reasons", ()):
            reason = Reason(data["code"], data["need"], data["have"], data["remedy"], Rank(data["rank"]))
            group = self.groups.setdefault(str(reason), Group(reason.remedy, reason.rank))
            group.tests.add(nodeid)
            if outcome == "failed":
                self.errors.add(nodeid)

    @property
    def not_run(self) -> int:
        """How many tests some unmet need kept from running."""
        return len({nodeid for group in self.groups.values() for nodeid in group.tests})

    def lines(self, ran: str = "passed") -> list[str]:
        """The summary's lines; none where nothing was counted. `ran` is the word for what was not kept from running."""
        lines: list[str] = []
        if self.passed:
            kinds = ", ".join(f"{count} on {kind}" for kind, count in self.passed.most_common())
            lines.append(f"{ran}: {kinds}")
        for promise, tests in sorted(self.breaches.items()):
            lines += [f"promised and not run: {promise}: {len(tests)}", f"       {_named(tests)}"]
        if self.idle:
            remedy = "Let them compute on their device, or take away the requirement; --cuda-strict fails them."
            lines += [f"passed without using CUDA: {len(self.idle)}", f"       {_named(self.idle)}", f"       {remedy}"]
        for code in sorted({finding.code for finding in self.findings.values()}):
            lines += _finding_lines(code, [one for one in self.findings.values() if one.code == code])
        if self.written:
            count = sum(map(len, self.written.values()))
            lines += [f"golden values written: {count}", f"       {_named(self.written)}"]
            lines += ["       Look at the difference before you commit it."]
        if self.unmarked:
            lines += _unmarked_lines(self.unmarked)
        if self.groups:
            errors = f" ({len(self.errors)} of them errors)" if self.errors else ""
            lines.append(f"not run: {self.not_run}{errors}")
        for text, group in _folded(_sorted(self.groups.items())):
            lines += [f"  {len(group.tests):4} {text}", f"       {group.remedy}"]
        return lines


def _finding_lines(code: str, found: Sequence[Finding]) -> list[str]:
    """Each message of a code with its tests, those of most tests first, and one remedy for all that share it."""
    found = sorted(found, key=lambda one: (-len(one.tests), one.text))
    told, rest = found[:MESSAGES], found[MESSAGES:]
    lines: list[str] = []
    for place, one in enumerate(told):
        lines += [f"[{code}] {len(one.tests)}: {one.text}", f"       {_named(one.tests)}"]
        if place + 1 == len(told) or told[place + 1].remedy != one.remedy:
            lines.append(f"       {one.remedy}")
    if rest:
        tests = {nodeid for one in rest for nodeid in one.tests}
        lines += [f"[{code}] {len(tests)}: {len(rest)} more messages, in the ledger", f"       {_named(tests)}"]
    return lines


def _sorted(groups: Iterable[tuple[str, Group]]) -> list[tuple[str, Group]]:
    return sorted(groups, key=lambda entry: (entry[1].rank, -len(entry[1].tests), entry[0]))


def _folded(groups: Sequence[tuple[str, Group]]) -> list[tuple[str, Group]]:
    """The groups, without the many kinds of what a suite skips by its own choice and nobody understands."""
    own = [entry for entry in groups if entry[1].rank == Rank.SUITE]
    if len(own) <= NAMED:
        return list(groups)
    rest = own[NAMED:]
    tests = {nodeid for _, group in rest for nodeid in group.tests}
    remedy = "`pytest -rs` and the ledger list them."
    more = (f"for {len(rest)} more reasons that are the suite's own", Group(remedy, Rank.SUITE, tests))
    return [entry for entry in groups if entry not in rest] + [more]


def _unmarked_lines(tests: Collection[str]) -> list[str]:
    remedy = "Put @requires_cuda on them, or choose --cuda-unmarked=grant, hide or fail."
    head = f"used CUDA without declaring it, and without a lease: {len(tests)}"
    return [head, f"       {_named(tests)}", f"       {remedy}"]


def _named(tests: Collection[str]) -> str:
    """The first tests by name, and how many more there are."""
    return ", ".join(sorted(tests)[:NAMED]) + (f" and {len(tests) - NAMED} more" if len(tests) > NAMED else "")
