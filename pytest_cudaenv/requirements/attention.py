"""Attention backends: their names, and why one does not run with this software, on this device, in this model."""

from __future__ import annotations

import sys

from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.host.software import Software, canonical
from pytest_cudaenv.requirements import hub_kernels, packages, precision
from pytest_cudaenv.requirements.attention_backends import (
    BACKENDS,
    FLASH_DTYPES,
    FLASH_FLAG,
    AttnBackend,
    UnknownBackendError,
    backend_name,
    registered,
    with_backends,
)
from pytest_cudaenv.requirements.capability import Capabilities, describe, exactly
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.reason import Importer, Rank, Reason, brief, quoted, unknown

__all__ = [
    "BACKENDS",
    "AttnBackend",
    "UnknownBackendError",
    "backend_name",
    "device_reasons",
    "head_dim_reason",
    "model_reasons",
    "note",
    "registered",
    "software_reasons",
    "stand_ins",
    "takes_dtype",
    "with_backends",
]


def _find(name: str, software: Software | None = None) -> AttnBackend | HubKernel:
    if backend := registered().get(name):
        return backend
    kernel = hub_kernels.attention_kernel(name)
    if kernel is None:
        raise UnknownBackendError(f"unknown attention backend {name!r}")
    if kernel.revision is None:
        return HubKernel(kernel.repo, version=_kernel_version(kernel.repo, software))
    return kernel


def stand_ins(backend: str) -> tuple[str, ...]:
    """The Hub kernels that transformers may load under this name; it then names them in the model's config."""
    told = getattr(_flash_utils(), "FLASH_ATTN_KERNEL_FALLBACK", {})
    found = registered().get(backend)
    repos = (told.get(backend), found.kernel if found else None)
    return tuple(dict.fromkeys(repo for repo in repos if isinstance(repo, str)))


def _flash_utils() -> object:
    """transformers' own tables, if this process has imported them."""
    return sys.modules.get("transformers.modeling_flash_attention_utils")


def _kernel_version(repo: str, software: Software | None) -> int:
    """The version of a kernel that transformers pins."""
    told = getattr(_flash_utils(), "FLASH_ATTN_KERNEL_VERSIONS", {}).get(repo)
    if isinstance(told, int):
        return told
    if repo == "kernels-community/flash-attn2":
        torch = software.torch if software else None
        return 3 if torch and not packages.version_fits(torch.version, ">=2.10") else 4
    return {"kernels-community/flash-attn4": 0, "kernels-community/metal-flash-sdpa": 2}.get(repo, 1)


def _stand_in(backend: AttnBackend, software: Software) -> HubKernel | None:
    """The Hub kernel that runs in place of a missing package: at hand, and loadable by this `kernels`."""
    if hub_kernels.usability_reasons(software):
        return None
    kernels = (HubKernel(repo, version=_kernel_version(repo, software)) for repo in stand_ins(backend.name))
    return next((k for k in kernels if hub_kernels.is_at_hand(k, software)), None)


def software_reasons(backend: str, software: Software, imports: Importer | None) -> list[Reason]:
    """Why the software here does not run the backend: package missing, too old or broken, and no Hub kernel for it."""
    found = _find(backend, software)
    if isinstance(found, HubKernel):
        return [*hub_kernels.usability_reasons(software), *hub_kernels.software_reasons(found, software)]
    if found.distribution == "torch":
        return _torch_reasons(found, software)
    reasons = _package_reasons(found, software)
    if reasons:
        return [] if _stand_in(found, software) else reasons
    return _import_reasons(found, software, imports)


def _torch_reasons(backend: AttnBackend, software: Software) -> list[Reason]:
    # Triton, which flex_attention needs, comes with every CUDA build of torch.
    if software.torch is None:
        need = f"{backend.label} needs torch"
        return [brief("attn-missing", need, "none", "Run pip install torch.", Rank.MISSING)]
    return _version_reasons(backend, software.torch.version, software)


def _version_reasons(backend: AttnBackend, version: str, software: Software) -> list[Reason]:
    if backend.minimum is None or packages.version_fits(version, f">={backend.minimum}"):
        return []
    if not version and canonical(backend.distribution) in software.assumed:
        return []
    wanted = f"{backend.distribution}>={backend.minimum}"
    remedy = f"Run pip install '{wanted}'."
    return [brief("attn-version", f"{backend.label} needs {wanted}", version, remedy, Rank.MISSING)]


