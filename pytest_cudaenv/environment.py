"""Environment variables that a run sets, and gives back exactly as they were."""

from __future__ import annotations

import os


class Environment:
    """What one run has changed in `os.environ`."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, str | None]] = []

    def set(self, name: str, value: str) -> None:
        """Set a variable until `restore`."""
        self._undo.append((name, os.environ.get(name)))
        os.environ[name] = value

    def has_set(self, name: str) -> bool:
        """Whether the variable's value is this run's own; processes that are started now inherit it."""
        return any(changed == name for changed, _ in self._undo)

    def restore(self, *names: str) -> None:
        """Give these variables (all that were set, if none is named) exactly the value that they had."""
        kept: list[tuple[str, str | None]] = []
        for name, value in reversed(self._undo):
            if names and name not in names:
                kept.insert(0, (name, value))
            elif value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._undo = kept
