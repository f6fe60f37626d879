"""What a running test is offered besides its grant: expected values, and cells for `unittest.TestCase`.

Made by the runner, and handed to `grants.current` and the fixtures, which stand below.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.cells import Cell, CellParameters
from pytest_cudaenv.grants.current import Current, NoGrantError, current
from pytest_cudaenv.grants.grant import Grant
from pytest_cudaenv.plan import Plan, cell_requirement
from pytest_cudaenv.requirements.markers import MARKERS, Axis
from pytest_cudaenv.requirements.reason import Rank, Reason
from pytest_cudaenv.requirements.requirement import Requirement
from pytest_cudaenv.verdict.expectation_keys import Place
from pytest_cudaenv.verdict.expectations import Expectations, place_of

if TYPE_CHECKING:
    from pytest_cudaenv.runner import Runner
    from pytest_cudaenv.verdict.memory import Meter
    from pytest_cudaenv.verdict.parity import AssertParity
    from pytest_cudaenv.verdict.witness import Watch

RAN = "ran"
"""What is told of a cell that could run here."""


class Offers:
    """The offers of one test."""

    def __init__(self, runner: Runner, item: pytest.Item, plan: Plan, grant: Grant) -> None:
        self.runner = runner
        self.item = item
        self.plan = plan
        self.grant = grant
        self.cell: CellParameters = plan.cell
        """The cell that the test is in now; one that goes through several is in one after the other."""
        self.told: dict[str, str] = {}
        """Cell -> `ran`, or why it did not: of a test that goes through its cells itself."""

    @cached_property
    def expectations(self) -> Expectations:
        """Values by capability, for this test; golden files stand beside its module."""
        path: Path = self.item.path
        settings = self.runner.session.settings
        return Expectations(
            self._place,
            path.parent / "expectations",
            path.stem,
            updates=settings.update_expectations,
            settled=self.runner.settled,
        )

    @property
    def assert_parity(self) -> AssertParity:
        """The test's comparisons, in the cell that it is in now."""
        from pytest_cudaenv.fixtures.verdict import PARITY
        from pytest_cudaenv.verdict.parity import AssertParity

        if (compared := self.item.stash.get(PARITY, None)) is None:
            compared = self.item.stash[PARITY] = AssertParity()
        if self.cell.attn_backend is not None and self.cell.dtype is not None:
            compared.cell = cell_from(self.cell, self.grant)
        return compared

    @property
    def cuda_memory(self) -> Meter:
        """The test's device memory; where the host has no device the test is refused, as by the fixture.

        Raises NoGrantError where it has one, and the test was granted none.
        """
        from pytest_cudaenv.fixtures.verdict import meter_of

        if not self.grant.devices:
            if reasons := self.runner.session.unmet(Requirement(devices=1)):
                current().refuse(reasons)
            raise NoGrantError("this test was granted no device: put @requires_cuda on it")
        return meter_of(self.item, len(self.grant.devices))

    def attn_witness(self, model: Any = None) -> Watch:
        """A watch over one block, and over one model where it is given."""
        from pytest_cudaenv.verdict.witness import watch

        return watch(model)

    def _place(self) -> Place:
        return place_of(self.grant.devices, self.cell.id, _torch_version())

    @property
    def facts(self) -> dict[str, Any]:
        """What a ledger and the summary tell of it."""
        facts: dict[str, Any] = {"cells": dict(self.told)} if self.told else {}
        if (written := self.__dict__.get("expectations")) is not None and written.written:
            facts["written"] = sorted(set(written.written))
        return facts

    def cells(
        self, running: Current, *attn_backends: Any, dtypes: Sequence[str] | None, exclude: Sequence[Any], model: Any
    ) -> Iterator[Cell]:
        """The cells of these lists, as `Current.cells` says."""
        if not compat.is_unittest(self.item):
            raise TypeError("cells() is for unittest.TestCase: a function or a plain class takes the fixture `cell`")
        lists = self.runner.session.cell_lists
        backends = _axis("attn_backends", attn_backends, exclude=tuple(exclude), model=model).of(lists.backends)
        names = _axis("dtypes", dtypes or ()).of(lists.dtypes)
        cells = [cell for b in backends for d in names if not (cell := CellParameters(b, str(d))).is_impossible]
        if not cells:
            raise ValueError("cells(): no cell is left that any device could run")
        return self._each(running, cells, model)

    def _each(self, running: Current, cells: Sequence[CellParameters], model: Any) -> Iterator[Cell]:
        outer = self.cell
        unmet: list[Reason] = []
        for parameters in cells:
            name = str(parameters.id)
            if reasons := self._unmet(running, parameters, model):
                unmet += reasons
                self.told[name] = " | ".join(map(str, reasons))
                self._skip(running, name, reasons)
                continue
            self.told[name] = RAN
            self.cell = parameters
            self.runner.seed(self.item, self.plan)
            observers, is_over = self.runner.observers, False
            observers.cell_begins(self.item, parameters)
            try:
                yield cell_from(parameters, self.grant)
                is_over = True
            finally:
                self.cell = outer
                observers.cell_ends(self.item, parameters, is_over=is_over)
            self.runner.forget_refusal(self.item)  # that of this cell was reported with its subtest
        if RAN not in self.told.values():
            running.refuse(tuple(dict.fromkeys(unmet)))

    def _unmet(self, running: Current, cell: CellParameters, model: Any) -> Sequence[Reason]:
        settings = self.runner.session.settings
        for option, wanted, have in (
            ("--cuda-attn-backends", settings.only_attn_backends, cell.attn_backend),
            ("--cuda-dtypes", settings.only_dtypes, cell.dtype),
        ):
            if wanted and have not in wanted:
                text = f"only {' '.join(wanted)} ({option})"
                return (Reason("cell-deselected", f"needs {cell.id} to be selected", text, "Nothing.", Rank.SUITE),)
        return self.runner.session.unmet_on(running.devices, cell_requirement(cell, model))

    def _skip(self, running: Current, name: str, reasons: Sequence[Reason]) -> None:
        """Report a cell that cannot run here as a subtest that says why: skipped, or as `--cuda-unmet` has it."""
        case: Any = getattr(self.item, "instance", None)
        if not compat.reports_subtests(self.item):
            self.runner.session.warn(f"{self.item.nodeid} ({name}): {' | '.join(map(str, reasons))}")
            return
        refuse: Callable[..., object] = running.refuse  # returns never, and subTest goes on after it
        with case.subTest(cell=name):
            refuse(reasons)
        self.runner.forget_refusal(self.item)


def cell_from(parameters: CellParameters, grant: Grant) -> Cell:
    """The cell of these parameters on the first granted device, or on the CPU."""
    import torch

    backend = parameters.attn_backend
    device = torch.device(str(grant.devices[0]) if grant.devices else "cpu")
    return Cell(
        backend if isinstance(backend, str) else dict(backend or ()), getattr(torch, str(parameters.dtype)), device
    )


OFFERS = pytest.StashKey[Offers]()
"""What the running test is offered."""


def _axis(marker: str, values: Sequence[Any], **keywords: Any) -> Axis:
    axis = compat.check_call(marker, MARKERS[marker], *values, **{k: v for k, v in keywords.items() if v})
    assert isinstance(axis, Axis)
    return axis


def _torch_version() -> str | None:
    if (torch := sys.modules.get("torch")) is not None:
        return str(torch.__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
