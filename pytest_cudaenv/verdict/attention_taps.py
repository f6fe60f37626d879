"""Taps: wraps around the places where attention is called, which tell a recorder what was called and by which module.

The places are transformers' registry (`AttentionInterface.get_interface`, through which `eager` goes as well), the
FlashAttention functions that transformers has loaded, and the entry points of `attention_ops`. They change no result,
and while torch.compile traces they are not there. What is written into a model or a registry: nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from pytest_cudaenv.verdict.attention_ops import ENTRY_POINTS, canonical, entry_points, is_known, of_module

MODELING = "transformers.modeling_utils"
FLASH_UTILS = "transformers.modeling_flash_attention_utils"

ORIGINAL = "_cudaenv_original"
"""The attribute of a wrapped function that holds the function itself."""


class OpenCall:
    """One open call: a registry's function, or an entry point inside it. Becomes a fact when the innermost one ends."""

    __slots__ = ("arguments", "asked", "backend", "function", "has_inner", "is_opaque", "module", "operators", "value")

    def __init__(
        self, backend: str, function: Any, arguments: tuple[Any, Any], module: Any = None, asked: str | None = None
    ) -> None:
        self.backend = backend
        self.function = function
        self.arguments = arguments
        self.module = module
        """The attention module, where a registry's function says it."""
        self.asked = asked
        """What the module's config asked the registry for; None for an entry point."""
        self.is_opaque = asked is not None and not is_known(asked)
        """A project's backend of which nothing but the name is known: what it calls inside is its own affair."""
        self.has_inner = False
        self.operators: list[Any] = []
        self.value: Any = None
        """What it returned; only while the recorder is told of it."""


TRACED = frozenset({"FakeTensor", "FunctionalTensor"})
"""Classes of tensors that have no numbers: torch traces with them, and what is called on them has not run."""


def is_traced(call: OpenCall) -> bool:
    """Whether a call of attention is on tensors without numbers: fake ones, or the meta device's."""
    args, kwargs = call.arguments
    place = 0 if call.asked is None else 1  # a registry's function takes its module first
    query = args[place] if len(args) > place else kwargs.get("query", kwargs.get("q"))
    return type(query).__name__ in TRACED or getattr(query, "is_meta", False) is True


_unseen = [0]
"""How many blocks are open in which nothing is recorded; of the process, as a backward pass has threads of its own."""


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """A block whose attention is no part of what a test is judged by, such as a reference's."""
    _unseen[0] += 1
    try:
        yield
    finally:
        _unseen[0] -= 1


def is_unseen() -> bool:
    """Whether such a block is open."""
    return _unseen[0] > 0


class Recorder(ABC):
    """Hears of each call; calls nest, by thread."""

    has_around = False
    """Whether `around` is more than nothing."""

    sees_all = False
    """Whether it hears of calls in blocks that are `unseen` to others as well."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def open(self) -> list[OpenCall]:
        """The calls in progress in this thread, innermost last."""
        try:
            calls: list[OpenCall] = self._local.open
        except AttributeError:
            calls = self._local.open = []
        return calls

    def run(self, call: OpenCall) -> Any:
        """Make the call: what it returns or raises is the function's own."""
        args, kwargs = call.arguments
        if (_unseen[0] and not self.sees_all) or is_traced(call):
            with self.around(call):
                return call.function(*args, **kwargs)
        stack = self.open
        stack.append(call)
        try:
            if self.has_around:
                with self.around(call):
                    value = call.function(*args, **kwargs)
            else:
                value = call.function(*args, **kwargs)
        finally:
            stack.pop()
        for outer in stack:  # no generator: this is paid for by every call of attention
            if outer.is_opaque:
                return value
        if stack:
            stack[-1].has_inner = True
        if not call.has_inner:
            call.value = value
            self.ran(call, stack)
            call.value = None
        return value

    def around(self, call: OpenCall) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """A context for the function itself."""
        return contextlib.nullcontext()

    @abstractmethod
    def ran(self, call: OpenCall, outer: list[OpenCall]) -> None:
        """A call without a further one inside it has ended."""


