"""Why a test skipped itself, read from the words of its reason; pure functions of text.

What the words ask for as a requirement is asked of the host, so that the reason has its "have". A pattern is kept only
where its words leave little doubt; what none fits is `skip-unknown`, and counted as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from pytest_cudaenv.ledger import skip_words as words
from pytest_cudaenv.ledger.adopt import disagrees
from pytest_cudaenv.ledger.skip_needs import is_of_host_memory, missing_import, needs
from pytest_cudaenv.requirements.reason import Reason, brief, shortened
from pytest_cudaenv.requirements.requirement import Requirement

Unmet: TypeAlias = Callable[[Requirement], Sequence[Reason]]
"""The needs of a requirement that this host does not meet."""

UNKNOWN = "skip-unknown"


@dataclass(frozen=True)
class Reading:
    """What the words of a skip say."""

    requirement: Requirement | None = None
    reason: Reason | None = None
    """Why, where that is no requirement; or why, where the host meets the requirement."""


def skip_reasons(text: str, unmet: Unmet) -> tuple[Reason, ...]:
    """The reasons behind the text of a skip on the host that `unmet` knows; `skip-unknown` if the words say nothing."""
    reading = read_skip(" ".join(text.split()))
    if reading is None:
        return (unknown_skip(text),)
    if reading.requirement is not None and (reasons := tuple(unmet(reading.requirement))):
        return reasons
    return (reading.reason or disagrees(f'"{shortened(text, 24)}"'),)


def unknown_skip(text: str) -> Reason:
    """A skip whose words nobody understood, in its own words."""
    have = f'"{shortened(text, 24)}"' if text.strip() else "no reason"
    remedy = "Say what it needs in words, or with a marker of this plugin."
    return brief(UNKNOWN, "needs a clearer reason", have, remedy, words.OWN)


@lru_cache(maxsize=4096)
def read_skip(text: str) -> Reading | None:
    """What the words of a skip say; None if nothing that is known."""
    if not text:
        return None
    if "got empty parameter set" in text:
        return Reading(reason=words.NO_PARAMETERS)
    if (reason := words.broken_import(text)) is not None:
        return Reading(reason=reason)
    if (requirement := missing_import(text)) is not None:
        return Reading(requirement)
    if words.IS_KNOWN_ISSUE.search(text):
        return Reading(reason=words.KNOWN_ISSUE)
    if (reason := words.asked_for(text) or words.vendor(text)) is not None:
        return Reading(reason=reason)
    if words.IS_CPU_ONLY.search(text):
        return Reading(reason=words.CPU_ONLY)
    if words.IS_OF_THE_SYSTEM.search(text) and (reason := words.system(text)) is not None:
        return Reading(reason=reason)
    if words.is_about_the_case(text):
        return Reading(reason=words.NOT_APPLICABLE)
    return _need(text) or _rest(text)


def _need(text: str) -> Reading | None:
    if words.RAN_OUT.search(text):
        return Reading(reason=words.MEMORY)  # the number is what was asked for last, and no need
    if words.IS_TOO_MANY.search(text):
        return Reading(reason=words.TOO_MANY)
    requirement = needs(text)
    if words.IS_OUT_OF_MEMORY.search(text) and not is_of_host_memory(text):
        return Reading(requirement if requirement is not None and requirement.memory else None, words.MEMORY)
    if requirement is None:
        return Reading(reason=words.OTHER_DEVICE) if words.IS_OF_THIS_DEVICE.search(text) else None
    fallback = None
    if requirement.devices == 1 and words.IS_ONE_DEVICE.search(text):
        fallback = words.TOO_MANY
    elif words.IS_OF_THIS_DEVICE.search(text):
        fallback = words.OTHER_DEVICE
    return Reading(requirement, fallback)


def _rest(text: str) -> Reading | None:
    for read in (words.opt_in, words.system):
        if (reason := read(text)) is not None:
            return Reading(reason=reason)
    return next((Reading(reason=reason) for pattern, reason in words.LAST if pattern.search(text)), None)
