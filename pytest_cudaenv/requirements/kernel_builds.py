"""Builds of Hub kernels that can be loaded without the network: local overrides and the cache, read from files.

Mirrors where `kernels` 0.17 looks and what it accepts, without importing it (its import reads the environment once
and for all): https://github.com/huggingface/kernels/tree/main/kernels/src/kernels (load.py, _versions.py,
resolver.py, variants.py).
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaenv.host.software import TorchBuild

Version = tuple[int, int]


@dataclass(frozen=True)
class Build:
    """One build variant of a kernel, in a folder that is named after it."""

    variant: str
    """`torch213-cxx11-cu130-x86_64-linux`, `torch-universal`."""
    archs: tuple[str, ...] = ()
    """The CUDA archs that its metadata declares, `("8.0", "9.0a")`; empty: it declares none."""

    def fits(self, torch: TorchBuild | None) -> bool | None:
        """Whether `kernels` would take this build for a torch; None where the name does not tell."""
        return _fits(self.variant, torch)


def local_override(repo: str, environ: Mapping[str, str]) -> Path | None:
    """The path that LOCAL_KERNELS gives a repository, or None.

    Raises ValueError for a value that `kernels` refuses at every load, whichever kernel is asked for.
    """
    value = environ.get("LOCAL_KERNELS")
    if value is None:
        return None
    entries = value.split(":")
    if wrong := next((e for e in entries if "=" not in e), None):
        raise ValueError(f"LOCAL_KERNELS entry {wrong!r}")
    if "" in entries:
        raise ValueError("an empty LOCAL_KERNELS entry")
    paths = dict(entry.split("=", 1) for entry in entries)
    return Path(paths[repo]) if repo in paths else None


def local_builds(path: Path) -> tuple[Build, ...]:
    """The builds below a path as `kernels` takes it: a repository, its `build` folder, or one variant."""
    found = tuple(build for base in (path, path / "build") for build in _builds_in(base))
    # A path that is itself a variant is taken as it is, whatever it is called.
    return found or ((Build("torch-universal", _archs(path)),) if (path / "metadata.json").is_file() else ())


def cached_builds(
    repo: str, version: int | None, revision: str | None, environ: Mapping[str, str]
) -> tuple[Build, ...]:
    """The builds of a kernel in the Hub cache, as offline loading would find them; empty where it is not cached.

    With neither version nor revision, whatever revision the cache has.
    """
    cache = cache_folder(environ)
    if cache is None:
        return ()
    # Offline, a version is looked up in both layouts, but a snapshot only under "kernels--": an old cache names
    # versions that do not load (measured, kernels 0.17.2).
    current, legacy = (cache / f"{kind}--{repo.replace('/', '--')}" for kind in ("kernels", "models"))
    if version is not None:
        commits = [_ref(folder, f"v{version}") for folder in (current, legacy)]
    elif revision is not None:
        commits = [_ref(current, revision), revision]
    else:
        commits = [p.name for p in _folders(current / "snapshots")]
    builds = (build for c in commits if c for build in _builds_in(current / "snapshots" / c / "build"))
    return tuple(dict.fromkeys(builds))


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where `kernels` and `huggingface_hub` keep kernels under this environment; None where nothing says.

    https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """
    for name in ("KERNELS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return _expanded(environ[name], environ)
    if environ.get("HF_HOME"):
        return _expanded(environ["HF_HOME"], environ) / "hub"
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"], "huggingface", "hub")
    return Path(environ["HOME"], ".cache", "huggingface", "hub") if environ.get("HOME") else None


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether `huggingface_hub` would go offline: the older variable counts only where the newer is not set."""
    value = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def _expanded(text: str, environ: Mapping[str, str]) -> Path:
    return Path(environ["HOME"], text[2:]) if text.startswith("~/") and environ.get("HOME") else Path(text)


def _ref(folder: Path, name: str) -> str | None:
    try:
        return (folder / "refs" / name).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _folders(path: Path) -> Iterator[Path]:
    try:
        with os.scandir(path) as entries:
            yield from sorted(Path(e.path) for e in entries if e.is_dir())
    except OSError:
        return


def _builds_in(path: Path) -> Iterator[Build]:
    for folder in _folders(path):
        if _VARIANT.fullmatch(folder.name):
            yield Build(folder.name, _archs(folder))


def _archs(variant: Path) -> tuple[str, ...]:
    """The archs in a variant's metadata.json; those of other vendors are none of ours."""
    try:
        backend = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["backend"]
        return tuple(map(str, backend["archs"])) if backend["type"] == "cuda" else ()
    except (OSError, ValueError, KeyError, TypeError):
        return ()


_VARIANT = re.compile(
    r"torch-(?P<noarch>cpu|cuda|rocm|xpu|metal|npu|universal)"
    r"|(?:torch-stable-abi(?P<abi>\d\d+)|torch(?P<torch>\d\d+)(?:-cxx11|-cxx98)?|tvm-ffi\d+)"
    r"-(?P<backend>cpu|metal|neuron|tpu|[a-z]+\d+)-(?P<machine>\w+)-(?P<system>[a-z]+)"
)


def _fits(variant: str, torch: TorchBuild | None) -> bool | None:
    match = _VARIANT.fullmatch(variant)
    if match is None or torch is None:
        return None
    ours = "cuda" if torch.cuda else "rocm" if torch.hip else "cpu"
    if match["noarch"]:
        return match["noarch"] in {ours, "universal"}
    if (match["machine"], match["system"]) != (platform.machine(), platform.system().lower()):
        return False
    version = _version(torch.version)
    built = match["abi"] or match["torch"]
    if version is None:
        return None
    if built:
        wanted = (int(built[0]), int(built[1:]))
        # The stable ABI is forward compatible; every other build is for one torch alone.
        if wanted > version if match["abi"] else wanted != version:
            return False
    return _backend_fits(match["backend"], ours, torch)


def _backend_fits(backend: str, ours: str, torch: TorchBuild) -> bool | None:
    if ours != "cuda":
        return backend == "cpu" if ours == "cpu" else None
    cuda, built = _version(torch.cuda or ""), re.fullmatch(r"cu(\d+)(\d)", backend)
    if built is None or cuda is None:
        return None if built else False
    return int(built[1]) == cuda[0] and int(built[2]) <= cuda[1]


def _version(text: str) -> Version | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
