"""The device process that this code runs in: its name in the run, and what it hands over at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class OwnProcess:
    """A device process, for the code that runs in it."""

    id: str
    """Unlike any other's of the run: `main-1`, or in a worker of pytest-xdist `gw0-1`."""
    output: dict[str, Any] = field(default_factory=dict)
    """What `pytest_cudaenv_device_process_finished` is given in the pytest process: plain data, as JSON has it."""


# Like `current()`, asked from anywhere and without an argument. A process is a device process for life.
_own: list[OwnProcess] = []


def device_process() -> OwnProcess | None:
    """The device process that this code runs in; None in the pytest process, and so with `--cuda-isolation off`."""
    return _own[-1] if _own else None


def become(process_id: str) -> None:
    """Note that this process is a device process from now on."""
    _own.append(OwnProcess(process_id))


def worker_id(config: pytest.Config) -> str:
    """The id of this worker of pytest-xdist; `main` where there are none."""
    return str(getattr(config, "workerinput", {}).get("workerid", "main"))
