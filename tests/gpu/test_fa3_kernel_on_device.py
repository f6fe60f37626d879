"""FlashAttention-3 as a kernel from LOCAL_KERNELS, on a Hopper: its cells pass though no such package is installed.

`CUDAENV_FA3_BUILD` names a folder with `flash_attn_interface.py` and `flash_attn_3/_C.abi3.so`, as a wheel unpacks to
(that of tokenspeed-fa3: torch 2.11 or newer, CUDA 13). Forward only: builds leave the backward out.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from pytest_cudaenv import requires_cuda, requires_hub_kernels
from tests.hub_kernels.fa3_kernel import SUITE, TESTS, environment, lay_out, missing_from

BUILD = "CUDAENV_FA3_BUILD"
FOLDER = os.environ.get(BUILD)
"""Read when the module is imported: inner runs forget what the environment says of the outer one."""

pytestmark = [requires_cuda(capability="==9.0"), requires_hub_kernels]


def test_its_cells_pass_without_the_package(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not FOLDER:
        pytest.skip(f"[fa3-build] needs a build of FlashAttention-3; have none in {BUILD}")
    if missing := missing_from(Path(FOLDER)):
        pytest.fail(f"[fa3-build] {BUILD}={FOLDER} has no {', '.join(missing)}")
    found = find_spec("flash_attn_interface")
    if found is not None and str(Path(str(found.origin)).parent) not in os.environ.get("PYTHONPATH", "").split(
        os.pathsep
    ):
        pytest.skip(f"[fa3-build] needs a Python without FlashAttention-3; have {found.origin}")
    repository = lay_out(Path(FOLDER), tmp_path / "repository", "torch-cuda")
    for name, value in environment(repository, os.environ).items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("--cuda-strict", "-p", "no:cacheprovider", "-rs").assert_outcomes(passed=TESTS)
