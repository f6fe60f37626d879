"""What a set of ledgers comes to: per test where it ran and what is wrong with that, per runner and altogether.

Everything here is a pure function of what the ledgers say, of what is expected, and of today's date.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from pytest_cudaenv.ledger.drift import MEDIAN_TIME, Drift, Measured, drift
from pytest_cudaenv.ledger.quarantine import Entry
from pytest_cudaenv.ledger.results import CPU, FAILED, UNREACHED, Result, Results, Run


class Kind(NamedTuple):
    """A kind of finding."""

    title: str
    """What is wrong, as a heading."""
    meaning: str
    is_red: bool
    """Whether it makes the merge fail, unless it is allowed; the others do where they are forbidden."""
    is_of_tests: bool
    """Whether its findings are of single tests."""

    def counted(self, count: int) -> str:
        """`3 failed somewhere`, `2 missing runners`."""
        return f"{count:,} {self.title}{'' if self.is_of_tests or count == 1 else 's'}"


KINDS: dict[str, Kind] = {
    "missing-runner": Kind("missing runner", "An --expect names a runner, and no ledger is of it", True, False),
    "empty-runner": Kind("empty runner", "A runner on which not one test ran", True, False),
    "cut-short": Kind(
        "cut-short run",
        "A run ended before tests that it had selected, and no other run of its runner reached them",
        True,
        False,
    ),
    "failed": Kind("failed somewhere", "The latest run on some runner failed, or was an error", True, True),
    "breach": Kind(
        "promised but skipped", "A runner promised what the test needs, and the test was skipped there", True, True
    ),
    "never-ran": Kind("never ran anywhere", "No run of any ledger reached its body", True, True),
    "cpu-only": Kind("ran on the CPU only", "Its requirement or cell takes a device, and it ran on none", True, True),
    "idle": Kind("idle everywhere", "It was granted a device wherever it passed, and used CUDA nowhere", True, True),
    "lost": Kind(
        "ran there before, and no longer",
        "It ran on a kind of device in the baseline; both are still here, and it does not run there",
        True,
        True,
    ),
    "quarantine-expired": Kind("expired quarantine", "An entry of the quarantine is past its date", True, False),
    "quarantine-stale": Kind(
        "stale quarantine", "An entry's tests pass everywhere, or it matches no test", True, False
    ),
    "quarantined": Kind("in quarantine", "What is wrong with it is excused by an entry of the quarantine", False, True),
    "unwitnessed": Kind(
        "passed without its backend seen",
        "It passed, and the attention that its cell names is not what was seen to run",
        False,
        True,
    ),
    "finding": Kind(
        "with a finding",
        "It did not fail, and left torch's state changed, kept memory, or was skipped when memory ran out",
        False,
        True,
    ),
    "unmarked": Kind("used CUDA undeclared", "It used CUDA, declares no device, and had no lease", False, True),
    "flaky": Kind("passed on a rerun only", "It passed after a failure on the same kind of device", False, True),
    "one-runner": Kind(
        "ran on one runner only", "It takes a device, and of several runners one has run it", False, True
    ),
    "drift-time": Kind("slower than the baseline", "Its time grew by more than half and by more than 1 s", False, True),
    "drift-memory": Kind(
        "larger than the baseline", "Its peak grew by more than a tenth and by more than 64 MiB", False, True
    ),
    "drift-parity": Kind(
        "less exact than the baseline",
        "Its distance from the reference grew by more than a quarter and by more than 0.1 of the limit",
        False,
        True,
    ),
    "unexpected-runner": Kind("unexpected runner", "A ledger is of a runner that no --expect names", False, False),
}
"""Name -> kind, the worst first."""


class Finding(NamedTuple):
    """One thing that is wrong, or worth saying."""

    kind: str
    subject: str
    """A test's id, a runner's name or a quarantine's entry."""
    text: str = ""


