"""The share of wrong attention that `assert_parity` catches, beside two rules that suites use today.

A small attention implementation, registered with transformers as a backend, and mutants of it: each with one line
changed. All rules see the same mutants in the same model (grouped queries, a sliding window, one padded row of seven):

- `assert_parity`, forward, backward and two generated tokens; and its forward alone;
- transformers' own eager-versus-sdpa rule (tests/test_modeling_common.py): `allclose` row by row against eager in the
  same dtype, with its tolerances for the CPU; 80 % of the rows are enough;
- `torch.testing.assert_close` with its defaults against eager in the same dtype.

A mutant counts as caught if any of the seeds catches it. The other half: honest variants of the same attention, on
which a rule must stay silent. `python -m benchmarks mutations` prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pytest_cudaenv.verdict.parity import AssertParity
from pytest_cudaenv.verdict.parity_numbers import ParityError
from tests.verdict.parity_models import Tiny, cell, models, registered

NAME = "mutant"

SOURCE = """
def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(groups, dim=1).float()
    values = value.repeat_interleave(groups, dim=1).float()
    scores = (query.float() * scaling) @ keys.transpose(2, 3)
    length, total = scores.shape[-2:]
    rows = torch.arange(length)[:, None] + total - length
    columns = torch.arange(total)[None, :]
    visible = columns <= rows
    window = kwargs.get("sliding_window")
    if window is not None:
        visible = visible & (columns > rows - window)
    visible = visible[None, None]
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, :].bool()
    scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
    weights = torch.softmax(scores, dim=-1)
    output = weights @ values
    output = output.to(query.dtype).transpose(1, 2)
    return output.contiguous(), None
