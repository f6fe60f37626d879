"""`assert_parity`: a model's numbers are right if they are about as near a better reference as plain eager ones are."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pytest_cudaenv.names import DTYPES
from pytest_cudaenv.verdict import parity_reference as refs
from pytest_cudaenv.verdict.attention_ops import canonical, is_known
from pytest_cudaenv.verdict.attention_taps import unseen
from pytest_cudaenv.verdict.parity_numbers import (
    Leaf,
    ParityError,
    Row,
    Rule,
    check_masked_rows,
    compare,
    typical_error,
    worst,
)
from pytest_cudaenv.verdict.seen import Seen
from pytest_cudaenv.verdict.witness import watch

K, GRAD_K = 2.0, 3.0
"""FlashAttention's factors, for outputs and for gradients."""

EAGER_ULPS = 64.0
"""What an eager cell may be off a reference in higher precision: units of the last place of a row's largest value.

Measured on tiny models (`python -m benchmarks verdict`): at most 20 in float32, 10 in bfloat16 and float16. Many
layers add up, and an eager cell cannot be judged by eager: the bound is for what is wrong altogether.
"""

GRAD_EAGER_ULPS = 256.0
"""The same for gradients, which sum over positions."""

OPTIONS = ("reference", "backward", "k", "grad_k", "generate", "tolerance", "compare")

TABLES = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
}
"""(rtol, atol) by dtype, `torch.testing.assert_close`'s: for where no reference can be had."""

UNPROVEN = "the witness saw no attention that it knows: which backend ran is not proven"

SAME_BITS = "candidate and reference agree bit for bit: nothing says that they are different code"

CLOSE = 0.8
"""How alike a keyword that nobody names is to one that is known before it is taken for a slip."""

_UNSET: Any = object()


@dataclass(frozen=True)
class Parity:
    """What one comparison found, at the row that is worst."""

    error: float
    reference_error: float
    """That of the low reference, eager in the cell's own dtype, in the same row; NaN without one."""
    ratio: float
    """The error as a share of what is allowed: 1 is the limit."""
    limit: float
    floor: float
    worst: str
    """The output and the index of the worst element: `logits[3, 5, 17]`."""
    row: int | None
    rows: tuple[Row, ...]
    kind: str
    """`candidate`, or `reference` for an eager cell, which is one."""
    notes: tuple[str, ...] = ()

    @property
    def checked(self) -> int:
        """How many elements were compared."""
        return sum(row.count for row in self.rows)

    def as_data(self) -> dict[str, Any]:
        """As reports and ledgers carry it."""
        data: dict[str, Any] = {
            "ratio": _number(self.ratio),
            "error": _number(self.error),
            "reference_error": _number(self.reference_error),
            "floor": _number(self.floor),
            "worst": self.worst,
            "checked": self.checked,
            "kind": self.kind,
        }
        return data | ({"notes": list(self.notes)} if self.notes else {})


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class _Side:
    """The cell, as far as it is known."""

    backends: frozenset[str]
    dtype: Any
    name: str

    @property
    def is_eager(self) -> bool:
        return self.backends == {refs.EAGER}


