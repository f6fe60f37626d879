"""The ledger: a file of JSON lines that tells of each test what it needed, whether it ran, and on what.

It is written while the run goes on, so that what is there is true however the run ends. `schema.json` beside this
file is the format. Pure but for the file: what goes in are facts and plain data.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.mask import VISIBLE_DEVICES, MaskReading
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.reason import Rank, Reason
from pytest_cudaenv.requirements.requirement import Requirement

VERSION = 1
"""Of the format; a reader refuses those that it does not know."""

IDS_PER_LINE = 1000

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
"""`json.dumps` would make an encoder for each line."""

INTERESTING = (
    "torch", "triton", "transformers", "accelerate", "kernels", "peft", "diffusers", "vllm", "flash-attn",
    "flash-attn-3", "flash-attn-4", "bitsandbytes", "torchao", "numpy", "pytest", "pytest-xdist", "nvidia-ml-py",
)  # fmt: skip
"""Distributions whose versions a ledger tells."""


def now() -> str:
    """The time, as ledgers write it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def run_facts(
    host: Host,
    reading: MaskReading,
    environ: Mapping[str, str],
    *,
    plugin: str,
    python: str,
    pytest: str,
    provenance: Mapping[str, str],
    promises: Sequence[str] = (),
    runner: str | None = None,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """The first line of a ledger: the host, its software, and what the run was told."""
    torch = host.software.torch
    distributions = {name: host.software.distributions.get(name) for name in INTERESTING}
    return _known(
        {
            "kind": "run",
            "ledger": VERSION,
            "plugin": plugin,
            "started": now(),
            "runner": runner,
            "simulated": host.simulated,
            "promises": list(promises),
            "host": _known(
                {
                    "devices": [
                        _known(
                            {
                                "uuid": d.uuid,
                                "name": d.name,
                                "capability": d.capability and "{}.{}".format(*d.capability),
                                "memory": d.total_memory,
                                "mig": d.is_mig or None,
                            }
                        )
                        for d in host.devices
                    ],
                    "visible": [d.uuid for d in reading.devices],
                    "mask": environ.get(VISIBLE_DEVICES),
                    "driver": host.driver,
                    "driver_cuda": host.driver_cuda and "{}.{}".format(*host.driver_cuda),
                    "problem": host.problem and {"code": host.problem.code, "have": host.problem.have},
                },
                keep=("devices", "visible", "mask"),
            ),
            "software": _known(
                {
                    "python": python,
                    "pytest": pytest,
                    "torch_build": None if torch is None else torch_build(torch.cuda, torch.hip),
                    "distributions": {name: version for name, version in distributions.items() if version is not None},
                },
                keep=("distributions",),
            ),
            "settings": [{"setting": setting, "origin": origin} for setting, origin in provenance.items()],
            "arguments": list(arguments),
        }
    )


def torch_build(cuda: str | None, hip: str | None) -> str:
    """`CUDA 13.0`, `ROCm 6.4` or `CPU`."""
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"


def _known(facts: dict[str, Any], keep: Iterable[str] = ()) -> dict[str, Any]:
    """The facts without those that are unknown or empty."""
    kept = set(keep)
    return {k: v for k, v in facts.items() if not (v is None or v in ("", [], {}, ())) or (k in kept and v is not None)}


def needs(requirement: Requirement) -> dict[str, Any]:
    """The fields of a requirement that are not at their default, as plain data."""
    default = Requirement()
    return {
        f.name: _plain(value)
        for f in dataclasses.fields(requirement)
        if (value := getattr(requirement, f.name)) != getattr(default, f.name)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(v) for f in dataclasses.fields(value) if (v := getattr(value, f.name)) is not None}
    return value


def requirement_from(needed: Mapping[str, Any]) -> Requirement:
    """The requirement that `needs` made this of, also after a way through JSON.

    Raises ValueError that names what is no field of a requirement, or not of its kind: never a need that is lost.
    """
    fields = {f.name: f for f in dataclasses.fields(Requirement)}
    values: dict[str, Any] = {}
    for name, value in needed.items():
        if name not in fields:
            raise ValueError(f"needs: {name!r} is not known here: it may come from a newer pytest-cudaenv")
        default = fields[name].default
        try:
            values[name] = _read_field(name, value, default)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"needs: {name}: {value!r} cannot be read ({error})") from None
    return Requirement(**values)


def _read_field(name: str, value: Any, default: object) -> Any:
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)):
            raise TypeError("is no list")
        return tuple(_read_one(name, one) for one in value)
    wanted = str if default is None else type(default)
    if type(value) is not wanted:
        raise TypeError(f"is no {wanted.__name__}")
    return value


def _read_one(name: str, value: Any) -> Any:
    if name == "hub_kernels":
        return HubKernel(**value)
    if name == "model_reasons":
        return Reason(**{**value, "rank": Rank(value["rank"])})
    if not isinstance(value, str):
        raise TypeError("is no text")
    return value


