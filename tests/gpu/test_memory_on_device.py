"""On a device: what torch's allocator and the driver say of tests that keep memory, take too much, or run out of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaenv import cuda_memory as limit
from pytest_cudaenv import requires_cuda
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.verdict.memory import Meter

MIB = 1024**2


@requires_cuda
def test_the_meter_counts_what_torch_allocates(cuda_device: CudaDevice, cuda_memory: Meter) -> None:
    torch = pytest.importorskip("torch")
    torch.ones(1, device=cuda_device)
    cuda_memory.reset()
    kept = torch.zeros(16 * MIB, dtype=torch.uint8, device=cuda_device)
    transient = torch.zeros(32 * MIB, dtype=torch.uint8, device=cuda_device)
    del transient
    assert cuda_memory.kept == 16 * MIB
    assert cuda_memory.peak >= 48 * MIB
    cycle: list[object] = [kept]
    cycle.append(cycle)
    del kept, cycle
    assert cuda_memory.kept == 0


@requires_cuda
@limit(leak="0")
def test_a_matrix_product_leaves_no_workspace_behind(cuda_device: CudaDevice) -> None:
    """cuBLAS allocates one at the first product of a process, and keeps it."""
    torch = pytest.importorskip("torch")
    a = torch.randn(512, 512, device=cuda_device)
    assert (a @ a).shape == (512, 512)


@requires_cuda
@limit(leak="0")
def test_training_gives_everything_back(cuda_device: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(cuda_device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(32, 256, device=cuda_device)).sum().backward()
    optimizer.step()


SUITE = """
import pytest
import torch
from pytest_cudaenv import cuda_memory, requires_cuda

pytestmark = requires_cuda
KEPT = {}
MIB = 1024**2

def megabytes(count, device):
    return torch.zeros(count * MIB, dtype=torch.uint8, device=device)

@pytest.fixture(scope="module")
def model(cuda_device):
    return torch.nn.Linear(4096, 4096, device=cuda_device)

@cuda_memory(leak="0")
def test_uses_a_wider_fixture(model, cuda_device):
    model(torch.ones(1, 4096, device=cuda_device))

def test_fails_and_leaks(cuda_device):
    activations = megabytes(64, cuda_device)
    KEPT["activations"] = activations
    assert 0

def test_only_fails(cuda_device):
    activations = megabytes(64, cuda_device)
    assert 0

@cuda_memory(peak="8MiB")
def test_takes_too_much(cuda_device):
    megabytes(200, cuda_device)

def test_runs_out(cuda_device):
    megabytes(torch.cuda.get_device_properties(cuda_device).total_memory // MIB * 2, cuda_device)

def test_skips_when_it_runs_out(cuda_device):
    try:
        megabytes(torch.cuda.get_device_properties(cuda_device).total_memory // MIB * 2, cuda_device)
    except torch.OutOfMemoryError:
        pytest.skip("too small")

def test_tf32_on(cuda_device):
    megabytes(1, cuda_device)
    torch.backends.cuda.matmul.allow_tf32 = True

def test_tf32_is_off_again(cuda_device):
    megabytes(1, cuda_device)
    assert not torch.backends.cuda.matmul.allow_tf32
"""


@requires_cuda
@pytest.mark.parametrize("level", ["session", "off"])
def test_planted_leaks_are_found(level: str, tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(tmp_path),
         f"--cuda-isolation={level}", "--cuda-strict", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = run.stdout
    outcomes = pytest.RunResult.parse_summary_nouns(told.splitlines())
    outcomes.pop("warnings", None)
    assert outcomes == {"failed": 4, "passed": 3, "skipped": 1, "errors": 2}, told + run.stderr
    assert "FutureWarning" not in told
    assert "held by the global test_suite.KEPT['activations']" in told
    assert "uint8 (67108864,) on cuda:0, 64 MiB" in told
    assert (
        "[memory-peak] needs a peak of at most 8 MiB on a device; have 328 MiB, 128 MiB of it from before the test"
        in told
    )
    assert "[cuda-oom] 1: needs" in told
    assert "PyTorch CUDA memory summary" in told
    assert "[oom-skipped] 1:" in told
    assert "[state-leak] 1: needs torch.backends.cuda.matmul.allow_tf32 given back; have True, was False" in told
