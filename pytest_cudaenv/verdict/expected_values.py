"""Comparing a measured value with an expected one, and writing a measured value so that it can be pasted.

Values are numbers, strings, lists, dicts with string keys, tensors and NumPy arrays, nested as they like. Tensors and
arrays are compared as the nested lists of their numbers, wherever they are and whatever the other side's dtype is; the
measured side's dtype decides how close is close enough.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TOLERANCE: dict[str | None, tuple[float, float]] = {
    None: (1e-7, 1e-7),
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
}
"""Relative and absolute, as torch.testing.assert_close has them; None: Python's float. Other dtypes: exactly."""

DIGITS: dict[str | None, int] = {"float64": 12, "float32": 8, "float16": 5, "bfloat16": 4}
"""Significant digits of a number that is told to be pasted; Python's floats, and other dtypes: all of them."""

PASTED = 1000
"""Numbers that a message shows to be pasted; more belong in a golden file, or a slice of them here."""


def failure(code: str, text: str) -> AssertionError:
    """What fails a test: plainly an AssertionError, with its code."""
    error = AssertionError(f"[{code}] {text}")
    error.code = code  # type: ignore[attr-defined]  # as `CodedError` has it
    return error


@dataclass(frozen=True)
class Leaf:
    """One number or string of a value."""

    path: str
    """`[0][3]`, as it is written behind the value."""
    value: Any
    dtype: str | None
    """Of the tensor or array that it is from; None for Python's own."""


def opened(value: Any) -> tuple[Any, str | None]:
    """A tensor, array or NumPy number as nested lists or a number, with its dtype's name; else the value itself.

    torch is told by its looks: whoever compares no tensor need not have it.
    """
    if hasattr(value, "detach") and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        value = value.detach()
        # Lists cannot be made of 8-bit floating point everywhere; float32 holds each of them.
        return (value.float() if dtype.startswith("float8") else value).tolist(), dtype
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return value.tolist(), str(value.dtype)
    return value, None


def plain(value: Any, what: str = "the value") -> Any:
    """The value in Python's own numbers, strings, lists and dicts.

    Raises AssertionError for what is empty, not finite or not comparable.
    """
    found = _plain(value, "", what)
    if not any(leaf.value not in ("", None) for leaf in leaves(value)):
        raise failure("expectation-empty", f"{what} is {value!r}: there is nothing to compare")
    return found


def _plain(value: Any, path: str, what: str) -> Any:
    inner, dtype = opened(value)
    if dtype is not None and _is_hollow(inner):
        raise failure("expectation-empty", f"{what}{path} has no elements: there is nothing to compare")
    if isinstance(inner, (list, tuple)):
        return [_plain(one, f"{path}[{i}]", what) for i, one in enumerate(inner)]
    if isinstance(inner, Mapping):
        for key in inner:
            if not isinstance(key, str):
                raise failure("expectation-type", f"{what}{path} has the key {key!r}; write strings")
        return {key: _plain(one, f"{path}[{key!r}]", what) for key, one in inner.items()}
    if isinstance(inner, float) and not math.isfinite(inner):
        raise failure("expectation-finite", f"{what}{path} is {inner}: only finite numbers are compared")
    if inner is None or isinstance(inner, (bool, int, float, str)):
        return inner
    have = type(inner).__name__
    hint = "a number, string, list, dict, tensor or array can be compared"
    raise failure("expectation-type", f"{what}{path} is of type {have}: {hint}")


def _is_hollow(inner: Any) -> bool:
    return isinstance(inner, list) and (not inner or any(_is_hollow(one) for one in inner))


def leaves(value: Any, path: str = "", dtype: str | None = None) -> Iterator[Leaf]:
    """Every number and string in a value, with where it stands."""
    inner, own = opened(value)
    dtype = own or dtype
    if isinstance(inner, (list, tuple)):
        for i, one in enumerate(inner):
            yield from leaves(one, f"{path}[{i}]", dtype)
    elif isinstance(inner, Mapping):
        for key, one in inner.items():
            yield from leaves(one, f"{path}[{key!r}]", dtype)
    else:
        yield Leaf(path, inner, dtype)


@dataclass(frozen=True)
class Difference:
    """Where two values differ most."""

    text: str
    count: int = 1
    """How many numbers and strings differ."""
    of: int = 1

    def __str__(self) -> str:
        return self.text if self.of == 1 else f"{self.text} ({self.count} of {self.of} differ)"


