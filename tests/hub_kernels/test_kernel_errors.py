"""Every failure of `kernels` that was met, and what becomes of a test for it. The texts are those that it raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.verdict.kernel_errors import HubKernelError, KernelFaultError, Outcome, diagnose


class ConnectError(Exception):
    """httpx2's: it is no OSError."""


class OfflineModeIsEnabled(ConnectionError):
    """huggingface_hub's."""


class RepositoryNotFoundError(Exception):
    """huggingface_hub's."""


class RevisionNotFoundError(Exception):
    """huggingface_hub's."""


class LocalEntryNotFoundError(FileNotFoundError):
    """huggingface_hub's."""


NO_BUILD = "Cannot find a build variant for this system in org/name (revision: abc):\n\n"
WRONG_TORCH = "torch29-cxx11-cpu-x86_64-linux: Torch version (2.9) does not match environment Torch version (2.13)\n"

TABLE = [
    (FileNotFoundError(NO_BUILD + WRONG_TORCH), "kernels-variant", "skip"),
    (FileNotFoundError("Cannot find a build variant for this system in /tmp/x:\n\n"), "kernels-no-build", "error"),
    (
        ValueError(
            "Version 1 of 'org/name' is not available in the local cache and Hugging Face Hub is in offline mode. "
            "Download the kernel while online first, or pass an explicit `revision=<commit>`."
        ),
        "kernels-offline",
        "skip",
    ),
    (
        FileNotFoundError("Cannot find a local snapshot for org/name (revision: main). When Hugging Face Hub is in"),
        "kernels-offline",
        "skip",
    ),
    (
        ValueError("Kernel repository 'org/name' could not verify publisher trust status. Set trust_remote_code=True"),
        "kernels-unreachable",
        "skip",
    ),
    (LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder"), "kernels-offline", "skip"),
    (LocalEntryNotFoundError("Cannot reach the Hub"), "kernels-unreachable", "skip"),
    (ConnectError("[Errno -2] Name or service not known"), "kernels-unreachable", "skip"),
    (OfflineModeIsEnabled("Cannot reach https://…: offline mode is enabled."), "kernels-unreachable", "skip"),
    (ValueError("Kernel repository 'o/n' is not from a trusted publisher. Set trust"), "kernels-untrusted", "error"),
    (ValueError("Version 3 not found, available versions: 1, 2"), "kernels-no-version", "error"),
    (RepositoryNotFoundError("404 Client Error."), "kernels-no-repository", "error"),
    (RevisionNotFoundError("404 Client Error."), "kernels-no-repository", "error"),
    (
        RuntimeError("Kernel 'n' variant 'v' does not support the current device: CUDA capability 12.1. The declared"),
        "kernels-arch",
        "skip",
    ),
    (
        ValueError(
            "No layer mapping for `RMSNorm` device `Device(type='cuda', properties=None)` with the right properties"
        ),
        "kernels-capability",
        "skip",
    ),
    (AssertionError("Torch not compiled with CUDA enabled"), "kernels-device", "skip"),
    (ValueError("No layer mapping for `X`"), "kernels-unmapped", "error"),
    (ValueError("No layer mapping for `X` with device type `Device(type='cpu')`"), "kernels-no-device", "error"),
    (ValueError("No repository for `X` for configuration mode=Mode.TRAINING"), "kernels-mode", "error"),
    (ValueError("Available kernel does not support mode: Mode.TRAINING"), "kernels-claim", "fail"),
    (
        ValueError("Function/layer from repo `x` does not support backward.\nWas registered for `RMSNorm` with mode"),
        "kernels-claim",
        "fail",
    ),
    (ValueError("Layer `Nope` not found in kernel repo `x`."), "kernels-no-layer", "error"),
    (ValueError("Kernel repo `x` does not define any layers."), "kernels-no-layer", "error"),
    (ValueError("Layer X is not registered in the model, please register it first using"), "kernels-layer", "error"),
    (TypeError("`x` must not override nn.Module constructor."), "kernels-bad-layer", "fail"),
    (TypeError("`x` must not contain additional members compared to `Y`."), "kernels-bad-layer", "fail"),
    (
        TypeError("Forward signature of `x` does not match `Y`: different number of arguments."),
        "kernels-bad-layer",
        "fail",
    ),
    (
        TypeError("Forward signature of `x` does not match `Y`: different kind of arguments (*a (VAR_POSITIONAL)"),
        "kernels-bad-layer",
        "fail",
    ),
    (TypeError("Layer `X` is not a Torch layer."), "kernels-bad-layer", "fail"),
    (
        ImportError("Kernel module `x` requires Python dependency `einops`. Please install with: pip install einops"),
        "kernels-dependency",
        "skip",
    ),
    (RuntimeError("Kernel 'x' requires kernels>=99.0.0, but version 0.17.2 is installed"), "kernels-version", "skip"),
    (OSError("Failed to open `/tmp/x/metadata.json`: No such file"), "kernels-metadata", "error"),
    (ValueError("Cannot parse metadata from `/tmp/x`: missing field `id`"), "kernels-metadata", "error"),
    (FileNotFoundError("No kernel module found at: `/tmp/x`"), "kernels-metadata", "error"),
    (ValueError("Kernel `X` is not locked. Please lock it with `kernels lock <project>`"), "kernels-lock", "error"),
    (ValueError("Cannot parse KernelLocks: unknown field `repo_id`"), "kernels-lock", "error"),
    (FileNotFoundError(2, "No such file or directory", "/tmp/kernels.lock"), "kernels-lock", "error"),
    (ValueError("Invalid LOCAL_KERNELS entry: . Expected format: a=b"), "kernels-local", "error"),
    (
        ImportError("`kernels` is either not installed or uses an incompatible version. Please install"),
        "kernels-version",
        "skip",
    ),
    (ValueError("Kernels are not available. Please install a compatible version"), "kernels-version", "skip"),
    (AttributeError("'tuple' object has no attribute 'split'"), "kernels-config", "error"),
    (AttributeError("'dict' object has no attribute 'kernel_mapping'"), "kernels-config", "error"),
    (ValueError("Expected exactly one kernel repo regardless of device/mode specificity"), "kernels-config", "error"),
    (
        UnboundLocalError("cannot access local variable 'kernel_function' where it is not associated with a value"),
        "kernels-attention",
        "fail",
    ),
    (ValueError('Specified `attn_implementation="./x"` is not supported.'), "kernels-attention-name", "error"),
    (ValueError("kernel_condition is False for this LlamaRMSNorm"), "kernels-condition", "error"),
    (ZeroDivisionError("division by zero"), "kernels-failed", "fail"),
]


@pytest.mark.parametrize(("error", "code", "outcome"), TABLE, ids=lambda value: str(value)[:40])
def test_each_failure_has_its_code_and_outcome(error: Exception, code: str, outcome: str) -> None:
    found = diagnose(error)
    assert (found.code, found.outcome.value) == (code, outcome)
    assert str(found).startswith(f"[{code}] ")
    assert "\n" not in str(found)
    assert found.remedy.endswith(".")
    if found.outcome is Outcome.SKIP:
        reason = found.reason("RMSNorm")
        assert reason.code == code
        assert "\n" not in str(reason)
        assert not reason.is_error
    else:
        kind = KernelFaultError if found.outcome is Outcome.FAIL else HubKernelError
        with pytest.raises(kind, match=rf"\[{code}\] RMSNorm: ") as caught:
            found.raise_("RMSNorm", error)
        assert caught.value.__cause__ is error


def test_a_skip_tells_every_variant_that_was_refused() -> None:
    found = diagnose(FileNotFoundError(NO_BUILD + WRONG_TORCH + "torch213-cxx11-cu130-x86_64-linux: backend\n"))
    assert found.text.count("torch") >= 2
    assert "cu130" in found.text


def test_what_transformers_wraps_is_judged_by_what_is_inside() -> None:
    inner = FileNotFoundError(NO_BUILD + WRONG_TORCH)
    error = ValueError(f"An error occurred while trying to load from 'org/name': {inner}.")
    error.__context__ = inner
    assert diagnose(error).code == "kernels-variant"


def test_an_import_that_fails_is_the_kernels_own() -> None:
    error = OSError("libfoo.so: cannot open shared object file")
    error.__notes__ = ["while importing kernel 'x', variant 'torch-universal' "]
    assert (diagnose(error).code, diagnose(error).outcome) == ("kernels-import", Outcome.FAIL)


@given(st.sampled_from([ValueError, RuntimeError, OSError, TypeError, KeyError, FileNotFoundError]), st.text())
def test_no_failure_of_unknown_text_is_a_skip(kind: type[Exception], text: str) -> None:
    assert diagnose(kind(text)).outcome is not Outcome.SKIP


def test_every_code_is_documented() -> None:
    from pathlib import Path

    from pytest_cudaenv.verdict import kernel_errors

    page = (Path(__file__).parents[2] / "docs" / "hub_kernels.md").read_text(encoding="utf-8")
    missing = {rule.code for rule in kernel_errors._RULES} - {c for c in page.split("`") if c.startswith("kernels-")}
    assert not missing