class AssertParity:
    """The fixture's object: one test's comparisons, and the references that they share."""

    def __init__(self, cell: Any | None = None, seed: int = 0) -> None:
        self.cell = cell
        """Something with `attn_backend`, `dtype` and `device`; None: each model says its own."""
        self.seed = seed
        self.found: list[Parity] = []
        self._references: dict[Any, refs.Run] = {}
        self._ran: dict[Any, frozenset[str]] = {}
        """What references that were given have run, by the same keys."""

    def __call__(
        self,
        model: Any,
        *args: Any,
        reference: Any = _UNSET,
        backward: bool = _UNSET,
        k: float = _UNSET,
        grad_k: float = _UNSET,
        generate: int = _UNSET,
        tolerance: str | tuple[float, float] | None = _UNSET,
        compare: Callable[[Any], Any] | None = _UNSET,
        **inputs: Any,
    ) -> Parity:
        """Run a model on inputs and compare it, row by row, with an eager reference one precision higher.

        `reference`: a model, a callable or a file of outputs, where none can be made from the model. A plain
        `nn.Module` is copied into both precisions; a callable is called twice, with the inputs in the higher precision
        (float64 for a float32 candidate) and in the cell's, and has to compute in the dtype of what it gets.
        `backward`: compare gradients too. `k`, `grad_k`: how many times the error of eager in the cell's dtype is
        allowed.
        `generate`: compare so many greedy tokens, by logits up to the first differing one. `tolerance`: a dtype's
        name or `(rtol, atol)`, in place of the rule. `compare`: picks outputs. Everything else goes to the model.

        Returns what was found. Raises ParityError (an AssertionError) where numbers are wrong, or where the comparison
        would prove nothing; TypeError where an option is also an input of the model.
        """
        given = {
            "reference": reference,
            "backward": backward,
            "k": k,
            "grad_k": grad_k,
            "generate": generate,
            "tolerance": tolerance,
            "compare": compare,
        }
        options = _options(model, {name: value for name, value in given.items() if value is not _UNSET}, inputs)
        try:
            result = self._compare(model, refs.Inputs(args, inputs), options)
        except _FoundError as error:
            self.found.append(error.result)
            raise ParityError("parity", error.text) from None
        self.found.append(result)
        return result

    def summary(self) -> dict[str, Any] | None:
        """The worst of a test's comparisons as plain data; `checked` counts the elements of all. None without one."""
        if not self.found:
            return None
        worst_one = max(self.found, key=lambda result: result.ratio)
        checked = sum(result.checked for result in self.found)
        return worst_one.as_data() | {"checked": checked, "comparisons": len(self.found)}

    def clear(self) -> None:
        """Free the references."""
        self._references.clear()
        self._ran.clear()

    def _side(self, model: Any, named: Mapping[str, Any], reference: Any) -> _Side:
        own = refs.configured(getattr(model, "config", None)) if refs.is_module(model) else frozenset()
        backends, dtype, name = own, None, ""
        backend = getattr(self.cell, "attn_backend", None)
        if backend is not None:
            backends = frozenset({backend} if isinstance(backend, str) else backend.values())
            name = _cell_part(backend)
        if (in_cell := getattr(self.cell, "dtype", None)) is not None:
            dtype = in_cell
        if refs.is_module(model):
            if dtype is not None:
                refs.check_dtype(model, dtype)
            _check_device(model, getattr(self.cell, "device", None))
            dtype = dtype or refs.dtype_of(model)
        if dtype is None:
            dtype = next((t.dtype for t in named.values() if _is_float(t)), None)
        if dtype is None:
            raise ParityError("parity-dtype", "neither a cell, nor the model's weights or inputs tell a dtype")
        if backend is not None and own == {refs.EAGER} and backends - {refs.EAGER}:
            text = f"the cell is {name}, the model's config says eager: eager would be compared with itself"
            raise ParityError("parity-same-backend", f"{text}; build the model with `cell.build`")
        if refs.is_module(reference) and own and own != {refs.EAGER}:
            theirs = refs.configured(getattr(reference, "config", None))
            if theirs == own:
                text = f"candidate and reference both use {', '.join(sorted(own))}"
                raise ParityError("parity-same-backend", f"{text}: the reference has to be eager")
        name = name or "+".join(sorted(own)) or type(model).__name__
        return _Side(backends, dtype, f"{name}-{DTYPES.get(refs.name_of(dtype), refs.name_of(dtype))}")

    def _compare(self, model: Any, inputs: refs.Inputs, options: _Options) -> Parity:
        named = inputs.named(model)
        side = self._side(model, named, options.reference)
        _check_given(model, options)
        mask, batch = refs.mask_of(named), refs.batch_of(named)
        check_masked_rows(mask)
        inputs = refs.without_hidden_labels(inputs, named, mask)
        if mask is not None:
            batch = int(mask.shape[0])
        inputs = refs.uncached(model, inputs)
        with watch(model if refs.is_module(model) else None) as seen:
            candidate = _run(model, inputs, side.dtype, side, self.seed, options, mask)
        if refs.is_module(model) and model.training:
            self._check_seed(model, inputs, candidate, side, options, mask, batch)
        if side.is_eager and options.reference is None:
            again = _run(model, inputs, side.dtype, side, self.seed, options, mask)
            reference, _, _, notes = self._reference(model, inputs, side, options, mask, want_low=False)
            judged = self._judge(candidate, reference, None, side, options, mask, batch, "reference", notes)
            self._check_repeats(candidate, again, side, mask, batch)
            return judged
        want_low = options.table is None
        reference, low, ran, notes = self._reference(model, inputs, side, options, mask, want_low=want_low)
        notes = (*notes, *self._check_backend(seen, candidate, low, side, options, refs.is_module(model)))
        if options.is_code:
            notes = (*notes, *_check_code(seen, ran, candidate, reference if low is None else low, side))
        return self._judge(candidate, reference, low, side, options, mask, batch, "candidate", notes)

    def _check_seed(
        self,
        model: Any,
        inputs: refs.Inputs,
        candidate: refs.Run,
        side: _Side,
        options: _Options,
        mask: Any | None,
        batch: int | None,
    ) -> None:
        """Refuse a model in train mode whose numbers depend on the seed.

        What is dropped differs between kernels and precisions, whatever the seed: nothing could be compared.
        """
        with unseen():
            alone = replace(options, backward=False, generate=0)
            other = _run(model, inputs, side.dtype, side, self.seed + 1, alone, mask)
        at = worst(compare(candidate.outputs, other.outputs, None, Rule(side.dtype), batch=batch, mask=mask))
        if at.ratio > 1:
            dropouts = refs.dropouts(model)
            have = f" ({', '.join(dropouts[:3])}{' …' if len(dropouts) > 3 else ''})" if dropouts else ""
            text = (
                f"{side.name} in train mode depends on the seed{have}: two seeds differ by {at.error:.3g} at {at.path}"
            )
            raise ParityError("parity-random", f"{text}; set every dropout to 0, or call `model.eval()`")

    def _check_backend(
        self, seen: Seen, candidate: refs.Run, low: refs.Run | None, side: _Side, options: _Options, is_module: bool
    ) -> tuple[str, ...]:
        """Refuse a candidate that ran what its reference runs; tell where nobody looked."""
        if seen.backends and seen.backends <= {refs.EAGER} and side.backends and not side.is_eager:
            text = f"the cell is {side.name}, and every attention that was seen is eager"
            raise ParityError("parity-same-backend", f"{text}: eager would be compared with itself")
        wanted = {canonical(name) for name in side.backends}
        asked = [call for call in seen.calls if not call.is_backward and call.asked is not None]
        if others := {str(call.module): call.backend for call in asked if call.backend not in wanted}:
            have = ", ".join(f"{ran} in {module}" for module, ran in list(others.items())[:3])
            text = f"the cell is {side.name}; have {have}"
            raise ParityError("parity-other-backend", f"{text}: each attention module has to run what the cell names")
        notes: tuple[str, ...] = ()
        if seen.backends and (silent := seen.silent()):
            have = f"nothing known in {', '.join(silent[:3])}"
            if not seen.has_compiled:
                text = f"the cell is {side.name}; have {have}: each attention module has to run what the cell names"
                raise ParityError("parity-other-backend", text)
            notes = (f"{have}: torch.compile has compiled code here, which does not say what it calls",)
        if any(name != refs.EAGER and is_known(name) for name in seen.backends):
            return notes
        if side.backends and options.compare is None and low is not None and _identical(candidate.outputs, low.outputs):
            # What was not watched can still be told: other kernels round otherwise.
            text = f"the outputs of {side.name} are those of eager, bit for bit, and no other backend was seen"
            raise ParityError("parity-same-backend", f"{text}: eager would be compared with itself")
        return (*notes, UNPROVEN) if side.backends or is_module else notes

    def _reference(
        self, model: Any, inputs: refs.Inputs, side: _Side, options: _Options, mask: Any | None, *, want_low: bool
    ) -> tuple[refs.Run, refs.Run | None, frozenset[str], tuple[str, ...]]:
        """The reference, the low reference where it is wanted, what they ran, and what may explain a difference.

        What was made of the candidate runs eagerly, and is not watched.
        """
        high, given = refs.higher(side.dtype), options.reference
        key = (
            type(model).__qualname__,
            _plain_config(model),
            refs.digest(model.state_dict()) if refs.is_module(model) else id(model),
            refs.digest(inputs.args),
            refs.digest(inputs.kwargs),
            options.key,
            str(side.dtype),
        )
        notes: list[str] = []
        backends: set[str] = set()

        def made(kind: str, make: Callable[[], tuple[Any, Any]]) -> refs.Run:
            if (key, kind) not in self._references:
                with unseen():
                    other, dtype = make()
                if refs.is_module(other) and refs.is_module(model) and kind == "high":
                    notes.extend(f"buffer {n} is not what the config gives" for n in refs.rounded_buffers(model, other))
                with unseen(), _told_of_dtypes(other, dtype, side.dtype), ExitStack() as watched:
                    if options.is_code:
                        ran = watched.enter_context(watch(sees_all=True))
                    self._references[key, kind] = _run(other, inputs, dtype, side, self.seed, options, mask)
                self._ran[key, kind] = ran.backends if options.is_code else frozenset()
            backends.update(self._ran[key, kind])
            return self._references[key, kind]

        if isinstance(given, (str, os.PathLike)):
            reference = refs.Run(refs.stored(given), {})
        elif given is None:
            reference = made("high", lambda: (_twin(model, high, side.dtype, options), high))
        elif refs.is_module(given):
            if refs.is_module(model) and not refs.is_quantized(model):
                refs.check_weights(model, given)
            if refs.can_be_eager(given):
                reference = made("high", lambda: (given, refs.dtype_of(given) or high))
            else:
                refs.check_precise(given, side.dtype)
                reference = made("high", lambda: (refs.in_dtype(given, high), high))
        else:
            reference = made("high", lambda: (given, high))
        if not want_low:
            return reference, None, frozenset(backends), tuple(notes)
        if refs.is_module(given) and not refs.can_be_eager(given) and not refs.can_be_eager(model):
            low = made("low", lambda: (refs.in_dtype(given, side.dtype), side.dtype))
        elif given is None or isinstance(given, (str, os.PathLike)) or refs.is_module(given):
            is_source = refs.is_module(given) and (refs.is_quantized(model) or not refs.can_be_eager(model))
            source = given if is_source else model
            own = refs.dtype_of(given) if source is given else side.dtype
            low = made("low", lambda: (_twin(source, side.dtype, own, options), side.dtype))
        else:
            low = made("low", lambda: (given, side.dtype))
        return reference, low, frozenset(backends), tuple(notes)

    def _judge(
        self,
        candidate: refs.Run,
        reference: refs.Run,
        low: refs.Run | None,
        side: _Side,
        options: _Options,
        mask: Any | None,
        batch: int | None,
        kind: str,
        notes: tuple[str, ...],
    ) -> Parity:
        ulps = (EAGER_ULPS, GRAD_EAGER_ULPS) if kind == "reference" else (None, None)
        rule = Rule(side.dtype, options.k, options.table, ulps[0])
        lows = None if low is None else low.outputs
        rows = compare(candidate.outputs, reference.outputs, lows, rule, batch=batch, mask=mask)
        if options.backward:
            if detached := sorted(candidate.missing - reference.missing):
                text = f"{detached[0].removeprefix('grad ')} gets no gradient, in the reference it does"
                raise ParityError("parity-no-gradient", f"{text} ({len(detached)} so): a branch is detached")
            lows = None if low is None else low.gradients
            largest = max((float(leaf.tensor.abs().max()) for leaf in reference.gradients.values()), default=0.0)
            rule = replace(rule, k=options.grad_k, ulps=ulps[1], scale=largest)
            if lows is not None:
                rule = replace(rule, typical=typical_error(reference.gradients, lows))
            mine, theirs = dict(candidate.gradients), dict(reference.gradients)
            embeddings = "grad of the input embeddings"
            if embeddings in mine:
                # The one gradient that has rows.
                one = [None if run is None else {embeddings: run.pop(embeddings)} for run in (mine, theirs)]
                alone = None if lows is None else {embeddings: lows[embeddings]}
                lows = None if lows is None else {n: leaf for n, leaf in lows.items() if n != embeddings}
                rows += compare(one[0] or {}, one[1] or {}, alone, rule, batch=batch, mask=mask)
            if mine:
                rows += compare(mine, theirs, lows, rule)
        if options.generate:
            rows += _compare_steps(
                candidate, reference, low, rule=replace(rule, k=options.k, ulps=ulps[0], typical=0.0, scale=0.0)
            )
        at = worst(rows)
        where = f"{at.path}{list(at.index)}"
        found = Parity(
            at.error, at.reference_error, at.ratio, at.limit, at.floor, where, at.row, tuple(rows), kind, notes
        )
        if at.ratio > 1:
            raise _FoundError(found, _message(found, side, options))
        return found

    def _check_repeats(
        self, first: refs.Run, second: refs.Run, side: _Side, mask: Any | None, batch: int | None
    ) -> None:
        """An eager cell gives the same numbers twice, within what rounding does."""
        rows = compare(first.outputs, second.outputs, None, Rule(side.dtype), batch=batch, mask=mask)
        at = worst(rows)
        if at.ratio > 1:
            text = f"{side.name} is not repeatable: two runs from one seed differ by {at.error:.3g}"
            raise ParityError("parity-unrepeatable", f"{text} at {at.path}{list(at.index)} (floor {at.floor:.3g})")


