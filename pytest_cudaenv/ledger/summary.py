"""The summary: what did not run, grouped by reason, and what passed on which kind of device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
class Summary:
    """Counts over the reports of a run; the same on one process and over xdist's workers."""

    passed: Counter[str] = field(default_factory=Counter)
    """Kind of device (`NVIDIA H200`, `CPU`) -> number of tests that passed there."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Reason line -> the tests that it kept from running."""
    errors: set[str] = field(default_factory=set)
    """Tests that are errors because a device is present and unusable."""

    def add(self, nodeid: str, when: str, outcome: str, record: Mapping[str, Any] | None) -> None:
        """Count one report (setup, call or teardown) of a test that uses the plugin."""
        if record is None:
            return
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
        if self.groups:
            errors = f" ({len(self.errors)} of them errors)" if self.errors else ""
            lines.append(f"not run: {self.not_run}{errors}")
        for text, group in _sorted(self.groups.items()):
            lines += [f"  {len(group.tests):4} {text}", f"       {group.remedy}"]
        return lines


def _sorted(groups: Iterable[tuple[str, Group]]) -> list[tuple[str, Group]]:
    return sorted(groups, key=lambda entry: (entry[1].rank, -len(entry[1].tests), entry[0]))
