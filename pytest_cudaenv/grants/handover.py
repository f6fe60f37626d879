"""What a device process hands over at its end, besides its reports."""

from __future__ import annotations

import traceback

import pytest

from pytest_cudaenv.grants import coverage_data, snapshot_data
from pytest_cudaenv.grants.own_process import device_process
from pytest_cudaenv.grants.transport import Message


def hand_over(config: pytest.Config) -> Message:
    """In a device process, after its last teardown: what it has for the pytest process."""
    own = device_process()
    handed: Message = {"output": {} if own is None else own.output}
    try:
        handed["snapshots"] = snapshot_data.asserted(config)
        handed["coverage"] = coverage_data.measured()
    except Exception:
        handed["error"] = traceback.format_exc()
    return handed


def take(config: pytest.Config, handed: Message | None) -> None:
    """In the pytest process: put it where it belongs; None where the process died before it could hand over.

    Raises RuntimeError where the process could not, and whatever a project's hook raises.
    """
    handed, is_complete = handed or {}, handed is not None
    if handed.get("coverage"):
        coverage_data.add(handed["coverage"])
    if not is_complete or "error" in handed:
        snapshot_data.miss(config)
    elif handed["snapshots"] is not None:
        snapshot_data.add(config, handed["snapshots"])
    hook = config.hook.pytest_cudaenv_device_process_finished
    hook(config=config, output=handed.get("output", {}), is_complete=is_complete)
    if "error" in handed:
        raise RuntimeError(handed["error"])