def difference(measured: Any, expected: Any, rtol: float | None = None, atol: float | None = None) -> Difference | None:
    """Where a measured value differs most from the expected one; None where it is close enough everywhere.

    A number is close enough if `abs(measured - expected) <= atol + rtol * abs(expected)`; without tolerances those of
    its dtype count, and whole numbers are compared exactly. Both values are usable (`plain`).
    """
    if (text := _shape_difference(plain(measured), plain(expected), "")) is not None:
        return Difference(text)
    compared = 0
    worst: list[tuple[float, str]] = []
    for mine, theirs in zip(_ordered(measured), _ordered(expected), strict=True):
        compared += 1
        excess, text = _leaf_difference(mine, theirs, rtol, atol)
        if excess > 1:
            worst.append((excess, text))
    if not worst:
        return None
    return Difference(max(worst, key=lambda found: found[0])[1], len(worst), compared)


def _ordered(value: Any) -> list[Leaf]:
    return sorted(leaves(value), key=lambda leaf: leaf.path)


def _shape_difference(mine: Any, theirs: Any, path: str) -> str | None:
    where = f"at {path} " if path else ""
    if isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            return f"{where}it has {len(mine)} elements, and not {len(theirs)}"
        pairs = [(mine[i], theirs[i], f"{path}[{i}]") for i in range(len(mine))]
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return f"{where}it has the keys {sorted(mine)}, and not {sorted(theirs)}"
        pairs = [(mine[key], theirs[key], f"{path}[{key!r}]") for key in mine]
    elif _kind(mine) != _kind(theirs):
        return f"{where}it is {_brief(mine)} ({_kind(mine)}), and not {_brief(theirs)} ({_kind(theirs)})"
    else:
        return None
    return next((text for pair in pairs if (text := _shape_difference(*pair)) is not None), None)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _leaf_difference(mine: Leaf, theirs: Leaf, rtol: float | None, atol: float | None) -> tuple[float, str]:
    """How far two numbers are apart as a multiple of what is allowed, and the words for it."""
    where = f"at {mine.path} " if mine.path else ""
    if _kind(mine.value) != "number":
        if mine.value == theirs.value:
            return 0.0, ""
        at = ""
        if isinstance(mine.value, str):
            same = next(
                (i for i, (a, b) in enumerate(zip(mine.value, theirs.value, strict=False)) if a != b),
                min(len(mine.value), len(theirs.value)),
            )
            at = f", from character {same} on"
        return math.inf, f"{where}it is {_brief(mine.value)}, and not {_brief(theirs.value)}{at}"
    is_whole = isinstance(mine.value, int) and isinstance(theirs.value, int)
    default = (0.0, 0.0) if is_whole else TOLERANCE.get(mine.dtype, (0.0, 0.0))
    relative = (0.0 if atol is not None else default[0]) if rtol is None else rtol
    absolute = (0.0 if rtol is not None else default[1]) if atol is None else atol
    error = abs(mine.value - theirs.value)
    allowed = absolute + relative * abs(theirs.value)
    excess = 0.0 if error <= allowed else error / allowed if allowed else math.inf
    text = f"{where}it is {mine.value!r}, and not {theirs.value!r}: off by {error:.3g}, where {allowed:.3g} is allowed"
    # Of what may not differ at all the largest difference is the worst.
    return excess if math.isfinite(excess) else 1e100 * (1 + min(error, 1e100)), text


def rounded(value: Any, rtol: float | None = None, atol: float | None = None) -> Any:
    """A measured value as it is told to be pasted: plain, and with no more digits than its dtype has.

    It is always close enough to the measured one: where these tolerances are too narrow for that, it has all digits.
    """
    short = _rounded(value, None)
    return short if difference(value, short, rtol, atol) is None else plain(value)


def _rounded(value: Any, dtype: str | None) -> Any:
    inner, own = opened(value)
    dtype = own or dtype
    if isinstance(inner, (list, tuple)):
        return [_rounded(one, dtype) for one in inner]
    if isinstance(inner, Mapping):
        return {key: _rounded(one, dtype) for key, one in inner.items()}
    if isinstance(inner, float) and (digits := DIGITS.get(dtype)) is not None:
        return float(f"{inner:.{digits}g}")
    return inner


def spelled(value: Any) -> str:
    """A plain value as Python: strings in double quotes where they have none in them."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if value.isprintable() else repr(value)
    if isinstance(value, list):
        return f"[{', '.join(spelled(one) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spelled(key)}: {spelled(one)}" for key, one in value.items()) + "}"
    return repr(value)
