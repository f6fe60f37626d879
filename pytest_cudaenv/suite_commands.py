"""`pytest-cudaenv explain` and `pytest-cudaenv matrix`: what a collected suite needs, and which runner can run it."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_cudaenv.collecting import CollectionFailed, collect
from pytest_cudaenv.host.detect import detect_host
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.mask import MaskReading, read_mask
from pytest_cudaenv.host.software import installed_software
from pytest_cudaenv.ledger.contract import Runner, read_runners
from pytest_cudaenv.ledger.durations import Durations
from pytest_cudaenv.ledger.explain import explain as explain_test
from pytest_cudaenv.ledger.header import header_lines
from pytest_cudaenv.ledger.matrix import Job, Matrix, NoRunner, matrix_of
from pytest_cudaenv.ledger.read import LedgerError, read
from pytest_cudaenv.ledger.results import united
from pytest_cudaenv.ledger.runners import RunnerHost
from pytest_cudaenv.ledger.suite import Suite, SuiteTest
from pytest_cudaenv.requirements.attention_backends import with_backends

EXIT_OK, EXIT_PROBLEM, EXIT_USAGE = 0, 1, 2

GITHUB_JOBS = 256
"""Of one matrix: https://docs.github.com/actions/reference/limits"""

NAMED = 10
"""Tests that a message names before it counts the rest."""

PYTEST_ARGUMENTS = "tests, files and folders, as pytest takes them; after --, options of pytest too"


class UsageError(Exception):
    """The command was called wrongly; the text names the choices."""


def add_parsers(commands: Any) -> None:
    """Add both commands to the command line."""
    text = "why tests would run here, on a simulated host and on each runner, or not: needs, sources, lease, verdict"
    status = "Status: 0 every test would run; 1 one would not; 2 usage, or a file that cannot be collected."
    sub = commands.add_parser("explain", help=text, description=text, epilog=status)
    _add_collection(sub)
    sub.add_argument("--json", action="store_true", help="machine-readable output")
    sub.set_defaults(command=_guarded(explain))

    text = "a CI matrix: each test to the cheapest runner (ini cuda_runners) that can run it, balanced over jobs"
    status = (
        "Status: 0 every test has its job; 1 a test has no runner, or a file skipped itself and nobody knows its "
        "tests (see --allow-none); 2 usage, or a file that cannot be collected."
    )
    sub = commands.add_parser("matrix", help=text, description=text, epilog=status)
    _add_collection(sub)
    sub.add_argument("--format", choices=("text", "github", "gitlab"), default="text", help="what to print")
    sub.add_argument("--runner", metavar="NAME", action="append", help="use only this profile; repeat for more")
    sub.add_argument("--jobs", metavar="DIR", default="jobs", help="where the lists of tests go (default: jobs)")
    sub.add_argument(
        "--durations",
        metavar="LEDGER",
        action="append",
        default=[],
        help="ledger, or --json of a merge, with durations; repeat for more",
    )
    sub.add_argument(
        "--default-seconds",
        metavar="S",
        type=_positive,
        help="of tests that no ledger tells of (default: median)",
    )
    sub.add_argument(
        "--max-minutes", metavar="M", type=_positive, help="as many jobs as M minutes of tests for each make"
    )
    sub.add_argument("--shards", metavar="RUNNER=N", action="append", default=[], help="N jobs on that runner")
    sub.add_argument("--allow-none", action="store_true", help="tests without a runner are told and no failure")
    sub.add_argument(
        "--github-output", metavar="KEY", nargs="?", const="matrix", help="append KEY=JSON to $GITHUB_OUTPUT as well"
    )
    sub.add_argument("--gitlab-include", metavar="FILE", help="file of the repository that the child pipeline includes")
    sub.add_argument("--gitlab-extends", metavar="JOB", help="hidden job in it that every job extends")
    sub.set_defaults(command=_guarded(matrix))


