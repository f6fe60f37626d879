"""Why a test would run or not: what it needs, who said so, and what a host and each runner make of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.mask import MaskReading
from pytest_cudaenv.ledger.record import needs
from pytest_cudaenv.ledger.runners import RunnerHost
from pytest_cudaenv.ledger.suite import SuiteTest, Told
from pytest_cudaenv.requirements.reason import Reason
from pytest_cudaenv.requirements.requirement import Requirement, fitting, unmet
from pytest_cudaenv.requirements.sizes import format_memory

VERDICTS = {
    "run": "would run",
    "skip": "would skip",
    "deselect": "would be left out (--cuda-unmet=deselect)",
    "fail": "would fail (--cuda-unmet=fail)",
    "error": "would be an error",
}


@dataclass(frozen=True)
class Explanation:
    """One test on one host."""

    test: SuiteTest
    verdict: str
    """run, skip, deselect, fail or error."""
    runs_on: str | None = None
    """The kind of device that it would be granted, or CPU; None where it would not run."""
    reasons: tuple[Reason, ...] = ()
    process: str = "pytest process"
    """Where its body would run."""
    lease: int = 0
    """Devices that it would lease."""
    memory: int | None = None
    """Bytes on each; None: it takes them whole."""
    runners: tuple[tuple[str, tuple[Reason, ...]], ...] = ()
    """What each profile lacks for it."""

    def as_json(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return {
            "id": self.test.id,
            "needs": needs(self.test.requirement),
            "sources": [{"where": where, "needs": needs(part)} for where, part in self.test.sources],
            "cell": self.test.cell,
            "verdict": self.verdict,
            "runs_on": self.runs_on,
            "reasons": [_reason_data(reason) for reason in self.reasons],
            "skip": self.test.skips,
            "process": self.process,
            "lease": {"devices": self.lease, "memory": self.memory} if self.lease else None,
            "runners": {name: [_reason_data(reason) for reason in lacks] for name, lacks in self.runners},
        }

    def lines(self) -> list[str]:
        """For readers."""
        test = self.test
        rows = [("needs", in_words(test.requirement) or ["nothing that this plugin knows of"])]
        if test.sources:
            rows.append(("from", [f"{where}: {', '.join(in_words(part))}" for where, part in test.sources]))
        if test.cell is not None:
            rows.append(("cell", [test.cell]))
        rows.append(("verdict", self._verdict_lines()))
        if test.requirement.asks_for_device:
            rows.append(("runs in", [self._place()]))
        if self.runners:
            rows.append(("runners", [_runner_line(name, lacks) for name, lacks in self.runners]))
        lines = [test.id]
        for title, texts in rows:
            lines += [f"  {title if place == 0 else '':<8} {text}" for place, text in enumerate(texts)]
        return lines

    def _verdict_lines(self) -> list[str]:
        if self.test.skips is not None:
            return [f"would skip: the suite's own mark says so: {self.test.skips}"]
        if self.verdict == "run":
            return [f"{VERDICTS['run']} on {self.runs_on}"]
        lines = [VERDICTS[self.verdict]]
        for reason in self.reasons:
            lines += [str(reason), f"  {reason.remedy}"]
        return lines

    def _place(self) -> str:
        if not self.lease:
            return f"the {self.process}"
        devices = "1 device" if self.lease == 1 else f"{self.lease} devices"
        memory = "whole" if self.memory is None else f"{format_memory(self.memory)} of each"
        return f"a {self.process}; leases {devices}, {memory}"


def _reason_data(reason: Reason) -> dict[str, str]:
    return {"code": reason.code, "need": reason.need, "have": reason.have, "remedy": reason.remedy}


def _runner_line(name: str, lacks: Sequence[Reason]) -> str:
    return f"{name}: {' | '.join(str(reason) for reason in lacks) or 'would run'}"


def explain(
    test: SuiteTest, told: Told, host: Host, reading: MaskReading, runners: Iterable[RunnerHost] = ()
) -> Explanation:
    """What would become of a test on a host, under the settings that the run was told."""
    requirement = test.requirement
    reasons = unmet(requirement, host, reading)
    verdict = "run"
    if test.skips is not None:
        verdict = "skip"
    elif reasons:
        verdict = "error" if any(reason.is_error for reason in reasons) else told.unmet
    devices = fitting(requirement, host, reading.devices) or () if not reasons else ()
    # What it would lease on a host that meets it, where this one does not.
    wanted = len(devices) if verdict == "run" else requirement.device_count
    leases = wanted if told.isolation != "off" else 0
    process = "pytest process"
    if leases:
        is_own = requirement.isolated or told.isolation == "function"
        process = "device process of its own" if is_own else "device process"
    memory = None if requirement.exclusive or not leases else requirement.memory or told.default_memory
    return Explanation(
        test,
        verdict,
        (devices[0].name if devices else "CPU") if verdict == "run" else None,
        reasons,
        process,
        leases,
        memory,
        tuple((runner.name, runner.lacks(requirement)) for runner in runners),
    )


def in_words(requirement: Requirement) -> list[str]:
    """What a requirement asks for, a phrase for each part; empty where it asks for nothing."""
    r = requirement
    words: list[str] = []
    if r.devices:
        words.append("a CUDA device" if r.devices == 1 else f"{r.devices} CUDA devices")
    elif r.device_if_any:
        words.append("a CUDA device where there is one")
    words += [f"{format_memory(r.memory)} on each"] if r.memory else []
    words += [f"capability {text}" for text in r.capability]
    words += [f"a driver for CUDA {text}" for text in r.driver]
    words += ["no other test on its devices"] if r.exclusive else []
    words += [f"native {dtype}" for dtype in r.dtypes]
    taking = f" in {r.cell_dtype}" if r.cell_dtype else ""
    words += [f"attention {backend}{taking}" for backend in r.attn_backends]
    for kernel in r.hub_kernels:
        at = f" version {kernel.version}" if kernel.version is not None else f"@{kernel.revision or 'any'}"
        words.append(f"the Hub kernel {kernel.repo}{at.removesuffix('@any')}")
    words += ["kernels and transformers that fit"] if r.needs_kernels else []
    words += [f"quantization {method}" for method in r.quantization]
    words += [f"the package {spec}" for spec in r.packages]
    words += ["NCCL"] if r.nccl else []
    words += ["a device process of its own"] if r.isolated else []
    words += [f"a model class that has it ({reason})" for reason in r.model_reasons]
    return words