class _FoundError(Exception):
    """A comparison that failed, with what it found."""

    def __init__(self, result: Parity, text: str) -> None:
        super().__init__(text)
        self.result, self.text = result, text


@dataclass(frozen=True)
class _Options:
    reference: Any = None
    backward: bool = False
    k: float = K
    grad_k: float = GRAD_K
    generate: int = 0
    table: tuple[float, float] | None = None
    compare: Callable[[Any], Any] | None = None

    @property
    def is_code(self) -> bool:
        """Whether a reference was given that computes: a model or a callable."""
        return self.reference is not None and not isinstance(self.reference, (str, os.PathLike))

    @property
    def key(self) -> Any:
        """What a reference depends on."""
        return (id(self.reference) if self.reference is not None else None, self.backward, self.generate, self.compare)


def _options(model: Any, given: dict[str, Any], inputs: Mapping[str, Any]) -> _Options:
    function = model.forward if refs.is_module(model) else model
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    if clash := [name for name in given if name in parameters]:
        name = getattr(model, "__name__", type(model).__name__)
        text = f"{clash[0]} is an option of assert_parity and an input of {name}"
        raise TypeError(f"{text}: pass a callable that gives the input another name")
    known = [*OPTIONS, *parameters]
    for name in inputs:
        # A `forward(**kwargs)` takes it without a word: `backwards=True` would compare no gradient.
        if name not in known and (near := difflib.get_close_matches(name, known, 1, CLOSE)):
            raise TypeError(f"{name} is neither an option of assert_parity nor a named input: did you mean {near[0]}?")
    for name in ("k", "grad_k"):
        if name in given and not (isinstance(given[name], (int, float)) and given[name] > 0):
            raise TypeError(f"{name} is a factor above 0, not {type(given[name]).__name__}")
    if not isinstance(given.get("generate", 0), int):
        raise TypeError(f"generate is how many tokens, not {type(given['generate']).__name__}")
    tolerance = given.pop("tolerance", None)
    return _Options(table=_table(tolerance), **given)