def _package_reasons(backend: AttnBackend, software: Software) -> list[Reason]:
    """Why the package is not there, or too old; nothing is imported."""
    version = software.version(backend.distribution)
    if canonical(backend.distribution) in software.assumed:
        return _version_reasons(backend, version or "", software)
    module = _module(backend, software)
    if version is not None and module is not None:
        return _version_reasons(backend, version, software)
    if version is None and module is not None and not backend.must_have_metadata and _is_own(module, software):
        return []  # see note()
    have = "none"
    if version is not None:
        have = f"{version} without its module"
    elif module is not None:
        have = f"{module} of {_sharing(software) or 'no package'}"
    need = f"{backend.label} needs {backend.distribution}"
    return [brief("attn-missing", need, have, _install(backend), Rank.MISSING)]


def _module(backend: AttnBackend, software: Software) -> str | None:
    return next((m for m in backend.modules if m in software.modules), None)


def _is_own(module: str, software: Software) -> bool:
    """Whether a module without its distribution is the real thing: flash-attn-4 leaves a bare folder flash_attn."""
    return not (module == "flash_attn" and _sharing(software))


def _sharing(software: Software) -> str | None:
    """The installed distribution of those that share the folder flash_attn."""
    return next((d for d in ("flash-attn", "flash-attn-4") if software.version(d) is not None), None)


def _install(backend: AttnBackend) -> str:
    wanted = f"{backend.distribution}>={backend.minimum}" if backend.minimum else backend.distribution
    package = f"Run pip install '{backend.source or wanted}'"
    if not backend.kernel:
        return f"{package}."
    return f"{package}, or download the Hub kernel {backend.kernel} (transformers needs a kernels it accepts)."


def note(backend: str, software: Software) -> str | None:
    """What a user should know of a backend that is importable under an unknown distribution; None otherwise.

    A vendored, editable or renamed copy runs, so it is no reason to skip; but transformers asks for the
    distribution's name too, and says that the package is not installed.
    """
    found = registered().get(backend)
    if found is None or not found.modules or software.version(found.distribution) is not None:
        return None
    module = _module(found, software)
    if module is None or _package_reasons(found, software):
        return None
    return (
        f"{module} is importable, but no distribution {found.distribution} is installed: transformers will not use it"
    )


def _import_reasons(backend: AttnBackend, software: Software, imports: Importer | None) -> list[Reason]:
    """Installed but broken, told by importing a public name: private ones change between releases."""
    if imports is None or not backend.proof or canonical(backend.distribution) in software.assumed:
        return []
    error = imports(backend.proof)
    if error is None:
        return []
    torch = f"torch {software.torch.version}" if software.torch else "this Python"
    module, _, name = backend.proof.partition(":")
    remedy = (
        f"`from {module} import {name}` fails with `{error}`; install a build of {backend.distribution} for {torch}."
    )
    return [brief("attn-broken", f"{backend.label} must import", quoted(error), remedy, Rank.BROKEN)]


def takes_dtype(backend: str, dtype: str) -> bool:
    """Whether the backend computes in this dtype on any device at all."""
    found = _find(backend)
    if isinstance(found, HubKernel):
        return dtype in FLASH_DTYPES if _is_flash(found) else dtype not in precision.FORMATS
    return dtype in found.dtypes or dtype in found.dtypes_on


def _is_flash(kernel: HubKernel) -> bool:
    """As transformers decides (is_flash_attention_requested): by the name."""
    return "flash" in kernel.repo


def device_reasons(backend: str, dtype: str | None, device: CudaDevice | None, software: Software) -> list[Reason]:
    """Why the device (None: the CPU) does not run the backend, in this dtype if one is given."""
    found = _find(backend, software)
    label = found.name if isinstance(found, HubKernel) else found.label
    reasons = [] if dtype is None else _dtype_reasons(backend, label, dtype, device)
    if device is not None and dtype is not None:
        reasons += precision.dtype_reasons(dtype, device)
    kernel = found if isinstance(found, HubKernel) else _provider(found, software)
    if device is None:
        return reasons + _cpu_reasons(found, kernel, label)
    if kernel is not None:
        arch_reasons = hub_kernels.device_reasons(kernel, device, software)
        if arch_reasons or isinstance(found, HubKernel) or hub_kernels.declared_archs(kernel, software):
            return reasons + arch_reasons
    # A kernel that declares no archs is compiled on the device: what its algorithm takes is all there is to ask.
    return reasons if isinstance(found, HubKernel) else reasons + _capability_reasons(found, device)


