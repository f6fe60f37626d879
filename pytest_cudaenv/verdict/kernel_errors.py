"""What went wrong with a Hub kernel: each failure of `kernels` as a skip, an error or a failure, with a stable code.

Pure: an exception goes in. The texts are those of kernels 0.17, transformers 5.22 and huggingface_hub 2.4; classes
alone do not tell, as a missing lock file and a missing build are both FileNotFoundError.
https://github.com/huggingface/kernels/tree/main/kernels/src/kernels (load.py, install.py, _versions.py, layer/layer.py)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NoReturn

from pytest_cudaenv.requirements.reason import Rank, Reason, brief, shortened
from pytest_cudaenv.verdict.coded import CodedError


class Outcome(Enum):
    """What becomes of a test whose kernel cannot be had."""

    SKIP = "skip"
    """The kernel is not for this host, or not at hand."""
    ERROR = "error"
    """The suite asks for something that is nowhere."""
    FAIL = "fail"
    """The kernel breaks its word."""


class HubKernelError(CodedError, RuntimeError):
    """The suite asks for kernels in a way that cannot work, on this host or any other. `code` is stable."""


class KernelFaultError(CodedError, AssertionError):
    """A kernel does not do what it claims, or what it replaces. `code` is stable."""


@dataclass(frozen=True)
class Diagnosis:
    """One failure, understood."""

    code: str
    outcome: Outcome
    text: str
    """What was needed and what there was, on one line."""
    remedy: str
    need: str = ""
    have: str = ""

    def __str__(self) -> str:
        return f"[{self.code}] {self.text}"

    def reason(self, subject: str) -> Reason:
        """As the reason of a skip; `subject` is what needed the kernel."""
        rank = Rank.HARDWARE if self.code in {"kernels-arch", "kernels-capability", "kernels-device"} else Rank.MISSING
        return brief(self.code, self.need or f"needs {subject}", self.have or self.text, self.remedy, rank)

    def raise_(self, subject: str, cause: BaseException | None = None) -> NoReturn:
        """Raise it as what it is, where it is no skip."""
        told = f"{subject}: {self.text}. {self.remedy}"
        if self.outcome is Outcome.FAIL:
            raise KernelFaultError(self.code, told) from cause
        raise HubKernelError(self.code, told) from cause


class _Rule(NamedTuple):
    classes: tuple[str, ...]
    """Names of exception classes, of which the error has one among its bases; empty: any."""
    pattern: str
    code: str
    outcome: Outcome
    remedy: str
    show: Callable[[str], str] | None = None


def _variants(text: str) -> str:
    """The trace of the build variants that were refused; `none` where there is none."""
    lines = [line.strip() for line in text.splitlines()[1:] if re.match(r"\s*(torch|tvm)\S*: ", line)]
    return "; ".join(lines) or "no build variant"


_ONLINE = 'While online, load it once with revision="v<version>", or name it in LOCAL_KERNELS.'


def _absent(text: str) -> str:
    """Which kernel is not in the cache, `org/name@v1`, where the error says."""
    if (version := re.search(r"Version (\d+) of '([^']+)'", text)) is not None:
        return f"offline, {version[2]}@v{version[1]} not cached"
    if (snapshot := re.search(r"local snapshot for (\S+) \(revision: ([^)]+)\)", text)) is not None:
        return f"offline, {snapshot[1]}@{snapshot[2]} not cached"
    return "offline, not cached"


_S, _E, _F = Outcome.SKIP, Outcome.ERROR, Outcome.FAIL

_RULES = (
    _Rule(("FileNotFoundError",), r"Cannot find a build variant for this system.*\n\s*(torch|tvm)\S*: ",
          "kernels-variant", _S, "Take another version of the kernel, or of torch.", _variants),
    _Rule(("FileNotFoundError",), r"Cannot find a build variant for this system",
          "kernels-no-build", _E, "Name a folder that holds a build, as build/torch-universal."),
    _Rule(("FileNotFoundError",), r"Cannot find a local snapshot",
          "kernels-offline", _S, _ONLINE, _absent),
    _Rule(("ValueError",), r"is not available in the local cache",
          "kernels-offline", _S, _ONLINE, _absent),
    _Rule(("LocalEntryNotFoundError",), r"cached snapshot",
          "kernels-offline", _S, _ONLINE, _absent),
    _Rule(("ValueError",), r"could not verify publisher trust status",
          "kernels-unreachable", _S, "Let this host reach the Hub, or set HF_HUB_OFFLINE=1 and warm the cache."),
    _Rule(("ConnectError", "ConnectTimeout", "ReadTimeout", "OfflineModeIsEnabled", "LocalEntryNotFoundError",
           "ConnectionError"), r"",
          "kernels-unreachable", _S, "Let this host reach the Hub, or set HF_HUB_OFFLINE=1 and warm the cache."),
    _Rule(("RuntimeError",), r"does not support the current device",
          "kernels-arch", _S, "Run it on a device that the kernel has code for."),
    _Rule(("ValueError",), r"with the right properties",
          "kernels-capability", _S, "Run it on a device whose capability the mapping names, or widen the mapping."),
    _Rule(("AssertionError", "RuntimeError"), r"Torch not compiled with CUDA enabled|Found no NVIDIA driver",
          "kernels-device", _S, "Run it where torch has CUDA, or map the layer for this device."),
    _Rule(("ImportError",), r"requires Python dependency",
          "kernels-dependency", _S, "Install what the kernel depends on."),
    _Rule(("ValueError",), r"Python dependency|dependency `[^`]*` is not (allowed|supported)",
          "kernels-dependency-unknown", _E, "kernels allows only the dependencies that it knows."),
    _Rule(("RuntimeError",), r"requires kernels>=",
          "kernels-version", _S, "Install the version of kernels that it needs."),
    _Rule(("ValueError",), r"is not from a trusted publisher",
          "kernels-untrusted", _E, "Name it with trust_remote_code=True if you trust it."),
    _Rule(("ValueError",), r"Version \d+ not found, available versions",
          "kernels-no-version", _E, "Name a version that the repository has."),
    _Rule(("RepositoryNotFoundError", "RevisionNotFoundError", "HfHubHTTPError"), r"",
          "kernels-no-repository", _E, "Correct the repository's name or its revision."),
    _Rule(("ValueError",), r"No layer mapping for `[^`]*` with device type",
          "kernels-no-device", _E, "Map the layer for this device."),
    _Rule(("ValueError",), r"No layer mapping for",
          "kernels-unmapped", _E, "Put the layer into the mapping, or allow the fallback."),
    _Rule(("ValueError",), r"No repository for `[^`]*` for configuration",
          "kernels-mode", _E, "Map the layer for this mode as well."),
    _Rule(("ValueError",), r"does not support mode: ",
          "kernels-claim", _F, "The kernel says itself that it cannot: take another one for this mode."),
    _Rule(("ValueError",), r"does not support (backward|torch\.compile)",
          "kernels-claim", _F, "The kernel says itself that it cannot: take another one for this mode."),
    _Rule(("ValueError",), r"Layer `[^`]*` not found in kernel repo|does not define any layers",
          "kernels-no-layer", _E, "Name a layer that the kernel's `layers` has."),
    _Rule(("ValueError",), r"is not registered in the model",
          "kernels-layer", _E, "Name a layer that the model has; hub_kernels.layers(model) lists them."),
    _Rule(("TypeError",), r"must not override nn\.Module constructor|must not contain additional members"
                          r"|does not match .*different (number|kind) of arguments|is not a Torch layer",
          "kernels-bad-layer", _F, "A kernel's layer is a stateless nn.Module whose forward has the same arguments."),
    _Rule(("ValueError",), r"Invalid LOCAL_KERNELS entry",
          "kernels-local", _E, "Write LOCAL_KERNELS=org/name=/path:org/other=/path."),
    _Rule(("ValueError",), r"Cannot parse KernelLocks|is not locked",
          "kernels-lock", _E, "Write the lock anew with `kernels lock`."),
    _Rule(("FileNotFoundError",), r"\.lock'?$|kernels\.lock",
          "kernels-lock", _E, "Write the lock with `kernels lock`, and name its path."),
    _Rule(("OSError", "ValueError"), r"Failed to open|Cannot parse metadata|No kernel module found",
          "kernels-metadata", _E, "Build the kernel anew: a variant has metadata.json and __init__.py."),
    _Rule(("ImportError", "ValueError"), r"not installed or uses an incompatible version|Kernels are not available",
          "kernels-version", _S, "Install the version of kernels that this transformers takes."),
    _Rule(("ValueError",), r"Expected exactly one kernel repo",
          "kernels-config", _E, "KernelConfig takes one device here; hub_kernels.on takes a mapping per device."),
    _Rule(("AttributeError",), r"'(tuple|dict)' object has no attribute '(split|kernel_mapping)'",
          "kernels-config", _E, "Give KernelConfig(mapping) with Hub names; hub_kernels.local is for folders."),
    _Rule(("UnboundLocalError",), r"kernel_function",
          "kernels-attention", _F, "An attention kernel exports flash_attn_func and flash_attn_varlen_func."),
    _Rule(("ValueError",), r"Could not find the currently requested flash attention implementation",
          "kernels-attention", _F, "An attention kernel exports flash_attn_func and flash_attn_varlen_func."),
    _Rule(("ValueError",), r"Specified `attn_implementation=.*is not supported",
          "kernels-attention-name", _E, 'Name it "org/name"; hub_kernels.override gives that name a folder.'),
    _Rule(("ValueError",), r"kernel_condition is False",
          "kernels-condition", _E, "The layer refuses kernels for this instance: allow the fallback, or change it."),
)  # fmt: skip


def diagnose(error: BaseException) -> Diagnosis:
    """What a failure of `kernels`, or of transformers around it, means for the test.

    What no rule knows is the kernel's own: it fails the test, `kernels-import` where it was being imported.
    """
    for one in _chain(error):
        names = {base.__name__ for base in type(one).__mro__}
        for rule in _RULES:
            text = _text(one)
            if (not rule.classes or names & set(rule.classes)) and re.search(rule.pattern, text, re.DOTALL):
                if rule.show is _absent:  # the error that this one wraps, or that wraps it, may name the kernel
                    text = "\n".join(map(_text, _chain(error)))
                shown = rule.show(text) if rule.show is not None else _first(text)
                # A skip's line has room for the names of the variants; why each was refused goes with the remedy.
                have = re.sub(r": [^;]*", "", shown) if rule.show is _variants else shown if rule.show else ""
                remedy = f"{rule.remedy[:-1]} ({shown})." if rule.show is _variants else rule.remedy
                return Diagnosis(rule.code, rule.outcome, shown, remedy, have=have)
    notes = " ".join(getattr(error, "__notes__", ()))
    if "while importing kernel" in notes:
        text = f"{type(error).__name__}: {_first(_text(error))} ({notes})"
        return Diagnosis(
            "kernels-import", Outcome.FAIL, shortened(text, 240), "The kernel itself does not import here."
        )
    text = f"{type(error).__name__}: {_first(_text(error))}"
    return Diagnosis("kernels-failed", Outcome.FAIL, text, "Nothing that is known of kernels explains it.")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it wraps: transformers wraps what an attention kernel raises, with its text only."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        # The wrapper's text holds the inner one's, whose class it lacks: the inner error is the better witness.
        inner = one.__cause__ or (
            one.__context__ if "An error occurred while trying to load from" in str(one) else None
        )
        if inner is not None:
            yield inner
        yield one
        one = inner


def _text(error: BaseException) -> str:
    return str(error)


def _first(text: str) -> str:
    """The first line that says something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return shortened(lines[0].rstrip(":. "), 200) if lines else "no message"