def _table(tolerance: Any) -> tuple[float, float] | None:
    if tolerance is None:
        return None
    if not isinstance(tolerance, (tuple, list)):
        name = refs.name_of(tolerance)
        if name not in TABLES:
            raise TypeError(f"tolerance is one of {', '.join(TABLES)} or (rtol, atol), not {name!r}")
        return TABLES[name]
    rtol, atol = tolerance
    if atol <= 0 or rtol < 0:
        raise TypeError(f"tolerance (rtol, atol) needs rtol of at least 0 and atol above 0, not {tolerance}")
    return float(rtol), float(atol)


def _is_float(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def _check_device(model: Any, device: Any | None) -> None:
    where = refs.device_of(model)
    kind = getattr(device, "type", None)
    if where is not None and kind is not None and where.type != kind:
        raise ParityError(
            "parity-device", f"the cell is on {device}, the model on {where}; move it with `.to(cell.device)`"
        )


def _cell_part(backend: str | Mapping[str, str]) -> str:
    """A backend as test ids have it: `text=flash_attention_2+vision=sdpa` for one per sub-config."""
    if isinstance(backend, str):
        return backend
    return "+".join(f"{sub.removesuffix('_config') or 'model'}={name}" for sub, name in backend.items())


def _check_given(model: Any, options: _Options) -> None:
    """Refuse a `reference=` that could not be one."""
    given = options.reference
    if given is None:
        return
    if given is model:
        raise ParityError("parity-same-backend", "`reference=` is the candidate: it would be compared with itself")
    if not options.backward or refs.is_module(given) or not refs.is_module(model):
        return
    if any(p.requires_grad for p in model.parameters()):
        kind = "a callable" if options.is_code else "a file"
        text = f"backward=True compares the gradients of {type(model).__name__}'s parameters, and {kind} has none"
        remedy = (
            "pass `reference=` a module with parameters of the same names; or give the candidate as a function "
            "as well, with inputs that require gradients"
        )
        raise ParityError("parity-no-reference", f"{text}: {remedy}")


def _check_code(
    seen: Seen, ran: frozenset[str], candidate: refs.Run, reference: refs.Run, side: _Side
) -> tuple[str, ...]:
    """Refuse a reference that was given and runs what the candidate runs, by the witness or by its bits."""
    mine = {name for name in seen.backends if name != refs.EAGER and is_known(name)}
    names_backend = bool(side.backends - {refs.EAGER})
    if names_backend and (same := sorted(mine & ran)):
        text = f"candidate and `reference=` both run {', '.join(same)}"
        raise ParityError("parity-same-backend", f"{text}: the reference has to be eager")
    if mine - ran or not _identical(candidate.outputs, reference.outputs):
        return ()
    if names_backend:
        text = f"the outputs of {side.name} are those of `reference=`, bit for bit"
        raise ParityError("parity-same-backend", f"{text}: it would be compared with itself")
    return (SAME_BITS,)


@contextmanager
def _told_of_dtypes(reference: Any, dtype: Any, low: Any) -> Iterator[None]:
    """A block whose errors say what a callable is called with, where exceptions take notes (since Python 3.11)."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not refs.is_module(reference) and hasattr(error, "add_note"):
            both = f"{refs.name_of(refs.higher(low))} and {refs.name_of(low)}"
            text = f"a `reference=` callable is called with inputs in {both} (here {refs.name_of(dtype)})"
            error.add_note(f"assert_parity: {text}: cast its weights to the dtype of what it gets, `w.to(x.dtype)`")
        raise


def _plain_config(model: Any) -> str:
    """A model's config without its backend: cells of one model share a reference."""
    config: Any = getattr(model, "config", None)
    return config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else repr(config)


def _twin(model: Any, dtype: Any, own: Any, options: _Options) -> Any:
    try:
        return refs.twin(model, dtype, own)
    except ParityError as error:
        if error.code == "parity-no-reference" and options.reference is not None:
            have = str(error).partition("] ")[2].partition("; pass")[0]
            remedy = "add `tolerance=`, or pass `reference=` a model or a callable, which are run in both precisions"
            raise ParityError(error.code, f"{have}, which a given reference is judged by; {remedy}") from None
        raise


def _run(
    model: Any, inputs: refs.Inputs, dtype: Any, side: _Side, seed: int, options: _Options, mask: Any | None
) -> refs.Run:
    return refs.call(
        model,
        inputs,
        dtype,
        cell_dtype=side.dtype,
        seed=seed,
        backward=options.backward,
        generate=options.generate,
        compare=options.compare,
        mask=mask,
    )


def _compare_steps(candidate: refs.Run, reference: refs.Run, low: refs.Run | None, rule: Rule) -> list[Row]:
    mine, theirs = candidate.steps, reference.steps
    if mine is None or theirs is None:
        raise ParityError("parity-no-reference", "generate= needs a reference that generates; a stored file does not")
    steps = refs.agreeing(mine["tokens"], theirs["tokens"])
    if low is not None and low.steps is not None:
        # Past its own first difference the low reference has read other tokens.
        steps = steps & refs.agreeing(low.steps["tokens"], theirs["tokens"])
    path = "generated logits"
    sides = [
        None if run is None or run.steps is None else {path: Leaf(run.steps["logits"], 1)}
        for run in (candidate, reference, low)
    ]
    return compare(sides[0] or {}, sides[1] or {}, sides[2], rule, batch=int(steps.shape[0]), mask=steps)


def _identical(one: Mapping[str, Leaf], other: Mapping[str, Leaf]) -> bool:
    """Whether all tensors are the same, bit for bit."""
    pairs = [(leaf.tensor, other[path].tensor) for path, leaf in one.items() if path in other]
    return any(a.numel() for a, _ in pairs) and all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)