@dataclass
class Judged:
    """One test: where it ran, and what is wrong with that."""

    finals: Mapping[str, Mapping[str, Result]]
    """Runner -> kind of device -> the latest run of the test there."""
    latest: Mapping[str, Result]
    """Runner -> what it says last of the test, ran or not."""
    findings: tuple[str, ...] = ()
    """Kinds of findings, the worst first."""

    @cached_property
    def kinds(self) -> dict[str, Result]:
        """Kind of device -> the best of the runners' results there."""
        best: dict[str, Result] = {}
        for by_kind in self.finals.values():
            for kind, result in by_kind.items():
                present = best.get(kind)
                best[kind] = result if present is None else min(present, result, key=_order)
        return best

    @cached_property
    def results(self) -> list[tuple[str, Result]]:
        """(runner, result): the latest run on each kind of device, else what the runner says last."""
        found: list[tuple[str, Result]] = []
        for runner, result in self.latest.items():
            by_kind = self.finals.get(runner)
            if by_kind:
                found += [(runner, final) for final in by_kind.values()]
            if not by_kind or (result.kind is None and result.is_failure):
                found.append((runner, result))
        return found

    @cached_property
    def takes_device(self) -> bool:
        return any(result.takes_device for _, result in self.results)

    @property
    def must_have_device(self) -> bool:
        """Whether it cannot do without a device."""
        return any(result.needs and _device_count(result.needs) for _, result in self.results)

    @property
    def cell(self) -> str | None:
        return next((result.cell for _, result in self.results if result.cell is not None), None)

    @property
    def reasons(self) -> list[str]:
        """Why it did not run, as lines, wherever it did not."""
        return list(dict.fromkeys(result.why for _, result in self.results if result.kind is None))


@lru_cache(maxsize=4096)
def _device_count(needs: str) -> int:
    """The devices in a requirement's fields. Many tests share one."""
    return int(json.loads(needs).get("devices", 0))


_GOODNESS = ("passed", "xfailed", "xpassed", "failed", "error")


def _order(result: Result) -> tuple[int, bool, float]:
    """Best first: passed, with work on the device, fast."""
    return _GOODNESS.index(result.outcome), result.idle, result.seconds or 0.0


@dataclass
class Runner:
    """One runner: all runs that go by its name."""

    name: str
    runs: list[Run]
    """In the order in which they started."""
    is_expected: bool = True
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcome -> tests, each by the latest run that reached it."""
    ran: int = 0
    seconds: float = 0.0
    """Of all tests' latest runs."""

    @property
    def failed(self) -> int:
        return sum(self.outcomes[outcome] for outcome in FAILED)

    @property
    def not_run(self) -> int:
        return sum(self.outcomes.values()) - self.ran

    @property
    def devices(self) -> str:
        return " / ".join(dict.fromkeys(run.devices for run in self.runs))


@dataclass
class Verdict:
    """What a merge comes to."""

    results: Results
    tests: dict[str, Judged]
    """In the order of their ids."""
    runners: list[Runner]
    findings: dict[str, list[Finding]]
    """Kind -> its findings; kinds without any are left out, the worst is first."""
    red: tuple[str, ...]
    """Kinds among them that make the merge fail."""
    allowed: tuple[str, ...]
    """Kinds among them that would, and are allowed."""
    drift: Drift = field(default_factory=Drift)
    has_baseline: bool = False

    @property
    def is_red(self) -> bool:
        return bool(self.red)

    @cached_property
    def ran(self) -> int:
        """Tests that ran somewhere."""
        return sum(1 for test in self.tests.values() if test.finals)

    @cached_property
    def kinds(self) -> list[str]:
        """Kinds of devices on which tests ran or could have run, the CPU last."""
        found = {kind for runner in self.runners for run in runner.runs for kind in run.kinds}
        found |= {kind for test in self.tests.values() for by_kind in test.finals.values() for kind in by_kind}
        return sorted(found, key=lambda kind: (kind == CPU, kind))

    def why(self, kind: str) -> list[tuple[str, str, list[str]]]:
        """(reason, remedy, tests) of the tests with a finding that did not run, the most frequent first."""
        groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for finding in self.findings.get(kind, ()):
            told: dict[str, str] = {}
            for _, result in self.tests[finding.subject].results:
                if result.kind is None:
                    told |= {str(r): r.remedy for r in result.reasons} or {result.why: ""}
            for reason in told.items():
                groups[reason].append(finding.subject)
        ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
        return [(reason, remedy, tests) for (reason, remedy), tests in ordered]


