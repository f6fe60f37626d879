"""A reason: one unmet need, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

Importer = Callable[[str], "str | None"]
"""Imports `"flash_attn.cute"`, or `"flash_attn:flash_attn_func"` and the name in it, in the process of the test.

Answers the first line of the error, or None if it works (`packages.try_import`).
"""

LINE = 60
"""Characters that `need; have what` may take: more is cut by terminals of 80 columns."""


class Rank(IntEnum):
    """In which order reasons are told: what somebody can mend comes first."""

    UNUSABLE = 0
    """A device is present and cannot be used: the test is an error."""
    BROKEN = 1
    """Installed, and its import fails."""
    MISSING = 2
    """Not installed, or in a version that does not do."""
    HARDWARE = 3
    """No such device here, or no code for it."""
    SUITE = 4
    """The suite's own choice, which no host changes."""


@dataclass(frozen=True)
class Reason:
    """One unmet need. `str(reason)` is the line that a user reads: `[code] need; have what`."""

    code: str
    """Stable across releases, lower-case with a dash: `attn-capability`."""
    need: str
    """`FA3 needs sm_90`: what is needed and by whom, in a few words, without index or UUID."""
    have: str
    """`8.6 (A10G)`."""
    remedy: str
    """What to do, in one sentence; printed once per group in the summary."""
    rank: Rank = Rank.HARDWARE

    def __str__(self) -> str:
        return f"[{self.code}] {self.need}; have {self.have}"

    @property
    def is_error(self) -> bool:
        """Whether the test is an error and not a skip: a device is present and cannot be used."""
        return self.rank is Rank.UNUSABLE


def brief(code: str, need: str, have: str, remedy: str, rank: Rank = Rank.HARDWARE) -> Reason:
    """A reason whose line fits: what is too long is cut, `have` before `need`, and marked with an ellipsis."""
    room = LINE - len("; have ")
    need = shortened(need, room - min(len(have), 12))
    return Reason(code, need, shortened(have, room - len(need)), remedy, rank)


def shortened(text: str, room: int) -> str:
    """The text on one line, in at most `room` characters."""
    text = " ".join(text.split())
    return text if len(text) <= room else text[: room - 1].rstrip() + "…"


def quoted(error: str) -> str:
    """An import error without what takes the room and tells little: its class, and the folders of files."""
    text = re.sub(r"^(ModuleNotFoundError|ImportError|OSError): ", "", error)
    return re.sub(r"(?<![^\s'\"(])/(?:[^\s/:'\"]+/)+", "", text)


def unknown(need: str, have: str) -> Reason:
    """A fact that no query answered. Unknown is not zero: the device may well do, and nobody can tell."""
    return brief("cuda-unknown", need, have, "`pytest-cudaenv doctor` says which query failed and why.", Rank.UNUSABLE)


def ordered(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons without repetition, broken before missing, hardware last."""
    return tuple(sorted(dict.fromkeys(reasons), key=lambda r: r.rank))
