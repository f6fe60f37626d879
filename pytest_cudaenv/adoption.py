"""Adoption: suites that were written without this plugin, read with no edit of a test.

Wraps the `require_*` of transformers and accelerate when they are imported, so that a condition which holds leaves a
trace; reads the conditions of `skipif`, and a project's own markers by its table in the ini file; and says of every
skip why. What the words mean is in `ledger.adopt`, `ledger.conditions`, `ledger.marker_table` and `ledger.skips`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.adopted import ADOPTED, Adopted
from pytest_cudaenv.importing import Announcer
from pytest_cudaenv.ledger import adopt
from pytest_cudaenv.ledger.conditions import Skip, Source, read_condition, read_source
from pytest_cudaenv.ledger.marker_table import MarkerTableError, parse_table
from pytest_cudaenv.options import ADOPT_MARKERS as TABLE
from pytest_cudaenv.requirements.reason import Reason
from pytest_cudaenv.requirements.requirement import Requirement

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession

_ATTRIBUTE = "__cudaenv_adopted__"
"""On functions and classes; `functools.wraps`, `parameterized.expand` and subclasses carry it on."""

_SKIPPING = ("__unittest_skip__", "__unittest_skip_why__")
"""What unittest marks a skipped class and function with; pytest reads the same."""


@dataclass(frozen=True)
class Trace:
    """One use of a wrapped decorator on a test."""

    name: str
    """`require_torch_large_accelerator(memory=20)`."""
    known: adopt.Known
    held: bool
    """Its condition held here, or a grant makes it hold."""
    on_cuda: bool
    """Its library computes on CUDA here: what it let through asks for devices of this plugin."""
    words: str = ""
    """Its skip's."""


