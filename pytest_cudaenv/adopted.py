"""What adoption found on a test; kept apart from `adoption`, as every start of pytest pays for this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cudaenv.adoption import Trace
    from pytest_cudaenv.requirements.requirement import Requirement


@dataclass(frozen=True)
class Adopted:
    """What one test needs by words that are not this plugin's."""

    sources: tuple[tuple[str, Requirement], ...] = ()
    """(`adopted require_torch_multi_gpu`, what it adds)."""
    traces: tuple[Trace, ...] = ()
    """Decorators that were wrapped, those that skip included."""
    error: str = ""
    """What is wrong with an argument of one of the project's own markers."""


ADOPTED = pytest.StashKey[Adopted]()
