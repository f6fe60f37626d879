"""The fixtures of tests/plugin: inner runs see neither the outer run's settings nor its order."""

from __future__ import annotations

from tests.plugin.conftest import _only_what_a_test_sets, on_host

__all__ = ["_only_what_a_test_sets", "on_host"]
