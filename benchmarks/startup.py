"""What the plugin costs at pytest's start, as a ratio to the same run without it (`-p no:cudaenv`).

Two one-test files: one that does not use the plugin and one that does. Pairs of runs in turn, each a fresh process,
so that a machine whose speed drifts slows both; the median of the pairs' ratios is the number to quote.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAIRS = 15

UNRELATED = "def test_one(): pass\n"

# The same file runs without the plugin, whose marks then mean nothing.
USING = "import pytest\n\n@pytest.mark.requires_cuda(devices=1, capability='>=9.0')\ndef test_one(): pass\n"


def seconds(folder: Path, *arguments: str) -> float:
    """One run of pytest in a folder, in seconds of wall-clock time."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # Without its cached byte code every start would compile the package.
    environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS"}}
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def imported(folder: Path, *arguments: str) -> set[str]:
    """The top-level modules that a run imports, also while pytest captures."""
    command = [sys.executable, "-X", "importtime", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *arguments]
    run = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in run.stderr.splitlines()}


def heavy_imports(folder: Path) -> list[str]:
    """Packages that nobody should pay for at start-up, of those that the plugin alone has the run import."""
    heavy = {"torch", "transformers", "accelerate", "kernels", "numpy", "pynvml"}
    return sorted((imported(folder) - imported(folder, "-p", "no:cudaenv")) & heavy)


def main() -> None:
    """Print the ratio of each file and the largest pair."""
    for name, text, limit in (("a file that does not use it", UNRELATED, 1.05), ("a file that does", USING, 1.2)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "test_one.py").write_text(text)
            for arguments in ((), ("-p", "no:cudaenv")):
                seconds(folder, *arguments)  # byte code is compiled once
            pairs = [(seconds(folder), seconds(folder, "-p", "no:cudaenv")) for _ in range(PAIRS)]
            ratios = sorted(with_it / without for with_it, without in pairs)
            base = statistics.median(without for _, without in pairs)
            print(
                f"start-up, {name}: {statistics.median(ratios):.3f} of {base:.2f} s without the plugin "
                f"(quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[-len(ratios) // 4]:.3f}, {PAIRS} pairs; "
                f"target {limit}); imported: {', '.join(heavy_imports(folder)) or 'none of the heavy packages'}"
            )


if __name__ == "__main__":
    main()
