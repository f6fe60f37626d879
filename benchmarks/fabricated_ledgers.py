"""Ledgers as a model suite's runs on several runners would have left them, of any size; for benchmarks and tests.

Everything follows from a seed. What runs where follows from simple rules that are like the plugin's own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = ("llama", "mistral", "qwen3", "gemma3", "falcon", "gpt_neox", "bert", "t5", "whisper", "clip", "vit", "mamba")
BACKENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
DTYPES = ("fp32", "fp16", "bf16")

Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A test of the suite."""

    id: str
    cell: str | None = None
    needs: tuple[tuple[str, Any], ...] = ()
    seconds: float = 0.01
    """On an H200."""
    memory: int = 0


@dataclass(frozen=True)
class Profile:
    """A runner: its name, the kind and number of its devices, and what is installed there."""

    name: str
    device: str | None = None
    count: int = 0
    capability: str = "9.0"
    memory: int = 140 * 1024**3
    flash_attention: bool = True
    promises: tuple[str, ...] = ()
    slowness: float = 1.0


CPU = Profile("cpu", slowness=8.0)
A10G = Profile("a10g", "NVIDIA A10G", 1, "8.6", 22 * 1024**3, slowness=3.0)
H200 = Profile("h200", "NVIDIA H200", 1, promises=("capability>=9.0",))
H200X2 = Profile("h200x2", "NVIDIA H200", 2, promises=("devices>=2",))


def suite(size: int, seed: int = 0) -> list[Case]:
    """That many tests: half of them plain, the others in cells or with requirements."""
    draw = random.Random(seed)
    cases: list[Case] = []
    number = 0
    while len(cases) < size:
        model = MODELS[number % len(MODELS)]
        file = f"tests/models/{model}/test_modeling_{model}_{number // 400}.py"
        name = f"test_{draw.choice(('forward', 'generate', 'save_load', 'tokenize', 'beam_search'))}_{number}"
        number += 1
        kind = draw.random()
        seconds = draw.lognormvariate(-3.5, 1.6)
        memory = int(draw.lognormvariate(5.5, 1.3)) * 1024**2
        if kind < 0.5:
            cases.append(Case(f"{file}::{name}", seconds=seconds))
        elif kind < 0.55:
            needs = (("devices", draw.choice((1, 1, 2))), ("memory", draw.choice((8, 30)) * 1024**3))
            cases.append(Case(f"{file}::TestParallel::{name}", None, needs, seconds * 3, memory * 4))
        else:
            for backend in BACKENDS:
                for dtype in DTYPES:
                    if not (backend.startswith("flash") and dtype == "fp32"):
                        cell = f"{backend}-{dtype}"
                        needs = (("attn_backends", (backend,)), ("cell_dtype", dtype), ("device_if_any", True))
                        cases.append(Case(f"{file}::{name}[{cell}]", cell, needs, seconds, memory))
    return cases[:size]


def ledger(
    cases: Sequence[Case],
    profile: Profile,
    *,
    seed: int = 0,
    started: str = "2026-11-30T08:00:00+00:00",
    failing: float = 0.0005,
) -> Iterator[Line]:
    """The lines of the ledger that a run of those tests on that runner leaves."""
    draw = random.Random(f"{seed} {profile.name}")
    devices = [f"GPU-{n:08x}-0000-0000-0000-{len(profile.name):012x}" for n in range(profile.count)]
    yield run_line(profile, devices, started, seed)
    for start in range(0, len(cases), 1000):
        yield {"kind": "collected", "ids": [case.id for case in cases[start : start + 1000]]}
    numbers: dict[tuple[tuple[str, Any], ...], int] = {}
    seconds = 0.0
    for case in cases:
        if case.needs and case.needs not in numbers:
            number = numbers[case.needs] = len(numbers)
            needs = {name: list(value) if isinstance(value, tuple) else value for name, value in case.needs}
            yield {
                "kind": "requirement",
                "number": number,
                "needs": needs,
                "sources": [{"where": "@dtypes", "needs": needs}],
            }
        line = result_line(case, profile, devices, draw, failing)
        if case.needs:
            line["requirement"] = numbers[case.needs]
        seconds += sum(line.get("seconds", {}).values())
        yield line
    yield {"kind": "end", "finished": "2026-11-30T09:00:00+00:00", "status": 0, "seconds": round(seconds, 3)}


