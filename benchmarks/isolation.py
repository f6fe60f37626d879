"""What an isolated test costs: with device processes, with other plugins that isolate, and in a fresh interpreter.

Tests that do nothing, with nothing imported, torch, and torch and transformers. A test's cost is the median time from
its end to the next one's; where each is a start of pytest, the difference between runs of three and of one, and for
the fresh interpreter a whole run of one. Rounds go through all ways in turn, so that a machine whose speed drifts
slows all of them, and ratios are taken within a round.

Then the price of two special suites: markers that alternate, and one module that cannot be forked.

    python -m benchmarks isolation       # the environment of the others is made in .venv-peers
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import FORKED, FRESH, MODES, OFF, REPOSITORY, REUSED, Mode, base, environment

ROUNDS = int(os.environ.get("ROUNDS", "5"))

PRELUDES = {
    "nothing imported": "",
    "torch": "import torch\n",
    "torch and transformers": "import torch\nfrom transformers import LlamaForCausalLM\n",
}

SUITE = "import pytest\n{prelude}\n@pytest.mark.parametrize('x', range({count}))\ndef test_it({fixture}x): pass\n"

MANY = 41
"""Tests in a run whose gaps are measured."""

MODULES, TESTS = 400, 15

POISON = """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()
"""


def run(python: Path, folder: Path, plugin: str, *arguments: str) -> tuple[float, float]:
    """One run of pytest that has to pass: its seconds, and those from one test's end to the next one's."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS", "PYTHONPATH"}
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    plugins, gaps = f"benchmarks.gaps,{plugin}" if plugin else "benchmarks.gaps", folder / "gaps.txt"
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": plugins, "GAPS": str(gaps)}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    if done.returncode != 0 or " passed" not in done.stdout:
        raise SystemExit(f"{' '.join(command)}, PYTEST_PLUGINS={plugins}:\n{done.stdout}{done.stderr}")
    return wall, float(gaps.read_text()) if gaps.exists() else 0.0


def cost_of(python: Path, folder: Path, mode: Mode, prelude: str) -> float:
    """Seconds per test."""

    def measure(count: int) -> tuple[float, float]:
        fixture = "cuda_device, " if mode.is_ours else ""
        (folder / "test_it.py").write_text(SUITE.format(prelude=prelude, count=count, fixture=fixture))
        return run(python, folder, mode.plugin, *mode.options)

    return (measure(3)[0] - measure(1)[0]) / 2 if mode.is_start else measure(MANY)[1]


def compare(python: Path, folder: Path, name: str, prelude: str) -> None:
    """Print the table of one prelude."""
    rounds: list[dict[str, float]] = []
    interpreter = "a fresh interpreter"
    for _ in range(ROUNDS):
        rounds.append({mode.name: cost_of(python, folder, mode, prelude) for mode in MODES})
        (folder / "test_it.py").write_text(SUITE.format(prelude=prelude, count=1, fixture=""))
        rounds[-1][interpreter] = run(python, folder, "")[0]
    print(f"seconds per test, {name} (medians of {ROUNDS})")
    for way in rounds[0]:
        print(f"  {way:<30} {statistics.median(r[way] for r in rounds):8.4f}")
    for text, one, other in (
        ("a process of its own over pytest-forked's", FRESH.name, FORKED.name),
        ("a fresh interpreter over a process of its own", interpreter, FRESH.name),
    ):
        print(f"  {text}: {statistics.median(r[one] / r[other] for r in rounds):.2f}")
    more = statistics.median(r[REUSED.name] - r[OFF.name] for r in rounds)
    print(f"  a process that lives, more than the pytest process: {more:.4f}")


def write_modules(folder: Path, markers: tuple[str, ...], poison: str = "") -> None:
    """400 modules of 15 tests, on which the markers take turns; `poison` at the import of the one in the middle."""
    for number in range(MODULES):
        lines = ["from pytest_cudaenv import requires_cuda", poison if number == MODULES // 2 else ""]
        for test in range(TESTS):
            lines += [markers[test % len(markers)], f"def test_{test}(cuda_device): pass"]
        (folder / f"test_m{number:03}.py").write_text("\n".join(lines) + "\n")


def pairs(name: str, suites: Sequence[Path], python: Path) -> list[tuple[float, float]]:
    """Two suites in turn."""
    found = []
    for _ in range(ROUNDS):
        one, other = (run(python, folder, REUSED.plugin, *REUSED.options)[0] for folder in suites)
        found.append((one, other))
    ratio = statistics.median(one / other for one, other in found)
    first, second = (statistics.median(seconds) for seconds in zip(*found, strict=True))
    print(f"{name}: {first:.1f} s over {second:.1f} s, {ratio:.2f}")
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
    alternating = [folders[name] for name in ("alternating", "one")]
    pairs(f"{MODULES} modules x {TESTS} tests, two markers in turn over one marker", alternating, python)
    write_modules(folders["poisoned"], (mark,), POISON)
    write_modules(folders["clean"], (mark,))
    for name in ("poisoned", "clean"):
        (folders[name] / "conftest.py").write_text(heavy)
    (folder / "test_it.py").write_text(SUITE.format(prelude=heavy, count=1, fixture=""))
    poisoned = [folders[name] for name in ("poisoned", "clean")]
    found = pairs("one poisoning module among them over none, torch and transformers imported", poisoned, python)
    start = statistics.median(run(python, folder, "")[0] for _ in range(ROUNDS))
    more = statistics.median(one - other for one, other in found)
    print(f"  {more:.1f} s more; a fresh interpreter's start is {start:.1f} s")


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
