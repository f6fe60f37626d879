"""Kernels from the Hub: whether `kernels` is usable here, a kernel at hand, and built for the device."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.host.software import Software, find_module
from pytest_cudaenv.requirements import kernel_builds
from pytest_cudaenv.requirements.capability import any_runs_on, describe
from pytest_cudaenv.requirements.kernel_builds import Build
from pytest_cudaenv.requirements.reason import Rank, Reason, brief, unknown

GRAMMAR = 'write "org/name", with version=<number> or revision="<branch, tag or commit>", not both'
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_IN_ATTENTION = re.compile(r"(?P<repo>[^/:@]+/[^/:@]+)(?:@(?P<revision>[^/:]+))?(?::[^/:]+)?")


@dataclass(frozen=True)
class HubKernel:
    """A kernel repository of the Hub, at a version or a revision, or at whichever is at hand.

    Raises ValueError, with the grammar.
    """

    repo: str
    version: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.repo, str) and _REPO.fullmatch(self.repo)):
            raise ValueError(f"{self.repo!r} names no kernel: {GRAMMAR}")
        if self.version is not None and self.revision is not None:
            raise ValueError(f"{self.repo}: version and revision exclude each other: {GRAMMAR}")
        if self.version is not None and (isinstance(self.version, bool) or not isinstance(self.version, int)):
            raise ValueError(f"{self.repo}: version={self.version!r} is no whole number: {GRAMMAR}")

    @property
    def name(self) -> str:
        """The repository without its owner, for messages."""
        return self.repo.partition("/")[2]


ACCEPTED: Mapping[tuple[int, int], tuple[str, str]] = {
    (5, 16): ("0.16.0", "0.17"),
    (5, 18): ("0.17.0", "0.18"),
    (5, 20): ("0.17.2", "0.18"),
    (5, 21): ("0.17.2", "0.18"),
    (5, 22): ("0.17.2", "0.18"),
    (5, 23): ("0.18.2", "0.19"),
    (5, 24): ("0.18.2", "0.19"),
}
"""transformers (major, minor) -> the versions of kernels that it accepts, lowest and first too new.

Read from the wheels; for one that is installed its own numbers count. Others are not known to refuse any.
https://github.com/huggingface/transformers/blob/main/src/transformers/utils/import_utils.py
"""

ARCHS: Mapping[str, tuple[str, ...]] = {
    "kernels-community/flash-attn2": ("8.0", "9.0", "10.0", "12.0"),
    "kernels-community/flash-attn3": ("8.0", "9.0a"),
    "kernels-community/vllm-flash-attn3": ("8.0", "9.0a"),
    "varunneal/flash-attention-3": ("9.0a",),
}
"""Archs of well-known kernels, for while no build is at hand whose metadata says. They load on every device and
fail at their first launch: https://github.com/karpathy/nanochat/pull/853,
https://github.com/huggingface/kernels-community (build.toml of each)."""

CUDA_ONLY = frozenset({*ARCHS, "kernels-community/flash-attn4"} - {"kernels-community/flash-attn2"})
"""Kernels without a build for the CPU; flash-attn2 has one."""


def attention_kernel(text: str) -> HubKernel | None:
    """The kernel that an `attn_implementation` such as `org/name@rev:fn` names; None for any other text.

    https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/hub_kernels.py (is_kernel)
    """
    match = _IN_ATTENTION.fullmatch(text)
    if match is None or not _REPO.fullmatch(match["repo"]):
        return None
    return HubKernel(match["repo"], revision=match["revision"])


def pair_reasons(software: Software) -> list[Reason]:
    """Why layers would not be replaced, whichever kernel is meant: no usable `kernels`, or kernels turned off.

    Every one of these is silent at run time: with a pair that does not fit or a variable that says no,
    `use_kernels=True` and `kernelize(use_fallback=False)` succeed and replace nothing.
    """
    return [*usability_reasons(software), *_off_reasons(software)]


def usability_reasons(software: Software) -> list[Reason]:
    """Why `kernels` cannot load anything under the installed transformers; without transformers any version can."""
    version = software.version("kernels")
    bounds = accepted_versions(software)
    wanted = f"kernels>={bounds[0]},<{bounds[1]}" if bounds else "kernels"
    install = f"Run pip install '{wanted}'."
    if version is None:
        return [brief("kernels-missing", "needs the kernels package", "none", install, Rank.MISSING)]
    reasons = []
    if bounds and not _is_between(version, *bounds):
        transformers = software.version("transformers")
        need = f"transformers needs {wanted}"
        remedy = f"{install[:-1]}: transformers {transformers} ignores any other version without a word."
        reasons.append(brief("kernels-version", need, version, remedy, Rank.MISSING))
    switch = software.environ.get("DISABLE_KERNEL_MAPPING")
    if switch is not None and not re.fullmatch(r"\s*[+-]?\d+\s*", switch):
        remedy = "Set DISABLE_KERNEL_MAPPING to 0 or 1: with anything else `import kernels` raises ValueError."
        reasons.append(brief("kernels-broken", "DISABLE_KERNEL_MAPPING is 0 or 1", repr(switch), remedy, Rank.BROKEN))
    return reasons


def _off_reasons(software: Software) -> list[Reason]:
    reasons = []
    hub = software.environ.get("USE_HUB_KERNELS")
    if hub is not None and hub.upper() not in {"1", "ON", "YES", "TRUE"} and software.version("transformers"):
        remedy = "Unset USE_HUB_KERNELS: under it transformers replaces no layer, silently."
        reasons.append(
            brief("kernels-off", "needs Hub kernels turned on", f"USE_HUB_KERNELS={hub}", remedy, Rank.MISSING)
        )
    mapping = software.environ.get("DISABLE_KERNEL_MAPPING", "0").strip()
    if re.fullmatch(r"[+-]?\d+", mapping) and int(mapping):
        remedy = "Unset DISABLE_KERNEL_MAPPING: under it kernelize() replaces no layer, silently."
        have = f"DISABLE_KERNEL_MAPPING={mapping}"
        reasons.append(brief("kernels-off", "needs Hub kernels turned on", have, remedy, Rank.MISSING))
    return reasons