def _provider(backend: AttnBackend, software: Software) -> HubKernel | None:
    """The Hub kernel that runs under this backend's name; None where the package does."""
    if backend.distribution == "torch" or not _package_reasons(backend, software):
        return None
    return _stand_in(backend, software)


def _cpu_reasons(found: AttnBackend | HubKernel, kernel: HubKernel | None, label: str) -> list[Reason]:
    if kernel is not None:
        runs = kernel.repo not in hub_kernels.CUDA_ONLY
    else:
        runs = isinstance(found, AttnBackend) and found.runs_on_cpu
    if runs:
        return []
    return [brief("attn-device", f"{label} needs a CUDA device", "the CPU", "Run it on a CUDA device, or use sdpa.")]


def _capability_reasons(backend: AttnBackend, device: CudaDevice) -> list[Reason]:
    if backend.capabilities is None:
        return []
    return _outside("attn-capability", f"{backend.label} needs", backend.capabilities, device, backend.remedy)


def _outside(code: str, need: str, wanted: Capabilities, device: CudaDevice, remedy: str) -> list[Reason]:
    if device.capability is None:
        return [unknown(f"{need} {wanted.text}", "unknown capability")]
    if device.capability in wanted:
        return []
    return [brief(code, f"{need} {wanted.text}", describe(device), remedy)]


def _dtype_reasons(backend: str, label: str, dtype: str, device: CudaDevice | None) -> list[Reason]:
    found = registered().get(backend)
    short = precision.dtype_id(dtype)
    if not takes_dtype(backend, dtype):
        takes = [precision.dtype_id(d) for d in (found.dtypes if found else FLASH_DTYPES)]
        either = f"{', '.join(takes[:-1])} or {takes[-1]}" if takes[1:] else takes[0]
        remedy = f"Use {either}; {label} computes in nothing else."
        return [brief("attn-dtype", f"{label} needs {either}", short, remedy)]
    if found is None or device is None or dtype not in found.dtypes_on:
        return []
    wanted = found.dtypes_on[dtype]
    return _outside("attn-dtype", f"{label} in {short} needs", wanted, device, "Run it there, or in another dtype.")


_DATACENTER_BLACKWELL_AND_THOR = exactly("10.x or 11.0", 10, (11, 0))


def head_dim_reason(backend: str, head_dim: int, device: CudaDevice | None) -> Reason | None:
    """Why the backend does not take heads of this size, on the device if one is given."""
    found = registered().get(backend)
    if found is None:
        return None
    remedy = f"Build the model with another head size, or without {found.label}."
    if found.max_head_dim is not None and head_dim > found.max_head_dim:
        return brief("attn-head-dim", f"{found.label} needs head_dim <= {found.max_head_dim}", str(head_dim), remedy)
    if head_dim % found.head_dim_multiple:
        need = f"{found.label} needs head_dim % {found.head_dim_multiple} == 0"
        return brief("attn-head-dim", need, str(head_dim), remedy)
    # FA4 on 10.x and 11.0 takes 8 to 128, (192, 128) and (256, 256): flash_attn/cute/interface.py
    if found.name == "flash_attention_4" and device is not None and device.capability is not None:
        odd = head_dim > 128 and head_dim not in {192, 256}
        if odd and device.capability in _DATACENTER_BLACKWELL_AND_THOR:
            have = f"{head_dim} ({device.short_name})"
            return brief("attn-head-dim", "FA4 needs head_dim <= 128 or 256", have, remedy)
    return None


def model_reasons(backend: str, model_class: type) -> list[Reason]:
    """Why a model class has no such backend, by the flags it declares; a flag that it lacks says nothing.

    A class may also name the only flash implementations that it is right with; transformers then replaces any
    other by the first of them, so that the named one never runs.
    """
    found = registered().get(backend)
    if found is not None:
        flag, label = found.model_flag, found.label
    else:
        kernel = hub_kernels.attention_kernel(backend)
        flag = FLASH_FLAG if kernel and _is_flash(kernel) else None
        label = kernel.name if kernel else backend
    if flag is None:
        return []
    name = model_class.__name__
    if getattr(model_class, flag, None) is False:
        remedy = f"Leave the backend out of this test's list: {name} sets {flag} to False."
        return [brief("model-attn", f"{label} needs a model with {label}", name, remedy)]
    only = getattr(model_class, "_compatible_flash_implementations", None)
    if flag == FLASH_FLAG and only and backend not in only and backend.partition("@")[0] not in only:
        remedy = f"Test {', '.join(only)} alone: with {name}, transformers replaces every other by the first of them."
        return [brief("model-attn", f"{label} needs a model with {label}", name, remedy)]
    return []
