"""The cheap witness of one cell's test: which backends ran, and whether each was the one that its model asked for.

It has taps and nothing else: no dispatch mode, no hook, no look at a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from pytest_cudaenv.requirements.attention import registered
from pytest_cudaenv.verdict.attention_ops import ENTRY_POINTS, canonical
from pytest_cudaenv.verdict.attention_taps import MODELING, OpenCall, Recorder, resolved
from pytest_cudaenv.verdict.finding import Finding

UNSEEN, OTHER, RAN = "witness-unseen", "witness-other", "witness-ran"


class CellRecorder(Recorder):
    """Counts calls by backend, and keeps those that are not what their model asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: frozenset[str] = frozenset()
        self.counts: dict[str, int] = {}
        self.others: dict[str, tuple[str, str]] = {}
        """Module -> (what its model asked for, what ran)."""
        self.parts: dict[str, dict[str, int]] = {}
        """Sub-config -> its calls by backend, where the cell names one for each."""
        self._subs: tuple[str, ...] = ()
        self._part_of: dict[int, str | None] = {}
        self._looked_at: dict[int, Any] = {}

    def start(self, wanted: Iterable[str], subs: Iterable[str] = ()) -> None:
        """Forget what was seen, for a test whose cell names these backends, and these sub-configs if any."""
        self.wanted = frozenset(map(canonical, wanted))
        self.counts = {}
        self.others = {}
        self.parts = {}
        self._subs = tuple(subs)
        self._part_of = {}
        self._looked_at = {}

    def ran(self, call: OpenCall, outer: list[OpenCall]) -> None:
        backend = resolved(call)
        self.counts[backend] = self.counts.get(backend, 0) + 1
        registry = call if call.asked is not None else (outer[-1] if outer else None)
        if registry is None or registry.asked is None:
            return
        if self._subs:
            self._count_part(registry.module, backend)
        if registry.asked != backend:
            self.others[_label(registry.module)] = (registry.asked, backend)
        elif backend not in self.wanted and id(registry.module) not in self._looked_at:
            # Held, so that its id stays its own.
            self._looked_at[id(registry.module)] = registry.module
            asked = _asked_around(registry.module)
            if asked is not None and asked != backend:
                self.others[_label(registry.module)] = (asked, backend)

    def _count_part(self, module: Any, backend: str) -> None:
        if id(module) not in self._part_of:
            self._looked_at.setdefault(id(module), module)
            self._part_of[id(module)] = _sub_config(module, self._subs)
        if (sub := self._part_of[id(module)]) is not None:
            counts = self.parts.setdefault(sub, {})
            counts[backend] = counts.get(backend, 0) + 1


def _label(module: Any) -> str:
    """`LlamaAttention 1`: the names of modules are not kept here."""
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ if layer is None else f"{type(module).__name__} {layer}"


def _asked_around(module: Any) -> str | None:
    """What the innermost transformers model around an attention module asks for; None where it cannot say.

    A module with a config of another class than its model's is a part with a backend of its own (a vision tower),
    and so says for itself. The models are found on the stack: there is no way from a module to its parent.
    """
    config = getattr(module, "config", None)
    for owner in _around(module):
        around = getattr(owner, "config", None)
        if around is not None and hasattr(owner, "base_model_prefix"):
            if type(around) is not type(config):
                return None
            asked = getattr(around, "_attn_implementation", None)
            return canonical(asked) if isinstance(asked, str) else None
    return None


def _sub_config(module: Any, subs: Sequence[str]) -> str | None:
    """Which of a model's sub-configs an attention module has; `""` for the model's own, None where nobody can say.

    It is the same object in the config of some model around it; else the only one of its class.
    """
    config = getattr(module, "config", None)
    outermost: Any = None
    for owner in _around(module):
        around = getattr(owner, "config", None)
        for sub in subs:
            if sub and getattr(around, sub, None) is config is not None:
                return sub
        if any(sub and hasattr(around, sub) for sub in subs):
            outermost = around
    if outermost is None:
        return None
    same = [sub for sub in subs if type(getattr(outermost, sub, None) if sub else outermost) is type(config)]
    return same[0] if len(same) == 1 else None


def _around(module: Any) -> Iterator[Any]:
    """The modules whose forward is under way around one, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and (owner := frame.f_locals.get("self")) is not module:
            yield owner
        frame = frame.f_back


def judge_parts(
    named: Mapping[str, str], parts: Mapping[str, Mapping[str, int]], *, has_compiled: bool
) -> list[Finding]:
    """What is wrong with a passed test whose cell names a backend for each sub-config: a part that ran others only."""
    found = []
    for sub, name in named.items():
        ran, backend = parts.get(sub, {}), canonical(name)
        if not ran or backend in ran or has_compiled or (backend != "eager" and not can_be_seen(backend)):
            continue
        have = ", ".join(f"{other} {count}x" for other, count in ran.items())
        text = f"needs {backend} in {sub or 'the model itself'}, which the cell names; have {have}"
        found.append(Finding(UNSEEN, text, "Build the model with `cell.build`, which takes the cell's dict"))
    return found


def judge_idle(counts: Mapping[str, int]) -> list[Finding]:
    """What is wrong with a passed test whose marker says that its body runs no attention: that it does."""
    if not counts:
        return []
    have = ", ".join(f"{backend} {count}x" for backend, count in counts.items())
    text = f"needs a body without attention, as @attn_witness(runs=False) says; have {have}"
    return [Finding(RAN, text, "Take the marker away: then the backend is proven", is_failure=True)]


def can_be_seen(backend: str) -> bool:
    """Whether a call of this backend would have been seen: by its functions, or through transformers' registry."""
    own = registered().get(backend)
    if backend in ENTRY_POINTS or (own is not None and own.entry_points):
        return True
    interface = getattr(sys.modules.get(MODELING), "AttentionInterface", None)
    return "/" in backend or backend in getattr(interface, "_global_mapping", ())


def judge(
    named: Collection[str], counts: Mapping[str, int], others: Mapping[str, tuple[str, str]], *, has_compiled: bool
) -> list[Finding]:
    """What is wrong with a passed test whose cell names these backends.

    eager may be computed by hand, and compiled code does not say what it calls: that nothing was seen of them is no
    finding.
    """
    found = []
    if others:
        have = "; ".join(f"{module}: {asked} was asked for, {ran} ran" for module, (asked, ran) in _first(others))
        remedy = "See attn_witness(model).assert_ran for each module, or build the reference with cell.build"
        found.append(Finding(OTHER, f"needs each attention module to run what its model asks for; have {have}", remedy))
    seen = ", ".join(f"{backend} {count}x" for backend, count in counts.items())
    for backend in dict.fromkeys(map(canonical, named)):
        if backend in counts or has_compiled or (backend == "eager" and not counts):
            continue
        if backend != "eager" and not can_be_seen(backend):
            continue
        remedy = "Run the cell's model in the test's own process, with the cell's backend"
        if not counts:
            remedy += ", or say @attn_witness(runs=False) of a test that needs no attention"
        text = f"needs {backend}, which the cell names; have {seen or 'no call of attention'}"
        found.append(Finding(UNSEEN, text, remedy))
    return found


def _first(others: Mapping[str, tuple[str, str]]) -> list[tuple[str, tuple[str, str]]]:
    return list(others.items())[:3]