def _is_between(version: str, lowest: str, too_new: str) -> bool:
    # As transformers compares: a development version of the upper bound is below it.
    from packaging.version import InvalidVersion, Version

    try:
        return Version(lowest) <= Version(version) < Version(too_new)
    except InvalidVersion:
        return False


def accepted_versions(software: Software) -> tuple[str, str] | None:
    """The versions of kernels that this transformers accepts, (lowest, first too new); None: none known."""
    version = software.version("transformers")
    if version is None:
        return None
    told = None if "transformers" in software.assumed else _told_by_installed(version)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return told or (ACCEPTED.get((int(numbers[1]), int(numbers[2]))) if numbers else None)


@lru_cache(maxsize=8)
def _told_by_installed(version: str) -> tuple[str, str] | None:
    """The bounds in the text of the installed transformers, if it is this version; importing it takes seconds."""
    try:
        init = find_module("transformers") if importlib.metadata.version("transformers") == version else None
        text = (init.parent / "utils" / "import_utils.py").read_text(encoding="utf-8") if init else ""
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    lowest, too_new = (re.search(rf'^KERNELS_{w}_VERSION = "([^"]+)"', text, re.MULTILINE) for w in ("MIN", "MAX"))
    return (lowest[1], too_new[1]) if lowest and too_new else None


def builds_at_hand(kernel: HubKernel, software: Software) -> tuple[Build, ...]:
    """The builds that load without the network: a local override's, or those in the cache.

    An override counts whatever version is asked for, and nothing else does where there is one.
    """
    try:
        path = kernel_builds.local_override(kernel.repo, software.environ)
    except ValueError:
        return ()
    if path is not None:
        return kernel_builds.local_builds(path)
    return kernel_builds.cached_builds(kernel.repo, kernel.version, kernel.revision, software.environ)


def is_at_hand(kernel: HubKernel, software: Software) -> bool:
    """Whether a build of the kernel that may suit this torch can be loaded without the network."""
    return any(build.fits(software.torch) is not False for build in builds_at_hand(kernel, software))


def software_reasons(kernel: HubKernel, software: Software) -> list[Reason]:
    """Why the kernel cannot be had here: a wrong override, offline and not cached, no build for this torch.

    Online, a kernel that is not at hand can be downloaded, and whether it has a build is known only then.
    """
    environ = software.environ
    need = f"needs kernel {kernel.name}"
    try:
        path = kernel_builds.local_override(kernel.repo, environ)
    except ValueError as error:
        remedy = "Write LOCAL_KERNELS=org/name=/path:org/other=/path; kernels refuses anything else at every load."
        return [brief("kernels-local", need, str(error), remedy, Rank.BROKEN)]
    builds = builds_at_hand(kernel, software)
    if path is not None and not builds:
        remedy = f"Correct LOCAL_KERNELS: {path} has no build, and no other place is asked for {kernel.repo}."
        return [brief("kernels-local", need, "a path without a build", remedy, Rank.BROKEN)]
    if path is None and not kernel_builds.is_offline(environ):
        return []
    if not builds:
        return [_offline(kernel, need)]
    if is_at_hand(kernel, software):
        return []
    have = ", ".join(b.variant for b in builds)
    remedy = f"Take another version of {kernel.repo}, or of torch: this one has builds for {have}."
    torch = ".".join(software.torch.version.split(".")[:2]) if software.torch else "none"
    return [brief("kernels-variant", f"{kernel.name} needs a build for torch {torch}", have, remedy, Rank.MISSING)]


def _offline(kernel: HubKernel, need: str) -> Reason:
    # Downloading with version=N stores no refs/vN, so that version=N does not load offline afterwards (measured).
    revision = f"v{kernel.version}" if kernel.version is not None else kernel.revision
    wanted = f', revision="{revision}"' if revision else ""
    remedy = f'While online, run kernels.get_kernel("{kernel.repo}"{wanted}) once, or name it in LOCAL_KERNELS.'
    return brief("kernels-offline", need, "offline, not cached", remedy, Rank.MISSING)


def device_reasons(kernel: HubKernel, device: CudaDevice, software: Software) -> list[Reason]:
    """Why the kernel has no code for the device, by the metadata of the builds at hand, else by ARCHS.

    Unknown archs are no reason: builds in Triton or Python declare none.
    """
    archs = declared_archs(kernel, software)
    if not archs:
        return []
    shown = f"sm_{'/'.join(archs).replace('.', '')}" if len(archs) <= 3 else f"one of {len(archs)} archs"
    need = f"{kernel.name} needs {shown}"
    if device.capability is None:
        return [unknown(need, "unknown capability")]
    if any_runs_on(archs, device.capability):
        return []
    remedy = f"Run it on a device of {', '.join(archs)}: {kernel.repo} has code for nothing else."
    return [brief("kernels-arch", need, describe(device), remedy)]


def declared_archs(kernel: HubKernel, software: Software) -> tuple[str, ...]:
    """The archs that the kernel has code for; empty: not known, or code that is compiled on the device."""
    builds = builds_at_hand(kernel, software)
    if not builds:
        return ARCHS.get(kernel.repo, ())
    fitting = [b for b in builds if b.fits(software.torch) is not False] or list(builds)
    if not all(b.archs for b in fitting):
        return ()
    return tuple(dict.fromkeys(arch for b in fitting for arch in b.archs))
