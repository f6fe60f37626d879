"""What the words of a skip are taken to say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.mask import read_mask
from pytest_cudaenv.host.software import Software, TorchBuild
from pytest_cudaenv.ledger.skips import UNKNOWN, skip_reasons
from pytest_cudaenv.requirements.reason import LINE, Reason
from pytest_cudaenv.requirements.requirement import Requirement, unmet

SOFTWARE = Software({"torch": "2.13.0", "numpy": "2.4.0"}, frozenset(), TorchBuild("2.13.0", cuda="13.0"))
HOST = simulated_host("t4", SOFTWARE)


def on_a_t4(requirement: Requirement) -> Sequence[Reason]:
    return unmet(requirement, HOST, read_mask(None, None, HOST.devices))


ON_A_T4 = {
    # Counts
    "Need at least 2 GPUs to run the test.": "cuda-devices",
    "requires at least 2 GPUs": "cuda-devices",
    "test requires multiple CUDA GPUs": "cuda-devices",
    "multi-GPU test": "cuda-devices",
    "more than 1 GPU needed": "cuda-devices",
    "Requires: [GPUs>=2]": "cuda-devices",
    "Skipping test because not enough GPUs are available: 2 required, 1 available": "cuda-devices",
    "Need 4 x H100": "cuda-devices cuda-capability",
    "torch.cuda.device_count() < 2": "cuda-devices",
    "test requires a single device accelerator": "cuda-too-many",
    # Kinds
    "Hopper only": "cuda-capability",
    "needs H100": "cuda-capability",
    "Device compute capability 9.0+ required.": "cuda-capability",
    "compute capability < (8, 0)": "cuda-capability",
    "requires sm_90": "cuda-capability",
    "Blackwell (SM100) required": "cuda-capability",
    "not supported on this GPU": "cuda-unsupported",
    # Memory
    "Need at least 40GB GPU memory to run the test.": "cuda-memory",
    "Requires >= 80GB VRAM": "cuda-memory",
    "not enough memory": "skip-memory",
    "CUDA out of memory. Tried to allocate 2.00 GiB": "skip-memory",
    "not enough host memory": "host-memory",
    # dtypes and attention
    "FP8 is not supported on this GPU type.": "dtype-native",
    "bfloat16 not supported": "dtype-native",
    "flash_attn not installed": "attn-missing attn-capability",
    "test requires Flash Attention 3": "attn-missing attn-capability",
    # Packages
    "could not import 'flash_attn': No module named 'flash_attn'": "package-missing",
    "could not import 'flash_attn.ops': No module named 'flash_attn'": "package-missing",
    "could not import 'fused': /usr/lib/fused.so: undefined symbol: _ZN3": "package-broken",
    "could not import 'fused': No module named 'half_of_it'": "package-broken",
    "Package(s) ['torch_sparse'] are not installed": "package-missing",
    "flashinfer is required": "package-missing",
    "test requires the timm library": "package-missing",
    "needs torch>=2.99": "package-version",
    "torch < 2.99": "package-version",
    "requires torch 2.99 or newer": "package-version",
    "Test requires numpy version < 2.0": "package-version",
    # The host meets it, so the check is what is wrong
    "CUDA not available": "skip-disagrees",
    "needs torch>=2.0": "skip-disagrees",
    # Not of this host
    "test requires a XPU": "vendor-xpu",
    "ROCm only": "vendor-rocm",
    "not supported on ROCm": "vendor-non-rocm",
    "MPS backend not available": "vendor-mps",
    "CPU only": "cuda-present",
    "Windows only": "host-os",
    "requires Python 3.13": "host-python",
    # Asked for, defects, cases
    "test is slow": "skip-opt-in",
    "need --runslow option to run": "skip-opt-in",
    "set RUN_GPU_TESTS=1 to run GPU tests": "skip-opt-in",
    "Flaky on A100, see #123": "skip-known-issue",
    "This model does not support Flash Attention 2": "skip-not-applicable",
    "LlamaModel does not support SDPA": "skip-not-applicable",
    "Processor has no chat template": "skip-not-applicable",
    "got empty parameter set for (backend)": "skip-no-parameters",
    "cannot connect to the hub": "skip-network",
    "HF_TOKEN not set: a gated repo": "skip-network",
    "weights file not found": "skip-data",
    "Must be run under torchrun": "skip-launcher",
    # Nobody knows
    "skip for now": UNKNOWN,
    "": UNKNOWN,
    "see below": UNKNOWN,
}


@pytest.mark.parametrize(("text", "codes"), ON_A_T4.items())
def test_words(text: str, codes: str) -> None:
    assert " ".join(reason.code for reason in skip_reasons(text, on_a_t4)) == codes


def test_what_is_here_stands_in_the_reason() -> None:
    (reason,) = skip_reasons("Need at least 40GB GPU memory to run the test.", on_a_t4)
    assert str(reason) == "[cuda-memory] needs 37.3 GiB of memory; have 15.0 GiB (T4)"


def test_a_broken_import_is_not_a_missing_package() -> None:
    (reason,) = skip_reasons("could not import 'fused': /usr/lib/fused.so: undefined symbol: x", on_a_t4)
    assert "undefined symbol" in reason.have
    assert "import fails" in reason.remedy


VOCABULARY = """
requires needs at least 2 GPUs capability 9.0 sm_90 not supported installed flash_attn torch>=2 < > = 80GB CUDA memory
model does bf16 ROCm --runslow RUN_SLOW=1 could import 'x': [ ] ( ) ` | ; @ 0 00 9999999999 é
"""
WORDS = st.sampled_from(VOCABULARY.split())


@given(st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=12).map(" ".join)))
def test_any_text_has_reasons_that_fit_a_line(text: str) -> None:
    reasons = skip_reasons(text, on_a_t4)
    assert reasons
    for reason in reasons:
        assert len(f"{reason.need}; have {reason.have}") <= LINE
        assert "\n" not in str(reason)


@given(st.lists(WORDS, max_size=8).map(" ".join))
def test_the_same_words_say_the_same(text: str) -> None:
    read = partial(skip_reasons, unmet=on_a_t4)
    assert [r.code for r in read(f"  {text}\n")] == [r.code for r in read(text)]