def run_line(profile: Profile, devices: Sequence[str], started: str, seed: int = 0) -> Line:
    """The first line."""
    hosts = [
        {"uuid": uuid, "name": profile.device, "capability": profile.capability, "memory": profile.memory}
        for uuid in devices
    ]
    line: Line = {
        "kind": "run",
        "ledger": 1,
        "plugin": "0.1.0",
        "started": started,
        "runner": profile.name,
        "host": {"devices": hosts, "visible": list(devices)},
        "software": {
            "python": "3.12.3",
            "pytest": "9.2.0",
            "torch_build": "CUDA 13.0" if devices else "CPU",
            "distributions": {"torch": "2.13.0", "transformers": "5.22.2"},
        },
        "arguments": ["tests", "-p", f"seed={seed}"],
    }
    if profile.promises:
        line["promises"] = list(profile.promises)
    if devices:
        line["host"] |= {"driver": "580.159.04", "driver_cuda": "13.0"}
    return line


def result_line(case: Case, profile: Profile, devices: Sequence[str], draw: random.Random, failing: float) -> Line:
    """What the run tells of one test."""
    line: Line = {"kind": "test", "id": case.id, "outcome": "passed"}
    if case.cell:
        line["cell"] = case.cell
    if reasons := reasons_of(case, profile):
        return {**line, "outcome": "skipped", "reasons": reasons, "seconds": {"setup": 0.0003}}
    needs = dict(case.needs)
    on_device = bool(devices) and bool(needs)
    if needs:
        line["ran_on"] = profile.device if on_device else "CPU"
    call = round(case.seconds * (1.0 if on_device else CPU.slowness) * draw.uniform(0.9, 1.1) * profile.slowness, 4)
    line["seconds"] = {"setup": round(call / 10, 4), "call": call, "teardown": 0.0004}
    if on_device:
        count = max(int(needs.get("devices", 1)), 1)
        line |= {"devices": list(devices[:count]), "process": draw.randrange(1000, 60000), "memory": case.memory}
        line["worker"] = f"gw{draw.randrange(8)}"
        if draw.random() < 0.003:
            line["idle"] = True
    if draw.random() < failing:
        line |= {"outcome": "failed", "message": "AssertionError: off by 0.0123, where eager's own error allows 0.004"}
    elif draw.random() < 0.001:
        line["attempts"] = 2
    return line


def reasons_of(case: Case, profile: Profile) -> list[dict[str, str]]:
    """Why the runner cannot run the test."""
    needs = dict(case.needs)
    count = int(needs.get("devices", 0))
    found: list[tuple[str, str, str, str]] = []
    if count > profile.count:
        need = "needs a CUDA device" if count == 1 else f"needs {count} CUDA devices"
        code, have = ("cuda-devices", str(profile.count)) if profile.count else ("cuda-none", "none")
        found.append((code, need, have, "Run it on a runner with as many GPUs, or widen the mask."))
    if count and profile.count and needs.get("memory", 0) > profile.memory:
        have = f"{profile.memory / 1024**3:.1f} GiB ({profile.device})"
        found.append(("cuda-memory", "needs 30.0 GiB of memory", have, "Run it on a device with that much memory."))
    cell = case.cell or ""
    if cell.startswith("flash"):
        name = "FA2" if "_2" in cell else "FA3"
        if not profile.device:
            found.append(
                ("attn-device", f"{name} needs a CUDA device", "the CPU", "Run it on a CUDA device, or use sdpa.")
            )
        elif name == "FA3" and not profile.capability.startswith("9"):
            have = f"{profile.capability} ({profile.device})"
            found.append(("attn-capability", "FA3 needs sm_90", have, "The package has code for Hopper."))
        if not profile.flash_attention:
            found.append(("attn-missing", f"{name} needs flash-attn", "none", "Run pip install flash-attn."))
    return [dict(zip(("code", "need", "have", "remedy"), reason, strict=True)) for reason in found]


def write(path: Path, lines: Iterable[Line]) -> str:
    """Write a ledger; its path as text."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
    return str(path)
