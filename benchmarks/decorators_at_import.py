"""Which of transformers' decorators initialise CUDA while they decorate, with the plugin answering torch's questions.

Each is applied to a function in a module that a fresh pytest collects, all at once. Needs a GPU and transformers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

DECORATORS = (
    "require_torch_gpu", "require_torch_accelerator", "require_torch_multi_gpu", "require_torch_multi_accelerator",
    "require_torch_non_multi_gpu", "require_torch_non_multi_accelerator", "require_torch_up_to_2_gpus",
    "require_torch_up_to_2_accelerators", "require_torch_large_gpu", "require_torch_large_accelerator",
    "require_cuda_capability_at_least(8, 0)", "require_torch_fp16", "require_torch_bf16", "require_torch_tf32",
    "require_fp8", "require_flash_attn", "require_flash_attn_3", "require_flash_attn_4", "require_flex_attention",
    "require_kernels", "require_bitsandbytes", "require_peft", "require_deepspeed", "require_torch_n_accelerators(2)",
    "require_torch_accelerator_memory(20)",
)  # fmt: skip

MODULE = """
import pytest, pytest_cudaenv
import transformers.testing_utils as testing_utils
@testing_utils.{decorator}
def test_it(): pass
"""

CONFTEST = """
from pytest_cudaenv.host.driver import is_cuda_initialised
def pytest_collection_finish(): print("INITIALISED", is_cuda_initialised())
"""


def main() -> None:
    """Print a line for each decorator."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = []
        for number, decorator in enumerate(DECORATORS):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            (folder / "conftest.py").write_text(CONFTEST)
            (folder / "test_it.py").write_text(MODULE.format(decorator=decorator))
            command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--collect-only"]
            process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            runs.append((decorator, process))
        for decorator, process in runs:
            output, _ = process.communicate(timeout=300)
            found = [line.partition("INITIALISED ")[2] for line in output.splitlines() if "INITIALISED" in line]
            print(f"{decorator}: {found[0] if found else output[-500:]}")


if __name__ == "__main__":
    main()