class Adoption:
    """Adopts one run's suite."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        self.active = False
        wanted = session.settings.adopt
        self._libraries = [library for library in wanted if library in adopt.LIBRARIES]
        self._reads_conditions = "skipif" in wanted
        try:
            self._table = parse_table(session.config.getini(TABLE) or ())
        except MarkerTableError as error:
            raise pytest.UsageError(str(error)) from None
        self._rules = {module: rules for name in self._libraries for module, rules in _modules(name)}
        self._finder = Announcer(self._rules, self._wrap_module)
        self._wrapped: list[tuple[ModuleType, str, Any, Any]] = []
        self._sources: dict[str, Source] = {}

    # Wrapping decorators ---------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap from now on, in libraries that are imported already or will be."""
        if self.active:
            return
        self.active = True
        for name in self._rules:
            if (module := sys.modules.get(name)) is not None:
                self._wrap_module(module)
        self._finder.install()

    def remove(self) -> None:
        """Put the libraries' own decorators back."""
        self.active = False
        self._finder.remove()
        for module, name, original, ours in reversed(self._wrapped):
            if getattr(module, name, None) is ours:
                setattr(module, name, original)
        self._wrapped.clear()

    def _wrap_module(self, module: ModuleType) -> None:
        for name, rule in self._rules[module.__name__].items():
            original = getattr(module, name, None)
            if callable(original) and not hasattr(original, "__cudaenv__"):
                ours = self._wrap(name, original, rule)
                setattr(module, name, ours)
                self._wrapped.append((module, name, original, ours))

    def _wrap(self, name: str, original: Callable[..., Any], rule: adopt.Rule) -> Callable[..., Any]:
        signature = inspect.signature(original)
        takes_test = next(iter(signature.parameters), "") in {"test_case", "tc"}

        @functools.wraps(original)
        def decorate(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            arguments = _arguments(signature, args, kwargs)
            test = arguments.pop("test_case", arguments.pop("tc", None)) if takes_test else None
            use = _Use(name, rule(**arguments), _spelled(name, arguments, signature))
            if compat.is_test_callable(test) or inspect.isclass(test):
                rest = args[1:] if args else ()
                named = {key: value for key, value in kwargs.items() if key not in {"test_case", "tc"}}
                return self._apply(use, test, lambda target: original(target, *rest, **named))
            if args and args[0] is None:
                self._warn(name, "was applied to None: put it below @parameterized.expand, above it has no effect")
                return original(*args, **kwargs)
            decorator = original(*args, **kwargs)
            if not callable(decorator):
                return decorator
            return lambda target: self._apply(use, target, decorator)

        decorate.__cudaenv__ = self  # type: ignore[attr-defined]
        return decorate

    def _apply(self, use: _Use, target: Any, decorate: Callable[[Any], Any]) -> Any:
        """Decorate a test as its library does, and leave a trace on it."""
        if not (inspect.isclass(target) or compat.is_test_callable(target)):
            return decorate(target)
        accelerator = _accelerator()
        if use.known.decided_here and accelerator == "cuda":
            result, held = target, True
        else:
            result, held = _ask(target, decorate)
        if not held and accelerator == "cuda" and self._grants_fewer(use.known):
            # Too many devices are visible here, and a grant will be exactly as many as the test asks for.
            result, held = target, True
        if _is_lost(target, result):
            self._warn(use.name, f"returned {result!r} in place of {target.__qualname__}, which does not run")
            return result
        words = "" if held else str(getattr(result, _SKIPPING[1], ""))
        _leave(result, Trace(use.spelled, use.known, held, accelerator == "cuda", words))
        return result

    def _grants_fewer(self, known: adopt.Known) -> bool:
        if known.at_most is None or self.session.settings.isolation == "off":
            return False
        visible = len(self.session.reading.devices)
        return visible > known.at_most and not self.session.unmet(known.grant)

    def _warn(self, name: str, what: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
            ("pytest_cudaenv.", "unittest")
        ):
            frame = frame.f_back
        self.session.warn(f"[adopt-lost] {frame.f_code.co_filename}:{frame.f_lineno}: {name} {what}")

    # Reading tests ---------------------------------------------------------------------------------------------

    def read(self, item: pytest.Item) -> bool:
        """Keep on a test what it needs by others' words; whether that has changed since it was read last."""
        if not (self._libraries or self._reads_conditions or self._table):
            return False  # only skips are told
        adopted = self._adopted(item)
        changed = item.stash.get(ADOPTED, Adopted()) != adopted
        item.stash[ADOPTED] = adopted
        return changed

    def _adopted(self, item: pytest.Item) -> Adopted:
        traces = tuple(dict.fromkeys(_traces(item)))
        sources = [(f"adopted {t.name}", self._of_trace(t)) for t in traces]
        if self._reads_conditions and not _other_hardware():
            sources += [(f"adopted {s.where}", s.requirement) for s in self._skips(item) if s.requirement is not None]
            sources += list(_of_string_conditions(item))
        try:
            sources += list(self._of_markers(item))
        except ValueError as error:
            return Adopted(error=str(error))
        empty = Requirement()
        return Adopted(tuple(dict.fromkeys((w, r) for w, r in sources if r != empty)), traces)

    def _of_trace(self, trace: Trace) -> Requirement:
        if not trace.held:
            return trace.known.needs
        return adopt.granted(trace.known, self.session.reading.devices) if trace.on_cuda else Requirement()

    def _of_markers(self, item: pytest.Item) -> Iterator[tuple[str, Requirement]]:
        """What the project's own markers ask for; ValueError that names the line."""
        if not self._table:
            return
        for mark in item.iter_markers():
            for line in self._table:
                if line.marker != mark.name:
                    continue
                try:
                    requirement = line.requirement(mark.args, mark.kwargs)
                except (TypeError, ValueError, LookupError) as error:
                    raise ValueError(f"{_mark_text(mark)} by {TABLE} {line.text!r}: {error}") from None
                if requirement is not None:
                    yield f"adopted @{_mark_text(mark)}", requirement

    # Reading sources -------------------------------------------------------------------------------------------

    def _skips(self, item: pytest.Item) -> list[Skip]:
        """The decorators that may skip a test, as they are written on it, its classes and its module."""
        found: list[Skip] = []
        function = inspect.unwrap(_function(item)) if _function(item) is not None else None
        code = getattr(function, "__code__", None)
        if code is not None:
            found += self._source(code.co_filename).functions.get((code.co_name, code.co_firstlineno), ())
        for cls in getattr(getattr(item, "cls", None), "__mro__", ()):
            path = getattr(sys.modules.get(cls.__module__), "__file__", None)
            if path and cls not in (object, unittest.TestCase):
                found += self._source(path).classes.get(cls.__qualname__, ())
        found += self._source(str(item.path)).module
        return found

    def _source(self, path: str) -> Source:
        if path not in self._sources:
            try:
                data = Path(path).read_bytes() if path.endswith(".py") else b""
                text = data.decode() if b"skip" in data else ""
            except (OSError, UnicodeDecodeError):
                text = ""
            source = self._sources[path] = read_source(text) if text else Source()
            for line, what in source.mistakes if self._reads_conditions else ():
                self.session.warn(f"[adopt-skip] {path}:{line}: {what}")
        return self._sources[path]

    # Saying why ------------------------------------------------------------------------------------------------

    def why(self, item: pytest.Item, text: str) -> tuple[Reason, ...]:
        """The reasons of a skip that is not this plugin's, whose text this is."""
        # Their many patterns are compiled in runs that skip something only.
        from pytest_cudaenv.ledger.skip_words import ALWAYS
        from pytest_cudaenv.ledger.skips import skip_reasons

        adopted = item.stash.get(ADOPTED, Adopted())
        reasons: list[Reason] = []
        for trace in adopted.traces:
            if not trace.held:
                unmet = self.session.unmet(trace.known.needs)
                visible = len(self.session.reading.devices)
                reasons += adopt.skip_reasons(trace.known, unmet, visible, trace.name)
        skips = self._skips(item)
        if not reasons and any(skip.always for skip in skips):
            return (ALWAYS,)
        if not reasons and not _other_hardware():
            for skip in skips:
                if skip.requirement is not None:
                    reasons += self.session.unmet(skip.requirement)
        if not reasons:
            return skip_reasons(text, self.session.unmet)
        return tuple(dict.fromkeys([*reasons, *asked_for(text)]))

    def claims(self, item: pytest.Item, text: str) -> tuple[Requirement, ...]:
        """What a skip that is not this plugin's claims to lack, each of which would do; empty where any of it is in
        doubt, or it skips for something else as well."""
        refused = [trace for trace in item.stash.get(ADOPTED, Adopted()).traces if not trace.held]
        claims = [None if t.known.reason or t.known.at_most is not None else t.known.needs for t in refused]
        if text not in {trace.words for trace in refused}:
            claims.append(self._claim(item, text))
        told = tuple(claim for claim in claims if claim is not None)
        return told if len(told) == len(claims) else ()

    def _claim(self, item: pytest.Item, text: str) -> Requirement | None:
        """By the condition that these words stand beside, else by the words."""
        by_condition = [skip for skip in self._skips(item) if skip.reason == text and not skip.always]
        if by_condition and all(skip.is_whole for skip in by_condition) and not _other_hardware():
            merged = Requirement()
            for skip in by_condition:
                merged = merged.merged(skip.requirement or Requirement())
            return merged
        from pytest_cudaenv.ledger.claims import claimed

        return claimed(text)


@dataclass(frozen=True)
class _Use:
    name: str
    known: adopt.Known
    spelled: str


def text_of_skip(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The words of a report's skip, without pytest's own."""
    longrepr = report.longrepr
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr or "")
    return text.removeprefix("Skipped").removeprefix(":").strip()


def original_text(item: pytest.Item) -> str:
    """Why unittest would have skipped a test that this plugin skipped before; empty where it would not."""
    for owner in (getattr(item, "cls", None), _function(item)):
        if getattr(owner, _SKIPPING[0], False):
            return str(getattr(owner, _SKIPPING[1], ""))
    return ""


def asked_for(text: str) -> tuple[Reason, ...]:
    """What has to be asked for besides, where the words of a skip say so."""
    from pytest_cudaenv.ledger.skips import read_skip

    reading = read_skip(" ".join(text.split()))
    if reading is None or reading.reason is None or reading.reason.code != "skip-opt-in":
        return ()
    return (reading.reason,)


def _modules(library: str) -> list[tuple[str, Mapping[str, adopt.Rule]]]:
    modules, rules = adopt.LIBRARIES[library]
    return [(module, rules) for module in modules]


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A decorator's arguments by name, defaults included; none where the call does not fit, which it says itself."""
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


def _spelled(name: str, arguments: Mapping[str, Any], signature: inspect.Signature) -> str:
    told = ", ".join(f"{k}={v!r}" for k, v in arguments.items() if v != signature.parameters[k].default)
    return f"{name}({told})" if told else name


def _accelerator() -> str:
    """`cuda`, where the tests of this process compute on CUDA; what else there is, by name, or `cpu`."""
    for module in ("transformers.testing_utils", "accelerate.test_utils.testing"):
        device = getattr(sys.modules.get(module), "torch_device", None)
        if device is not None:
            name = str(device).partition(":")[0]
            return "rocm" if name == "cuda" and _other_hardware() else name
    return "cpu"


def _other_hardware() -> bool:
    """Whether what torch calls CUDA here is AMD's."""
    return getattr(sys.modules.get("torch.version"), "hip", None) is not None


def _ask(target: Any, decorate: Callable[[Any], Any]) -> tuple[Any, bool]:
    """What a decorator makes of a test, and whether it lets it through."""
    if not inspect.isclass(target):
        result = decorate(target)
        return result, result is target or not getattr(result, _SKIPPING[0], False)
    # A class is marked in place, and may have been by the decorator below.
    before = {name: vars(target)[name] for name in _SKIPPING if name in vars(target)}
    for name in before:
        delattr(target, name)
    result = decorate(target)
    held = not vars(target).get(_SKIPPING[0], False)
    if held:
        for name, value in before.items():
            setattr(target, name, value)
    return result, held


def _is_lost(target: Any, result: Any) -> bool:
    """Whether a decorator gave back something that does not call the test."""
    if result is target or inspect.isclass(target):
        return False
    with contextlib.suppress(ValueError):
        return inspect.unwrap(result) is not inspect.unwrap(target)
    return False


def _leave(target: Any, trace: Trace) -> None:
    owner = target.__func__ if isinstance(target, (staticmethod, classmethod)) else target
    with contextlib.suppress(AttributeError, TypeError):  # slots, builtins: not tests that anybody could mark
        setattr(owner, _ATTRIBUTE, (*vars(owner).get(_ATTRIBUTE, ()), trace))


def _traces(item: pytest.Item) -> Iterator[Trace]:
    function = _function(item)
    while function is not None:
        yield from getattr(function, "__dict__", {}).get(_ATTRIBUTE, ())
        function = getattr(function, "__wrapped__", None)
    for cls in getattr(getattr(item, "cls", None), "__mro__", ()):
        yield from vars(cls).get(_ATTRIBUTE, ())


def _function(item: pytest.Item) -> Any:
    found = getattr(item, "obj", None)
    return getattr(found, "__func__", found)


def _of_string_conditions(item: pytest.Item) -> Iterator[tuple[str, Requirement]]:
    for mark in item.iter_markers("skipif"):
        condition = mark.args[0] if mark.args else mark.kwargs.get("condition")
        if isinstance(condition, str) and (requirement := read_condition(condition)) is not None:
            yield f"adopted skipif({condition})", requirement


def _mark_text(mark: pytest.Mark) -> str:
    arguments = [repr(a) for a in mark.args] + [f"{k}={v!r}" for k, v in mark.kwargs.items()]
    return f"{mark.name}({', '.join(arguments)})" if arguments else mark.name
