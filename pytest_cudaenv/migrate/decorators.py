"""Decorators under another library's names, made of this plugin's markers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest

# By the package's own names, as a suite would: from here on it uses the plugin.
from pytest_cudaenv import requires_cuda, requires_package
from pytest_cudaenv.compat import NamedMark, is_test_callable, not_decorable
from pytest_cudaenv.decorators import DECORATORS

_NOTHING: Any = object()

Marks = Callable[..., "tuple[pytest.MarkDecorator, ...]"]
"""A decorator's own arguments -> the marks that they stand for."""


class Decorator:
    """`@require_torch_gpu`, and with arguments: `@require_torch_large_gpu(memory=20)`.

    Good where this plugin's markers are: on functions, classes and TestCase methods, below `parameterized.expand`.
    """

    def __init__(self, name: str, marks: Marks, *args: Any, **kwargs: Any) -> None:
        self.__name__ = name
        self._marks = marks
        self._args = args
        self._kwargs = kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decorate a test, with further keywords as the libraries allow; or take the arguments first."""
        target = args[0] if args else kwargs.pop("test_case", _NOTHING)
        if inspect.isclass(target) or is_test_callable(target):
            for mark in self._marks(*self._args, *args[1:], **{**self._kwargs, **kwargs}):
                target = mark(target)
            return target
        if target is None and not kwargs:
            raise TypeError(not_decorable(self.__name__, None))
        inspect.signature(self._marks).bind(*self._args, *args, **{**self._kwargs, **kwargs})
        return Decorator(self.__name__, self._marks, *self._args, *args, **{**self._kwargs, **kwargs})

    def __repr__(self) -> str:
        return f"<{self.__name__} of pytest_cudaenv.migrate>"


def always(*marks: pytest.MarkDecorator) -> Marks:
    """The same marks, whatever; no arguments are taken."""

    def made() -> tuple[pytest.MarkDecorator, ...]:
        return marks

    return made


def cuda(devices: int = 1, **needs: Any) -> Marks:
    """That many devices."""
    return always(requires_cuda(devices=devices, **needs))


def package(*specs: str) -> Marks:
    """Packages, as PEP 508 strings."""
    return always(requires_package(*specs))


def versioned(distribution: str, argument: str = "version") -> Marks:
    """A package whose lowest version is the decorator's argument."""

    def made(*args: Any, **kwargs: Any) -> tuple[NamedMark, ...]:
        version = args[0] if args else kwargs.get(argument)
        return (requires_package(f"{distribution}>={version}" if version else distribution),)

    return made


def marker(name: str, *args: Any) -> Marks:
    """One of this plugin's markers."""
    mark = DECORATORS[name]
    return always(mark(*args) if args else mark)


def large(memory: float = 20) -> tuple[NamedMark, ...]:
    """A device with more memory than that, to itself: the number says how large it is, not what the test uses."""
    return (requires_cuda(memory=int(memory * 1024**3), exclusive=True),)


def capability(major: int, minor: int = 0) -> tuple[NamedMark, ...]:
    """A device of that capability at least."""
    return (requires_cuda(capability=f">={major}.{minor}"),)


def counted(n: int) -> tuple[NamedMark, ...]:
    """That many devices."""
    return (requires_cuda(devices=n),)


def lookup(name: str, marks: Mapping[str, Marks], here: str, library: str) -> Any:
    """A name of the library: its decorator made of our markers, or whatever the library itself has by that name."""
    if name in marks:
        return Decorator(name, marks[name])
    if name.startswith("__"):
        raise AttributeError(f"module {here!r} has no attribute {name!r}")
    try:
        original = import_module(library)
    except ImportError as error:
        raise AttributeError(f"{name} is not one of {here}, and {library} cannot be imported: {error}") from None
    try:
        return getattr(original, name)
    except AttributeError:
        raise AttributeError(f"neither {here} nor {library} has {name!r}") from None
