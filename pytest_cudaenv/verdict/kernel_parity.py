"""Whether a model with kernels computes what it computes without: the parity rule, for `hub_kernels.compare`.

The reference is the model without kernels, one precision higher. What the model without kernels is off it in its own
precision, times `k`, is what kernels may be off it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cudaenv.verdict.kernel_errors import HubKernelError, KernelFaultError
from pytest_cudaenv.verdict.parity_numbers import (
    FEW,
    Leaf,
    ParityError,
    Row,
    Rule,
    all_leaves,
    compare,
    typical_error,
    worst,
)
from pytest_cudaenv.verdict.parity_reference import Inputs, call, dtype_of, higher

GRADIENTS = 1.5
"""How much more gradients are allowed than outputs, as FlashAttention's own tests have it (3 and 2)."""

SEED = 0


@dataclass(frozen=True)
class Run:
    """What one run gave: tensors by name, and the names of what got no gradient."""

    outputs: Mapping[str, Leaf]
    gradients: Mapping[str, Leaf]
    missing: frozenset[str]
    whole: Mapping[str, Any]
    """Outputs that are no floating-point numbers: with kernels they are the same."""


def applied(inputs: Sequence[Any]) -> Inputs:
    """What a module is called with for itself: gradients of its floating-point inputs are wanted."""
    given = (value.detach().requires_grad_() if _is_float(value) else value for value in inputs)
    return Inputs(tuple(given), {})


