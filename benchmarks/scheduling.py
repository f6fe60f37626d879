"""How long a run on eight devices takes, over the least that it can take: `--dist cuda`, and what is used without it.

200 tests of 1, 2 and 4 devices in ten modules, which sleep for log-normal times, on a simulated host of eight H100s:

- `--dist cuda` with leases, without last durations and with them;
- `--dist load` with leases;
- static pinning: eight workers with a device each run the tests of one device, then one process all the others.

Then 64 tests that declare `memory=` on one device, with leases and without.

A run counts from the start of its first test to the end of its last one, so that starting workers does not. Each test
writes when it began and ended, the UUIDs in its mask and its budget. From that it is checked that no device was in use
twice at once, nor beyond its memory; a run that does not pass ends the benchmark.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaenv.grants.demand import Demand
from pytest_cudaenv.grants.scheduling import Work, lower_bound
from pytest_cudaenv.host.catalog import simulated_host

TESTS, MODULES, DEVICES, WORKERS = 200, 10, 8, 8
COUNTS, WEIGHTS = (1, 2, 4), (4, 2, 1)
SIGMA, SEED, BOUND = 1.0, 2026, 30.0
"""Of the log-normal durations, scaled so that the lower bound is so many seconds."""
SMALL, SMALL_SECONDS, BUDGET = 64, 0.75, 9 * 10**9

PREAMBLE = """
import json, os, time, pytest
from pytest_cudaenv import requires_cuda

def use(devices, seconds, memory=None):
    began = time.monotonic()
    time.sleep(seconds)
    event = {"began": began, "ended": time.monotonic(), "uuids": [d.uuid for d in devices], "memory": memory}
    with open(os.environ["EVENTS"], "ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\\n")

"""

PINNING = """
import os
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["DEVICES"].split(",")[int(worker[2:])]
"""
"""One worker, one device. The second pass, in one process, sees them all."""


@dataclass(frozen=True)
class Event:
    """What one test did."""

    began: float
    ended: float
    uuids: tuple[str, ...]
    memory: int | None


class Violation(Exception):
    """A device was in use twice at once, or beyond its memory."""


def check(events: list[Event], total: dict[str, int]) -> None:
    """Raise Violation unless each device was used by one test, or by such whose budgets fit it, at every moment."""
    if strange := [event for event in events if not event.uuids or not set(event.uuids) <= set(total)]:
        raise Violation(f"no device, or one that is not there: {strange[0]}")
    for uuid, memory in total.items():
        moments = [(e.began, 1, e) for e in events if uuid in e.uuids]
        moments += [(e.ended, 0, e) for e in events if uuid in e.uuids]
        using: list[Event] = []
        for _, starts, event in sorted(moments, key=lambda moment: moment[:2]):
            if not starts:
                using.remove(event)
                continue
            using.append(event)
            if len(using) > 1 and (any(e.memory is None for e in using) or sum(e.memory or 0 for e in using) > memory):
                raise Violation(f"{uuid}: {using}")


def makespan(events: list[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max(e.ended for e in events) - min(e.began for e in events)


def suite() -> Iterator[tuple[str, int, float]]:
    """(module, devices, seconds) of each test; always the same."""
    rng = random.Random(SEED)
    tests = [(rng.choices(COUNTS, WEIGHTS)[0], rng.lognormvariate(0, SIGMA)) for _ in range(TESTS)]
    unscaled = lower_bound(*_works(tests))
    for n, (count, seconds) in enumerate(tests):
        yield f"test_{n * MODULES // TESTS}.py", count, seconds * BOUND / unscaled


def _works(tests: list[tuple[int, float]]) -> tuple[list[Work], int]:
    uuids = tuple(map(str, range(DEVICES)))
    return [Work("", demand=Demand(uuids, count), seconds=seconds) for count, seconds in tests], WORKERS


def write_suite(folder: Path) -> None:
    """The modules of the suite, as files."""
    texts: dict[str, str] = {}
    for n, (module, count, seconds) in enumerate(suite()):
        test = (
            f"@requires_cuda(devices={count})\ndef test_{n}(cuda_devices):\n    assert len(cuda_devices) == {count}\n"
        )
        texts[module] = texts.get(module, PREAMBLE) + test + f"    use(cuda_devices, {seconds:.4f})\n\n"
    for module, text in texts.items():
        (folder / module).write_text(text)


class Bench:
    """Runs of pytest in one folder, on one simulated host."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.total = {d.uuid: d.total_memory or 0 for d in simulated_host(host).devices}

    def run(self, tests: int, *arguments: str, checked: bool = True) -> float:
        """The makespan of a run of so many tests; Violation, or SystemExit where a test failed or is missing."""
        log = self.folder / "events"
        log.unlink(missing_ok=True)
        environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS"}}
        environ |= {
            "EVENTS": str(log),
            "CUDAENV_LEASE_DIR": str(self.folder / "leases"),
            "DEVICES": ",".join(self.total),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "--cuda-simulate", self.host, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environ, check=False, capture_output=True, text=True)
        lines = log.read_text().splitlines() if log.exists() else []
        if done.returncode or len(lines) != tests:
            raise SystemExit(f"{' '.join(command)}: {len(lines)} of {tests} tests\n{done.stdout}\n{done.stderr}")
        said = [json.loads(line) for line in lines]
        events = [Event(e["began"], e["ended"], tuple(e["uuids"]), e["memory"]) for e in said]
        if checked:
            check(events, self.total)
        return makespan(events)


