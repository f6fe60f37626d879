"""What the plugin costs while collecting a large suite, as a ratio to the same suite without it."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.startup import seconds

FILES, TESTS, PAIRS = 100, 50, 5

PLAIN = "import pytest\n\n@pytest.mark.parametrize('x', range({tests}))\ndef test_it(x, tmp_path): pass\n"
MARKED = (
    "import pytest\n\n@pytest.mark.requires_cuda(devices=1)\n"
    "@pytest.mark.parametrize('x', range({tests}))\ndef test_it(x): pass\n"
)


def main() -> None:
    """Print the ratio for a suite that does not use the plugin and for one in which every test does."""
    for name, text in (("that does not use it", PLAIN), ("with a marker on every test", MARKED)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for index in range(FILES):
                (folder / f"test_{index}.py").write_text(text.format(tests=TESTS))
            for arguments in ((), ("-p", "no:cudaenv")):
                seconds(folder, "--collect-only", *arguments)
            pairs = [
                (seconds(folder, "--collect-only"), seconds(folder, "--collect-only", "-p", "no:cudaenv"))
                for _ in range(PAIRS)
            ]
            ratio = statistics.median(with_it / without for with_it, without in pairs)
            base = statistics.median(without for _, without in pairs)
            print(f"collecting {FILES * TESTS} tests {name}: {ratio:.3f} of {base:.2f} s without the plugin")


if __name__ == "__main__":
    sys.exit(main())