@dataclass
class _Test:
    """What the reports of a test have told so far."""

    nodeid: str
    outcome: str = "passed"
    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    again: bool = False
    """What is reported until its next setup is the rest of an attempt that is repeated."""
    message: str | None = None
    skip: str | None = None
    worker: str | None = None
    record: dict[str, Any] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        if report.when == "setup":
            self.again = False
        if report.outcome == "rerun":
            self.attempts += not self.again
            self.again = True
            self.outcome, self.message, self.skip = "passed", None, None
            return
        self.worker = report.worker or self.worker
        found = self.record.get("findings", [])
        self.record.update(report.record)
        if found and report.record.get("findings"):
            self.record["findings"] = [*found, *report.record["findings"]]
        self.seconds[report.when] = round(self.seconds.get(report.when, 0.0) + report.seconds, 4)
        if report.outcome == "failed":
            is_error = report.when in {"setup", "teardown"}
            if self.outcome != "failed":
                self.outcome = "error" if is_error else "failed"
            self.message = self.message or report.message
        elif report.outcome == "skipped" and self.outcome == "passed":
            self.outcome = "xfailed" if report.xfail else "skipped"
            self.skip = None if report.xfail or self.record.get("reasons") else report.message
        elif report.outcome == "passed" and report.xfail and report.when == "call":
            self.outcome = "xpassed"


class Report(NamedTuple):
    """What a ledger reads of one of pytest's reports. A tuple: three of them are made for each test."""

    nodeid: str
    when: str
    """setup, call or teardown."""
    outcome: str
    """passed, failed, skipped or rerun."""
    seconds: float = 0.0
    message: str | None = None
    """The first line of a failure, or the text of a skip."""
    xfail: bool = False
    worker: str | None = None
    record: Mapping[str, Any] = MappingProxyType({})
    """What the plugin has put on the report."""


class Ledger:
    """Writes one ledger."""

    def __init__(self, file: IO[str], run: Mapping[str, Any]) -> None:
        self._file = file
        self._tests: dict[str, _Test] = {}
        self._last: _Test | None = None
        self._requirements: dict[str, int] = {}
        self._write(run)

    def collected(self, ids: Sequence[str]) -> None:
        """Tell which tests were selected: those that are never told of again did not run."""
        for start in range(0, len(ids), IDS_PER_LINE):
            self._write({"kind": "collected", "ids": list(ids[start : start + IDS_PER_LINE])})

    def add(self, report: Report) -> None:
        """Take in a report; the test is written with its last one."""
        test = self._tests.get(report.nodeid)
        if test is None:
            # A process that ends late can still tell something of the test that ran last: it is then written again.
            is_late = self._last is not None and self._last.nodeid == report.nodeid and report.when == "teardown"
            test = self._last if is_late and self._last is not None else _Test(report.nodeid)
            self._tests[report.nodeid] = test
        test.add(report)
        if report.when not in {"setup", "call"} and not test.again:
            self._finish(test)

    def unrun(self, nodeid: str, outcome: str, record: Mapping[str, Any]) -> None:
        """Tell of a test, or of a whole module, of which there will be no report: why it does not run."""
        self._finish(_Test(nodeid, outcome=outcome, record=dict(record)))

    def end(self, status: int, seconds: float) -> None:
        """Tell of the tests that had no last report, and how the run ended."""
        for test in list(self._tests.values()):
            self._finish(test)
        self._write({"kind": "end", "finished": now(), "status": status, "seconds": round(seconds, 3)})
        self._file.close()

    def _finish(self, test: _Test) -> None:
        self._tests.pop(test.nodeid, None)
        self._last = test
        record = test.record
        if not (record or test.skip or test.message) and test.attempts == 1:
            self._write_text(_plain_line(test))
            return
        reasons = [{k: v for k, v in r.items() if k != "rank"} for r in record.get("reasons", ())]
        line = {
            "kind": "test",
            "id": test.nodeid,
            "outcome": test.outcome,
            "cell": record.get("cell"),
            "requirement": self._requirement(record),
            "reasons": reasons,
            "skip": record.get("skip") or test.skip,
            "ran_on": record.get("ran_on") if test.outcome not in {"skipped", "deselected"} else None,
            "devices": record.get("devices"),
            "process": record.get("process"),
            "worker": test.worker,
            "seconds": test.seconds,
            "waited": (record.get("waited") or {}).get("seconds"),
            "memory": record.get("memory"),
            "attempts": test.attempts if test.attempts > 1 else None,
            "idle": record.get("idle"),
            "findings": record.get("findings"),
            "witness": record.get("witness"),
            "parity": record.get("parity"),
            "cells": record.get("cells"),
            "kernels": record.get("kernels"),
            "breach": record.get("breach"),
            "unmarked": record.get("unmarked"),
            "message": test.message if test.outcome in {"failed", "error"} else None,
        }
        self._write(_known(line))

    def _requirement(self, record: Mapping[str, Any]) -> int | None:
        """The number under which this ledger tells of a requirement and its sources; told once."""
        if not record.get("needs"):
            return None
        told = {"needs": record["needs"], "sources": record.get("sources", [])}
        key = repr(told)  # of plain data in one order; JSON takes thrice as long
        number = self._requirements.get(key)
        if number is None:
            number = self._requirements[key] = len(self._requirements)
            self._write({"kind": "requirement", "number": number, **told})
        return number

    def _write(self, line: Mapping[str, Any]) -> None:
        self._write_text(_encode(line))

    def _write_text(self, line: str) -> None:
        # One write for each line: who is killed between two leaves whole lines.
        self._file.write(line + "\n")
        self._file.flush()


def _plain_line(test: _Test) -> str:
    """The line of a test of which there is nothing to tell but its time: most tests of most suites."""
    seconds = ",".join([f'"{when}":{time}' for when, time in test.seconds.items()])
    worker = f',"worker":{_encode(test.worker)}' if test.worker is not None else ""
    return f'{{"kind":"test","id":{_encode(test.nodeid)},"outcome":"{test.outcome}"{worker},"seconds":{{{seconds}}}}}'
