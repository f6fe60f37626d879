"""Names that people spell in many ways, and what to say about one that nobody knows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping


def plain(text: str) -> str:
    """A name without case, blanks, dashes and underscores: `Flash-Attn_3` -> `flashattn3`."""
    return re.sub(r"[-_ ]", "", text).lower()


def spelled(spellings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """(spelling, canonical name) pairs -> plain spelling -> canonical name."""
    return {plain(spelling): name for spelling, name in spellings}


def unknown_name(kind: str, text: object, spellings: Mapping[str, str], choices: str) -> str:
    """`unknown dtype 'bf61'; did you mean 'bfloat16'? choose from …`."""
    close = difflib.get_close_matches(plain(str(text)), spellings, n=1)
    guess = f"did you mean {spellings[close[0]]!r}? " if close else ""
    return f"unknown {kind} {str(text)!r}; {guess}choose from {choices}"
