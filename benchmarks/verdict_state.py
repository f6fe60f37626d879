"""What the state guard costs a test, in a process that has imported torch, NumPy and, with an argument, transformers.

The guard's own work is timed around an empty test: what is read before, and compared and set back after. Then the
same around one that leaves TF32 on, and the parts of which the first consists.

    python -m benchmarks verdict_state
    python -m benchmarks.verdict_state transformers
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

TESTS = 500


def median_of(action: Callable[[], object]) -> tuple[float, float]:
    """(median, 95th percentile) of the seconds that it takes."""
    action()
    seconds = []
    for _ in range(TESTS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]


def main() -> None:
    """Print a table."""
    import numpy
    import torch

    if "transformers" in sys.argv:
        import transformers.modeling_flash_attention_utils
        import transformers.modeling_utils  # noqa: F401
    from pytest_cudaenv.verdict.state import Answers, Generators, Guard, let_warn_again

    guard = Guard()
    guard.look()

    def test(body: Callable[[], object] = lambda: None) -> None:
        guard.before()
        guard.begin()
        body()
        guard.end()

    def leak() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True

    print(f"torch {torch.__version__}, NumPy {numpy.__version__}, {len(guard.state.settings)} settings")
    for name, action in (
        ("a test that leaves nothing", test),
        ("a test that leaves TF32 on", lambda: test(leak)),
        ("  reading all settings, once", guard.state.read),
        ("  random generators, read and set back", lambda: Generators().set_back()),
        ("  remembered answers", lambda: Answers().forget_new()),
        ("  warnings that are given once", let_warn_again),
    ):
        median, high = median_of(action)
        print(f"{name:42} {1e6 * median:8.0f} us   95 %: {1e6 * high:8.0f} us")


if __name__ == "__main__":
    main()