def _add_collection(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("arguments", metavar="TEST", nargs="*", help=PYTEST_ARGUMENTS)
    sub.add_argument("-k", metavar="EXPRESSION", help="as pytest's")
    sub.add_argument("-m", metavar="EXPRESSION", help="as pytest's")
    sub.add_argument("--simulate", metavar="NAME[:COUNT]", help="collect and answer as on that host: h100, h200:2")
    sub.add_argument(
        "--assume", metavar="DIST[==VERSION]", action="append", default=[], help="take it as installed and working"
    )


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


Command = Callable[[argparse.Namespace, Mapping[str, str]], int]


def _guarded(command: Command) -> Command:
    def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
        try:
            return command(options, environ)
        except (UsageError, CollectionFailed) as error:
            print(f"pytest-cudaenv: {error}", file=sys.stderr)
            return EXIT_USAGE

    return run


@contextmanager
def _collected(options: argparse.Namespace) -> Iterator[Suite]:
    """The suite, with its project's own attention backends known while the block runs."""
    arguments = [*options.arguments, *options.more]
    for flag in ("k", "m"):
        if (expression := getattr(options, flag)) is not None:
            arguments += [f"-{flag}", expression]
    suite = collect(arguments, options.simulate, options.assume)
    with_backends({backend.name: backend for backend in suite.backends})
    try:
        yield suite
    finally:
        with_backends({})


def _runners(suite: Suite) -> dict[str, Runner]:
    try:
        return read_runners(suite.told.runners)
    except ValueError as error:
        raise UsageError(str(error)) from None


def explain(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print of each test what it needs and what would become of it; 1 where one would not run."""
    with _collected(options) as suite:
        told = suite.told
        host, reading = _host(suite, environ)
        software = installed_software()
        runners = [RunnerHost(runner, software) for runner in _runners(suite).values()]
        found = [explain_test(test, told, host, reading, runners) for test in suite.tests]
        if options.json:
            lost = [{"id": gone.id, "why": gone.why} for gone in suite.uncollected]
            data = {"host": told.simulate, "tests": [one.as_json() for one in found], "uncollected": lost}
            print(json.dumps(data, indent=2))
        else:
            print("\n".join(header_lines(host, reading, {}, environ)))
            for one in found:
                print("\n" + "\n".join(one.lines()))
            for gone in suite.uncollected:
                print(f"\n{gone.id}\n  skipped itself while it was collected: {gone.why}")
    would_run = all(one.verdict == "run" for one in found) and not suite.uncollected
    return EXIT_OK if would_run else EXIT_PROBLEM


def _host(suite: Suite, environ: Mapping[str, str]) -> tuple[Host, MaskReading]:
    """The host for which the suite was collected, and what a run there would see of it."""
    from pytest_cudaenv.settings import Settings, host_of

    told = suite.told
    if told.simulate is None and not told.assume:
        host = detect_host(environ)
    else:
        host = host_of(Settings(simulate=told.simulate, assume=told.assume))
    return host, read_mask(told.mask, told.order, host.devices, host.fastest_first)


def matrix(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the matrix and write its lists of tests; 1 where a test has no runner."""
    if options.github_output is not None and not environ.get("GITHUB_OUTPUT"):
        raise UsageError("--github-output: GITHUB_OUTPUT is not set: this is no step of GitHub Actions")
    durations = _durations(options)
    with _collected(options) as suite:
        profiles = _chosen(_runners(suite), options.runner)
        shards = _shards(options.shards, profiles)
        software = installed_software()
        runners = [RunnerHost(runner, software) for runner in profiles.values()]
        found = matrix_of(
            suite.tests,
            runners,
            lambda test, runner: durations.seconds(test.id, runner.name, runner.kind),
            shards=shards,
            max_seconds=None if options.max_minutes is None else 60 * options.max_minutes,
        )
    if options.format == "github" and len(found.jobs) > GITHUB_JOBS:
        raise UsageError(f"{len(found.jobs)} jobs: GitHub takes {GITHUB_JOBS} in a matrix; raise --max-minutes")
    for line in _complaints(suite, found):
        print(f"pytest-cudaenv: {line}", file=sys.stderr)
    failed = bool(found.none or suite.uncollected) and not options.allow_none
    folder = Path(options.jobs)
    _write_lists(suite, found, folder)
    rows = [_row(job, profiles[job.runner], folder) for job in found.jobs]
    as_github = json.dumps({"include": rows}, separators=(",", ":"))
    if options.format == "github":
        print(as_github)
    elif options.format == "gitlab":
        print(json.dumps(_gitlab(rows, options.gitlab_include, options.gitlab_extends), indent=2))
    else:
        print("\n".join(_table(found, profiles, suite, durations)))
    if options.github_output is not None and not failed:
        with open(environ["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
            file.write(f"{options.github_output}={as_github}\n")
    return EXIT_PROBLEM if failed else EXIT_OK


def _durations(options: argparse.Namespace) -> Durations:
    durations = Durations(options.default_seconds)
    try:
        # A run that several files tell of is counted once.
        durations.add(united(read(path).results for path in options.durations))
    except LedgerError as error:
        raise UsageError(f"--durations {error}") from None
    return durations


def _chosen(profiles: dict[str, Runner], names: Sequence[str] | None) -> dict[str, Runner]:
    if not profiles:
        raise UsageError("the ini key cuda_runners has no profile; write NAME: devices=h100:2 cost=8 label=gpu")
    for name in names or ():
        if name not in profiles:
            raise UsageError(f"--runner: {name!r}: choose from {', '.join(profiles)}")
    return {name: runner for name, runner in profiles.items() if names is None or name in names}


def _shards(texts: Sequence[str], profiles: Mapping[str, Runner]) -> dict[str, int]:
    shards: dict[str, int] = {}
    for text in texts:
        name, _, count = text.partition("=")
        if name not in profiles:
            raise UsageError(f"--shards {text}: choose from {', '.join(profiles)}")
        if not re.fullmatch(r"[1-9][0-9]{0,5}", count):
            raise UsageError(f"--shards {text}: write RUNNER=N, with N from 1 on")
        shards[name] = int(count)
    return shards


def _complaints(suite: Suite, found: Matrix) -> list[str]:
    """What keeps the matrix from being a whole suite's, or its tests from testing what they are for."""
    lines: list[str] = []
    groups: dict[tuple[str, str], list[NoRunner]] = {}
    for one in found.none:
        groups.setdefault((one.nearest, " | ".join(map(str, one.reasons))), []).append(one)
    for (near, reasons), held in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        tests = "1 test has" if len(held) == 1 else f"{len(held)} tests have"
        remedies = " ".join(dict.fromkeys(reason.remedy for reason in held[0].reasons))
        lines.append(f"[matrix-no-runner] {tests} no runner; the nearest is {near}: {reasons}. {remedies}")
        lines += _named([one.test for one in held])
    for gone in suite.uncollected:
        lines.append(
            f"[matrix-uncollected] {gone.id} skipped itself while it was collected, and nobody knows its tests: "
            f"{gone.why}. Say what it needs by a marker, or collect where it imports (--simulate, --assume)"
        )
    if found.cpu_only:
        count = len(found.cpu_only)
        tests = "1 test that takes a device runs" if count == 1 else f"{count} tests that take a device run"
        lines.append(f"[matrix-cpu-only] {tests} on the CPU alone: no runner with a device can run them")
        lines += _named(found.cpu_only)
    return lines


def _named(tests: Sequence[SuiteTest]) -> list[str]:
    more = [f"  and {len(tests) - NAMED} more"] if len(tests) > NAMED else []
    return [f"  {test.id}" for test in tests[:NAMED]] + more


def _write_lists(suite: Suite, found: Matrix, folder: Path) -> None:
    """A file for each job, as `pytest @FILE` reads it, and one for the tests that have no runner."""
    lists = {f"{job.name}.txt": [_argument(test, suite) for test in job.tests] for job in found.jobs}
    if found.none:
        lists["no-runner.txt"] = [_argument(one.test, suite) for one in found.none]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in lists.items():
            folder.joinpath(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--jobs {folder}: {error.strerror}: name a folder that can be written") from None


def _argument(test: SuiteTest, suite: Suite) -> str:
    """A test as an argument of a pytest that is started here.

    Ids begin at the root folder. What begins with a dash would be an option, and with @ another list.
    Raises UsageError for what is more than one line to pytest.
    """
    path = test.id.partition("::")[0]
    here = Path(os.path.relpath(Path(suite.told.rootdir) / test.file)).as_posix()
    argument = here + test.id[len(path) :]
    if len(argument.splitlines()) != 1:
        raise UsageError(f"{test.id!r} is more than one line, and no list can name it: rename it")
    return f"./{argument}" if argument.startswith(("-", "@")) else argument


def _row(job: Job, runner: Runner, folder: Path) -> dict[str, Any]:
    """A job as an entry of a GitHub matrix: its keys are what workflows write behind `matrix.`."""
    return {
        "job": job.name,
        "runner": job.runner,
        "labels": list(runner.labels) or [runner.name],
        "tests": f"{folder.as_posix()}/{job.name}.txt",
        "count": len(job.tests),
        "minutes": round(job.seconds / 60, 1),
    }


def _gitlab(rows: Sequence[Mapping[str, Any]], include: str | None, extends: str | None) -> dict[str, Any]:
    """A child pipeline. JSON is YAML, and needs no library to be written."""
    pipeline: dict[str, Any] = {"include": [{"local": include}]} if include is not None else {}
    for row in rows:
        ledger = f"{row['job']}.json"
        job: dict[str, Any] = {"extends": extends} if extends is not None else {}
        job |= {
            "tags": row["labels"],
            "needs": [{"pipeline": "$PARENT_PIPELINE_ID", "job": "matrix"}],
            "script": [f"pytest @{row['tests']} --cuda-runner {row['runner']} --cuda-ledger {ledger}"],
            "artifacts": {"when": "always", "paths": [ledger]},
        }
        pipeline[row["job"]] = job
    return pipeline


def _table(found: Matrix, profiles: Mapping[str, Runner], suite: Suite, durations: Durations) -> list[str]:
    """For readers: a line for each job, and what all of them cost."""
    width = max([len(job.name) for job in found.jobs], default=0)
    lines = [
        f"{job.name:<{width}}  {len(job.tests):6} tests  {job.seconds / 60:8.1f} min  "
        f"cost {job.seconds / 60 * profiles[job.runner].cost:8.2f}"
        for job in found.jobs
    ]
    minutes = sum(job.seconds for job in found.jobs) / 60
    cost = sum(job.seconds / 60 * profiles[job.runner].cost for job in found.jobs)
    known = sum(durations.knows(test.id) for test in suite.tests)
    lines.append(f"{len(found.jobs)} jobs, {minutes:.1f} min of tests, cost {cost:.2f}")
    lines.append(f"durations known of {known} of {len(suite.tests)} tests")
    return lines
