"""Runs of one suite at several levels of isolation, and what of them must be the same."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RECORDER = '''
    """Writes down what pytest tells the plugins of the pytest process, or of xdist's controller."""
    import json
    import os

    PATH = os.path.abspath("recorded.jsonl")

    def write(config, kind, **data):
        if not hasattr(config, "workerinput"):
            with open(PATH, "a") as file:
                file.write(json.dumps({"kind": kind, **data}, default=repr) + "\\n")

    class Recorder:
        def __init__(self, config):
            self.config = config

        def pytest_runtest_logstart(self, nodeid, location):
            write(self.config, "start", nodeid=nodeid, location=location)

        def pytest_runtest_logreport(self, report):
            data = {
                name: getattr(report, name, None)
                for name in ("nodeid", "location", "when", "outcome", "longreprtext", "sections", "user_properties",
                             "wasxfail", "rerun", "extra_of_conftest", "cudaenv")
            }
            # How long a test waited for its devices is no behaviour: another worker may hold them, or not.
            data["cudaenv"] = {k: v for k, v in (data["cudaenv"] or {}).items() if k != "waited"}
            write(self.config, "report", **data, keywords=sorted(report.keywords), timed=report.duration >= 0,
                  ordered=report.stop >= report.start)

        def pytest_runtest_logfinish(self, nodeid, location):
            write(self.config, "finish", nodeid=nodeid, location=location)

        def pytest_warning_recorded(self, warning_message, when, nodeid, location):
            write(self.config, "warning", category=warning_message.category.__name__, text=str(warning_message.message),
                  lineno=warning_message.lineno, when=when, nodeid=nodeid, location=location)

        def pytest_sessionfinish(self, session, exitstatus):
            write(self.config, "end", exitstatus=int(exitstatus), failed=session.testsfailed,
                  shouldfail=session.shouldfail, shouldstop=session.shouldstop)

    def pytest_configure(config):
        config.pluginmanager.register(Recorder(config), "recording")
'''

ALIKE = (
    (r"0x[0-9a-f]+", "0x"),
    (r"\b\d+\.\d+ ?(s|ms|seconds)\b", "N s"),
    (r"\d+\.\d+s (call|setup|teardown)", r"N s \1"),
    (r"\(0:\d\d:\d\d\)", ""),
    (r"\d:\d\d:\d\d ago", "ago"),
    (r"pytest-\d+/", "pytest-N/"),
    (r"(~ \d+-|< ?|~ )\d+ ?ms", "N ms"),
    (r"\bgw\d\b", "gwN"),
    # In the line that reproduces a failure.
    (r"--cuda-isolation \w+", "--cuda-isolation LEVEL"),
    (r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)=\S+ ", ""),
    (r'(time|timestamp|hostname)="[^"]*"', r'\1=""'),
    (r"=+$|^=+|-+$|^-+|_+$|^_+", ""),
)
"""What differs between any two runs of one suite, and its replacement."""


@dataclass(frozen=True)
class Run:
    """What one run said."""

    ret: int
    lines: list[str]
    errors: list[str]
    records: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def outcomes(self) -> list[tuple[str, str, str]]:
        """(id, phase, outcome) of every report."""
        return [(r["nodeid"], r["when"], r["outcome"]) for r in self.of_kind("report")]


def alike(line: str) -> str:
    """A line without what differs between any two runs."""
    for pattern, replacement in ALIKE:
        line = re.sub(pattern, replacement, line)
    return line.rstrip()


def run(
    pytester: pytest.Pytester, level: str, *arguments: str, plugins: Sequence[str] = (), simulate: str = "h100:2"
) -> Run:
    """Run the suite in `pytester`'s folder at one level of isolation, with these plugins beside ours and none else."""
    recorded = pytester.path / "recorded.jsonl"
    recorded.unlink(missing_ok=True)
    (pytester.path / "recorder.py").write_text("\n".join(line[4:] for line in RECORDER.splitlines()))
    loaded = [word for name in ("cudaenv", "recorder", *plugins) for word in ("-p", name)]
    options = [*loaded, "--cuda-simulate", simulate, "--cuda-isolation", level, *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        result = pytester.runpytest_subprocess(*options)
    records = [json.loads(line) for line in recorded.read_text().splitlines()] if recorded.exists() else []
    lines = [alike(line) for line in result.outlines if not line.startswith("cudaenv: ")]
    return Run(int(result.ret), lines, [alike(line) for line in result.errlines], records)


def differences(one: Run, other: Run, *, ordered: bool = True) -> list[str]:
    """What two runs told pytest, or the user, differently: lines of a diff; empty where they are the same."""
    found: list[str] = []
    for kind in ("report", "start", "finish", "warning", "end"):
        found += _diff(
            kind, *([alike(json.dumps(r, sort_keys=True)) for r in x.of_kind(kind)] for x in (one, other)), ordered
        )
    found += _diff("stdout", one.lines, other.lines, ordered)
    found += _diff("stderr", one.errors, other.errors, ordered)
    return found + _diff("exit status", [str(one.ret)], [str(other.ret)], ordered)


def _diff(name: str, one: list[str], other: list[str], ordered: bool) -> list[str]:
    lines = ([*x] if ordered else sorted(map(_without_progress, x)) for x in (one, other))
    return list(difflib.unified_diff(*lines, f"{name} of one", f"{name} of the other", n=0, lineterm=""))


def _without_progress(line: str) -> str:
    """A line without what depends on the order of tests: percentages, and the letters before them."""
    return re.sub(r"\[ *\d+%\] ?|^[.FsxXERPu]+ +(?=\[)", "", line).rstrip()


def files(folder: Path) -> list[str]:
    """Names of all files below a folder, in order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