def judge(
    results: Results,
    *,
    today: datetime.date,
    expected: Sequence[str] = (),
    allow: Collection[str] = (),
    forbid: Collection[str] = (),
    quarantine: Iterable[Entry] = (),
    baseline: Results | None = None,
) -> Verdict:
    """The verdict on what ledgers say; the order in which they were read does not enter into it."""
    runners = _runners(results, expected)
    tests = _final_results(results, runners)
    found: dict[str, list[Finding]] = {kind: [] for kind in KINDS}
    for finding in (*_of_runners(runners, expected), *_of_runs(results, runners)):
        found[finding.kind].append(finding)

    wrong: dict[str, dict[str, str]] = {test: dict(_of_test(judged, len(runners))) for test, judged in tests.items()}
    drifted = Drift()
    if baseline is not None:
        before = _final_results(baseline, _runners(baseline, ()))
        drifted = drift(_numbers(before), _numbers(tests))
        for change in drifted.changes:
            text = str(change).removeprefix(f"{change.test} ")
            earlier = wrong[change.test].get(f"drift-{change.what}")
            wrong[change.test][f"drift-{change.what}"] = f"{earlier}; {text}" if earlier else text
        kinds = {kind for judged in tests.values() for by_kind in judged.finals.values() for kind in by_kind}
        kinds |= {kind for run in results.runs.values() for kind in run.kinds}
        for test in tests.keys() & before.keys():
            if gone := sorted((before[test].kinds.keys() - tests[test].kinds.keys()) & kinds):
                why = " | ".join(tests[test].reasons) or f"ran on {', '.join(tests[test].kinds)}"
                wrong[test]["lost"] = f"{', '.join(gone)}: {why}"

    for finding in _apply(quarantine, tests, wrong, today):
        found[finding.kind].append(finding)
    for test, judged in tests.items():
        told = wrong[test]
        kinds_of_test = tuple(kind for kind in KINDS if kind in told) if told else ()
        if kinds_of_test:
            judged.findings = kinds_of_test
        for kind in kinds_of_test:
            found[kind].append(Finding(kind, test, told[kind]))
    findings = {kind: several for kind, several in found.items() if several}
    could_be_red = [kind for kind in findings if KINDS[kind].is_red or kind in forbid]
    return Verdict(
        results,
        tests,
        runners,
        findings,
        red=tuple(kind for kind in could_be_red if kind not in allow),
        allowed=tuple(kind for kind in could_be_red if kind in allow),
        drift=drifted,
        has_baseline=baseline is not None,
    )


def _runners(results: Results, expected: Sequence[str]) -> list[Runner]:
    by_name: defaultdict[str, list[Run]] = defaultdict(list)
    for run in results.runs.values():
        by_name[run.runner].append(run)
    wanted = {name.casefold() for name in expected}
    return [
        Runner(
            name,
            sorted(by_name[name], key=lambda run: (run.started, run.key)),
            not wanted or name.casefold() in wanted,
        )
        for name in sorted(by_name)
    ]


def _final_results(results: Results, runners: Sequence[Runner]) -> dict[str, Judged]:
    """Every test by what counts of its results: on each runner the latest run in which it ran, else the latest."""
    in_order = [(run.key, runner.name) for runner in runners for run in runner.runs]
    tests: dict[str, Judged] = {}
    for test in sorted(results.tests):
        by_run = results.tests[test]
        finals: dict[str, dict[str, Result]] = {}
        latest: dict[str, Result] = {}
        for key, name in in_order:
            result = by_run.get(key)
            if result is None:
                continue
            if result.outcome != UNREACHED or name not in latest:
                latest[name] = result
            if (kind := result.kind) is not None:
                by_kind = finals.get(name)
                if by_kind is None:
                    finals[name] = {kind: result}
                    continue
                before = by_kind.get(kind)
                if before is not None and before.outcome in FAILED and result.outcome not in FAILED:
                    result = result._replace(attempts=max(result.attempts, 2))
                by_kind[kind] = result
        tests[test] = Judged(finals, latest)
    _count(tests, {runner.name: runner for runner in runners})
    return tests


