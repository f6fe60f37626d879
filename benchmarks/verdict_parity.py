"""What a comparison of numbers costs, and how often it complains of cells that are right.

`parity`: the time of one `assert_parity` as a ratio to the bare forward of its model, on a tiny model and a larger one,
with and without the gradients. `honest`: seeds x models x backends x dtypes on the CPU, forward, backward and generated
tokens; how many were refused, and the largest share of what is allowed that any of them needed.
"""

from __future__ import annotations

import argparse
import contextlib
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
    """The same with hidden size 512, heads of 64, four layers; its queries per key stay as they are."""
    config = copy.deepcopy(tiny.config)
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        if part is None or not hasattr(part, "num_attention_heads"):
            continue
        tiny_size = part.hidden_size
        shared = part.num_attention_heads // getattr(part, "num_key_value_heads", part.num_attention_heads)
        part.hidden_size, part.intermediate_size, part.num_hidden_layers = 512, 1024, 4
        part.num_attention_heads = 8
        if hasattr(part, "initializer_range"):
            # Products of as many more numbers, of about the same size: else gradients are noise in half precision.
            part.initializer_range *= (tiny_size / 512) ** 0.5
        if hasattr(part, "num_key_value_heads"):
            part.num_key_value_heads, part.head_dim = 8 // shared, 64
    return replace(tiny, name=f"{tiny.name} (hidden 512, 4 layers)", config=config)


def parity(device: torch.device, rounds: int = 7) -> None:
    """Print the cost."""
    for tiny, batch, length in ((models()["llama"], 7, 12), (larger(models()["llama"]), 4, 128)):
        model = tiny.build("sdpa", torch.float32).to(device)
        inputs = {name: value.to(device) for name, value in tiny.inputs(batch=batch, length=length).items()}

        def forward(model: Any = model, inputs: Any = inputs) -> None:
            with torch.no_grad():
                model(**inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()

        checked = AssertParity(cell("sdpa", torch.float32, device))

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
        print(f"parity on {device.type}, {tiny.name}, ratio to a forward of {1000 * bare:.1f} ms: {told}", flush=True)


def forced(name: str) -> tuple[str, contextlib.AbstractContextManager[Any]]:
    """A backend by name, and what forces its kernel: `sdpa:MATH`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend, _, kernel = name.partition(":")
    return backend, sdpa_kernel(getattr(SDPBackend, kernel)) if kernel else contextlib.nullcontext()


def on(device: torch.device, tiny: Tiny, seed: int, *, is_padded: bool = True) -> dict[str, Any]:
    """What the model is called with, there."""
    inputs = tiny.inputs(seed, padding=5 if is_padded else 0)
    return {name: value.to(device) for name, value in inputs.items() if is_padded or name != "attention_mask"}


def honest(seeds: int, names: list[str], backends: list[str], dtypes: list[str], device: torch.device) -> None:
    """Print the false alarms.

    On a CUDA device the models have hidden size 512: FlashAttention's kernels take no head of eight. sdpa's flash
    kernel takes no mask, so that cells with a forced kernel go without padding.
    """
    refused = cells = rows = 0
    found = models()
    for tiny in (larger(found[name]) if device.type == "cuda" else found[name] for name in names):
        for named in backends:
            for dtype in (getattr(torch, name) for name in dtypes):
                backend, _ = forced(named)
                if backend.startswith("flash") and dtype == torch.float32:
                    continue
                largest, at, has_backward = 0.0, "", True
                note = ""
                for seed in range(seeds):
                    checked = AssertParity(cell(backend, dtype, device))
                    generate = 0 if tiny.has_image else 4
                    inputs = on(device, tiny, seed, is_padded=":" not in named)
                    cells += 1
                    try:
                        model = tiny.build(backend, dtype, seed).to(device)
                        with forced(named)[1]:
                            checked(model, **inputs, backward=has_backward, generate=generate)
                    except RuntimeError as error:
                        if "No available kernel" in str(error):
                            note = "; this kernel takes no such call"
                            cells -= 1
                            break
                        if "does not support backward" not in str(error):
                            raise
                        has_backward, note = False, "; this build has no backward"
                        with forced(named)[1]:
                            checked(model, **inputs, generate=generate)
                    except ParityError as error:
                        refused += 1
                        print(str(error).splitlines()[0], flush=True)
                    for result in checked.found:
                        rows += len(result.rows)
                        if result.ratio > largest:
                            largest, at = result.ratio, result.worst
                print(
                    f"honest, {tiny.name} {named} {str(dtype).removeprefix('torch.')}: "
                    f"at most {largest:.2f} of what is allowed, {at}" + note,
                    flush=True,
                )
    print(f"honest: {refused} of {cells} refused ({seeds} seeds, {rows} rows, {device})")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--models", nargs="*", default=list(models()), help="of the honest cells")
    parser.add_argument("--backends", nargs="*", default=["eager", "sdpa"], help="the same; also `sdpa:MATH`")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "float16"], help="the same")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="the same")
    parser.add_argument("--honest-only", action="store_true")
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    if not arguments.honest_only:
        parity(arguments.device)
    honest(arguments.seeds, arguments.models, arguments.backends, arguments.dtypes, arguments.device)


if __name__ == "__main__":
    main()
