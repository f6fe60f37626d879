"""What `--cuda-ledger` costs at 100,000 tests: time, memory, and the size of the file; and what merging it costs.

Trivial tests, three in ten of them with a device of a simulated host, in one process (`--cuda-isolation off`): no test
could make the ledger's share larger. Each round is a run with and one without a ledger, side by side, so that both meet
the same machine; the ratio is of processor time, which a busy machine distorts less than the clock. And, in a run of a
fifth of the tests, the share of its processor time that the ledger's own functions take: of one process, so that
nothing else on the machine moves it.

Rounds end where another would not be done within `--minutes`. `python -m benchmarks ledger --tests 2000` is quick.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS, ROUNDS, MINUTES = 100_000, 3, 8

WITH = ("--cuda-ledger", "ledger.json")

SUITE = """
import pytest
from pytest_cudaenv import requires_cuda

@pytest.mark.parametrize("x", range({plain}))
def test_plain(x): pass

@pytest.mark.parametrize("x", range({device}))
def test_device(cuda_device, x): pass

@requires_cuda(memory="8GB")
@pytest.mark.parametrize("x", range({marked}))
def test_marked(cuda_device, x): pass
"""

INSIDE = """
import time
from pytest_cudaenv.bookkeeping import Bookkeeping
from pytest_cudaenv.runner import Runner

spent, depth = 0.0, 0

def timed(function):
    def call(*args, **kwargs):
        global spent, depth
        depth += 1
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1
            spent += (time.process_time() - began) * (depth == 0)
    return call

for owner, names in ((Bookkeeping, ("check", "start", "add", "end")), (Runner, ("observe",))):
    for name in names:
        setattr(owner, name, timed(getattr(owner, name)))

def pytest_unconfigure():
    with open("inside", "w") as file:
        file.write(f"{spent} {time.process_time()}")
"""


TARGET_SHARE, TARGET_MB = 0.05, 200


class Cost(NamedTuple):
    """What one process took."""

    processor: float
    """Seconds."""
    clock: float
    """Seconds."""
    memory: float
    """MB at its peak."""


class Started(NamedTuple):
    """A process that runs."""

    command: list[str]
    pid: int
    began: float


def start(*command: str) -> Started:
    """Start Python with these arguments, without its output."""
    # Without its cached byte code every start would compile the package.
    environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS"}}
    environ |= {"PYTHONHASHSEED": "0", "PWD": os.getcwd()}
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    line = [sys.executable, *command]
    return Started(line, os.posix_spawnp(line[0], line, environ, file_actions=quiet), time.perf_counter())


def cost_of(started: Started, statuses: tuple[int, ...] = (0,)) -> Cost:
    """Wait for a process; RuntimeError if it ends with another status."""
    _, status, usage = os.wait4(started.pid, 0)
    if (code := os.waitstatus_to_exitcode(status)) not in statuses:
        raise RuntimeError(f"{' '.join(started.command)} ended with status {code}")
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - started.began, usage.ru_maxrss / 1000)


def start_run(*arguments: str) -> Started:
    """Start pytest in this folder."""
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    return start("-m", "pytest", *quiet, "--cuda-simulate", "h100", "--cuda-isolation", "off", *arguments)


def write_suite(tests: int) -> None:
    """A file of that many tests, in this folder."""
    device, marked = tests // 5, tests // 10
    Path("test_many.py").write_text(SUITE.format(plain=tests - device - marked, device=device, marked=marked))


def rounds_of(wanted: int, deadline: float) -> list[tuple[Cost, Cost]]:
    """(with a ledger, without) of each round; at least one, and none that would not be done by the deadline."""
    found: list[tuple[Cost, Cost]] = []
    longest = 0.0
    while len(found) < wanted and (not found or time.monotonic() + 1.1 * longest < deadline):
        began = time.monotonic()
        both = {kind: start_run(*kind) for kind in (WITH, ())[:: 1 if len(found) % 2 else -1]}
        # wait4 takes them in this order; a process that is done keeps its figures until it is asked.
        found.append((cost_of(both[WITH]), cost_of(both[()])))
        longest = max(longest, time.monotonic() - began)
        ratio = found[-1][0].processor / found[-1][1].processor
        print(f"  round {len(found)}: {ratio:.3f} of {found[-1][1].processor:.1f} s, in {longest:.0f} s", flush=True)
    return found


def share_inside() -> float:
    """The ledger's own functions, over all else that the process does."""
    Path("conftest.py").write_text(INSIDE)
    cost_of(start_run("--cuda-ledger", "inside.json"))
    inside, total = map(float, Path("inside").read_text().split())
    return inside / (total - inside)


