"""`pytest-cudaenv`: what decides a skip here, why a test runs and on which runner, what ran where over all of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_cudaenv._version import __version__
from pytest_cudaenv.host.catalog import UnknownDeviceError, simulated_host
from pytest_cudaenv.host.detect import detect_host
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.mask import INVALID_DEVICE, MaskReading, read_environment
from pytest_cudaenv.host.software import installed_software

COLLECTING = ("explain", "matrix")
"""Commands that run pytest to collect a suite."""

EXIT_OK, EXIT_PROBLEM, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 where something is wrong with what it looked at, 2 for usage."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    # What follows `--` is pytest's: argparse would take it for more of what stands before.
    place = given.index("--") if "--" in given and given[0] in COLLECTING else len(given)
    options = _parser(given).parse_args(given[:place])
    options.more = given[place + 1 :]
    command: Callable[[argparse.Namespace, Mapping[str, str]], int] = options.command
    status = EXIT_OK
    try:
        status = command(options, os.environ)
        sys.stdout.flush()  # here, where a reader that has gone is expected, and not while Python ends
        return status
    except UnknownDeviceError as error:
        print(f"pytest-cudaenv: --simulate: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader has seen enough (`| head`); Python would print a traceback while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pytest-cudaenv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pytest-cudaenv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("doctor", doctor, "everything that decides a skip on this host, with remedies"),
        ("devices", devices, "what a CUDA process would see under the present environment, in its order"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="machine-readable output")
        sub.add_argument("--simulate", metavar="NAME[:COUNT]", help="answer as on that host: h100, h200:2")
        sub.set_defaults(command=command)
    from pytest_cudaenv.suite_commands import add_parsers

    add_parsers(commands)
    text = "judge the ledgers of several runners: what ran where, what never ran anywhere, what drifted"
    sub = commands.add_parser("merge", help=text, description=text)
    if "merge" in arguments:  # its modules are its own
        from pytest_cudaenv.merge_command import add_arguments, merge

        add_arguments(sub)
        sub.set_defaults(command=merge)
    return parser


def _host(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Host, MaskReading]:
    if options.simulate is not None:
        host = simulated_host(options.simulate, installed_software())
    else:
        host = detect_host(environ)
    return host, read_environment(environ, host.devices, host.fastest_first)


def devices(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the visible devices as CUDA would list them; 1 where `cuInit` would fail or a device is unusable."""
    host, reading = _host(options, environ)
    error = _error(host, reading)
    rows = [
        {
            "index": d.index,
            "uuid": d.uuid,
            "name": d.name,
            "capability": None if d.capability is None else "{}.{}".format(*d.capability),
            "total_memory": d.total_memory,
        }
        for d in reading.devices
    ]
    if options.json:
        print(json.dumps({"error": error} if error else rows, indent=2))
    elif error:
        print(f"[{error['code']}] {error['message']}")
    else:
        for row in rows:
            memory = "unknown" if row["total_memory"] is None else f"{int(row['total_memory']) / 1024**3:.1f} GiB"
            print(f"cuda:{row['index']}  {row['uuid']}  {row['name']}  {row['capability'] or 'unknown'}  {memory}")
        if not rows:
            print("no CUDA device is visible")
        for note in reading.notes:
            print(f"warning: {note}")
    return EXIT_PROBLEM if error else EXIT_OK


def _error(host: Host, reading: MaskReading) -> dict[str, Any] | None:
    if reading.cu_init == INVALID_DEVICE:
        message = reading.notes[-1] if reading.notes else "cuInit fails"
        return {"code": "cuda-mask-invalid", "message": message, "cu_init": reading.cu_init}
    if host.problem is not None:
        return {"code": host.problem.code, "message": f"{host.problem.have}. {host.problem.remedy}", "cu_init": None}
    return None


def doctor(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what decides a skip here; 1 where a device is present and cannot be used."""
    from pytest_cudaenv.doctor import examine

    host, reading = _host(options, environ)
    host = replace(host, software=replace(host.software, environ=dict(environ)))
    report = examine(host, reading, environ)
    print(json.dumps(report.as_json(), indent=2) if options.json else "\n".join(report.lines()))
    return EXIT_PROBLEM if report.is_unusable else EXIT_OK
