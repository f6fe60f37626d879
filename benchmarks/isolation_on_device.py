"""What a device process costs on a GPU: a test that puts a tiny Llama on the device and does one forward.

One run of pytest per level of isolation. Seconds per test are those between pytest's announcement of the test and its
last report, in the pytest process: fork, mask, CUDA's start and teardown included. Needs a GPU, torch, transformers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = 12

CLOCK = """
import json, os, time
STARTED = {}
def pytest_runtest_logstart(nodeid): STARTED[nodeid] = time.perf_counter()
def pytest_runtest_logfinish(nodeid):
    with open(os.environ["TIMES"], "a") as file:
        file.write(json.dumps(time.perf_counter() - STARTED[nodeid]) + "\\n")
"""

SUITE = f"""
import pytest, torch
from transformers import LlamaConfig, LlamaForCausalLM
CONFIG = LlamaConfig(vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)

@pytest.mark.parametrize("n", range({TESTS}))
def test_forward(cuda_device, n):
    model = LlamaForCausalLM(CONFIG).to(cuda_device)
    assert model(torch.ones(1, 8, dtype=torch.long, device=cuda_device)).logits.isfinite().all()
"""


def seconds(folder: Path, level: str) -> list[float]:
    """Of each test of one run."""
    times = folder / f"{level}.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environ = {**os.environ, "TIMES": str(times)}
    subprocess.run([*command, "--cuda-isolation", level], cwd=folder, env=environ, check=True)
    return [json.loads(line) for line in times.read_text().splitlines()]


def main() -> None:
    """Print one line for each kind of process."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "conftest.py").write_text(CLOCK)
        (folder / "test_it.py").write_text(SUITE)
        found = {level: seconds(folder, level) for level in ("off", "session", "function")}
    for name, times in (
        ("in the pytest process, the first", found["off"][:1]),
        ("in the pytest process, the others", found["off"][1:]),
        ("in a device process, its first", found["session"][:1]),
        ("in a device process that has run one", found["session"][1:]),
        ("in a device process of its own", found["function"]),
    ):
        print(f"{name}: median {statistics.median(times):.4f} s, {min(times):.4f} to {max(times):.4f} ({len(times)})")


if __name__ == "__main__":
    main()
