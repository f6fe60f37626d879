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

FLOOR_ULPS = 4.0
"""Units in the last place of the largest value that any two orders of summation may differ by."""

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


def higher(dtype: Any) -> Any:
    """The dtype of a reference for one: double for float, float for what is smaller."""
    import torch

    return torch.float64 if dtype in {torch.float32, torch.float64} else torch.float32


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
    """Compare the run with kernels; the comparison at its worst, as plain data.

    Raises KernelFaultError where a gradient is gone, an output is, or numbers are too far off.
    """
    if lost := sorted(candidate.missing - baseline.missing):
        text = f"{len(lost)} gradients are gone with kernels on {what}, first {lost[0]}: a forward is detached"
        raise KernelFaultError("kernels-no-gradient", text)
    worst: dict[str, Any] = {"ratio": 0.0, "checked": 0}
    for mine, theirs, base in (
        (candidate.outputs, reference.outputs, baseline.outputs),
        (candidate.gradients, reference.gradients, baseline.gradients),
    ):
        if mine.keys() != base.keys():
            odd = sorted(mine.keys() ^ base.keys())
            raise KernelFaultError("kernels-parity", f"with kernels {what} returns other tensors: {', '.join(odd[:4])}")
        for name in mine:
            one = _judge_one(name, mine[name], theirs[name], base[name], k, what)
            one["checked"] += worst["checked"]
            worst = one if one["ratio"] >= worst["ratio"] else worst | {"checked": one["checked"]}
    if not worst["checked"]:
        raise HubKernelError("kernels-compare", "run(model) returned empty tensors: there is nothing to compare")
    return worst


def _judge_one(name: str, mine: Any, theirs: Any, base: Any, k: float, what: str) -> dict[str, Any]:
    import torch

    if mine.shape != base.shape or mine.dtype != base.dtype:
        have = f"{tuple(mine.shape)} {mine.dtype}, without {tuple(base.shape)} {base.dtype}"
        raise KernelFaultError("kernels-parity", f"{name} of {what}: with kernels {have}")
    if not mine.numel():
        return {"ratio": 0.0, "checked": 0, "worst": name}
    if not mine.is_floating_point():
        if not torch.equal(mine, base):
            raise KernelFaultError("kernels-parity", f"{name} of {what} has other whole numbers with kernels")
        return {"ratio": 0.0, "checked": mine.numel(), "worst": name}
    wide, right, plain = mine.double(), theirs.double(), base.double()
    finite = right.isfinite()
    if not torch.equal(wide.isfinite(), plain.isfinite()):
        count = int((wide.isfinite() != plain.isfinite()).sum())
        raise KernelFaultError("kernels-parity", f"{name} of {what}: {count} values are not finite with kernels")
    usable = finite & wide.isfinite()

    def off(values: Any) -> float:
        return float((values - right)[usable].abs().max()) if bool(usable.any()) else 0.0

    error, own = off(wide), off(plain)
    scale = float(right[usable].abs().max()) if bool(usable.any()) else 0.0
    allowed = k * own + FLOOR_ULPS * torch.finfo(mine.dtype).eps * scale
    ratio = error / allowed if allowed else (0.0 if not error else float("inf"))
    if ratio > 1:
        text = f"{name} of {what} is {error:.3g} off with kernels, {own:.3g} without; allowed is {allowed:.3g}"
        raise KernelFaultError("kernels-parity", text)
    return {"ratio": ratio, "error": error, "reference_error": own, "worst": name, "checked": mine.numel()}
