"""Watching which attention runs: `with watch(model) as seen: …`, then `seen.assert_ran("flash_attention_3")`.

Three instruments, each for what the others cannot see: taps (`attention_taps`) for modules, arguments, eager and flex;
a dispatch mode for sdpa's kernels, custom operators, backward and what torch.compile has compiled; hooks on modules for
names. sdpa without a fused operator inside ran math, which has no operator of its own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any

from pytest_cudaenv.verdict.attention_facts import bound, facts_of
from pytest_cudaenv.verdict.attention_ops import SDPA, Operator, operator_of, own_operators
from pytest_cudaenv.verdict.attention_taps import (
    NOTHING_KNOWN,
    TRACED,
    OpenCall,
    Recorder,
    Taps,
    is_unseen,
    itself,
    resolved,
)
from pytest_cudaenv.verdict.sdpa_choice import SdpaCall
from pytest_cudaenv.verdict.seen import Call, Module, Seen, WitnessError

__all__ = ["Call", "Module", "Seen", "Watch", "Witness", "WitnessError", "compiled_frames", "watch"]


def watch(model: Any = None, *, sees_all: bool = False) -> Watch:
    """A context in which every call of attention is seen, or those of one model. Imports torch.

    `sees_all`: of blocks, too, that no other watch is to hear of (a reference's).
    """
    return Watch(model, sees_all=sees_all)


def compiled_frames() -> int:
    """How much torch.compile has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return 0 if counters is None else int(counters["frames"]["ok"]) + int(counters["stats"]["unique_graphs"])


class Watch:
    """One stretch of watching; may be nested in another."""

    def __init__(self, model: Any = None, *, sees_all: bool = False) -> None:
        self.recorder = _Detailed(model)
        self.recorder.sees_all = sees_all
        self.seen = Seen(self.recorder.look)
        self._exits = ExitStack()

    def __enter__(self) -> Seen:
        with ExitStack() as exits:
            self.recorder.taps.install()
            exits.callback(self.recorder.taps.remove)
            for handle in self.recorder.hooks():
                exits.callback(handle.remove)
            exits.enter_context(_mode_class()(self.recorder))
            self._exits = exits.pop_all()
        return self.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()
        self.seen.freeze()
        self.recorder.forget()


class Witness:
    """What the fixture `attn_witness` is: a watch over the whole test, from which one makes narrower ones."""

    def __init__(self) -> None:
        self._watch = Watch()

    def __enter__(self) -> Witness:
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)

    def __call__(self, model: Any = None) -> Watch:
        """A watch over one block, and over one model where it is given."""
        return Watch(model)

    def __getattr__(self, name: str) -> Any:
        """As of what the whole test has done: `calls`, `backends`, `assert_ran` …"""
        return getattr(self._watch.seen, name)


