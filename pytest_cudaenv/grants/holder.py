"""What stands in the lock files: who holds a device and who waits for one. To be read, cut and doubted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_cudaenv.grants.demand import Demand

STALE_AFTER = 5.0
"""Seconds without a look after which a waiting request (stopped, in a debugger) reserves nothing until it looks."""


@dataclass(frozen=True)
class Holder:
    """Who holds a device, or waits for it, as they say themselves; unknown where the file is unreadable."""

    uuid: str
    """The device; empty for the gate, and for one who waits."""
    pid: int | None = None
    run: str = ""
    test: str = ""
    since: float | None = None
    """Seconds since the epoch."""
    memory: int | None = None
    """Bytes of a sharer's budget; None: the whole device, or unknown."""
    waiting: bool = False
    """Waits ahead of the request that was told about it."""

    def __str__(self) -> str:
        what = "waits longer" if self.waiting else self.uuid or "gate"
        who = f"pid {self.pid}" if self.pid is not None else "unknown process"
        run = f" of run {self.run}" if self.run else ""
        test = f", test {self.test}" if self.test else ""
        when = ""
        if self.since is not None:
            when = f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"
        return f"{what}: {who}{run}{test}{when}"


@dataclass(frozen=True)
class Waiting:
    """An entry of the queue."""

    turn: int
    demand: Demand
    holder: Holder


def parsed(data: bytes) -> dict[str, Any]:
    """The first line of a file as a JSON object; empty for anything else."""
    try:
        found = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object, least: int = 0) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and least <= value < 2**63 else None  # type: ignore[return-value, operator]


def _seconds(value: object) -> float | None:
    is_time = isinstance(value, (int, float)) and 0 <= value < 2**36  # refuses NaN and the infinities too
    return float(value) if is_time else None  # type: ignore[arg-type]


def _text(value: object) -> str:
    """A text that another user wrote, fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in value[:300]) if isinstance(value, str) else ""


def holder_from(uuid: str, said: Mapping[str, Any], *, waiting: bool = False) -> Holder:
    return Holder(
        uuid,
        pid=_number(said.get("pid"), 1),
        run=_text(said.get("run")),
        test=_text(said.get("test")),
        since=_seconds(said.get("since")),
        memory=_number(said.get("memory"), 1),
        waiting=waiting,
    )


def waiting_from(said: Mapping[str, Any], now: float) -> Waiting | None:
    """An entry of the queue; None where it is unreadable or its owner has stopped looking."""
    turn, count = _number(said.get("turn")), _number(said.get("count"), 1)
    looked, pairs = _seconds(said.get("looked")), said.get("of")
    if turn is None or count is None or looked is None or not isinstance(pairs, dict) or count > len(pairs):
        return None
    if abs(now - looked) > STALE_AFTER:
        return None
    total = {uuid: t for uuid, t in pairs.items() if _number(t, 1) is not None}
    demand = Demand(tuple(pairs), count, _number(said.get("memory"), 1), total)
    return Waiting(turn, demand, holder_from("", said, waiting=True))
