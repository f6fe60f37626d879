"""Hooks by which a project adds to the plugin; implement them in a conftest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cudaenv.requirements.attention import AttnBackend


@pytest.hookspec
def pytest_cudaenv_attn_backends(config: pytest.Config) -> Iterable[AttnBackend]:  # type: ignore[empty-body]
    """Return attention backends of the project's own, with the rules that decide where they run.

    They are then good wherever a backend's name is: markers, options, ini. Called once, when pytest is configured;
    a conftest below the rootdir or the arguments is too late.
    """