def references(model: Any, run: Callable[[Any], Any] | Inputs, backward: bool) -> tuple[Run, Run]:
    """(one precision higher, as it is): two runs of a model that has no kernel."""
    low = _dtype_of(model, run)
    high = higher(low)
    twin = copy.deepcopy(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point() and tensor.dtype != high:
            tensor.data = tensor.data.to(higher(tensor.dtype) if tensor.dtype == low else high)
    raised = Inputs(tuple(_raised(value) for value in run.args), {}) if isinstance(run, Inputs) else run
    try:
        reference = take(twin, raised, backward, of=low)
    except RuntimeError as error:
        text = f"run(model) fails on the model one precision higher: {str(error).splitlines()[0]}"
        remedy = "give the model floating-point inputs in its own dtype, next(model.parameters()).dtype"
        raise HubKernelError("kernels-compare", f"{text}; {remedy}") from error
    return reference, take(model, run, backward)


def take(model: Any, run: Callable[[Any], Any] | Inputs, backward: bool, of: Any = None) -> Run:
    """Run a model once, from the same random numbers each time, without touching its `.grad`.

    `of`: the precision of the model that this one is the reference of; None: it is none.
    """
    low = _dtype_of(model, run) if of is None else of
    whole: dict[str, Any] = {}

    def picked(output: Any) -> Any:
        whole.update(whole_numbers(output))
        return output

    def called(model: Any, inputs: Inputs) -> Any:
        return run(model) if callable(run) else model(*inputs.args)

    inputs = run if isinstance(run, Inputs) else Inputs((), {})
    dtype = low if of is None else higher(of)
    made = call(model, inputs, dtype, cell_dtype=low, seed=SEED, backward=backward, compare=picked, run=called)
    if not made.outputs and not whole:
        raise HubKernelError("kernels-compare", "run(model) returned no tensor: there is nothing to compare")
    return Run(_detached(made.outputs), _detached(made.gradients), made.missing, whole)


def whole_numbers(output: Any) -> dict[str, Any]:
    """The tensors of an output that are no floating-point numbers, by the paths that `leaves` gives."""
    return {name: leaf.tensor for name, leaf in all_leaves(output) if not leaf.tensor.is_floating_point()}


def _dtype_of(model: Any, run: Any) -> Any:
    """The precision of a model; of one without weights, its inputs'."""
    import torch

    given = run.args if isinstance(run, Inputs) else ()
    return dtype_of(model) or next((value.dtype for value in given if _is_float(value)), torch.float32)


def _raised(value: Any) -> Any:
    return value.detach().to(higher(value.dtype)).requires_grad_() if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def _detached(sides: Mapping[str, Leaf]) -> dict[str, Leaf]:
    return {name: Leaf(leaf.tensor.detach(), leaf.sequence) for name, leaf in sides.items()}


def judge(candidate: Run, reference: Run, baseline: Run, k: float, what: str = "the model") -> dict[str, Any]:
    """Compare the run with kernels, row by row, by the rule of `assert_parity`; its worst row, as plain data.

    Gradients are allowed half as much again, as there. Raises KernelFaultError where a gradient is gone, an output is,
    or numbers are too far off; HubKernelError where the comparison would prove nothing.
    """
    if lost := sorted(candidate.missing - baseline.missing):
        text = f"{len(lost)} gradients are gone with kernels on {what}, first {lost[0]}: a forward is detached"
        raise KernelFaultError("kernels-no-gradient", text)
    rows: list[Row] = []
    _check_whole(candidate.whole, baseline.whole, what)
    for part, factor in (("outputs", k), ("gradients", GRADIENTS * k)):
        mine, theirs, base = (getattr(run, part) for run in (candidate, reference, baseline))
        _check_alike(mine, base, what)
        # A float32 loss is one number of another dtype than all that tells how this model rounds.
        usual = typical_error({n: x for n, x in theirs.items() if x.tensor.numel() >= FEW}, base)
        kinds = {
            name: (leaf.tensor.dtype, part == "outputs" and leaf.tensor.numel() < FEW) for name, leaf in mine.items()
        }
        for dtype, is_few in dict.fromkeys(kinds.values()):
            names = [name for name, kind in kinds.items() if kind == (dtype, is_few)]
            found = [{name: side[name] for name in names} for side in (mine, theirs, base)]
            rows += _rows(found, part, dtype, factor, usual if is_few else 0.0, what)
    exact = sum(value.numel() for value in candidate.whole.values())
    if not rows and not exact:
        raise HubKernelError("kernels-compare", "run(model) returned empty tensors: there is nothing to compare")
    checked = exact + sum(row.count for row in rows)
    if not rows:
        return {"ratio": 0.0, "checked": checked}
    row = worst(rows)
    if row.ratio > 1:
        at = f"{row.path} of {what}" + (f", row {row.row}," if row.row is not None else "")
        text = (
            f"{at} is {row.error:.3g} off with kernels, {row.reference_error:.3g} without; allowed is {row.limit:.3g}"
        )
        raise KernelFaultError("kernels-parity", text)
    told = {"error": row.error, "reference_error": row.reference_error, "floor": row.floor, "worst": row.path}
    return {"ratio": row.ratio, **told, "checked": checked}


def _rows(sides: Sequence[Mapping[str, Leaf]], part: str, dtype: Any, k: float, usual: float, what: str) -> list[Row]:
    mine, theirs, base = sides
    rule, batch = Rule(dtype, k, typical=usual), None
    if part == "gradients":
        largest = max((float(leaf.tensor.abs().max()) for leaf in theirs.values() if leaf.tensor.numel()), default=0.0)
        rule = Rule(dtype, k, typical=typical_error(theirs, base), scale=largest)
    else:
        first = next(iter(mine.values())).tensor
        batch = int(first.shape[0]) if first.dim() > 1 else None
    try:
        return compare(mine, theirs, base, rule, batch=batch)
    except ParityError as error:
        raise HubKernelError("kernels-compare", f"{part} of {what}: {error}") from None


def _check_alike(mine: Mapping[str, Leaf], base: Mapping[str, Leaf], what: str) -> None:
    """With kernels there are the same tensors as without, of the same shapes, finite in the same places."""
    _check_kinds({n: x.tensor for n, x in mine.items()}, {n: x.tensor for n, x in base.items()}, what)
    for name, leaf in mine.items():
        finite = base[name].tensor.isfinite()
        if count := int((leaf.tensor.isfinite() != finite).sum()):
            raise KernelFaultError("kernels-parity", f"{name} of {what}: {count} values are not finite with kernels")


def _check_whole(mine: Mapping[str, Any], base: Mapping[str, Any], what: str) -> None:
    """With kernels there are the same whole numbers as without."""
    import torch

    _check_kinds(mine, base, what)
    for name, value in mine.items():
        if not torch.equal(value, base[name]):
            raise KernelFaultError("kernels-parity", f"{name} of {what} has other whole numbers with kernels")


def _check_kinds(mine: Mapping[str, Any], base: Mapping[str, Any], what: str) -> None:
    if mine.keys() != base.keys():
        odd = sorted(mine.keys() ^ base.keys())
        raise KernelFaultError("kernels-parity", f"with kernels {what} returns other tensors: {', '.join(odd[:4])}")
    for name, value in mine.items():
        plain = base[name]
        if value.shape != plain.shape or value.dtype != plain.dtype:
            have = f"{tuple(value.shape)} {value.dtype}, without {tuple(plain.shape)} {plain.dtype}"
            raise KernelFaultError("kernels-parity", f"{name} of {what}: with kernels {have}")
