"""Downloading the Hub kernels that tests declare: once for a run, before its first test, by the process that leads it.

Under xdist that is the controller, which collects nothing: its workers tell it what they need in a folder of the run.
Tests then load these kernels without asking the Hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv.fixtures.hub_kernels import AT_HAND, KERNELS_FOLDER
from pytest_cudaenv.requirements.hub_kernels import HubKernel, is_at_hand, usability_reasons
from pytest_cudaenv.requirements.kernel_builds import is_offline
from pytest_cudaenv.session import PLAN

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession

IN_WORKERINPUT = "cudaenv_kernels"
"""Where workers tell what they need."""

WANTED = "wanted.json"


def folder_of(session: CudaSession) -> Path:
    """The folder of a run; there once some test needs a kernel of the Hub."""
    return Path(f"{session.reporting.mailbox}-kernels")


def declared(session: CudaSession, items: Iterable[pytest.Item]) -> list[HubKernel]:
    """The kernels of the Hub that tests name at a version or revision, where this host can use any."""
    plans = (item.stash.get(PLAN, None) for item in items)
    found = dict.fromkeys(k for plan in plans if plan is not None for k in plan.requirement.hub_kernels)
    named = [kernel for kernel in found if kernel.version is not None or kernel.revision is not None]
    return [] if not named or usability_reasons(session.host.software) else named


def tell(folder: Path, session: CudaSession, items: Sequence[pytest.Item]) -> None:
    """In a worker that has collected: write what its tests need, and say to its device processes where."""
    if not (wanted := declared(session, items)):
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{WANTED}.{os.getpid()}"
        unfinished.write_text(json.dumps([astuple(kernel) for kernel in wanted]), encoding="utf-8")
        os.replace(unfinished, folder / WANTED)
        session.environment.set(KERNELS_FOLDER, str(folder))


def hear(session: CudaSession) -> None:
    """In the controller, when a worker has collected, before any test: download what it needs, once."""
    folder = folder_of(session)
    if (folder / AT_HAND).exists():
        return
    with contextlib.suppress(OSError, ValueError):
        wanted = [HubKernel(*one) for one in json.loads((folder / WANTED).read_text(encoding="utf-8"))]
        _provide(folder, wanted, session)


def provide(session: CudaSession, items: Sequence[pytest.Item]) -> None:
    """Without xdist: download what the tests need, before the first."""
    if not (wanted := declared(session, items)):
        return
    folder = folder_of(session)
    folder.mkdir(mode=0o700, exist_ok=True)
    session.environment.set(KERNELS_FOLDER, str(folder))
    _provide(folder, wanted, session)


def _provide(folder: Path, wanted: Sequence[HubKernel], session: CudaSession) -> None:
    software = session.host.software
    missing = [] if is_offline(os.environ) else [k for k in wanted if _moves(k) or not is_at_hand(k, software)]
    for kernel, why in zip(missing, download(missing), strict=True):
        if why is not None and not is_at_hand(kernel, software):
            session.warn(f"[kernels-download] {kernel.repo} could not be downloaded: {why}")
    here = sorted({kernel.repo for kernel in wanted} - {k.repo for k in wanted if not is_at_hand(k, software)})
    unfinished = folder / f"{AT_HAND}.{os.getpid()}"
    unfinished.write_text(json.dumps(here), encoding="utf-8")
    os.replace(unfinished, folder / AT_HAND)


def _moves(kernel: HubKernel) -> bool:
    """Whether the Hub may have something newer under this name: it is a branch."""
    return kernel.revision is not None and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}|v\d+", kernel.revision) is None


def download(kernels: Sequence[HubKernel]) -> list[str | None]:
    """Why each kernel could not be downloaded, or None; in a child, as `kernels` imports torch."""
    if not kernels:
        return []
    argument = json.dumps([astuple(kernel) for kernel in kernels])
    command = [sys.executable, "-m", "pytest_cudaenv.verdict.kernel_cache", argument]
    ran: Any = subprocess.run(command, capture_output=True, text=True, check=False)
    told: list[str | None] = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith(('"', "null"))]
    lost = (ran.stderr.strip().splitlines() or ["no word"])[-1]
    return [*told, *[lost] * len(kernels)][: len(kernels)]
