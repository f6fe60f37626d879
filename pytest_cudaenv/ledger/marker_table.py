"""A project's own markers as requirements: `distributed(num_gpus=n) = requires_cuda(devices=n)`, one a line of ini.

Left of the equals sign stands the project's marker with its arguments, each a name or a constant; right of it one of
this plugin's, whose arguments are constants, those names, or strings with those names in braces. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pytest_cudaenv.requirements.markers import MARKERS
from pytest_cudaenv.requirements.requirement import Requirement

GRAMMAR = (
    "write MARKER = requires_…, as `gpu_4 = requires_cuda(devices=4)` or "
    '`large_gpu(min_gb=m) = requires_cuda(memory="{m}GB")`'
)


class MarkerTableError(ValueError):
    """A line that is none; the text says which, why, and the grammar."""


@dataclass(frozen=True)
class Name:
    """An argument of the project's marker, by the name that the line gives it."""

    name: str


Value: TypeAlias = "Name | int | float | str | bool | None"


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    marker: str
    args: tuple[Value, ...]
    kwargs: tuple[tuple[str, Value], ...]
    target: str
    """One of this plugin's markers."""
    target_args: tuple[Value, ...]
    target_kwargs: tuple[tuple[str, Value], ...]
    text: str

    def requirement(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Requirement | None:
        """What a use of the marker asks for; None for one that this line does not fit.

        Raises ValueError or TypeError for a value that the requirement does not take.
        """
        bound = self._bind(args, kwargs)
        if bound is None:
            return None
        positional = [_filled(value, bound) for value in self.target_args]
        named = {key: _filled(value, bound) for key, value in self.target_kwargs}
        declared = MARKERS[self.target](*positional, **named)
        assert isinstance(declared, Requirement)
        return declared

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Name -> value of this use; a line that names no arguments fits every use."""
        if len(args) < len(self.args):
            return None
        pairs = list(zip(self.args, args, strict=False))
        for key, value in self.kwargs:
            if key not in kwargs:
                return None
            pairs.append((value, kwargs[key]))
        bound: dict[str, Any] = {}
        for expected, given in pairs:
            if isinstance(expected, Name):
                bound[expected.name] = given
            elif expected != given:
                return None
        return bound


def _filled(value: Value, bound: Mapping[str, Any]) -> Any:
    if isinstance(value, Name):
        return bound[value.name]
    if isinstance(value, str):
        return value.format(**bound)
    return value


def parse_table(lines: Sequence[str]) -> tuple[Line, ...]:
    """The lines of `cuda_adopt_markers`; raises MarkerTableError for the first that is none."""
    return tuple(_parse(line.strip()) for line in lines if line.strip() and not line.strip().startswith("#"))


def _parse(text: str) -> Line:
    left, right = _split(text)
    marker, args, kwargs = _call(left, text)
    target, target_args, target_kwargs = _call(right, text)
    if target not in MARKERS or not target.startswith(("requires_", "cuda_isolated")):
        choices = ", ".join(name for name in MARKERS if name.startswith(("requires_", "cuda_isolated")))
        raise _error(text, f"{target!r} is no marker that declares a need; choose from {choices}")
    names = {value.name for value in (*args, *(v for _, v in kwargs)) if isinstance(value, Name)}
    for value in (*target_args, *(v for _, v in target_kwargs)):
        for used in _used(value, text):
            if used not in names:
                raise _error(text, f"{used!r} is no argument on the left")
    line = Line(marker, args, kwargs, target, target_args, target_kwargs, text)
    _try(line, names)
    return line


def _try(line: Line, names: set[str]) -> None:
    """What can be wrong whatever the arguments are: the marker's own signature."""
    if names:
        return
    try:
        line.requirement(list(line.args), dict(line.kwargs))
    except (TypeError, ValueError) as error:
        raise _error(line.text, str(error)) from None


def _split(text: str) -> tuple[str, str]:
    """Both sides of the first equals sign outside brackets and quotes."""
    depth, quote = 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "=" and depth == 0:
            return text[:place].strip(), text[place + 1 :].strip()
    raise _error(text, "no equals sign between a marker and what it needs")


def _call(text: str, line: str) -> tuple[str, tuple[Value, ...], tuple[tuple[str, Value], ...]]:
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise _error(line, f"{text!r} is no marker") from None
    if isinstance(node, ast.Name):
        return node.id, (), ()
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _error(line, f"{text!r} is no marker")
    args = tuple(_value(a, line) for a in node.args)
    kwargs = []
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _error(line, "** says nothing here")
        kwargs.append((keyword.arg, _value(keyword.value, line)))
    return node.func.id, args, tuple(kwargs)


def _value(node: ast.expr, line: str) -> Value:
    if isinstance(node, ast.Name):
        return Name(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool, type(None))):
        return node.value
    raise _error(line, f"{ast.unparse(node)!r} is neither a constant nor a name")


def _used(value: Value, line: str) -> list[str]:
    """Names that a value on the right takes from the left."""
    if isinstance(value, Name):
        return [value.name]
    if not isinstance(value, str):
        return []
    try:
        parts = list(string.Formatter().parse(value))
    except ValueError as error:
        raise _error(line, f"{value!r}: {error}") from None
    names = [name for _, name, _, _ in parts if name is not None]
    if bad := [name for name in names if not name.isidentifier()]:
        raise _error(line, f"{value!r}: {{{bad[0]}}} is no name")
    return names


def _error(line: str, why: str) -> MarkerTableError:
    return MarkerTableError(f"cuda_adopt_markers: {line!r}: {why}; {GRAMMAR}")
