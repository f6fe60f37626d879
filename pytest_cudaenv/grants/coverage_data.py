"""Coverage of what runs in device processes: measured there, added to the run's own data here.

With coverage.py's public API alone, so that no setting of the user's is needed and no file is left behind:
https://coverage.readthedocs.io/en/latest/api_coveragedata.html
"""

from __future__ import annotations

import base64
import contextlib
import sys
from typing import Any


def _current() -> Any | None:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None else None


_SETTINGS = ("branch", "source", "source_pkgs", "include", "omit", "concurrency", "context", "dynamic_context", "core")


def settings() -> dict[str, Any] | None:
    """How this process is being measured, for a process that is not forked from it; None where it is not."""
    current = _current()
    if current is None:
        return None
    known: dict[str, Any] = {}
    for name in _SETTINGS:
        with contextlib.suppress(Exception):  # older releases have fewer settings
            known[f"run:{name}"] = current.get_option(f"run:{name}")
    for name in ("report:exclude_lines", "report:exclude_also"):
        with contextlib.suppress(Exception):
            known[name] = current.get_option(name)
    return known


def start(how: dict[str, Any]) -> None:
    """Measure this process with another's `settings`, into memory."""
    from coverage import Coverage

    coverage = Coverage(data_file=None, config_file=False)
    for name, value in how.items():
        if value is not None:
            coverage.set_option(name, value)
    coverage.start()


def switch_context(name: str) -> None:
    """Put what is measured from now on down to this context."""
    if (current := _current()) is not None:
        current.switch_context(name)


def measured() -> str | None:
    """What the coverage of this process has measured, as text; None where none is being measured."""
    current = _current()
    if current is None:
        return None
    current.stop()
    data = current.get_data()
    text = base64.b64encode(data.dumps()).decode()
    data.erase()  # a process that is forked measures into a file of its own, which nobody would combine
    return text


def add(text: str) -> None:
    """Add what another process `measured` to the coverage of this one."""
    current = _current()
    if current is None:
        return
    from coverage import CoverageData

    other = CoverageData(no_disk=True)
    other.loads(base64.b64decode(text))
    current.get_data().update(other)
