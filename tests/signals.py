"""Signals as a terminal delivers them: what `nohup` or a background job ignores, its children would ignore as well."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """For `preexec_fn` of a process that a test interrupts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
