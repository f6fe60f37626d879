"""A grant: the devices handed to one test, and the policy that hands them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pytest_cudaenv.host.devices import CudaDevice, Host
from pytest_cudaenv.host.mask import MaskReading
from pytest_cudaenv.requirements.requirement import Requirement, device_reasons, fitting

INHERITED_VARIABLE = "CUDAENV_LEASE"
"""Names to child processes the devices that the test around them holds."""

TAG = "CUDAENV_TAG"
"""Names to subprocesses the run, the device process and the test that started them: `RUN:PROCESS:TEST`; test 0 is none:
what fixtures of a wider scope start lives as long as its device process."""


@dataclass(frozen=True)
class Grant:
    """The devices of one test, numbered as CUDA numbers them in its process; none: the test runs on the CPU."""

    devices: tuple[CudaDevice, ...] = ()

    @property
    def ran_on(self) -> str:
        """The kind of device, for summaries: `NVIDIA H200`, `CPU`."""
        return self.devices[0].name if self.devices else "CPU"


class Granter(Protocol):
    """Hands devices to tests. Device processes and leases take the place of `InProcess` behind this."""

    def grant(self, requirement: Requirement, held: Grant | None) -> Grant:
        """The devices for a test whose requirements the host meets, given what the last test held."""
        ...


class InProcess:
    """Tests run in the pytest process: a test is granted the first visible devices that fit."""

    def __init__(self, host: Host, reading: MaskReading) -> None:
        self.host = host
        self.reading = reading

    def grant(self, requirement: Requirement, held: Grant | None) -> Grant:
        """What the last test held, while it fits; otherwise the first devices that do, or the CPU."""
        if held is not None and self.fits(requirement, held):
            return held
        return Grant(fitting(requirement, self.host, self.reading.devices) or ())

    def fits(self, requirement: Requirement, held: Grant) -> bool:
        """Whether a grant is as large as the requirement asks for, and each of its devices meets it."""
        count = requirement.device_count if self.reading.devices else 0
        return len(held.devices) == count and not any(device_reasons(requirement, d, self.host) for d in held.devices)
