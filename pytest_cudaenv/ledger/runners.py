"""What a runner's profile can run: its simulated host, its packages taken as installed, its promises taken as kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Package
from packaging.version import InvalidVersion, Version

from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.mask import read_mask
from pytest_cudaenv.host.software import Software
from pytest_cudaenv.ledger.contract import Runner
from pytest_cudaenv.requirements.reason import Rank, Reason
from pytest_cudaenv.requirements.requirement import Requirement, unmet


@dataclass
class RunnerHost:
    """The host that a profile describes. What it does not speak of is as where the suite was collected."""

    runner: Runner
    software: Software = field(default_factory=Software)
    _known: dict[Requirement, tuple[Reason, ...]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.runner.name

    @cached_property
    def host(self) -> Host:
        """With the runner's packages, each in the oldest version that its profile allows."""
        software = self.software.assuming(dict(filter(None, map(_assumed, self.runner.packages))))
        return Host(software=software) if self.runner.devices is None else simulated_host(self.runner.devices, software)

    @property
    def kind(self) -> str:
        """Its kind of device, as ledgers tell of it."""
        return self.host.devices[0].name if self.host.devices else "CPU"

    def lacks(self, requirement: Requirement) -> tuple[Reason, ...]:
        """The needs that this runner does not meet; empty where the test can run there."""
        if requirement not in self._known:
            self._known[requirement] = tuple(
                reason for reason in self._unmet(requirement) if (reason.code, reason.need) not in self._promised
            )
        return self._known[requirement]

    def _unmet(self, requirement: Requirement) -> tuple[Reason, ...]:
        return unmet(requirement, self.host, read_mask(None, None, self.host.devices))

    @cached_property
    def _promised(self) -> set[tuple[str, str]]:
        """What software would be missing, had the runner not promised it: what hardware can do no promise changes."""
        reasons = (reason for promise in self.runner.promises() for reason in self._unmet(promise.requirement))
        return {(r.code, r.need) for r in reasons if r.rank in {Rank.MISSING, Rank.BROKEN}}


def _assumed(text: str) -> tuple[str, str] | None:
    """`peft>=0.18` -> ("peft", "0.18"): a test that needs more was promised nothing. None for alternatives."""
    try:
        package = Package(text)
    except InvalidRequirement:
        return None
    if not len(package.specifier):
        return package.name, "9999"
    allowed: list[Version] = []
    for part in package.specifier:
        stem = part.version.removesuffix(".*")
        for candidate in (stem, f"{stem}.1"):
            try:
                if package.specifier.contains(candidate, prereleases=True):
                    allowed.append(Version(candidate))
            except InvalidVersion:
                continue
    return package.name, str(min(allowed)) if allowed else "0"