def _count(tests: Mapping[str, Judged], runners: Mapping[str, Runner]) -> None:
    for judged in tests.values():
        for name, last in judged.latest.items():
            runner, by_kind = runners[name], judged.finals.get(name)
            if by_kind:
                several = by_kind.values()
                # A test that a mixed runner ran on two kinds of device is one test: its worst outcome.
                worst = max(several, key=_order) if len(by_kind) > 1 else next(iter(several))
                if last.kind is None and last.is_failure:
                    worst = last
                runner.outcomes[worst.outcome] += 1
                runner.ran += 1
                for result in several:
                    runner.seconds += result.seconds or 0.0
            else:
                runner.outcomes[last.outcome] += 1


def _of_test(judged: Judged, runners: int) -> Iterator[tuple[str, str]]:
    """(kind, text) of what is wrong with one test."""
    failures, breaches = [], []
    noted: dict[str, dict[str, None]] = {}
    on_device = on_cpu = unmarked = flaky = False
    takes_device = judged.takes_device
    all_idle = True
    for runner, result in judged.results:
        unmarked = unmarked or result.unmarked
        if result.is_failure:
            where = (
                f"{result.kind} of {runner}" if result.kind and result.kind.casefold() != runner.casefold() else runner
            )
            failures.append(f"on {where}: {result.message or result.why}")
        if result.findings and not result.is_failure:
            for told in result.findings:
                kind = "unwitnessed" if told.startswith("[witness-") else "finding"
                noted.setdefault(kind, {})[told] = None
        if result.kind is None:
            if result.breach is not None:
                breaches.append(f"on {runner}: {result.breach}; {result.why}")
            continue
        if result.kind == CPU:
            on_cpu = True
        else:
            on_device = True
            all_idle = all_idle and result.idle
        flaky = flaky or (result.attempts > 1 and result.outcome not in FAILED)
    if failures:
        yield "failed", "; ".join(failures)
    if breaches:
        yield "breach", "; ".join(breaches)
    if not judged.finals:
        yield "never-ran", " | ".join(judged.reasons)
    elif takes_device and on_cpu and not on_device:
        yield "cpu-only", " | ".join(judged.reasons)
    elif takes_device and on_device and all_idle:
        yield "idle", "passed without using CUDA"
    for kind, texts in noted.items():
        yield kind, "; ".join(texts)
    if unmarked:
        yield "unmarked", ""
    if flaky:
        yield "flaky", ""
    if takes_device and runners > 1 and len(judged.finals) == 1:
        yield "one-runner", f"on {next(iter(judged.finals))}"


def _of_runners(runners: Sequence[Runner], expected: Sequence[str]) -> Iterator[Finding]:
    present = {runner.name.casefold() for runner in runners}
    for name in dict.fromkeys(expected):
        if name.casefold() not in present:
            yield Finding("missing-runner", name, "no ledger is of this runner: its job was cancelled, or kept none")
    for runner in runners:
        if not runner.is_expected:
            yield Finding("unexpected-runner", runner.name, runner.devices)
        if not runner.ran:
            yield Finding("empty-runner", runner.name, f"of {sum(runner.outcomes.values())} tests none ran")


