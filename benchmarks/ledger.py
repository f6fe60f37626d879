"""What `--cuda-ledger` costs at 100,000 tests: time, memory, and the size of the file.

Trivial tests, three in ten of them with a device of a simulated host, in one process (`--cuda-isolation off`): no test
could make the ledger's share larger. Pairs of runs with and without a ledger, in turn; the ratio is of processor
time, which a busy machine distorts less than the clock. And, in one more run, the share of its processor time that the
ledger's own functions take: of one process, so that nothing else on the machine moves it.

`python -m benchmarks.ledger --tests 5000 --pairs 5` is quick.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS, PAIRS = 100_000, 3

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


class Cost(NamedTuple):
    """What one run took."""

    processor: float
    """Seconds."""
    clock: float
    """Seconds."""
    memory: float
    """MB at its peak."""


def run(folder: Path, *arguments: str) -> Cost:
    """One run of pytest in a folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["--cuda-simulate", "h100", "--cuda-isolation", "off", *arguments]
    # Without its cached byte code every start would compile the package.
    environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS"}}
    environ["PYTHONHASHSEED"] = "0"
    began = time.perf_counter()
    process = os.posix_spawnp(
        command[0],
        command,
        environ | {"PWD": str(folder)},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(process, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - began, usage.ru_maxrss / 1000)


def main() -> None:
    """Print the ratio, the memory and the size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger")
    parser.add_argument("--tests", type=int, default=TESTS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        device, marked = options.tests // 5, options.tests // 10
        text = SUITE.format(plain=options.tests - device - marked, device=device, marked=marked)
        (folder / "test_many.py").write_text(text)
        os.chdir(folder)
        ledger = folder / "ledger.json"
        pairs = []
        for number in range(options.pairs):
            with_it = ("--cuda-ledger", str(ledger))
            # Whichever comes second finds the machine as the first has left it.
            costs = {a: run(folder, *a) for a in ((), with_it)[:: 1 if number % 2 else -1]}
            pairs.append((costs[with_it], costs[()]))
            ratio = costs[with_it].processor / costs[()].processor
            print(
                f"  pair {number + 1}: {ratio:.3f}; {costs[with_it].clock:.1f} s and {costs[()].clock:.1f} s",
                flush=True,
            )
        (folder / "conftest.py").write_text(INSIDE)
        run(folder, "--cuda-ledger", str(ledger))
        inside, total = map(float, (folder / "inside").read_text().split())
        ratios = sorted(with_it.processor / without.processor for with_it, without in pairs)
        base = statistics.median(without.processor for _, without in pairs)
        memory = statistics.median(with_it.memory - without.memory for with_it, without in pairs)
        peak = max(with_it.memory for with_it, _ in pairs)
        size = ledger.stat().st_size / 1e6
        print(
            f"ledger, {options.tests} tests: {statistics.median(ratios):.3f} of {base:.1f} s without it "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(pairs)} pairs; target 1.05); inside: "
            f"1 + {inside / (total - inside):.3f}; {memory:+.0f} MB at a peak of {peak:.0f} MB (target +200 MB); "
            f"file {size:.1f} MB"
        )


if __name__ == "__main__":
    main()
