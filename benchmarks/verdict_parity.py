"""What a comparison of numbers costs, and how often it complains of cells that are right.

`parity`: the time of one `assert_parity` as a ratio to the bare forward of its model, on a tiny model and a larger one,
with and without the gradients. `honest`: seeds x models x backends x dtypes on the CPU, forward, backward and generated
tokens; how many were refused, and the largest share of what is allowed that any of them needed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pytest_cudaenv.verdict.parity import AssertParity
from pytest_cudaenv.verdict.parity_numbers import ParityError
from tests.verdict.parity_models import Tiny, cell, models

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """The median of some calls, after one that is not counted."""
    call()
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def larger(tiny: Tiny) -> Tiny:
    """The same with hidden size 512, four layers."""
    config = copy.deepcopy(tiny.config)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 1024, 4
    config.head_dim = 64
    config.num_attention_heads = config.num_key_value_heads = 8
    return replace(tiny, name="hidden 512, 4 layers", config=config)


def parity(rounds: int = 7) -> None:
    """Print the cost."""
    for tiny, batch, length in ((models()["llama"], 7, 12), (larger(models()["llama"]), 4, 128)):
        model, inputs = tiny.build("sdpa", torch.float32), tiny.inputs(batch=batch, length=length)

        def forward(model: Any = model, inputs: Any = inputs) -> None:
            with torch.no_grad():
                model(**inputs)

        checked = AssertParity(cell("sdpa", torch.float32))

        def compare(
            again: bool, checked: Any = checked, model: Any = model, inputs: Any = inputs, **options: Any
        ) -> None:
            if not again:
                checked.clear()
            checked(model, **inputs, **options)

        bare = seconds(forward, rounds)
        costs = {
            "first": seconds(lambda: compare(False), rounds),
            "further ones of a test": seconds(lambda: compare(True), rounds),
            "first, with gradients": seconds(lambda: compare(False, backward=True), rounds),
        }
        told = ", ".join(f"{name} {cost / bare:.1f} ({1000 * cost:.0f} ms)" for name, cost in costs.items())
        print(f"parity, {tiny.name}, ratio to a forward of {1000 * bare:.1f} ms: {told}", flush=True)


def honest(seeds: int, names: list[str]) -> None:
    """Print the false alarms."""
    refused = cells = rows = 0
    for tiny in (models()[name] for name in names):
        for backend in ("eager", "sdpa"):
            for dtype in DTYPES:
                largest, at = 0.0, ""
                for seed in range(seeds):
                    checked = AssertParity(cell(backend, dtype))
                    generate = 0 if tiny.has_image else 4
                    cells += 1
                    try:
                        checked(tiny.build(backend, dtype, seed), **tiny.inputs(seed), backward=True, generate=generate)
                    except ParityError as error:
                        refused += 1
                        print(str(error).splitlines()[0], flush=True)
                    for result in checked.found:
                        rows += len(result.rows)
                        if result.ratio > largest:
                            largest, at = result.ratio, result.worst
                name = str(dtype).removeprefix("torch.")
                print(
                    f"honest, {tiny.name} {backend} {name}: at most {largest:.2f} of what is allowed, {at}", flush=True
                )
    print(f"honest: {refused} of {cells} refused ({seeds} seeds, {rows} rows)")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--models", nargs="*", default=list(models()), help="of the honest cells")
    parser.add_argument("--honest-only", action="store_true")
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    if not arguments.honest_only:
        parity()
    honest(arguments.seeds, arguments.models)


if __name__ == "__main__":
    main()
