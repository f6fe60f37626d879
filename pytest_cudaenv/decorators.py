"""The markers as decorators: `@requires_flash_attn3`, `@requires_cuda(devices=2)`."""

from __future__ import annotations

from pytest_cudaenv.compat import NamedMark, named_mark
from pytest_cudaenv.requirements.markers import MARKERS

DECORATORS: dict[str, NamedMark] = {name: named_mark(name, signature) for name, signature in MARKERS.items()}
"""Marker name -> its decorator; good on functions, classes, TestCase methods, `pytestmark` and `pytest.param`."""
