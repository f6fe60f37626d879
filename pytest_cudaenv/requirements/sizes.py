"""Amounts of memory and PEP 440 specifiers, as markers and options write them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("kMGT", start=1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?B|B)\s*")

TOLERANCE = 0.07
"""The usual part by which what NVML reports stays under the number that the card is sold with ("24 GB" of an L4)."""


def parse_memory(value: int | str) -> int:
    """Bytes of `"30GiB"`, `"24 GB"` or a number of bytes.  GB is 10**9 bytes, GiB is 2**30.

    Raises ValueError, with the grammar, for anything else.
    """
    # A small number is meant to be something else than bytes.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024**2:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = match[2].replace("kB", "kB").replace("KB", "kB").replace("kiB", "KiB")
        amount = int(float(match[1]) * _UNITS[unit])
        if amount > 0:
            return amount
    raise ValueError(f'memory={value!r}: write a number and a unit, "30GiB" or "24GB", or a number of bytes')


def format_memory(count: int) -> str:
    """`15360 MiB` of bytes as `15.0 GiB`; GiB is what `nvidia-smi` counts in."""
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.0f} MiB"


def is_enough_memory(total: int, needed: int) -> bool:
    """Whether a device of `total` bytes counts as one that has `needed`: "80 GB" means the card sold as such."""
    return total >= needed * (1 - TOLERANCE)


@lru_cache(maxsize=256)
def specifier(text: str, argument: str) -> SpecifierSet:
    """The PEP 440 specifier set that a marker's argument spells, `">=9.0"` or `">=8.0,<9"`.

    Raises ValueError that names the argument and the grammar.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        parsed = SpecifierSet(text)
    except (InvalidSpecifier, TypeError, AttributeError):
        parsed = SpecifierSet()
    if not len(parsed):
        raise ValueError(f'{argument}={text!r}: write a PEP 440 specifier, ">=9.0" or ">=8.0,<9"')
    return parsed


def version_tuple_fits(version: tuple[int, int], specifiers: tuple[str, ...], argument: str) -> bool:
    """Whether (major, minor) satisfies every specifier; versions compare as numbers, never as text."""
    text = f"{version[0]}.{version[1]}"
    return all(specifier(s, argument).contains(text) for s in specifiers)
