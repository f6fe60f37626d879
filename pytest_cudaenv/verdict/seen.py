"""What a witness has seen, as data, and the questions that a test asks of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pytest_cudaenv.verdict.attention_names import known_backend, known_kernel, known_name
from pytest_cudaenv.verdict.coded import CodedError
from pytest_cudaenv.verdict.sdpa_choice import SdpaCall


class WitnessError(CodedError, AssertionError):
    """Something else ran than the test says; the text names it, and why where torch tells. `code` is stable."""


@dataclass(frozen=True)
class Call:
    """One call of attention that was seen."""

    backend: str
    """`eager`, `sdpa`, `flash_attention_2` …, `flex_attention`, a Hub kernel's repository, a project's own name;
    `unknown` where a function registered as one of them reached none of its entry points."""
    kernel: str | None = None
    """Behind sdpa `flash`, `efficient`, `cudnn`, `math`; None where it was not told."""
    module: str | None = None
    """The attention module's qualified name; None for compiled code and for backward."""
    is_backward: bool = False
    model: str | None = None
    """The class of the model, `#2` for a second one of the class."""
    asked: str | None = None
    """The backend for which the module's config asked transformers."""
    function: str = ""
    """The function that was called, or the operator where only that was seen."""
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What reached it: causal, window, softcap, scale, dropout, sinks, heads, kv_heads … as far as it can be told."""
    choice: SdpaCall | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        told = f"{self.backend} ({self.kernel})" if self.kernel else self.backend
        return f"{told} from {self.function}" if self.backend == "unknown" else told


@dataclass(frozen=True)
class Module:
    """One module of a model that ran."""

    model: str
    name: str
    was_called: bool
    """Whether its forward ran outside compiled code."""
    has_attention: bool
    """Whether its class calls attention, as its code says."""


class Seen:
    """What was seen: complete once the watch has ended, and as far as it has come before."""

    def __init__(self, look: Callable[[], tuple[Sequence[Call], Sequence[Module], bool]]) -> None:
        self._look = look

    def freeze(self) -> None:
        """Keep what was seen by now, and hold no model any more."""
        result = self._look()
        self._look = lambda: result

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call, in order."""
        return tuple(self._look()[0])

    @property
    def modules(self) -> tuple[Module, ...]:
        """Every module of each model that ran."""
        return tuple(self._look()[1])

    @property
    def has_compiled(self) -> bool:
        """Whether torch.compile has compiled anything in this process: of such code only operators are seen."""
        return self._look()[2]

    @property
    def backends(self) -> frozenset[str]:
        """The backends that ran."""
        return frozenset(call.backend for call in self.calls)

    @property
    def kernels(self) -> frozenset[str]:
        """What ran behind sdpa."""
        return frozenset(call.kernel for call in self.calls if call.kernel is not None)

    def counts(self) -> dict[str, int]:
        """Backend, with its kernel where there is one -> its forward calls."""
        counted: dict[str, int] = {}
        for call in self.calls:
            if not call.is_backward:
                key = f"{call.backend}:{call.kernel}" if call.kernel else call.backend
                counted[key] = counted.get(key, 0) + 1
        return counted

    @property
    def idle(self) -> tuple[str, ...]:
        """Attention modules of the models that ran whose own forward did not run (a vision tower, for text)."""
        return tuple(module.name for module in self.modules if module.has_attention and not module.was_called)

    def assert_ran(
        self,
        name: str,
        kernel: str | None = None,
        in_: str | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        causal: bool | None = None,
    ) -> None:
        """Every attention module that ran used this backend and only it, and there was one.

        `kernel` is for sdpa. `in_` narrows to modules by a glob of their names. `window`, `softcap` and `causal` must
        have reached the backend's own function: in each module, and in at least one call in which it matters.
        Raises WitnessError, which says what ran instead and why; ValueError for a name that nobody knows.
        """
        wanted = known_backend(name, self.backends)
        if kernel is not None:
            known_kernel(kernel)
        calls = [call for call in self.calls if _is_in(call.module, in_)]
        need = f"{wanted} ({kernel})" if kernel else wanted
        place = f"each attention module in {in_}" if in_ else "each attention module"
        if not calls:
            raise WitnessError("witness-unseen", f"needs {need} in {place}; have no call of attention{self._hint(in_)}")
        wrong = [call for call in calls if not _is_it(call, wanted, kernel)]
        silent = self.silent(in_)
        if wrong or silent:
            have = [f"{call} in {_places(same)}" for call, same in _grouped(wrong)]
            have += [f"nothing known in {', '.join(silent)}"] if silent else []
            code = "witness-kernel" if wrong and all(call.backend == wanted for call in wrong) else "witness-other"
            raise WitnessError(code, f"needs {need} in {place}; have {', '.join(have)}{_why(wrong, wanted, kernel)}")
        if all(call.is_backward for call in calls):
            raise WitnessError("witness-unseen", f"needs {need} in {place}; have backward calls only{self._hint(in_)}")
        asked = {"window": window, "softcap": softcap, "causal": causal}
        for fact, value in asked.items():
            if value is not None:
                _check_fact(fact, value, [call for call in calls if not call.is_backward], need)

    def assert_never(self, name: str) -> None:
        """No call ran this backend, or this kernel of sdpa.

        Raises WitnessError; ValueError for a name that nobody knows, of which no call would ever be seen.
        """
        wanted = known_name(name, self.backends)
        wrong = [call for call in self.calls if wanted in (call.backend, call.kernel)]
        if wrong:
            why = _why(wrong, "sdpa", "flash") if wanted == "math" else ""
            have = ", ".join(f"{call} in {_places(same)}" for call, same in _grouped(wrong))
            raise WitnessError("witness-other", f"needs no {wanted}; have {have}{why}")

    def silent(self, in_: str | None = None) -> list[str]:
        """Modules whose forward ran without any attention known, where their class or their place says attention."""
        heard = {(call.model, call.module) for call in self.calls}
        places = {(model, _place(name)) for model, name in heard if name is not None}
        return [
            module.name
            for module in self.modules
            if module.was_called
            and (module.model, module.name) not in heard
            and _is_in(module.name, in_)
            and (module.has_attention or (module.model, _place(module.name)) in places)
            and not any(str(name).startswith(f"{module.name}.") for model, name in heard if model == module.model)
        ]

    def _hint(self, in_: str | None) -> str:
        idle = [name for name in self.idle if _is_in(name, in_)]
        if idle:
            return f": {', '.join(idle[:4])}{' …' if len(idle) > 4 else ''} did not run"
        if self.calls:
            names = dict.fromkeys(str(call.module) for call in self.calls if call.module)
            return f": calls were seen in {', '.join(list(names)[:4])}{' …' if len(names) > 4 else ''}"
        if self.has_compiled:
            return ": of code that torch.compile has compiled only fused operators are seen, without their modules"
        return ""


