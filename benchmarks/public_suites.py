"""The test suites of public packages, from their source distributions, run as they are and with every test isolated.

Each test is given a need for a device of a simulated host, so that it runs in a device process: at level `session`
in one that lives, at level `function` in one of its own. The outcome of each phase of each test has to be the same.

    python -m benchmarks public_suites      # several minutes; downloads what it runs
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import REPOSITORY

SIMULATE = ("--cuda-simulate", "h100")


@dataclass(frozen=True)
class Suite:
    """A package and how its tests are run."""

    package: str
    version: str
    source: str
    """The folder to import the package from."""
    tests: tuple[str, ...]
    unless_each: tuple[str, ...] = ()
    """What is left out where each test has a process of its own."""
    needs: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


HUGE = ("--ignore=tests/test_version.py",)
"""51,524 times the same few functions."""

LARGE = tuple(f"--ignore=tests/test_{name}.py" for name in ("requirements", "markers", "specifiers", "ranges"))

SUITES = (
    Suite("einops", "0.8.2", ".", ("einops/tests",), environ={"EINOPS_TEST_BACKENDS": "numpy,torch"}),
    Suite(
        "packaging",
        "26.4",
        "src",
        ("tests", *HUGE),
        unless_each=LARGE,
        needs=("pretend", "tomli_w"),
        plugins=("hypothesispytest",),
    ),
)


def pip(*arguments: str) -> None:
    """Run pip quietly."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def unpack(suite: Suite, folder: Path) -> Path:
    """The unpacked source distribution; what its tests need besides is beside it, in `needs`."""
    pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), f"{suite.package}=={suite.version}")
    (folder / "needs").mkdir()
    if suite.needs:
        pip("install", "--target", str(folder / "needs"), *suite.needs)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"{suite.package}-{suite.version}"


def outcomes(suite: Suite, folder: Path, level: str | None, tests: tuple[str, ...]) -> tuple[list[list[str]], float]:
    """(id, phase, outcome) of every report, and the seconds that the run took; `level` None: without this plugin."""
    written = folder / "outcomes.json"
    written.unlink(missing_ok=True)
    options = ["-p", "no:randomly", "-p", "no:cacheprovider"]
    for plugin in suite.plugins:
        options += ["-p", plugin]
    if level is None:
        options += ["-p", "benchmarks.isolate_all", "-o", "markers=requires_cuda"]
    else:
        options += ["-p", "cudaenv", "-p", "benchmarks.isolate_all", *SIMULATE, "--cuda-isolation", level]
    path = os.pathsep.join([suite.source, str(folder.parent / "needs"), str(REPOSITORY)])
    environ = {**os.environ, **suite.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ |= {"OUTCOMES": str(written)}
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", *options, *tests]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if not written.exists() or not (found := json.loads(written.read_text())):
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return found, seconds


def main() -> None:
    """Print, for each suite and level, the number of tests and the differences."""
    for suite in SUITES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = unpack(suite, Path(temporary))
            for level, tests in (("session", suite.tests), ("function", suite.tests + suite.unless_each)):
                plain, seconds = outcomes(suite, folder, None, tests)
                isolated, more = outcomes(suite, folder, level, tests)
                differences = Counter(map(tuple, plain))
                differences.subtract(Counter(map(tuple, isolated)))
                differing = sorted((report, count) for report, count in differences.items() if count)
                counted = Counter(outcome for _, when, outcome in plain if when == "call" or outcome != "passed")
                ids = len({nodeid for nodeid, _, _ in plain})
                kinds = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counted.items()))
                print(
                    f"{suite.package} {suite.version}, {level}: {ids} tests ({kinds}), "
                    f"{len(differing)} reports differ; {seconds:.0f} s without isolation, {more:.0f} s with"
                )
                for (nodeid, when, outcome), count in differing[:20]:
                    print(f"  only {'without' if count > 0 else 'with'}: {nodeid} {when} {outcome}")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