class Taps:
    """The wraps of one recorder: on for a stretch of time, once or often."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.is_on = False
        self._undo: list[Callable[[], bool]] = []
        self._left: list[Callable[[], bool]] = []
        """Those of wraps that somebody had replaced when they were to go, and may put back."""
        self._wraps: dict[int, Callable[..., Any]] = {}
        """id of a function -> its wrap, the same one each time: code compiled under a wrap stays valid."""
        self._interfaces: dict[tuple[int, str], Callable[..., Any]] = {}
        self._places: list[tuple[ModuleType, str, Any]] = []
        self._replaced: dict[tuple[int, str], tuple[Any, Any]] = {}
        """(id of an owner, attribute) -> the owner, and the wrap that was put there."""
        self._scanned = -1

    def begin(self) -> None:
        """The same in front of a test: what others have put in the wraps' places since is wrapped in their stead."""
        if not self._is_in_place():
            self.remove()
        self.install()

    def _is_in_place(self) -> bool:
        return all(vars(owner).get(name) is wrap for (_, name), (owner, wrap) in self._replaced.items())

    def install(self) -> None:
        """Wrap what has been imported by now; called again, what was imported since."""
        self.is_on = True
        if "torch" not in sys.modules or (self._replaced and not self.is_behind() and self._is_in_place()):
            return
        self._find_places()
        for module, name, wrap in self._places:
            self._replace(module, name, wrap)
        if (modeling := sys.modules.get(MODELING)) is not None:
            interface = getattr(modeling, "AttentionInterface", None)
            if interface is not None and hasattr(interface, "get_interface"):
                self._replace(interface, "get_interface", self._wrapped(interface.get_interface, self._registry))
        flash = sys.modules.get(FLASH_UTILS)
        if flash is not None and hasattr(flash, "lazy_import_flash_attention"):
            loader = flash.lazy_import_flash_attention
            self._replace(flash, "lazy_import_flash_attention", self._wrapped(loader, self._flash_loader))

    def is_behind(self) -> bool:
        """Whether modules were imported since it was installed."""
        return self._scanned != len(sys.modules)

    def pause(self) -> None:
        """Hear of nothing, until it is installed again: the wraps stay, and call what they wrap.

        To put them in place and take them away for each test costs more than they do: code that has run is compiled
        anew by the interpreter where what it refers to has changed.
        """
        self.is_on = False

    def remove(self) -> None:
        """Put back what was there."""
        self.is_on = False
        self._replaced.clear()
        to_do, self._undo = [*reversed(self._undo), *self._left], []
        self._left = [undo for undo in to_do if not undo()]

    def _replace(self, owner: Any, name: str, wrap: Any) -> None:
        if (id(owner), name) in self._replaced:
            return
        self._replaced[id(owner), name] = owner, wrap
        # An attribute of a class may be inherited: then it is taken away again.
        own = vars(owner).get(name)

        def undo() -> bool:
            if vars(owner).get(name) is not wrap:
                return False  # somebody replaced it since, and owns it now
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
            return True

        setattr(owner, name, wrap)
        self._undo.append(undo)

    def _find_places(self) -> None:
        """Every module attribute that is an entry point, also where another module has imported it by name.

        Looked for again only when modules were imported or an entry point was replaced.
        """
        known = all(
            getattr(module, name, None) in (wrap, getattr(wrap, ORIGINAL)) for module, name, wrap in self._places
        )
        if not self.is_behind() and known:
            return
        points: dict[str, dict[int, str]] = {}
        for place, name, backend in entry_points():
            function = getattr(sys.modules.get(place), name, None)
            if callable(function):
                points.setdefault(name, {}).setdefault(id(itself(function)), backend)
        self._scanned = len(sys.modules)
        self._places = []
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(module, ModuleType) or names is None:
                continue
            for name, functions in points.items():
                function = names.get(name)
                backend_of = functions.get(id(itself(function)))
                if function is None or backend_of is None:
                    continue
                _, wrap = self._replaced.get((id(module), name)) or (module, self._entry(function, backend_of))
                self._places.append((module, name, wrap))

    def _wrapped(self, function: Any, make: Callable[[Any], Any]) -> Any:
        wrap = self._wraps.get(id(function))
        if wrap is None or getattr(wrap, ORIGINAL) is not function:
            wrap = self._wraps[id(function)] = make(function)
            setattr(wrap, ORIGINAL, function)
        return wrap

    def _entry(self, function: Any, backend: str) -> Any:
        from torch.compiler import is_compiling

        recorder = self.recorder

        def make(function: Any) -> Any:
            @functools.wraps(function)
            def entry(*args: Any, **kwargs: Any) -> Any:
                if is_compiling() or not self.is_on:
                    return function(*args, **kwargs)
                return recorder.run(OpenCall(backend, function, (args, kwargs)))

            _let_torchscript_know(entry, backend)
            return entry

        return self._wrapped(function, make)

    def _registry(self, get_interface: Any) -> Any:
        from torch.compiler import is_compiling

        @functools.wraps(get_interface)
        def get(registry: Any, attn_implementation: str, default: Any, *args: Any, **kwargs: Any) -> Any:
            function = get_interface(registry, attn_implementation, default, *args, **kwargs)
            if is_compiling() or not self.is_on or attn_implementation is None:
                return function
            return self._interface(function, attn_implementation)

        return get

    def _interface(self, function: Any, asked: str) -> Any:
        known = self._interfaces.get((id(function), asked))
        if known is not None and getattr(known, ORIGINAL) is function:
            return known
        recorder, backend = self.recorder, canonical(asked)

        @functools.wraps(function)
        def interface(module: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder.run(OpenCall(backend, function, ((module, *args), kwargs), module, backend))

        setattr(interface, ORIGINAL, function)
        self._interfaces[id(function), asked] = interface
        return interface

    def _flash_loader(self, loader: Any) -> Any:
        from torch.compiler import is_compiling

        @functools.wraps(loader)
        def load(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            loaded = loader(implementation, *args, **kwargs)
            if is_compiling() or not self.is_on:
                return loaded
            asked = implementation or getattr(sys.modules.get(FLASH_UTILS), "_loaded_implementation", None)
            functions, process = loaded[0], loaded[1:]
            tapped = [self._flash(function, asked or "flash") for function in functions[:-2]]
            return ((*tapped, *functions[-2:]), *process)

        return load

    def _flash(self, function: Any, asked: str) -> Any:
        """A FlashAttention function that transformers has loaded: of the package it is from, else what it was
        loaded as."""
        if function is None:
            return None
        backend = of_module(getattr(function, "__module__", None) or "") or canonical(asked)
        return self._entry(function, backend)


def itself(function: Any) -> Any:
    """The function itself, of a wrap that may be another recorder's or a former one's."""
    while ORIGINAL in getattr(function, "__dict__", ()):
        function = getattr(function, ORIGINAL)
    return function


NOTHING_KNOWN = "unknown"
"""The backend of a call that reached none of the entry points of what it was registered as."""


def resolved(call: OpenCall) -> str:
    """The backend that a call without an inner one ran, as far as its taps tell.

    transformers' own functions for sdpa and FlashAttention always reach an entry point: one that does not is another
    function under that name.
    """
    if call.asked is not None and call.asked in ENTRY_POINTS and call.asked != "flex_attention":
        return NOTHING_KNOWN
    return call.backend


def _let_torchscript_know(wrap: Any, backend: str) -> None:
    """TorchScript finds sdpa by the identity of its function: the wrap is to be the same operator to it."""
    if backend == "sdpa":
        try:
            from torch.jit._builtins import _register_builtin

            _register_builtin(wrap, "aten::scaled_dot_product_attention")
        except (ImportError, AttributeError):
            return