def _is_in(module: str | None, glob: str | None) -> bool:
    return glob is None or (module is not None and fnmatchcase(module, glob))


def _is_it(call: Call, backend: str, kernel: str | None) -> bool:
    return call.backend == backend and (kernel is None or call.kernel == kernel)


def _place(name: str | None) -> str:
    """A module's name without its layer: `model.layers.*.self_attn`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name or "")


def _grouped(calls: Iterable[Call]) -> list[tuple[Call, list[Call]]]:
    groups: dict[tuple[str, bool], list[Call]] = {}
    for call in calls:
        groups.setdefault((str(call), call.is_backward), []).append(call)
    return [(same[0], same) for same in groups.values()]


def _places(calls: Sequence[Call]) -> str:
    several = len({call.model for call in calls if call.module}) > 1
    names = [
        (f"{call.model}: {call.module}" if several else call.module) if call.module else _unnamed(call)
        for call in calls
    ]
    unique = list(dict.fromkeys(names))
    return f"{', '.join(unique[:4])}{f' and {len(unique) - 4} more' if len(unique) > 4 else ''}"


def _unnamed(call: Call) -> str:
    return "backward" if call.is_backward else "no module"


def _why(wrong: Sequence[Call], backend: str, kernel: str | None) -> str:
    """Why sdpa did not choose the kernel that was asked for; by default, why it fell back to math."""
    if backend != "sdpa":
        return ""
    for call in wrong:
        if call.backend == "sdpa" and call.choice is not None and (why := call.choice.why_not(kernel or "flash")):
            return f": {why}"
    return ""


def _check_fact(fact: str, value: object, calls: Sequence[Call], need: str) -> None:
    untold = [call for call in calls if fact not in call.facts]
    told = [call for call in calls if fact in call.facts and not _is_vacuous(fact, value, call)]
    differ = [call for call in told if not _agrees(call.facts[fact], value)]
    if differ:
        have = ", ".join(dict.fromkeys(f"{call.facts[fact]}" for call in differ))
        raise WitnessError(
            "witness-argument", f"needs {fact}={value} to reach {need}; have {fact}={have} in {_places(differ)}"
        )
    if told:
        return
    if untold and len(untold) == len(calls):
        raise WitnessError("witness-argument", f"needs {fact}={value} to reach {need}; have no way to tell it here")
    longest = max((call.facts.get("keys", 0) for call in calls), default=0)
    text = f"needs {fact}={value} to matter in a call; have at most {longest} keys: nothing is checked"
    raise WitnessError("witness-argument", text)


def _is_vacuous(fact: str, value: object, call: Call) -> bool:
    """Whether the call says nothing of it: a window that holds all keys, causality of a single query."""
    if fact == "window":
        return isinstance(value, int) and call.facts.get("keys", value + 1) <= value
    return fact == "causal" and call.facts.get("queries", 2) <= 1


def _agrees(have: object, value: object) -> bool:
    if isinstance(have, float) and isinstance(value, (int, float)):
        return abs(have - value) <= 1e-6 * max(1.0, abs(value))
    return have == value
