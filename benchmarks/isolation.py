"""What an isolated test costs: with device processes, with other plugins that isolate, and in a fresh interpreter.

Tests that do nothing, with nothing imported, torch, and torch and transformers. A test's cost is the difference
between runs of many and of one, divided; the fresh interpreter's is a whole run of one. Rounds go through all ways in
turn, so that a machine whose speed drifts slows all of them, and ratios are taken within a round. Processor time is
given beside wall-clock time: on a machine that others use it is the steadier of the two.

Then the price of two special suites: markers that alternate, and one module that cannot be forked.

    python -m benchmarks isolation       # the environment of the others is made in .venv-peers
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers import FORKED, FRESH, MODES, OFF, REPOSITORY, REUSED, Mode, base, environment

ROUNDS = int(os.environ.get("ROUNDS", "5"))

PRELUDES = {
    "nothing imported": "",
    "torch": "import torch\n",
    "torch and transformers": "import torch\nfrom transformers import LlamaForCausalLM\n",
}

SUITE = "import pytest\n{prelude}\n@pytest.mark.parametrize('x', range({count}))\ndef test_it({fixture}x): pass\n"

MODULES, TESTS = 400, 15

POISON = """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()
"""


class Cost(NamedTuple):
    """Seconds."""

    wall: float
    processor: float

    def less(self, other: Cost, count: int = 1) -> Cost:
        """The difference, divided."""
        return Cost((self.wall - other.wall) / count, (self.processor - other.processor) / count)


def median(costs: Iterable[Cost]) -> Cost:
    """Of each kind of seconds by itself."""
    walls, processors = zip(*costs, strict=True)
    return Cost(statistics.median(walls), statistics.median(processors))


def run(python: Path, folder: Path, plugin: str, *arguments: str) -> Cost:
    """One run of pytest that has to pass."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS", "PYTHONPATH"}
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": plugin}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0 or " passed" not in done.stdout:
        raise SystemExit(f"{' '.join(command)}, PYTEST_PLUGINS={plugin}:\n{done.stdout}{done.stderr}")
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def cost_of(python: Path, folder: Path, mode: Mode, prelude: str) -> Cost:
    """What one test more costs."""
    costs = []
    for count in (1, mode.count + 1):
        fixture = "cuda_device, " if mode.is_ours else ""
        (folder / "test_it.py").write_text(SUITE.format(prelude=prelude, count=count, fixture=fixture))
        costs.append(run(python, folder, mode.plugin, *mode.options))
    return costs[1].less(costs[0], mode.count)


def compare(python: Path, folder: Path, name: str, prelude: str) -> None:
    """Print the table of one prelude."""
    rounds: list[dict[str, Cost]] = []
    interpreter = "a fresh interpreter"
    for _ in range(ROUNDS):
        rounds.append({mode.name: cost_of(python, folder, mode, prelude) for mode in MODES})
        (folder / "test_it.py").write_text(SUITE.format(prelude=prelude, count=1, fixture=""))
        rounds[-1][interpreter] = run(python, folder, "")
    print(f"seconds per test, {name} (processor time in brackets; medians of {ROUNDS})")
    for way in rounds[0]:
        cost = median(r[way] for r in rounds)
        print(f"  {way:<30} {cost.wall:8.4f} ({cost.processor:.4f})")
    for text, one, other in (
        ("a process of its own over pytest-forked's", FRESH.name, FORKED.name),
        ("a fresh interpreter over a process of its own", interpreter, FRESH.name),
    ):
        wall = statistics.median(r[one].wall / r[other].wall for r in rounds)
        processor = statistics.median(r[one].processor / r[other].processor for r in rounds)
        print(f"  {text}: {wall:.2f} ({processor:.2f})")
    more = median(r[REUSED.name].less(r[OFF.name]) for r in rounds)
    print(f"  a process that lives, more than the pytest process: {more.wall:.4f} ({more.processor:.4f})")


def write_modules(folder: Path, markers: tuple[str, ...], poison: str = "") -> None:
    """400 modules of 15 tests, on which the markers take turns; `poison` at the import of the one in the middle."""
    for number in range(MODULES):
        lines = ["from pytest_cudaenv import requires_cuda", poison if number == MODULES // 2 else ""]
        for test in range(TESTS):
            lines += [markers[test % len(markers)], f"def test_{test}(cuda_device): pass"]
        (folder / f"test_m{number:03}.py").write_text("\n".join(lines) + "\n")


def pairs(name: str, one: Mapping[str, Path], python: Path, *options: str) -> list[tuple[Cost, Cost]]:
    """Two suites in turn."""
    found = []
    for _ in range(ROUNDS):
        costs = [run(python, folder, "pytest_cudaenv.plugin", *REUSED.options, *options) for folder in one.values()]
        found.append((costs[0], costs[1]))
    ratio = statistics.median(a.wall / b.wall for a, b in found)
    processor = statistics.median(a.processor / b.processor for a, b in found)
    first, second = median(a for a, _ in found), median(b for _, b in found)
    print(f"{name}: {first.wall:.1f} s over {second.wall:.1f} s, {ratio:.2f} ({processor:.2f} in processor time)")
    return found


def special_suites(python: Path, folder: Path) -> None:
    """Print what alternating markers cost, and what one module that cannot be forked."""
    heavy = PRELUDES["torch and transformers"]
    folders = {name: folder / name for name in ("alternating", "one", "poisoned", "clean")}
    for path in folders.values():
        path.mkdir()
    mark, other = "@requires_cuda", "@requires_cuda(capability='>=8.0')"
    write_modules(folders["alternating"], (mark, other))
    write_modules(folders["one"], (mark,))
    alternating = {name: folders[name] for name in ("alternating", "one")}
    pairs(f"{MODULES} modules x {TESTS} tests, two markers in turn over one marker", alternating, python)
    write_modules(folders["poisoned"], (mark,), POISON)
    write_modules(folders["clean"], (mark,))
    for name in ("poisoned", "clean"):
        (folders[name] / "conftest.py").write_text(heavy)
    (folder / "test_it.py").write_text(SUITE.format(prelude=heavy, count=1, fixture=""))
    one = {name: folders[name] for name in ("poisoned", "clean")}
    found = pairs("one poisoning module among them over none, torch and transformers imported", one, python)
    starts = [run(python, folder, "") for _ in range(ROUNDS)]
    more, start = median(a.less(b) for a, b in found), median(starts)
    print(
        f"  {more.wall:.1f} s more ({more.processor:.1f}), a fresh interpreter's start is {start.wall:.1f} s "
        f"({start.processor:.1f})"
    )


def main() -> None:
    """Print everything."""
    python = environment(REPOSITORY / ".venv-peers")
    print(base())
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, prelude) in enumerate(PRELUDES.items()):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            compare(python, folder, name, prelude)
            sys.stdout.flush()
        special_suites(python, Path(temporary))


if __name__ == "__main__":
    main()