class _Detailed(Recorder):
    """Keeps each call with its module and what reached it."""

    has_around = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.taps = Taps(self)
        self.calls: list[Call] = []
        self.only = model
        self._roots: dict[int, tuple[Any, str, dict[int, str]]] = {}
        """id of a model -> it, what it is called, and its modules' names by id."""
        self._called: set[int] = set()
        self._compiled = compiled_frames()
        if model is not None:
            self._root(model)

    def _is_blind(self) -> bool:
        return is_unseen() and not self.sees_all

    def forget(self) -> None:
        """Hold no model, and no tensor."""
        self._roots.clear()
        self._called.clear()
        self.only = None
        self.calls = []

    def look(self) -> tuple[list[Call], list[Module], bool]:
        """What was seen by now."""
        modules = [
            Module(
                label, names[id(module)] or type(module).__name__, id(module) in self._called, _calls_attention(module)
            )
            for root, label, names in self._roots.values()
            for module in root.modules()
            if id(module) in names
        ]
        return list(self.calls), modules, compiled_frames() > 0

    # Modules

    def hooks(self) -> list[Any]:
        """Hooks on every module, for as long as they are not removed."""
        from torch.nn.modules import module as modules

        return [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    @property
    def _stack(self) -> list[Any]:
        try:
            stack: list[Any] = self._local.modules
        except AttributeError:
            stack = self._local.modules = []
        return stack

    def _enter(self, module: Any, _inputs: Any) -> None:
        from torch.compiler import is_compiling

        if self._is_blind() or is_compiling() or _is_of_compiler(type(module)):
            return
        stack = self._stack
        if not stack and self.taps.is_behind():
            self.taps.install()
        stack.append(module)
        self._called.add(id(module))

    def _leave(self, module: Any, _inputs: Any, _output: Any) -> None:
        from torch.compiler import is_compiling

        if self._is_blind() or is_compiling() or _is_of_compiler(type(module)):
            return
        stack = self._stack
        while stack and stack.pop() is not module:
            pass

    def _root(self, root: Any) -> tuple[Any, str, dict[int, str]]:
        found = self._roots.get(id(root))
        if found is None:
            name = type(root).__name__
            same = sum(type(other).__name__ == name for other, *_ in self._roots.values())
            names = {id(module): place for place, module in root.named_modules()}
            found = self._roots[id(root)] = (root, f"{name}#{same + 1}" if same else name, names)
        return found

    def _named(self, module: Any) -> tuple[str | None, str | None, bool]:
        """A module's model and name, and whether it is to be seen at all."""
        stack = self._stack
        module = module if module is not None else (stack[-1] if stack else None)
        if module is None:
            return None, None, True
        root = self.only if self.only is not None else (stack[0] if stack else module)
        _, label, names = self._root(root)
        name = names.get(id(module))
        if name is None and self.only is not None:
            return None, None, False
        return label, (name if name else type(module).__name__), True

    # Calls

    def around(self, call: OpenCall) -> Any:
        # Under a dispatch mode flex does not compile, and raises.
        if call.backend != "flex_attention":
            return nullcontext()
        from torch.utils._python_dispatch import _disable_current_modes

        return _disable_current_modes()

    def ran(self, call: OpenCall, outer: list[OpenCall]) -> None:
        args, kwargs = call.arguments
        module = next((o.module for o in reversed([*outer, call]) if o.module is not None), None)
        model, name, is_ours = self._named(module)
        if not is_ours:
            return
        operators = [operator for operator in call.operators if not operator.is_backward]
        backend, kernel = resolved(call), None
        if operators:
            backend, kernel = operators[-1].backend, operators[-1].kernel
        elif backend == "sdpa":
            kernel = "math"
        asked = next((o.asked for o in reversed([*outer, call]) if o.asked is not None), None)
        function = itself(call.function)
        choice = SdpaCall.of(bound(function, args, kwargs)) if backend == "sdpa" and call.backend == "sdpa" else None
        facts = facts_of(backend, function, args, kwargs) if backend != NOTHING_KNOWN else {}
        told = f"{getattr(function, '__module__', '') or ''}.{getattr(function, '__qualname__', '')}".strip(".")
        self.calls.append(Call(backend, kernel, name, False, model, asked, told, facts, choice))
        if not operators:
            self._await_backward(call.value, Call(backend, kernel, name, True, model, asked, told))

    def _await_backward(self, value: Any, backward: Call) -> None:
        """Where no operator tells of a backward pass, autograd does: FlashAttention-4's kernels are no operators."""
        output = value[0] if isinstance(value, tuple) and value else value
        node = getattr(output, "grad_fn", None)
        if node is None:
            return
        watched = weakref.ref(self)

        def runs(_gradients: Any) -> None:
            recorder = watched()
            if recorder is not None and recorder.taps.is_on and not recorder._is_blind():
                recorder.calls.append(backward)

        node.register_prehook(runs)

    def saw(self, name: str, operator: Operator) -> None:
        """A fused operator runs now."""
        if self._is_blind():
            return
        if self.open and not operator.is_backward:
            self.open[-1].operators.append(operator)
            return
        model, module, is_ours = (None, None, True) if operator.is_backward else self._named(None)
        if is_ours:
            self.calls.append(
                Call(operator.backend, operator.kernel, module, operator.is_backward, model, function=name)
            )


def _is_of_compiler(module_class: type) -> bool:
    """Whether a module stands for compiled code: what runs in it has no module of the model's any more."""
    return module_class.__name__ == "OptimizedModule" or any(
        base.__module__ == "torch.fx.graph_module" for base in module_class.__mro__
    )


_CALLS_ATTENTION = {
    "ALL_ATTENTION_FUNCTIONS",
    "get_interface",
    "scaled_dot_product_attention",
    "flex_attention",
    "multi_head_attention_forward",
    "_flash_attention_forward",
    "flash_attn_func",
    "flash_attn_varlen_func",
}


def _calls_attention(module: Any) -> bool:
    module_class: Any = type(module)
    return calls_attention(module_class)


@functools.lru_cache(maxsize=4096)
def calls_attention(module_class: type) -> bool:
    """Whether a module's own forward calls attention, by the names in its code."""
    code = getattr(inspect.unwrap(getattr(module_class, "forward", None) or calls_attention), "__code__", None)
    return code is not None and not _CALLS_ATTENTION.isdisjoint(code.co_names)


@functools.lru_cache(maxsize=1)
def _mode_class() -> Any:
    """The dispatch mode; made once torch is there to derive it from."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class WitnessMode(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
        """Tells the recorder each attention operator, and changes nothing."""

        supports_higher_order_operators = True

        def __init__(self, recorder: _Detailed) -> None:
            super().__init__()
            self.recorder = recorder
            self.own = own_operators()
            self.known: dict[Any, tuple[str, Operator | None]] = {}

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """torch.compile is on as without the mode (where torch asks for this): the user's own program runs."""
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            known = self.known.get(func)
            if known is None:
                name = (func.name() if hasattr(func, "name") else str(func)).partition(".")[0]
                known = self.known[func] = (name, operator_of(name, self.own))
            name, operator = known
            if (operator is not None or name == SDPA) and any(kind.__name__ in TRACED for kind in types):
                return func(*args, **kwargs)
            if name == SDPA:
                return self._sdpa(func, args, kwargs)
            if operator is not None:
                self.recorder.saw(name, operator)
            return func(*args, **kwargs)

        def _sdpa(self, func: Any, args: Any, kwargs: Any) -> Any:
            """In inference mode sdpa comes whole: it is taken apart here, and what is inside shows the kernel."""

            def taken_apart(*args: Any, **kwargs: Any) -> Any:
                with self:
                    value = func.decompose(*args, **kwargs)
                return func(*args, **kwargs) if value is NotImplemented else value

            is_open = self.recorder.open and self.recorder.open[-1].backend == "sdpa"
            if is_open:
                return taken_apart(*args, **kwargs)
            return self.recorder.run(OpenCall("sdpa", taken_apart, (args, kwargs)))

    return WitnessMode