LEASES = ("--cuda-isolation", "session")


def mixed() -> None:
    """Print the ratios of the first suite."""
    tests = [(count, seconds) for _, count, seconds in suite()]
    works, workers = _works(tests)
    bound = lower_bound(works, workers)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_suite(folder)
        bench = Bench(folder, f"h100:{DEVICES}")
        spread = ("-n", str(WORKERS), "--dist")
        first = bench.run(TESTS, *spread, "cuda", *LEASES)
        second = bench.run(TESTS, *spread, "cuda", *LEASES)
        load = bench.run(TESTS, *spread, "load", *LEASES)
        (folder / "conftest.py").write_text(PINNING)
        ones = sum(count == 1 for count, _ in tests)
        pinned = bench.run(ones, *spread, "load", "-m", "cuda and not multi_gpu")
        pinned += bench.run(TESTS - ones, "-m", "multi_gpu")
    longest = max(seconds for _, seconds in tests)
    print(f"{TESTS} tests of 1, 2 and 4 devices on {DEVICES}: {bound:.1f} s at least, {longest:.1f} s the longest")
    for name, seconds in (
        ("--dist cuda, durations known", second),
        ("--dist cuda, first run", first),
        ("--dist load, leases", load),
        ("a worker for each device, then one process", pinned),
    ):
        print(f"    {name}: {seconds / bound:.3f} times that")


def small() -> None:
    """Print the ratio of the second suite."""
    test = f"@requires_cuda(memory='{BUDGET}B')\n@pytest.mark.parametrize('x', range({SMALL}))\n"
    test += f"def test_small(cuda_devices, x):\n    use(cuda_devices, {SMALL_SECONDS}, {BUDGET})\n"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "test_small.py").write_text(PREAMBLE + test)
        bench = Bench(folder, "h100")
        arguments = ("-n", str(WORKERS), "--dist", "cuda")
        without = bench.run(SMALL, *arguments, "--cuda-isolation", "off", checked=False)
        leased = bench.run(SMALL, *arguments, *LEASES)
    print(
        f"{SMALL} tests of {SMALL_SECONDS} s that declare memory=, {WORKERS} workers, one device: with leases "
        f"{leased / without:.3f} times the time without ({without:.1f} s)"
    )


def main() -> None:
    """Print the ratios of both."""
    mixed()
    small()


if __name__ == "__main__":
    main()
