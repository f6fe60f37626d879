"""What a worker of `--dist cuda` tells xdist's controller, which collects nothing: what each test asks for.

One file in a folder of the controller's. A worker on another host does not see the folder, and tells nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.grants.demand import Demand
from pytest_cudaenv.grants.scheduling import Work
from pytest_cudaenv.session import PLAN

if TYPE_CHECKING:
    from pytest_cudaenv.requirements.requirement import Requirement
    from pytest_cudaenv.session import CudaSession

FOLDER = "cudaenv_requests"
"""In `workerinput`: where to write. There under `--dist cuda` only."""

FILE = "requests.json"


class Heard(NamedTuple):
    """What the controller knows of the tests."""

    works: list[Work]
    leased: bool
    """False where there are device tests, and they run in the workers' own processes, without leases."""


class Group(NamedTuple):
    """Tests that share fixtures."""

    name: str
    together: bool
    """The user wants them run by one worker."""


def group_of(item: pytest.Item) -> Group:
    """The group of a test: its module, or the xdist groups that the user put it in."""
    name = compat.xdist_group(item)
    return Group(_module(item.nodeid), False) if name is None else Group(name, True)


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def tell(folder: Path, session: CudaSession, items: Sequence[pytest.Item]) -> None:
    """In a worker, once it has collected: write what each test asks for, unless another worker has."""
    if (folder / FILE).exists() or not folder.is_dir():
        return
    device_tests = [session.is_device_test(item) for item in items]
    leased = session.settings.isolation != "off" if any(device_tests) else True
    demands: list[dict[str, Any]] = []
    places: dict[Requirement, int] = {}
    works: list[tuple[str, bool, int | None]] = []
    for item, is_device_test in zip(items, device_tests, strict=True):
        place = None
        if leased and is_device_test:
            from pytest_cudaenv.isolation import demand_of

            requirement = item.stash[PLAN].requirement
            if requirement not in places:
                demand = asdict(demand_of(requirement, session))
                if demand not in demands:
                    demands.append(demand)
                places[requirement] = demands.index(demand)
            place = places[requirement]
        works.append((*group_of(item), place))
    with contextlib.suppress(OSError):  # a full disk: a worse schedule is not worth a failed run
        unfinished = folder / f"{FILE}.{os.getpid()}"
        unfinished.write_text(json.dumps({"leased": leased, "demands": demands, "works": works}))
        os.replace(unfinished, folder / FILE)


def heard(folder: Path, ids: Sequence[str], history: Mapping[str, tuple[float, float]]) -> Heard:
    """In the controller: what a worker has written; where none has, tests of their modules that need no device.

    `history` has the seconds that each test took last, in all and in setting up.
    """
    told: list[tuple[str, bool, int | None]] = [(_module(nodeid), False, None) for nodeid in ids]
    demands: list[Demand] = []
    leased = True
    with contextlib.suppress(OSError):
        said = json.loads((folder / FILE).read_text())
        if len(said["works"]) == len(ids):
            told, leased = said["works"], said["leased"]
            demands = [Demand(**{**d, "candidates": tuple(d["candidates"])}) for d in said["demands"]]
    works = []
    for nodeid, (group, together, place) in zip(ids, told, strict=True):
        seconds, setup = history.get(nodeid, (None, 0.0))
        works.append(Work(group, together, None if place is None else demands[place], seconds, setup))
    return Heard(works, leased)
