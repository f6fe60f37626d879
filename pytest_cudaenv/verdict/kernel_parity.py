"""Whether a model with kernels computes what it computes without: the parity rule, for `hub_kernels.compare`.

The reference is the model without kernels, one precision higher. What the model without kernels is off it in its own
precision, times `k`, is what kernels may be off it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cudaenv.verdict.kernel_errors import HubKernelError, KernelFaultError
from pytest_cudaenv.verdict.parity_numbers import Leaf, ParityError, Row, Rule, compare, typical_error, worst
from pytest_cudaenv.verdict.parity_reference import higher

GRADIENTS = 1.5
"""How much more gradients are allowed than outputs, as FlashAttention's own tests have it (3 and 2)."""

SEED = 0


@dataclass(frozen=True)
class Run:
    """What one run gave: tensors by name, and the names of what got no gradient."""

    outputs: Mapping[str, Any]
    gradients: Mapping[str, Any]
    missing: frozenset[str]


class Applied:
    """A run that calls a module on inputs, in the precision of its weights, and wants their gradients."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = tuple(inputs)
        self.higher = False
        self.used: list[Any] = []

    def __call__(self, model: Any) -> Any:
        self.used = []
        arguments = [self._fresh(value) for value in self.inputs]
        return model(*arguments)

    def _fresh(self, value: Any) -> Any:
        if not (hasattr(value, "is_floating_point") and value.is_floating_point()):
            return value
        fresh = value.detach().clone()
        fresh = fresh.to(higher(fresh.dtype)) if self.higher else fresh
        self.used.append(fresh.requires_grad_())
        return fresh


applied = Applied


def references(model: Any, run: Callable[[Any], Any], backward: bool) -> tuple[Run, Run]:
    """(one precision higher, as it is): two runs of a model that has no kernel."""
    twin = copy.deepcopy(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(higher(tensor.dtype))
    if isinstance(run, Applied):
        run.higher = True
    try:
        high = take(twin, run, backward)
    except RuntimeError as error:
        text = f"run(model) fails on the model one precision higher: {str(error).splitlines()[0]}"
        remedy = "give the model floating-point inputs in its own dtype, next(model.parameters()).dtype"
        raise HubKernelError("kernels-compare", f"{text}; {remedy}") from error
    finally:
        if isinstance(run, Applied):
            run.higher = False
    return high, take(model, run, backward)


def take(model: Any, run: Callable[[Any], Any], backward: bool) -> Run:
    """Run a model once, from the same random numbers each time, without touching its `.grad`."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(backward):
        torch.manual_seed(SEED)
        outputs = dict(_leaves(run(model)))
        if not outputs:
            raise HubKernelError("kernels-compare", "run(model) returned no tensor: there is nothing to compare")
        gradients, missing = _gradients(model, run, outputs) if backward else ({}, [])
    return Run({name: value.detach() for name, value in outputs.items()}, gradients, frozenset(missing))


def _gradients(model: Any, run: Callable[[Any], Any], outputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    import torch

    wanted = {f"grad {name}": p for name, p in model.named_parameters() if p.requires_grad}
    wanted |= {f"grad of input {i}": value for i, value in enumerate(getattr(run, "used", ()))}
    output = next(iter(outputs.values()))
    if not output.requires_grad or not wanted:
        return {}, list(wanted)
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output.device, output.dtype)
    goal = (output * weights).sum() if output.dim() else output
    found = torch.autograd.grad(goal, list(wanted.values()), allow_unused=True)
    given = {name: g.detach() for name, g in zip(wanted, found, strict=True) if g is not None}
    return given, [name for name in wanted if name not in given]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in an output, by name."""
    if hasattr(value, "is_floating_point") and hasattr(value, "detach"):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{index}]")


def judge(candidate: Run, reference: Run, baseline: Run, k: float, what: str = "the model") -> dict[str, Any]:
    """Compare the run with kernels, row by row, by the rule of `assert_parity`; its worst row, as plain data.

    Gradients are allowed half as much again, as there. Raises KernelFaultError where a gradient is gone, an output is,
    or numbers are too far off; HubKernelError where the comparison would prove nothing.
    """
    if lost := sorted(candidate.missing - baseline.missing):
        text = f"{len(lost)} gradients are gone with kernels on {what}, first {lost[0]}: a forward is detached"
        raise KernelFaultError("kernels-no-gradient", text)
    rows: list[Row] = []
    for part, factor in (("outputs", k), ("gradients", GRADIENTS * k)):
        mine, theirs, base = (getattr(run, part) for run in (candidate, reference, baseline))
        _check_alike(mine, base, what)
        sides = [{n: Leaf(side[n]) for n in mine if mine[n].is_floating_point()} for side in (mine, theirs, base)]
        for dtype in dict.fromkeys(leaf.tensor.dtype for leaf in sides[0].values()):
            found = [{n: leaf for n, leaf in side.items() if mine[n].dtype == dtype} for side in sides]
            rows += _rows(found, part, dtype, factor, what)
    exact = sum(value.numel() for value in candidate.outputs.values() if not value.is_floating_point())
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


def _rows(sides: Sequence[Mapping[str, Leaf]], part: str, dtype: Any, k: float, what: str) -> list[Row]:
    mine, theirs, base = sides
    rule, batch = Rule(dtype, k), None
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


def _check_alike(mine: Mapping[str, Any], base: Mapping[str, Any], what: str) -> None:
    """With kernels there are the same tensors as without: of the same shapes, whole numbers and places without one."""
    import torch

    if mine.keys() != base.keys():
        odd = sorted(mine.keys() ^ base.keys())
        raise KernelFaultError("kernels-parity", f"with kernels {what} returns other tensors: {', '.join(odd[:4])}")
    for name, value in mine.items():
        plain = base[name]
        if value.shape != plain.shape or value.dtype != plain.dtype:
            have = f"{tuple(value.shape)} {value.dtype}, without {tuple(plain.shape)} {plain.dtype}"
            raise KernelFaultError("kernels-parity", f"{name} of {what}: with kernels {have}")
        if not value.is_floating_point():
            if not torch.equal(value, plain):
                raise KernelFaultError("kernels-parity", f"{name} of {what} has other whole numbers with kernels")
        elif not torch.equal(value.isfinite(), plain.isfinite()):
            count = int((value.isfinite() != plain.isfinite()).sum())
            raise KernelFaultError("kernels-parity", f"{name} of {what}: {count} values are not finite with kernels")
