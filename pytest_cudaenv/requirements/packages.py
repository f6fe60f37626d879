"""Which packages are installed, new enough and importable: PEP 508 strings with alternatives."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from pytest_cudaenv.host.software import Software, canonical
from pytest_cudaenv.requirements.reason import Importer, Rank, Reason, brief, quoted

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

GRAMMAR = 'write PEP 508 requirements, alternatives joined by " | ": "torch>=2.6" or "flash-attn>=2.5 | xformers"'


class State(Enum):
    """What is wrong with a package; its value ends the code, and the order is that of hope."""

    BROKEN = "broken"
    VERSION = "version"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """A package that does not do."""

    state: State
    have: str
    """`2.3.0`, `none`, or the first line of the error that its import raises."""

    @property
    def rank(self) -> Rank:
        """What somebody can mend comes first."""
        return Rank.BROKEN if self.state is State.BROKEN else Rank.MISSING


def parse_package(text: str) -> str:
    """The requirement as it is kept: checked, blanks made even, alternatives joined by ` | `.

    Raises ValueError, with the grammar.
    """
    return " | ".join(str(r) for r in _alternatives(text))


@lru_cache(maxsize=256)
def _alternatives(text: str) -> tuple[Requirement, ...]:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = tuple(Requirement(part) for part in text.split("|"))
    except (InvalidRequirement, AttributeError, TypeError) as error:
        raise ValueError(f"{text!r}: {str(error).splitlines()[0]}; {GRAMMAR}") from None
    if any(r.url for r in parsed):
        raise ValueError(f"{text!r}: a URL says nothing about what is installed; {GRAMMAR}")
    for requirement in parsed:
        _applies(requirement)
    return parsed


def _applies(requirement: Requirement) -> bool:
    """Whether the environment marker, if there is one, is true here; raises ValueError for one that never could be."""
    from packaging.markers import UndefinedComparison, UndefinedEnvironmentName

    if requirement.marker is None:
        return True
    if re.search(r"\bextras?\b", str(requirement.marker)):
        raise ValueError(f"{str(requirement)!r}: nobody asks for extras here; {GRAMMAR}")
    try:
        return requirement.marker.evaluate()
    except (UndefinedEnvironmentName, UndefinedComparison) as error:
        raise ValueError(f"{str(requirement)!r}: {error}; {GRAMMAR}") from None


def package_reasons(spec: str, software: Software, imports: Importer | None) -> list[Reason]:
    """Why no alternative of the requirement does: broken, too old or missing; empty where one of them does.

    Extras are not looked at: no metadata says which extras somebody installed. An alternative whose environment
    marker is false is no alternative; where none is left, nothing is needed.
    """
    alternatives = [r for r in _alternatives(spec) if _applies(r)]
    findings = []
    for requirement in alternatives:
        finding = examine(requirement, software, imports)
        if finding is None:
            return []
        findings.append(finding)
    if not findings:
        return []
    worst = min(findings, key=lambda f: list(State).index(f.state))
    install = " or ".join(f"pip install '{_without_marker(r)}'" for r in alternatives)
    wanted = " | ".join(_without_marker(r) for r in alternatives)
    return [package_reason(f"package-{worst.state.value}", f"needs {wanted}", worst, f"Run {install}.")]


def package_reason(code: str, need: str, finding: Finding, install: str) -> Reason:
    """The reason that a finding makes: `[package-version] needs x>=2; have 1.0`."""
    if finding.state is not State.BROKEN:
        return brief(code, need, finding.have, install, finding.rank)
    remedy = f"It is installed and its import fails with `{finding.have}`; reinstall it for this torch and Python."
    return brief(code, need, quoted(finding.have), remedy, finding.rank)


def _without_marker(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def examine(
    requirement: Requirement, software: Software, imports: Importer | None, module: str | None = None
) -> Finding | None:
    """What is wrong with one package; None where it does.

    With `module`, a module that is importable under an unknown distribution name counts as installed, in a version
    that nobody knows: vendored and editable copies have no metadata.
    """
    version = software.version(requirement.name)
    assumed = canonical(requirement.name) in software.assumed
    if version is None:
        if module is None or module not in software.modules:
            return Finding(State.MISSING, "none")
    elif not (assumed and not version) and not version_fits(version, requirement.specifier):
        return Finding(State.VERSION, version)
    target = module or (top_module(requirement.name) if imports else None)
    if imports and target and not assumed and (error := imports(target)):
        return Finding(State.BROKEN, error)
    return None


def version_fits(version: str, specifier: SpecifierSet | str) -> bool:
    """Whether an installed version satisfies a specifier, nightlies included.

    `>=2.15` takes `2.15.0.dev20260801+cu130`, although PEP 440 sorts it before 2.15: who asks for 2.15 means its
    features, and a nightly of 2.15 has them. Name a pre-release (`>=2.15.0rc1`) for the strict order. What is no
    PEP 440 version satisfies only the empty specifier.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    specifier = SpecifierSet(specifier) if isinstance(specifier, str) else specifier
    try:
        installed = Version(version)
    except InvalidVersion:
        return not len(specifier)
    release = Version(installed.base_version)
    lenient = {">=", "~="} if installed.is_prerelease else set()
    return all(
        part.contains(installed, prereleases=True)
        or (part.operator in lenient and not Version(part.version).is_prerelease and part.contains(release))
        for part in specifier
    )


def top_module(distribution: str) -> str | None:
    """The module to import as proof that a distribution works; None where its files do not tell.

    Looked up for one distribution; `packages_distributions()` reads them all.
    """
    guess = canonical(distribution).replace("-", "_")
    try:
        installed = importlib.metadata.distribution(distribution)
        names = (installed.read_text("top_level.txt") or "").split() or _top_names(installed.files or ())
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return guess
    public = [name for name in names if name.isidentifier() and not name.startswith("_")]
    by_lower = {name.lower(): name for name in public}
    return by_lower.get(guess) or (public[0] if public else None)


def _top_names(files: Sequence[importlib.metadata.PackagePath]) -> list[str]:
    """Top-level packages and modules among a distribution's files, packages first."""
    packages = dict.fromkeys(f.parts[0] for f in files if len(f.parts) == 2 and f.name == "__init__.py")
    modules = dict.fromkeys(f.stem for f in files if len(f.parts) == 1 and f.suffix == ".py")
    return [*packages, *modules]


@cache
def try_import(target: str) -> str | None:
    """Import `package.module`, or `package.module:name` and look the name up, in this process.

    Answers the first line of what went wrong, with its class, or None. To be asked in the process that is to use
    the package, with its devices visible: some packages fail to import where no device is.
    """
    before = set(sys.modules)
    try:
        with warnings.catch_warnings():
            # A package that only warns works; `-W error` is about the suite's own code.
            warnings.simplefilter("ignore")
            pkgutil.resolve_name(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a broken package raises is the answer; some call sys.exit
        # What a failed import leaves behind makes the next one fail with another, misleading error.
        package = target.partition(":")[0].partition(".")[0]
        for left in [m for m in sys.modules if m not in before and m.partition(".")[0] == package]:
            del sys.modules[left]
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return None