"""

SCALED = "(query.float() * scaling)"
SOFTMAX = "torch.softmax(scores, dim=-1)"
OUTPUT = "output = weights @ values"

MUTANTS: tuple[tuple[str, str, str], ...] = (
    ("scale 1.01", SCALED, "(query.float() * scaling * 1.01)"),
    ("scale 1.001", SCALED, "(query.float() * scaling * 1.001)"),
    ("scale squared", SCALED, "(query.float() * scaling**2)"),
    ("no scale", SCALED, "query.float()"),
    ("scale 1.01 in one layer", SCALED, "(query.float() * scaling * (1.01 if module.layer_idx == 1 else 1))"),
    ("causal mask off by one, less", "columns <= rows", "columns < rows"),
    ("causal mask off by one, more", "columns <= rows", "columns <= rows + 1"),
    ("causal mask missing", "columns <= rows", "columns >= 0"),
    ("causal mask of the decoding step", " + total - length", ""),
    ("window off by one, more", "columns > rows - window", "columns >= rows - window"),
    ("window off by one, less", "columns > rows - window", "columns > rows - window + 1"),
    ("window dropped", "if window is not None", "if window is None"),
    ("window twice as wide", "columns > rows - window", "columns > rows - 2 * window"),
    ("padding ignored", "if attention_mask is not None", "if False"),
    ("padding shifted by one", "attention_mask[:,", "attention_mask.roll(-1, 1)[:,"),
    ("padding of the first row for all", "attention_mask[:,", "attention_mask[:1,"),
    ("key heads mapped in turn", "key.repeat_interleave(groups, dim=1)", "key.repeat(1, groups, 1, 1)"),
    ("value heads mapped in turn", "value.repeat_interleave(groups, dim=1)", "value.repeat(1, groups, 1, 1)"),
    ("key heads reversed", "key.repeat_interleave(groups, dim=1)", "key.repeat_interleave(groups, dim=1).flip(1)"),
    ("softmax over the queries", "dim=-1)", "dim=-2)"),
    ("softmax in bfloat16", SOFTMAX, "torch.softmax(scores.bfloat16(), dim=-1).float()"),
    ("softmax in float16", SOFTMAX, "torch.softmax(scores.half(), dim=-1).float()"),
    ("weights in float8", SOFTMAX, SOFTMAX + ".to(torch.float8_e4m3fn).float()"),
    ("weights sum to 0.99", SOFTMAX, SOFTMAX + " * 0.99"),
    ("softmax capped at 5", SOFTMAX, "torch.softmax(5 * torch.tanh(scores / 5), dim=-1)"),
    ("last token dropped", "visible = columns <= rows", "visible = (columns <= rows) & (columns < total - 1)"),
    ("values shifted by one", OUTPUT, "output = weights @ values.roll(1, dims=2)"),
    ("heads of the output swapped", OUTPUT, "output = (weights @ values).flip(1)"),
    (
        "last row is the row before",
        OUTPUT,
        "output = weights @ values; output = torch.cat([output[:-1], output[-2:-1]])",
    ),
    ("one head of one row off by 5 %", OUTPUT, "output = weights @ values; output[1:2, 1] *= 1.05"),
    ("output in bfloat16", "output.to(query.dtype)", "output.bfloat16().to(query.dtype)"),
    ("query detached", SCALED, "(query.detach().float() * scaling)"),
    ("value detached", "value.repeat_interleave", "value.detach().repeat_interleave"),
    ("gradient of the weights 1 % off", OUTPUT, "output = (weights * 1.01 - weights.detach() * 0.01) @ values"),
)
"""(what is wrong, the text of the line, what it is replaced by)."""

BY_MAXIMUM = "scores - scores.amax(-1, True)"
NORMALISED = f"weights = torch.exp({BY_MAXIMUM}); output = (weights @ values) / weights.sum(-1, True)"
BLOCKS = "h = length // 2; output = weights[..., :h] @ values[..., :h, :] + weights[..., h:] @ values[..., h:, :]"

HONEST: tuple[tuple[str, str, str], ...] = (
    ("as it is", SCALED, SCALED),
    ("scale in the model's dtype", SCALED, "(query * scaling).float()"),
    ("softmax to base two", SOFTMAX, f"torch.exp2(({BY_MAXIMUM}) * 1.4426950408889634)"),
    ("normalised at the end", OUTPUT, NORMALISED),
    ("products in the model's dtype", OUTPUT, "output = weights.to(query.dtype) @ values.to(query.dtype)"),
    ("scale half and half", f"{SCALED} @ keys", "(query.float() * scaling**0.5) @ (keys * scaling**0.5)"),
    ("keys in two blocks", OUTPUT, BLOCKS),
)
"""Other ways to compute the same, with other rounding."""

# transformers 5, tests/test_modeling_common.py, device "cpu".
RTOL = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}
ATOL = {torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 1e-2}


@contextlib.contextmanager
def seen_by_its_name() -> Iterator[None]:
    """The witness as it is for these: it sees the backend that is registered. Only numbers decide, here."""

    @contextlib.contextmanager
    def watch(model: Any = None) -> Iterator[Any]:  # noqa: ARG001  # the witness's signature
        yield SimpleNamespace(backends=frozenset({NAME}), calls=())

    name = "pytest_cudaenv.verdict.witness"
    fake = ModuleType(name)
    vars(fake)["watch"] = watch
    with mock.patch.dict(sys.modules, {name: fake}):
        yield


def changed(old: str, new: str) -> Callable[..., Any]:
    """The attention with one line replaced."""
    assert SOURCE.count(old) == 1, old
    text = SOURCE.replace(old, new)
    if "exp2" in new:  # not normalised yet
        text = text.replace("output = weights @ values", "output = weights @ values / weights.sum(-1, True)", 1)
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    function: Callable[..., Any] = names["attention"]
    return function


@dataclass(frozen=True)
class Trial:
    """One model, dtype and seed."""

    tiny: Tiny
    dtype: torch.dtype
    seed: int

    def caught_by(self, function: Callable[..., Any]) -> dict[str, bool]:
        """Which rules complain of this attention."""
        with seen_by_its_name(), registered(NAME, function, masks="flash_attention_2"):
            model = self.tiny.build(NAME, self.dtype, self.seed)
            inputs = self.tiny.inputs(self.seed)
            checked = AssertParity(cell(NAME, self.dtype))
            ours = {}
            for rule, options in (("assert_parity", {"backward": True, "generate": 2}), ("its forward", {})):
                try:
                    checked(model, **inputs, **options)
                    ours[rule] = False
                except ParityError:
                    ours[rule] = True
            with torch.no_grad():
                mine = model(**inputs).logits
        with torch.no_grad():
            eager = self.tiny.build("eager", self.dtype, self.seed)(**inputs).logits
        close = False
        with contextlib.suppress(AssertionError):
            visible = inputs["attention_mask"].bool()
            torch.testing.assert_close(mine[visible], eager[visible])
            close = True
        return ours | {
            "transformers": not transformers_rule(mine, eager, inputs["attention_mask"].bool()),
            "assert_close": not close,
        }


def transformers_rule(mine: torch.Tensor, eager: torch.Tensor, visible: torch.Tensor) -> bool:
    """Whether four rows of five are close; what is masked is not looked at, as there."""
    dtype = mine.dtype
    atol = ATOL[dtype]
    if dtype == torch.bfloat16:
        atol = max(atol, 3e-2 * float(eager.abs().max()))
    rows = [
        torch.allclose(a[seen], b[seen], rtol=RTOL[dtype], atol=atol)
        for a, b, seen in zip(mine, eager, visible, strict=True)
    ]
    return sum(rows) / len(rows) >= 0.8


RULES = ("assert_parity", "its forward", "transformers", "assert_close")


def trials(dtype: torch.dtype, spread: float, seeds: int) -> list[Trial]:
    """The window model with weights of this spread."""
    tiny = models()["window"]
    config = copy.deepcopy(tiny.config)
    config.initializer_range = spread
    return [Trial(replace(tiny, config=config), dtype, seed) for seed in range(seeds)]


def main() -> None:
    """Print what each rule caught, and how often it complained of honest variants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--honest-seeds", type=int, default=10)
    parser.add_argument("--each", action="store_true", help="also a line for each mutant")
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    print(f"{len(MUTANTS)} mutants x {arguments.seeds} seeds; {len(HONEST)} honest x {arguments.honest_seeds} seeds\n")
    print("| dtype | weights | " + " | ".join(RULES) + " | false alarms: " + " | ".join(RULES) + " |")
    print("|---|---|" + "---|" * (2 * len(RULES)))
    lines = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for spread in (0.02, 0.2):
            missed: dict[str, list[str]] = {rule: [] for rule in RULES}
            for name, old, new in MUTANTS:
                seen = [trial.caught_by(changed(old, new)) for trial in trials(dtype, spread, arguments.seeds)]
                for rule in RULES:
                    if not any(one[rule] for one in seen):
                        missed[rule].append(name)
            alarms = dict.fromkeys(RULES, 0)
            total = 0
            for _, old, new in HONEST:
                for trial in trials(dtype, spread, arguments.honest_seeds):
                    total += 1
                    for rule, is_caught in trial.caught_by(changed(old, new)).items():
                        alarms[rule] += is_caught
            share = [f"{len(MUTANTS) - len(missed[rule])}/{len(MUTANTS)}" for rule in RULES]
            false = [f"{alarms[rule]}/{total}" for rule in RULES]
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {spread} | " + " | ".join([*share, *false]) + " |", flush=True)
            lines += [f"{name}, {spread}, missed by {rule}: {', '.join(missed[rule]) or 'none'}" for rule in RULES]
    if arguments.each:
        print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
