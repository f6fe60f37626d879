"""A collected suite as data: what each test needs, and what the run that collected it was told.

`pytest --collect-only --cuda-plan PATH` writes it as JSON lines; `pytest-cudaenv explain` and `matrix` read it. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_cudaenv.ledger.record import needs, requirement_from
from pytest_cudaenv.requirements.attention_backends import AttnBackend
from pytest_cudaenv.requirements.capability import Capabilities
from pytest_cudaenv.requirements.requirement import Requirement

VERSION = 1
"""Of the format; a reader refuses those that it does not know."""


class SuiteError(ValueError):
    """What was read is no collected suite, or not a whole one; the text says what to do."""


@dataclass(frozen=True)
class SuiteTest:
    """One collected test."""

    id: str
    file: str
    """Of the test, below the root folder, with slashes."""
    requirement: Requirement = field(default_factory=Requirement)
    sources: tuple[tuple[str, Requirement], ...] = ()
    """(`@requires_cuda(devices=2)` or `fixture cuda_device`, what it adds)."""
    cell: str | None = None
    skips: str | None = None
    """Why the suite's own marks skip it where it was collected."""


@dataclass(frozen=True)
class Uncollected:
    """A file or class that skipped itself, or failed, while it was collected: nobody knows its tests."""

    id: str
    why: str
    failed: bool = False


@dataclass(frozen=True)
class Told:
    """What the run that collected was told, as far as it decides what a test would do."""

    rootdir: str = "."
    runners: tuple[str, ...] = ()
    """The lines of the ini key cuda_runners."""
    simulate: str | None = None
    assume: tuple[str, ...] = ()
    isolation: str = "session"
    default_memory: int | None = None
    unmet: str = "skip"
    mask: str | None = None
    """Of CUDA_VISIBLE_DEVICES, with what --cuda-visible made of it."""
    order: str | None = None
    """Of CUDA_DEVICE_ORDER."""
    deselected: int = 0
    """How many tests `-k`, `-m` and the like left out."""


@dataclass(frozen=True)
class Suite:
    """Everything that one collection found."""

    tests: tuple[SuiteTest, ...] = ()
    told: Told = field(default_factory=Told)
    backends: tuple[AttnBackend, ...] = ()
    """The project's own attention backends."""
    uncollected: tuple[Uncollected, ...] = ()


def lines_of(suite: Suite) -> Iterator[str]:
    """The suite as JSON lines; the last one proves that it is whole."""
    backends = [_backend_data(backend) for backend in suite.backends]
    told = dataclasses.asdict(suite.told)
    yield _line({"kind": "suite", "version": VERSION, "told": told, "backends": backends})
    for test in suite.tests:
        line: dict[str, Any] = {"kind": "test", "id": test.id, "file": test.file}
        if needed := needs(test.requirement):
            line["needs"] = needed
        if test.sources:
            line["sources"] = [{"where": where, "needs": needs(part)} for where, part in test.sources]
        if test.cell is not None:
            line["cell"] = test.cell
        if test.skips is not None:
            line["skips"] = test.skips
        yield _line(line)
    for gone in suite.uncollected:
        yield _line({"kind": "uncollected", "id": gone.id, "why": gone.why, "failed": gone.failed})
    yield _line({"kind": "end", "tests": len(suite.tests)})


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def read_suite(lines: Iterable[str]) -> Suite:
    """The suite that `lines_of` made these of. Raises SuiteError for anything else, also for a part of it."""
    known: dict[str, Requirement] = {}

    def requirement(data: Any) -> Requirement:
        # Most tests of a suite need what others need too.
        key = json.dumps(data, sort_keys=True)
        if key not in known:
            known[key] = requirement_from(data)
        return known[key]

    head: Mapping[str, Any] = {}
    tests: list[SuiteTest] = []
    uncollected: list[Uncollected] = []
    is_whole = False
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            if not head:
                head = _head(data)
            elif data["kind"] == "test":
                sources = tuple((s["where"], requirement(s["needs"])) for s in data.get("sources", ()))
                needed = requirement(data.get("needs", {}))
                tests.append(SuiteTest(data["id"], data["file"], needed, sources, data.get("cell"), data.get("skips")))
            elif data["kind"] == "uncollected":
                uncollected.append(Uncollected(data["id"], data["why"], data["failed"]))
            elif data["kind"] == "end":
                is_whole = data["tests"] == len(tests)
        except SuiteError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise SuiteError(f"line {number} is none of a collected suite ({error})") from None
    if not is_whole:
        raise SuiteError("it was cut short: collect again with --collect-only --cuda-plan")
    try:
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in head["told"].items()}
        told = Told(**settings)
        backends = tuple(_backend(data) for data in head["backends"])
    except (ValueError, KeyError, TypeError) as error:
        raise SuiteError(f"its first line cannot be read ({error})") from None
    return Suite(tuple(tests), told, backends, tuple(uncollected))


def _head(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict) or data.get("kind") != "suite":
        raise SuiteError("it is no collected suite: write one with --collect-only --cuda-plan")
    if data.get("version") != VERSION:
        raise SuiteError(f"it is of version {data.get('version')}, and version {VERSION} is known here")
    return data


def _backend_data(backend: AttnBackend) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(backend).items() if value not in (None, "", ())}


def _backend(data: Mapping[str, Any]) -> AttnBackend:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
    if "capabilities" in values:
        values["capabilities"] = _capabilities(values["capabilities"])
    values["dtypes_on"] = {dtype: _capabilities(on) for dtype, on in values.get("dtypes_on", {}).items()}
    return AttnBackend(**values)


def _capabilities(data: Mapping[str, Any]) -> Capabilities:
    def pair(numbers: Sequence[int]) -> tuple[int, int]:
        major, minor = numbers
        return (major, minor)

    return Capabilities(data["text"], tuple((pair(low), pair(high)) for low, high in data["ranges"]))
