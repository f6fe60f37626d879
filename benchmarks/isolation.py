"""What a device process costs per test, beside the pytest process and beside a fresh interpreter.

Device tests on a simulated host, which do nothing, in one run each: with nothing imported, and with torch and
transformers. Seconds per test are the differences to a run of one test; the fresh interpreter is a pytest for each.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.startup import seconds

TESTS, RUNS = 40, 5

PRELUDES = {
    "nothing imported": "",
    "torch and transformers imported": "import torch\nfrom transformers import LlamaForCausalLM\n",
}

SUITE = "import pytest\n{prelude}\n@pytest.mark.parametrize('x', range({count}))\ndef test_it(cuda_device, x): pass\n"


def per_test(folder: Path, prelude: str, level: str) -> float:
    """Seconds that one test more costs at a level of isolation; median of several pairs of runs."""
    differences = []
    for _ in range(RUNS):
        times = []
        for count in (1, TESTS + 1):
            (folder / "test_it.py").write_text(SUITE.format(prelude=prelude, count=count))
            times.append(seconds(folder, "--cuda-simulate", "h100", "--cuda-isolation", level))
        differences.append((times[1] - times[0]) / TESTS)
    return statistics.median(differences)


def main() -> None:
    """Print a line for each prelude."""
    for name, prelude in PRELUDES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            off, session, function = (per_test(folder, prelude, level) for level in ("off", "session", "function"))
            (folder / "test_it.py").write_text(SUITE.format(prelude=prelude, count=1))
            fresh = statistics.median(seconds(folder, "--cuda-simulate", "h100") for _ in range(RUNS))
            print(
                f"per device test, {name}: {1000 * off:.1f} ms in the pytest process, {1000 * session:.1f} ms in a "
                f"device process that lives, {1000 * function:.1f} ms in one of its own; a fresh interpreter "
                f"{1000 * fresh:.0f} ms ({fresh / function:.0f} times a process of its own)"
            )


if __name__ == "__main__":
    main()