def taken_for_real(ledger: Path) -> str:
    """A copy that merge reads, which refuses ledgers of simulated hosts."""
    first, _, rest = ledger.read_text().partition("\n")
    facts = json.loads(first)
    del facts["simulated"]
    copy = ledger.with_name("real.json")
    copy.write_text(json.dumps(facts, separators=(",", ":")) + "\n" + rest)
    return str(copy)


def row(what: str, measured: str, target: str = "", is_met: bool | None = None) -> str:
    """A line of the table."""
    return f"| {what} | {measured} | {target} | {'' if is_met is None else 'yes' if is_met else '**no**'} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ledger")
    parser.add_argument("--tests", type=int, default=TESTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no round that would end later")
    options, _ = parser.parse_known_args()
    # What comes after the rounds takes about a quarter of them.
    deadline = time.monotonic() + 60 * options.minutes * 0.8
    outer = os.getcwd()
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        try:
            write_suite(options.tests)
            rounds = rounds_of(options.rounds, deadline)
            real = taken_for_real(Path("ledger.json"))
            merge = ("-m", "pytest_cudaenv", "merge", real)
            merged = cost_of(start(*merge), (0, 1))
            paged = cost_of(start(*merge, "--html", "page.html"), (0, 1))
            size, page = (Path(name).stat().st_size / 1e6 for name in ("ledger.json", "page.html"))
            write_suite(options.tests // 5)
            inside = share_inside()
        finally:
            os.chdir(outer)
    ratios = sorted(with_it.processor / without.processor for with_it, without in rounds)
    base = statistics.median(without.processor for _, without in rounds)
    more = statistics.median(with_it.memory - without.memory for with_it, without in rounds)
    peak = max(with_it.memory for with_it, _ in rounds)
    ratio = statistics.median(ratios)
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} round{'s' if len(ratios) > 1 else ''}"
    each = 1e6 / options.tests
    share, limit = f"at most {TARGET_SHARE:.0%}", f"at most {TARGET_MB} MB"
    lines = [
        f"| {options.tests:,} tests | measured | target | met |",
        "|---|---|---|---|",
        row(
            "processor time with a ledger, over that without",
            f"{ratio:.3f} of {base:.1f} s ({spread})",
            share,
            ratio <= 1 + TARGET_SHARE,
        ),
        row(
            f"of that inside the ledger's functions ({options.tests // 5:,} tests)",
            f"{inside:.1%}, {inside * base * each:.0f} µs a test",
            share,
            inside <= TARGET_SHARE,
        ),
        row("peak memory of the run", f"{more:+.0f} MB, {peak:.0f} MB in all", limit, more <= TARGET_MB),
        row("the ledger", f"{size:.1f} MB, {size * each:.0f} bytes a test", limit, size <= TARGET_MB),
        row("merging it, to the terminal", f"{merged.clock:.1f} s ({merged.processor:.1f} s of processor)"),
        row("peak memory of the merge", f"{merged.memory:.0f} MB", limit, merged.memory <= TARGET_MB),
        row(
            "the HTML page besides",
            f"{paged.processor - merged.processor:+.1f} s of processor, {paged.memory:.0f} MB; {page:.1f} MB",
        ),
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
