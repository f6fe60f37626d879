"""Who may take which devices: pure functions of what is held and of who waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

SHARERS = 64
"""Budgets that one device can be divided into."""

Held = Mapping[str, Sequence[int | None]]
"""UUID -> what its holders took of it: bytes of a budget each, or one None for a device that is held whole."""


@dataclass(frozen=True)
class Demand:
    """`count` of these devices, whole or with a memory budget on each."""

    candidates: tuple[str, ...]
    """UUIDs, the preferred ones first."""
    count: int
    memory: int | None = None
    """Bytes on each device; None takes them whole."""
    total: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each device has. One that is not listed is unknown, and taken whole."""

    def budget(self, uuid: str) -> int | None:
        """What this takes of a device: bytes, or None for all of it (also where the budget is all it has)."""
        total = self.total.get(uuid)
        return None if self.memory is None or total is None or self.memory >= total else self.memory

    def fits(self, uuid: str, held: Held) -> bool:
        """Whether the device can be taken beside what is held of it."""
        budget, budgets = self.budget(uuid), held.get(uuid, ())
        if budget is None or not budgets:
            return not budgets
        taken = sum(b if b is not None else self.total[uuid] for b in budgets)
        return taken + budget <= self.total[uuid] and len(budgets) < SHARERS

    def fitting(self, held: Held) -> tuple[str, ...]:
        """The first `count` devices that can be taken; fewer where there are not enough."""
        return tuple([uuid for uuid in self.candidates if self.fits(uuid, held)][: self.count])

    def reserves(self, held: Held) -> tuple[str, ...]:
        """The devices that are kept for this while it waits: those that fit, then those with the fewest holders.

        A device that fits stays so, as it is kept, and no holder joins the others: so the first in the queue is
        served once some holders end, and everybody becomes the first.
        """
        fitting = self.fitting(held)
        others = [uuid for uuid in self.candidates if uuid not in fitting]
        others.sort(key=lambda uuid: len(held.get(uuid, ())))
        return (*fitting, *others[: self.count - len(fitting)])


def decide(demand: Demand, ahead: Sequence[Demand], held: Held) -> tuple[str, ...] | None:
    """The devices that a request takes now, in its order of preference; None: it waits.

    It may take what those `ahead`, the longest waiting first, have no use for: it never delays them.
    """
    kept = {uuid: list(budgets) for uuid, budgets in held.items()}
    for earlier in ahead:
        for uuid in earlier.reserves(kept):
            kept.setdefault(uuid, []).append(earlier.budget(uuid))
    fitting = demand.fitting(kept)
    return fitting if len(fitting) == demand.count else None


def waits_for_others(demand: Demand, ahead: Sequence[Demand], held: Held) -> bool:
    """Whether other runs keep a request waiting, given what they alone hold and which of them wait ahead.

    False where one's own run holds enough: then the request is served when its own tests end. Those ahead who
    would be served then are waiting for one's own run too, and are not to blame.
    """
    stuck = [earlier for earlier in ahead if decide(earlier, (), held) is None]
    return decide(demand, stuck, held) is None


@dataclass(frozen=True)
class Holding:
    """What leases say about a device."""

    budgets: Sequence[int | None] = ()
    """What each other lease of it takes: bytes, or None for all of it."""
    unleased: Collection[int] = ()
    """Ids of processes of this run that use devices without a lease: its unmarked tests, in the pytest process."""
