"""`pytest-cudaenv merge`: reads ledgers, judges what they say together, and writes that in several forms."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pytest_cudaenv.ledger.judge import KINDS, Verdict, judge
from pytest_cudaenv.ledger.merge import to_lines
from pytest_cudaenv.ledger.merge_text import lines
from pytest_cudaenv.ledger.quarantine import Entry, QuarantineError, parse_quarantine
from pytest_cudaenv.ledger.read import LedgerError, Reading, read
from pytest_cudaenv.ledger.results import Results, united

FINE, RED, UNREADABLE = 0, 1, 2

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
SUFFIXES = (".json", ".jsonl")
"""Of the files that are read in a folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    red = ", ".join(kind for kind, about in KINDS.items() if about.is_red)
    rest = ", ".join(kind for kind, about in KINDS.items() if not about.is_red)
    parser.add_argument(
        "ledgers", nargs="+", metavar="LEDGER", help="ledgers, --json files of earlier merges, or folders of them"
    )
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="RUNNER",
        help="a runner of which a ledger must be here; repeat for more",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KIND",
        choices=KINDS,
        help=f"let this pass: {red}; repeat for more",
    )
    parser.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="KIND",
        choices=KINDS,
        help=f"fail for this, too: {rest}; repeat for more",
    )
    parser.add_argument("--quarantine", metavar="FILE", help="tests that may fail until a date, as TOML")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="FILE",
        help="an earlier merge: tell what drifted from it, or no longer runs",
    )
    parser.add_argument(
        "--json", metavar="OUT", help="write what the ledgers say, for a later merge or as its baseline"
    )
    parser.add_argument("--markdown", metavar="OUT", help="write the verdict as Markdown")
    parser.add_argument("--junit", metavar="OUT", help="write the verdict as JUnit XML, a suite per kind of device")
    parser.add_argument("--html", metavar="OUT", help="write the verdict as one page that needs nothing else")
    parser.add_argument(
        "--github", action="store_true", help=f"add the Markdown to ${STEP_SUMMARY}, and print annotations"
    )


@dataclass
class _Files:
    """What was read, and what could not be."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def read(self, paths: Sequence[str]) -> Iterator[Results]:
        """The results of each file that can be read, one at a time; the others are told of and left out."""
        for path in paths:
            try:
                for file in _files_in(path):
                    reading = self._read_one(file)
                    if reading is not None:
                        self.notes += reading.notes
                        yield reading.results
            except LedgerError as error:
                self.problems.append(str(error))

    def _read_one(self, path: str) -> Reading | None:
        try:
            return read(path)
        except LedgerError as error:
            self.problems.append(str(error))
            return None


def _files_in(path: str) -> list[str]:
    """The file itself, or the ledgers in a folder and its folders. Raises LedgerError where there are none."""
    if not os.path.isdir(path):
        return [path]
    found = sorted(str(file) for file in Path(path).rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise LedgerError(f"{path}: no {' or '.join(SUFFIXES)} file is in this folder")
    return found


def merge(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the verdict and write its files: 0 where all is fine, 1 where something is red, 2 for unreadable files."""
    with _without_collector():
        return _merge(options, environ)


def _merge(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    files = _Files()
    results = united(files.read(options.ledgers))
    baseline = united(files.read(options.baseline)) if options.baseline else None
    entries: tuple[Entry, ...] = ()
    if options.quarantine:
        try:
            entries = parse_quarantine(Path(options.quarantine).read_text(encoding="utf-8"))
        except QuarantineError as error:
            files.problems.append(f"{options.quarantine}: {error}")
        except (OSError, UnicodeDecodeError) as error:
            files.problems.append(f"{options.quarantine}: cannot be read: {getattr(error, 'strerror', None) or error}")
    for note in files.notes:
        _print(f"pytest-cudaenv: note: {note}", sys.stderr)
    status = FINE
    if results.runs:
        verdict = judge(
            results,
            today=datetime.date.today(),
            expected=options.expect,
            allow=options.allow,
            forbid=options.forbid,
            quarantine=entries,
            baseline=baseline,
        )
        for line in lines(verdict):
            _print(line)
        files.problems += _write(verdict, options, environ)
        status = RED if verdict.is_red else FINE
    else:
        files.problems.append("no ledger is left to merge")
    # Last, where the reader of a long log looks.
    for problem in files.problems:
        _print(f"pytest-cudaenv: error: {problem}", sys.stderr)
        if options.github:
            from pytest_cudaenv.ledger.merge_markdown import command

            _print(command("error", {"title": "cudaenv: not merged"}, problem))
    return UNREADABLE if files.problems else status


def _write(verdict: Verdict, options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Write every file that was asked for; what could not be written."""
    problems: list[str] = []

    def write(path: str | None, pieces: Iterable[str], mode: str = "w") -> None:
        if path is None:
            return
        try:
            # Ids may hold what no encoding can write.
            with open(path, mode, encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.writelines(pieces)
        except OSError as error:
            problems.append(f"{path}: cannot be written: {error.strerror}")

    if options.json:
        write(options.json, (f"{line}\n" for line in to_lines(verdict.results)))
    if options.markdown or options.github:
        from pytest_cudaenv.ledger.merge_markdown import annotation_lines, markdown

        text = markdown(verdict)
        write(options.markdown, [text])
        if options.github:
            summary = environ.get(STEP_SUMMARY)
            if summary:
                write(summary, [text], "a")
            else:
                problems.append(f"--github: the variable {STEP_SUMMARY} is not set: this is no step of a workflow")
            for line in annotation_lines(verdict, Path.cwd()):
                _print(line)
    if options.junit:
        from pytest_cudaenv.ledger.merge_junit import junit

        write(options.junit, junit(verdict))
    if options.html:
        from pytest_cudaenv.ledger.merge_page import page

        write(options.html, page(verdict))
    return problems


def _print(line: str, file: TextIO | None = None) -> None:
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=file)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of objects are made here, none of them in a cycle: looking for cycles takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
