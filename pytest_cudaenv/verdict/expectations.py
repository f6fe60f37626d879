"""Values that depend on the device: the one that is meant for this device and cell, checked or picked.

`check` is told the measured value, so that where none is meant for this place, the failure has the entry to paste.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.verdict import golden
from pytest_cudaenv.verdict.expectation_keys import Place, best, parse_key
from pytest_cudaenv.verdict.expected_values import (
    PASTED,
    Difference,
    difference,
    failure,
    leaves,
    plain,
    rounded,
    spelled,
)

UPDATE = "--cuda-update-expectations"


@dataclass(frozen=True, repr=False)
class Expectations:
    """The fixture `expectations`, and `pytest_cudaenv.current().expectations`."""

    find_place: Callable[[], Place]
    """Where the test is now: the cell of a `unittest` test changes."""
    folder: Path | None = None
    """Where the golden files are."""
    module: str = ""
    """The test module's name: its golden file's, without the suffix."""
    updates: bool = False
    """Whether golden files are written."""
    settled: set[tuple[Path, str, Hashable]] = field(default_factory=set, compare=False)
    """Which golden values this process has measured while it updates them: a second must agree with the first."""
    written: list[str] = field(default_factory=list, compare=False)
    """The golden values that the test has written."""

    def __repr__(self) -> str:
        return f"Expectations({self.find_place()})"

    def check(
        self,
        value: Any,
        expected: Mapping[Any, Any],
        *,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Compare a measured value with the one of `expected` that is meant for this device and cell.

        `{(9, 0): 1.25, (8, None): 1.5, "cpu": 1.125}`; `verdict.expectation_keys` has the grammar of keys and which
        of several is meant. Numbers, strings, lists, dicts, tensors and arrays; a number is close enough if
        `abs(value - expected) <= atol + rtol * abs(expected)`, by default as torch.testing.assert_close has it for the
        measured dtype. Raises AssertionError, with the entry to paste; ValueError for what is no key.
        """
        __tracebackhide__ = True
        self._check(value, expected, rtol, atol)

    def _check(
        self, value: Any, expected: Mapping[Any, Any], rtol: float | None, atol: float | None, where: str = ""
    ) -> None:
        __tracebackhide__ = True
        _check_tolerances(rtol, atol)
        plain(value)  # also where nothing is expected: no such value may be pasted
        place = self.find_place()

        def entry() -> str:
            return _entry(value, place.key(expected), rtol, atol) + where

        meant = _the_one(expected, place, entry)
        plain(expected[meant], f"the expected value of {spelled_key(meant)}")
        if (found := difference(value, expected[meant], rtol, atol)) is not None:
            is_same = parse_key(meant) == parse_key(place.key(expected))
            how = "put in its place" if is_same else "add"
            need = f"needs the value for {place} to be as {spelled_key(meant)} says; have another: {found}"
            raise failure("expectation", f"{need}. If it is right, {how}:\n{entry()}")

    def pick(self, expected: Mapping[Any, Any]) -> Any:
        """The value that is meant for this device and cell, for whoever compares it otherwise.

        Raises AssertionError where none is, or two are; it cannot tell what was measured, as `check` does.
        """
        __tracebackhide__ = True
        place = self.find_place()
        hint = f"    {spelled_key(place.key(expected))}: …,    # check(value, {{…}}) in place of pick fills it in"
        return expected[_the_one(expected, place, lambda: hint)]

    def __call__(self, name: str) -> Golden:
        """A value that stands in `expectations/<module>.json` beside the test module, under this name."""
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"expectations({name!r}): write a name, unlike any other of the test module")
        return Golden(self, name)


@dataclass(frozen=True)
class Golden:
    """One name of a golden file: its values by capability and cell."""

    owner: Expectations
    name: str

    @property
    def path(self) -> Path:
        """The golden file."""
        if self.owner.folder is None:
            raise TypeError("this test is in no file, beside which a golden file could be")
        return self.owner.folder / f"{self.owner.module}.json"

    def check(self, value: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
        """As `Expectations.check`, with what the golden file expects.

        Under `--cuda-update-expectations` a value that it does not expect is written into it, for exactly this device
        and cell; two in one run that disagree are a failure.
        """
        __tracebackhide__ = True
        expected = golden.read(self.path).get(self.name, {})
        if self.owner.updates:
            self._update(value, expected, rtol, atol)
        else:
            where = f"\n    in {golden.shown(self.path)}, under {spelled(self.name)}; {UPDATE} writes it"
            self.owner._check(value, expected, rtol, atol, where)

    def pick(self) -> Any:
        """The value that the golden file has for this device and cell."""
        __tracebackhide__ = True
        return self.owner.pick(golden.read(self.path).get(self.name, {}))

    def _update(self, value: Any, expected: Mapping[Hashable, Any], rtol: float | None, atol: float | None) -> None:
        __tracebackhide__ = True
        _check_tolerances(rtol, atol)
        plain(value)
        place = self.owner.find_place()
        found = best(expected, place)
        told = difference(value, expected[found[0]], rtol, atol) if len(found) == 1 else Difference("it is new")
        measured = (self.path, self.name, place.key())
        if told is not None and measured in self.owner.settled:
            raise failure(
                "expectation-name",
                f"needs one value of {spelled(self.name)} for {place}; have two in this run: {told}. Names are the "
                "module's: give each value its own, or make the test repeatable",
            )
        if told is not None:
            golden.write(self.path, self.name, place.key(expected), rounded(value, rtol, atol))
            self.owner.written.append(self.name)
        self.owner.settled.add(measured)


def place_of(devices: Sequence[CudaDevice], cell: str | None, torch: str | None) -> Place:
    """Where a test is: its first granted device (none: the CPU), its cell, and torch's version."""
    release = None if torch is None else ".".join(torch.split("+")[0].split(".")[:2])
    if not devices:
        return Place("cpu", None, cell, release)
    return Place("cuda", devices[0].capability, cell, release)


def _the_one(expected: Mapping[Any, Any], place: Place, entry: Callable[[], str]) -> Any:
    __tracebackhide__ = True
    if not isinstance(expected, Mapping):
        raise TypeError(f"expected is {type(expected).__name__}: write a dict, {{(9, 0): …, 'cpu': …}}")
    found = best(expected, place)
    if not found:
        have = f"only {', '.join(map(spelled_key, expected))}" if expected else "none"
        raise failure("expectation-missing", f"needs a value for {place}; have {have}. To expect:\n{entry()}")
    if len(found) > 1:
        raise failure(
            "expectation-ambiguous",
            f"needs one value for {place}; have {' and '.join(map(spelled_key, found))}, of which neither names more "
            f"than the other. A key that names all that they do decides:\n{entry()}",
        )
    return found[0]


def _entry(value: Any, key: Hashable, rtol: float | None, atol: float | None) -> str:
    """The measured value as an entry of a dict, ready to paste."""
    count = sum(1 for _ in leaves(value))
    if count > PASTED:
        return f'    …,    # {count} values: check a slice of them, or expectations("name") with a golden file'
    return f"    {spelled_key(key)}: {spelled(rounded(value, rtol, atol))},"


def spelled_key(key: Any) -> str:
    """A key as Python, with strings in double quotes."""
    if isinstance(key, tuple):
        return f"({', '.join(map(spelled_key, key))}{',' if len(key) == 1 else ''})"
    return spelled(key) if isinstance(key, str) else repr(key)


def _check_tolerances(rtol: float | None, atol: float | None) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value!r}: write a finite number, 0 or more")
