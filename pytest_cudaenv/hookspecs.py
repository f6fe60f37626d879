"""Hooks by which a project adds to the plugin; implement them in a conftest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_cudaenv.requirements.attention import AttnBackend


@pytest.hookspec
def pytest_cudaenv_attn_backends(config: pytest.Config) -> Iterable[AttnBackend]:  # type: ignore[empty-body]
    """Return attention backends of the project's own, with the rules that decide where they run.

    They are then good wherever a backend's name is: markers, options, ini. Called once, when pytest is configured;
    a conftest below the rootdir or the arguments is too late.
    """


@pytest.hookspec
def pytest_cudaenv_device_process_finished(config: pytest.Config, output: dict[str, Any], is_complete: bool) -> None:
    """Called in the pytest process when a device process has ended, with what code in that process left in
    `pytest_cudaenv.device_process().output`.

    That is plain data: what JSON does not know arrives as its `repr`. A process that died was not able to send
    anything: `output` is empty then, and `is_complete` False. Under pytest-xdist the hook is called in the worker.
    """