def _told(value: float) -> str:
    """A number of the table; a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def _message(found: Parity, side: _Side, options: _Options) -> str:
    """One line with everything, then the rows that are off most."""
    at = f"at {found.worst}" + (f", row {found.row}" if found.row is not None else "")
    if options.table is not None:
        allowed = f"{options.table[1]:g} + {options.table[0]:g} x |reference|"
    elif found.kind == "reference":
        allowed = f"{EAGER_ULPS:g} units of the last place + floor"
    else:
        allowed = f"{options.k:g} x reference error {found.reference_error:.3g} + floor"
        if found.worst.startswith("grad"):
            allowed = f"{options.grad_k:g}{allowed.removeprefix(f'{options.k:g}')}"
    wrong = [row for row in found.rows if row.ratio > 1]
    first = (
        f"{side.name}: error {found.error:.3g} {at}, allowed {found.limit:.3g} ({allowed} {found.floor:.3g}); "
        f"ratio {found.ratio:.3g}, {len(wrong)} of {len(found.rows)} rows wrong"
    )
    lines = [f"{'output':<32} {'row':>4} {'error':>10} {'reference':>10} {'floor':>10} {'allowed':>10} {'ratio':>8}"]
    for row in sorted(found.rows, key=lambda row: -row.ratio)[:8]:
        number = "" if row.row is None else row.row
        lines.append(
            f"{row.path[-32:]:<32} {number:>4} {row.error:>10.3g} {_told(row.reference_error):>10} "
            f"{row.floor:>10.3g} {row.limit:>10.3g} {row.ratio:>8.3g}"
        )
    return "\n".join([first, *lines, *(f"note: {note}" for note in found.notes)])
