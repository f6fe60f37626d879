"""What a witness costs, as a ratio to the bare forward of a tiny model, on the CPU or the first CUDA device.

Blocks of both in turn, as tests of cells come after one another, so that a machine whose speed drifts slows both; the
median of the blocks' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 800
BLOCK = 20
CHEAP_LIMIT = 1.05


def tiny_llama(device: Any) -> tuple[Any, Callable[[], None]]:
    """A model of two layers, and its forward: what is done for a test, no more than the smallest of them does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval().to(device)
    ids = torch.arange(24, device=device).reshape(2, 12)

    def forward() -> None:
        with torch.no_grad():
            model(ids)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return model, forward


def witnessed(forward: Callable[[], Any]) -> dict[str, tuple[Callable[[], Any], Callable[[], None]]]:
    """The forward under the cheap witness, with all that is done for a test, and under the full one.

    Each with what is done where a test follows that nobody watches.
    """
    from pytest_cudaenv.verdict.attention_taps import Taps
    from pytest_cudaenv.verdict.cell_witness import CellRecorder, judge
    from pytest_cudaenv.verdict.witness import watch

    recorder = CellRecorder()
    taps = Taps(recorder)

    def cheap() -> None:
        recorder.start(("sdpa",))
        taps.begin()
        taps.install()  # once before the fixtures, once before the body
        forward()
        assert not judge(("sdpa",), recorder.counts, recorder.others, has_compiled=False)
        taps.pause()

    def full() -> None:
        with watch() as seen:
            forward()
        seen.assert_ran("sdpa")

    return {"cheap witness": (cheap, taps.remove), "attn_witness": (full, lambda: None)}


def main() -> None:
    """Print each form's ratio."""
    import torch

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, bare = tiny_llama(device)
    for name, (form, leave) in witnessed(bare).items():
        alone, with_it = pairs(bare, form, block=BLOCK, leave=leave)
        blocks = range(0, len(alone), BLOCK)
        ratio = statistics.median(
            statistics.median(with_it[at : at + BLOCK]) / statistics.median(alone[at : at + BLOCK]) for at in blocks
        )
        limit = f" (limit {CHEAP_LIMIT})" if name.startswith("cheap") else ""
        base = statistics.median(alone) * 1e3
        print(f"verdict, {name} on {device.type}: {ratio:.3f} of a forward of {base:.1f} ms{limit}")


def pairs(
    bare: Callable[[], Any],
    form: Callable[[], Any],
    *,
    rounds: int = ROUNDS,
    block: int = 1,
    leave: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Seconds of both, round by round; which comes first changes, as each pays for garbage that the other left.

    `block`: so many of one before the other's turn, as tests of a suite come; `leave` is called after the form's.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    for place in range(-2, rounds // block):
        for which in (0, 1) if place % 2 else (1, 0):
            for _ in range(block):
                started = time.perf_counter()
                (bare, form)[which]()
                if place >= 0:
                    taken[which].append(time.perf_counter() - started)
            if which:
                leave()
    return taken


if __name__ == "__main__":
    main()
