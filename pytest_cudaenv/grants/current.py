"""What the running test was given, for code that cannot request a fixture (unittest, helpers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from pytest_cudaenv.grants.grant import Grant
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.requirements.reason import Reason

if TYPE_CHECKING:
    import torch


class NoGrantError(RuntimeError):
    """The running test declared no device, or no test is running."""


@dataclass(frozen=True)
class Current:
    """The running test's grant."""

    nodeid: str
    grant: Grant
    seed: int
    refuse: Callable[[Sequence[Reason]], NoReturn] = field(repr=False, compare=False)
    """Ends the running test as one whose needs are not met."""

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """The granted devices; empty where the test runs on the CPU."""
        return self.grant.devices

    @property
    def device(self) -> torch.device:
        """The first granted device as a `torch.device`; the CPU on a host without NVIDIA devices."""
        import torch

        return torch.device(str(self.devices[0]) if self.devices else "cpu")


# Python calls `current()` from anywhere and without an argument, so what runs now is kept here: one test at a time.
_running: list[Current] = []


def current() -> Current:
    """What the running test was given: `pytest_cudaenv.current().device` in a `unittest.TestCase`.

    Raises NoGrantError where the running test asked for no device.
    """
    if not _running:
        raise NoGrantError(
            "no test with a grant is running: put @requires_cuda on the test (or a class above it), "
            "or request the fixture `device`"
        )
    return _running[-1]


def enter(running: Current) -> None:
    """Note that a test has its grant, until `leave`."""
    _running.append(running)


def leave(nodeid: str) -> None:
    """Forget the grant of a test; harmless where it has none."""
    while _running and _running[-1].nodeid == nodeid:
        _running.pop()
