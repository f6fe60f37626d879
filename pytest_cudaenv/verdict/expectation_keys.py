"""Which of several expected values is meant for this place: keys, and the best match among them. Pure data.

A key names a kind of device, and may name a cell and a torch release as well:

- `(9, 0)`, `(8, None)`: an NVIDIA device by capability; `"cuda"`: any; `"cpu"`; `None` or `"default"`: anything;
- as transformers' `Expectations` spells them: `("cuda", (8, 6))`, `("cuda", 8)`, `("cuda", None)`, `(None, None)`;
  `("rocm", (9, 4))` and other vendors are read, and match nothing here;
- behind them, in any order: a cell (`"sdpa-bf16"`, or one half of it: `"sdpa"`, `"bf16"`) and `"torch 2.13"`:
  `(9, 0, "sdpa-bf16")`, `("cpu", "fp32", "torch 2.13")`, `(None, "bf16")`.

A key matches if all that it names is so. Of two that match, the one that names all that the other does, and more, is
better; a capability names more than its major version, that more than "cuda", that more than nothing. Nothing matches
from afar: `(8, None)` says nothing of 9.0.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from pytest_cudaenv.names import DTYPES

GRAMMAR = (
    "write (major, minor), (major, None), 'cuda', 'cpu', None, or as transformers does ('cuda', (8, 6)), and behind it "
    "a cell ('sdpa-bf16', 'sdpa' or 'bf16') and 'torch 2.13' where the value depends on them: (9, 0, 'sdpa-bf16')"
)

_TORCH = re.compile(r"torch ?(\d+\.\d+)")
_DTYPE_IDS = frozenset(DTYPES.values())
_DEVICES = frozenset(
    ("default", "cpu", "cuda", "rocm", "hip", "xpu", "npu", "mps", "hpu", "mlu", "musa", "neuron", "xla")
)
_WORD = re.compile(r"[a-z_]+")


class InvalidKeyError(ValueError):
    """What is no key. The text has the grammar."""


@dataclass(frozen=True)
class Place:
    """Where a value was measured."""

    device: str = "cpu"
    """`cuda` or `cpu`."""
    capability: tuple[int, int] | None = None
    """Of the CUDA device; None where no query answered."""
    cell: str | None = None
    """`sdpa-bf16`."""
    torch: str | None = None
    """`2.13`."""

    def key(self, among: Iterable[Hashable] = ()) -> Any:
        """The key that names this device and cell, and torch's release where one of `among` that fits does.

        It is better than all of them that fit, but for one that is the same.
        """
        parts: list[Any]
        if self.device == "cuda":
            parts = list(self.capability) if self.capability is not None else ["cuda"]
        else:
            parts = [self.device]
        if self.cell is not None:
            parts.append(self.cell)
        if any(known.torch is not None and known.fits(self) for known in map(parse_key, among)):
            parts.append(f"torch {self.torch}")
        return parts[0] if len(parts) == 1 else tuple(parts)

    def __str__(self) -> str:
        device = "the CPU" if self.device == "cpu" else "CUDA {}.{}".format(*self.capability or ("?", "?"))
        return f"{device} in {self.cell}" if self.cell else device


@dataclass(frozen=True)
class Key:
    """What a key names; None: nothing of that."""

    device: str | None = None
    major: int | None = None
    minor: int | None = None
    backend: str | None = None
    dtype: str | None = None
    torch: str | None = None

    @property
    def depth(self) -> int:
        """How closely it names a device: not, its type, its major version, its capability."""
        return sum(part is not None for part in (self.device, self.major, self.minor))

    def fits(self, place: Place) -> bool:
        """Whether all that the key names is so at a place."""
        major, minor = place.capability or (None, None)
        backend, dtype = cell_halves(place.cell)
        named = (self.device, self.major, self.minor, self.backend, self.dtype, self.torch)
        facts = (place.device, major, minor, backend, dtype, place.torch)
        return all(name is None or name == fact for name, fact in zip(named, facts, strict=True))

    def names_all_of(self, other: Key) -> bool:
        """Of two keys that fit one place: whether this one names all that the other does."""
        mine, theirs = (self.backend, self.dtype, self.torch), (other.backend, other.dtype, other.torch)
        return self.depth >= other.depth and all(m is not None or t is None for m, t in zip(mine, theirs, strict=True))


def cell_halves(cell: str | None) -> tuple[str | None, str | None]:
    """`sdpa-bf16` -> (`sdpa`, `bf16`); a cell may have one half only."""
    if cell is None:
        return None, None
    if cell in _DTYPE_IDS:
        return None, cell
    backend, _, dtype = cell.rpartition("-")
    return (backend, dtype) if backend and dtype in _DTYPE_IDS else (cell, None)


def parse_key(key: Hashable) -> Key:
    """What a key names. Raises InvalidKeyError with the grammar."""
    parts = list(key) if isinstance(key, tuple) else [key]
    device: str | None = None
    major: Any = None
    minor: Any = None
    first = parts.pop(0) if parts else object()
    if _is_number(first):
        device, major = "cuda", first
        minor = parts.pop(0) if parts and (parts[0] is None or _is_number(parts[0])) else _refuse(key)
    elif isinstance(first, str) and first in _DEVICES:
        device = None if first == "default" else first
        if parts and not isinstance(parts[0], str):
            major, minor = _capability(key, parts.pop(0))
    elif first is None:
        if parts and parts[0] is None:
            parts.pop(0)
    else:
        _refuse(key)
    if device in {None, "cpu"} and major is not None:
        _refuse(key)
    return _refined(key, Key(device, major, minor), parts)


def _refined(key: Hashable, found: Key, rest: list[Any]) -> Key:
    cells: list[str] = []
    releases: list[str] = []
    for part in rest:
        if not isinstance(part, str) or not part:
            _refuse(key)
        release = _TORCH.fullmatch(part)
        if release is None and part.startswith("torch"):
            _refuse(key)
        (cells if release is None else releases).append(part if release is None else release[1])
    if len(cells) > 1 or len(releases) > 1:
        _refuse(key)
    backend, dtype = cell_halves(cells[0] if cells else None)
    return Key(found.device, found.major, found.minor, backend, dtype, releases[0] if releases else None)


def _capability(key: Hashable, value: Any) -> tuple[Any, Any]:
    """`8`, `(8, 6)`, `(8, None)` or None, as transformers has it behind the device."""
    if value is None or _is_number(value):
        return value, None
    if isinstance(value, tuple) and len(value) == 2:
        major, minor = value
        if (_is_number(major) and (minor is None or _is_number(minor))) or value == (None, None):
            return major, minor
    _refuse(key)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse(key: object) -> NoReturn:
    raise InvalidKeyError(f"{key!r} is no key of an expectation: {GRAMMAR}")


def best(keys: Iterable[Hashable], place: Place) -> list[Hashable]:
    """The keys that fit a place and that no other is better than: one is the match, none or several are failures.

    The order of the keys does not matter. Raises InvalidKeyError for what is no key, matching or not.
    """
    parsed = [(key, parse_key(key)) for key in keys]
    fitting = [(key, found) for key, found in parsed if found.fits(place)]
    return [
        key
        for key, found in fitting
        if not any(other.names_all_of(found) and not found.names_all_of(other) for _, other in fitting)
    ]


def write_key(key: Hashable) -> str:
    """A key as golden files have it: its Python spelling, a single word without quotes."""
    return key if isinstance(key, str) and _WORD.fullmatch(key) else repr(key)


def read_key(text: str) -> Hashable:
    """The key that `write_key` wrote, or a person: `(9, 0)`, `cpu`, `('cuda', 8)`. Raises InvalidKeyError."""
    try:
        key: Hashable = text if _WORD.fullmatch(text) else ast.literal_eval(text)
        hash(key)
    except (ValueError, SyntaxError, TypeError):
        raise InvalidKeyError(f"{text!r} is no key of an expectation: {GRAMMAR}") from None
    parse_key(key)
    return key