def _of_runs(results: Results, runners: Sequence[Runner]) -> Iterator[Finding]:
    """Runs that ended before tests which they had selected."""
    unreached: Counter[str] = Counter()
    names = {run.key: runner.name for runner in runners for run in runner.runs}
    for by_run in results.tests.values():
        missed = [key for key, result in by_run.items() if result.outcome == UNREACHED]
        if missed:
            reached = {names[key] for key, result in by_run.items() if result.outcome != UNREACHED}
            unreached.update(key for key in missed if names[key] not in reached)
    for runner in runners:
        for run in runner.runs:
            count = unreached[run.key]
            if count or (run.end is None and not run.tells_selected):
                tests = f"{count} tests" if count != 1 else "1 test"
                what = f"before {tests} that it had selected" if count else "and does not tell what it had selected"
                how = "without an end" if run.end is None else f"with pytest's exit status {run.end['status']}"
                yield Finding("cut-short", runner.name, f"{', '.join(sorted(run.sources))} ended {what}, {how}")


def _numbers(tests: Mapping[str, Judged]) -> dict[tuple[str, str], Measured]:
    """What was measured of the tests that passed, by test and kind of device."""
    numbers: dict[tuple[str, str], Measured] = {}
    for test, judged in tests.items():
        for by_kind in judged.finals.values():
            for kind, result in by_kind.items():
                if result.outcome in FAILED:
                    continue
                measured = Measured(result.seconds, result.memory, result.parity)
                present = numbers.get((test, kind))
                numbers[test, kind] = measured if present is None else present.joined(measured)
    return numbers


def _apply(
    quarantine: Iterable[Entry],
    tests: Mapping[str, Judged],
    wrong: Mapping[str, dict[str, str]],
    today: datetime.date,
) -> list[Finding]:
    """Turn what entries excuse into `quarantined`; findings on the entries themselves."""
    findings: list[Finding] = []
    excused: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    """Test -> (kind, runner) that some entry excuses."""
    by_whom: defaultdict[str, list[str]] = defaultdict(list)
    for entry in quarantine:
        if entry.is_expired(today):
            days = (today - entry.until).days
            findings.append(Finding("quarantine-expired", str(entry), f"{days} day{'s' if days > 1 else ''} ago"))
            continue
        matched = entry.matching(tests)
        used = False
        for test in matched:
            for kind in entry.excuses:
                where = {r for r in _runners_with(kind, tests[test], wrong[test]) if entry.covers_runner(r)}
                if where:
                    used = True
                    excused[test] |= {(kind, runner) for runner in where}
                    by_whom[test].append(f"{entry.owner}, until {entry.until}")
        if not matched:
            findings.append(Finding("quarantine-stale", str(entry), "it matches no test"))
        elif not used and not entry.flaky and (ran := _ran_within(entry, tests, matched)):
            findings.append(
                Finding("quarantine-stale", str(entry), f"{ran} of its tests ran, and nothing of them needs excusing")
            )
    for test, pairs in excused.items():
        told = wrong[test]
        for kind in [kind for kind in KINDS if any(kind == excused_kind for excused_kind, _ in pairs)]:
            if all((kind, runner) in pairs for runner in _runners_with(kind, tests[test], told)):
                text = told.pop(kind)
                who = ", ".join(dict.fromkeys(by_whom[test]))
                present = told.get("quarantined")
                told["quarantined"] = f"{present}; {kind} {text}" if present else f"{who}: {kind} {text}"
    return findings


def _runners_with(kind: str, judged: Judged, wrong: Mapping[str, str]) -> list[str]:
    """The runners on which a test has a finding of that kind."""
    if kind not in wrong:
        return []
    if kind == "failed":
        return [runner for runner, result in judged.results if result.is_failure]
    if kind == "breach":
        return [runner for runner, result in judged.results if result.kind is None and result.breach is not None]
    return list(judged.latest)


def _ran_within(entry: Entry, tests: Mapping[str, Judged], matched: Iterable[str]) -> int:
    """How many of an entry's tests ran on the runners that it is about."""
    return sum(1 for test in matched if any(entry.covers_runner(runner) for runner in tests[test].finals))


def shift_lines(drifted: Drift) -> list[str]:
    """Where the times of a kind of device moved as a whole, a line each."""
    return [
        f"all of {kind}: {ratio:.2f} times the baseline's time (median)"
        for kind, ratio in drifted.shifts.items()
        if ratio >= MEDIAN_TIME or ratio <= 1 / MEDIAN_TIME
    ]
