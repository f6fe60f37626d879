"""The fake libraries, and processes that use them."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.native.build import build_cuda, build_nvml

Ask = Callable[[str, Mapping[str, str]], Any]

# Machines of all speeds run this, and examples that fail belong into the tests.
settings.register_profile("host", deadline=None, database=None)
settings.load_profile("host")

CLIENT = """
import base64, pickle, sys
from pathlib import Path
from pytest_cudaenv.host.detect import detect_host
from pytest_cudaenv.host.driver import ask_driver, is_cuda_initialised
from pytest_cudaenv.host.nvml import read_nvml, read_usage
sys.stdout.write(base64.b64encode(pickle.dumps(eval(sys.argv[1]))).decode())
"""


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fake NVML is."""
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fake NVML of an old driver is."""
    return build_nvml(tmp_path_factory.mktemp("old-nvml"), old=True)


@pytest.fixture(scope="session")
def cuda_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fake CUDA driver is."""
    return build_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def ask() -> Ask:
    """Evaluates an expression in a new process with an environment, where nothing of another test is loaded."""

    def evaluate(expression: str, environ: Mapping[str, str]) -> Any:
        command = [sys.executable, "-W", "error", "-c", CLIENT, expression]
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return pickle.loads(base64.b64decode(done.stdout.splitlines()[-1]))

    return evaluate
