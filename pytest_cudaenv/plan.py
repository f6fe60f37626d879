"""What each collected test needs, read from its marks, its fixture closure and its cell."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from typing import NoReturn

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.adopted import ADOPTED, Adopted
from pytest_cudaenv.cells import PACKAGE, CellParameters, axis_of, backend_names, cell_of
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.names import FIXTURES, HUB_KERNELS, KERNEL_STATES, NEEDS_DEVICE, TAKES_DEVICE
from pytest_cudaenv.requirements import attention
from pytest_cudaenv.requirements.markers import (
    MARKERS,
    NO_LIMIT,
    KernelUse,
    KnownBadCell,
    MemoryLimit,
    SdpaKernels,
    WitnessUse,
)
from pytest_cudaenv.requirements.requirement import Requirement, with_cell
from pytest_cudaenv.requirements.sizes import version_tuple_fits

_AXES = {"attn_backends": "attn_backend", "dtypes": "dtype"}


@dataclass(frozen=True)
class Plan:
    """What one test needs and where each part was declared."""

    requirement: Requirement
    cell: CellParameters
    sources: tuple[tuple[str, Requirement], ...] = ()
    """(`@requires_cuda(devices=2)` or `fixture cuda_device`, what it adds)."""
    known_bad: tuple[KnownBadCell, ...] = ()
    memory: MemoryLimit = NO_LIMIT
    is_compared: bool = False
    """Whether its numbers are compared with a reference's, though it may have neither device nor cell."""
    sdpa_kernels: tuple[str, ...] = ()
    """The kernels that sdpa may run while the body runs, from the closest mark; empty: any."""
    runs_attention: bool = True
    """What its body is declared to do, by the closest mark."""
    hub_kernels: str | None = None
    """`on` or `off`: how it uses the fixture hub_kernels; None: it does not."""

    @property
    def is_watched(self) -> bool:
        """Whether observers are told of the test."""
        return self.is_seeded or bool(self.sdpa_kernels)

    @property
    def is_seeded(self) -> bool:
        """Whether the test starts from a seed made from its id: every device and cell test does."""
        return self.requirement.asks_for_device or self.cell.id is not None or self.is_compared


def plan_of(item: pytest.Item) -> Plan | None:
    """The plan of a test that uses the plugin; None for one that does not.

    Raises CollectError, with the marker's signature, for a mark whose arguments are wrong.
    """
    ours = compat.our_fixtures(item, PACKAGE) & FIXTURES
    marks = [mark for mark in item.iter_markers() if mark.name in MARKERS]
    adopted = item.stash.get(ADOPTED, Adopted())
    if adopted.error:
        raise pytest.Collector.CollectError(f"{item.nodeid}: {adopted.error}")
    if not ours and not marks and not adopted.sources:
        return None
    sources: list[tuple[str, Requirement]] = []
    known_bad: list[KnownBadCell] = []
    memory = NO_LIMIT
    kernels: list[SdpaKernels] = []
    witnessed: list[WitnessUse] = []
    state = kernel_state(item, ours)
    uses: list[tuple[str, Requirement]] = []
    for mark in marks:
        declared = _declaration(item, mark)
        if isinstance(declared, Requirement):
            sources.append((_spelled(mark), declared))
        elif isinstance(declared, KnownBadCell):
            known_bad.append(declared)
        elif isinstance(declared, MemoryLimit):
            memory = memory.merged(declared)  # marks come innermost first
        elif isinstance(declared, SdpaKernels):
            if not kernels:  # the closest says it all
                sources.append((_spelled(mark), declared.requirement))
            kernels.append(declared)
        elif isinstance(declared, WitnessUse):
            witnessed.append(declared)
        elif isinstance(declared, KernelUse):
            uses.append((_spelled(mark), declared.requirement))
    _check_kernels(item, state)
    if state == "on":
        sources += uses[:1]  # the closest says it all, as a mapping is no list to add to
        sources.append((f"fixture {HUB_KERNELS}", Requirement(needs_kernels=True)))
    sources += adopted.sources
    sources += [(f"fixture {name}", Requirement(devices=1)) for name in sorted(ours & NEEDS_DEVICE)]
    sources += [(f"fixture {name}", Requirement(device_if_any=True)) for name in sorted(ours & TAKES_DEVICE)]
    cell = cell_of(item, ours)
    _check_axes(item, ours)
    _check_cell(item, cell)
    _check_witnessed(item, cell)
    _check_known_bad(item, cell, known_bad)
    if cell.id is not None:
        sources.append((f"cell {cell.id}", cell_requirement(cell, axis_of(item, "attn_backends").model)))
    requirement = Requirement()
    for _, declared_requirement in sources:
        requirement = requirement.merged(declared_requirement)
    forced = kernels[0].names if kernels else ()
    return Plan(
        requirement,
        cell,
        tuple(sources),
        tuple(known_bad),
        memory=memory,
        sdpa_kernels=forced,
        runs_attention=witnessed[0].runs if witnessed else True,
        is_compared="assert_parity" in ours,
        hub_kernels=state,
    )


def kernel_state(item: pytest.Item, ours: frozenset[str]) -> str | None:
    """`on` or `off`, for a test with the fixture hub_kernels."""
    if HUB_KERNELS not in ours:
        return None
    state = compat.parameters(item).get(HUB_KERNELS, "on")
    return state if state in KERNEL_STATES else "on"


def _check_kernels(item: pytest.Item, state: str | None) -> None:
    """Refuse the marker on a test that cannot use it: it would do nothing and say nothing."""
    if state is None and any(mark.name == HUB_KERNELS for mark in getattr(item, "own_markers", ())):
        hint = "request the fixture `hub_kernels`"
        raise pytest.Collector.CollectError(f"{item.nodeid}: @{HUB_KERNELS} has no effect here: {hint}")


def _declaration(item: pytest.Item, mark: pytest.Mark) -> object:
    try:
        return compat.check_call(mark.name, MARKERS[mark.name], *mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        raise pytest.Collector.CollectError(f"{item.nodeid}: {error}") from None


def _spelled(mark: pytest.Mark) -> str:
    arguments = [repr(a) for a in mark.args] + [f"{k}={v!r}" for k, v in mark.kwargs.items()]
    return f"@{mark.name}({', '.join(arguments)})" if arguments else f"@{mark.name}"


def cell_requirement(cell: CellParameters, model: type | None) -> Requirement:
    """What a cell needs; with a model class, what that class supports."""
    requirement = with_cell(Requirement(), cell.backends, cell.dtype)
    if not cell.backends:
        requirement = replace(requirement, device_if_any=False)
    if cell.dtype is not None:
        requirement = replace(requirement, dtypes=(cell.dtype,))
    if model is not None and isinstance(cell.attn_backend, str):
        requirement = replace(requirement, model_reasons=tuple(attention.model_reasons(cell.attn_backend, model)))
    return requirement


def _check_axes(item: pytest.Item, ours: frozenset[str]) -> None:
    """Refuse lists of cells on a test that cannot have any: they would do nothing and say nothing."""
    is_unittest = compat.is_unittest(item)
    marks = list(getattr(item, "own_markers", ()))
    if is_unittest and (case := item.getparent(pytest.Class)) is not None:
        # A plain class may have a list for those of its tests that take it; of a TestCase none can.
        marks += case.own_markers
    for mark in marks:
        fixture = _AXES.get(mark.name)
        if fixture is None or fixture in ours:
            continue
        if is_unittest:
            hint = (
                "a unittest.TestCase method cannot take fixtures; go through pytest_cudaenv.current().cells(…) in it, "
                "or move it to a function or a plain class"
            )
        else:
            hint = f"request the fixture `cell` or `{fixture}`"
        raise pytest.Collector.CollectError(f"{item.nodeid}: @{mark.name} has no effect here: {hint}")


def _check_cell(item: pytest.Item, cell: CellParameters) -> None:
    """Refuse a list that came too late to make this test's cells, as one in `pytest.param(marks=…)` does."""
    for marker, value in (("attn_backends", cell.attn_backend), ("dtypes", cell.dtype)):
        axis = axis_of(item, marker)
        if value is not None and value not in axis.of((value,)):
            raise pytest.Collector.CollectError(
                f"{item.nodeid}: @{marker} came too late to make its cells: put it on the function, class or module"
            )


def _check_witnessed(item: pytest.Item, cell: CellParameters) -> None:
    """Refuse a word to the witness from a test that it does not watch: it would do nothing and say nothing."""
    own = {mark.name for mark in getattr(item, "own_markers", ())}
    if "attn_witness" in own and cell.attn_backend is None and not compat.is_unittest(item):
        hint = "request the fixture `cell` or `attn_backend`; other tests are not watched"
        raise pytest.Collector.CollectError(f"{item.nodeid}: @attn_witness has no effect here: {hint}")


def _check_known_bad(item: pytest.Item, cell: CellParameters, known_bad: list[KnownBadCell]) -> None:
    """Refuse an entry for cells on a test that has none: it would do nothing, and never expire."""
    own = {mark.name for mark in getattr(item, "own_markers", ())}
    if "xfail_cells" not in own:
        return
    for known in known_bad:
        if (known.attn_backend is not None and cell.attn_backend is None) or (known.dtype and cell.dtype is None):
            hint = "request the fixture `cell`, or name only capability="
            raise pytest.Collector.CollectError(f"{item.nodeid}: @xfail_cells has no effect here: {hint}")


def matching_bad_cell(plan: Plan, device: CudaDevice | None) -> KnownBadCell | None:
    """The known-bad entry that covers this test's cell on this device (None: the CPU), if any."""
    return next((known for known in plan.known_bad if _covers(known, plan.cell, device)), None)


def _covers(known: KnownBadCell, cell: CellParameters, device: CudaDevice | None) -> bool:
    if known.attn_backend is not None:
        if cell.attn_backend is None:
            return False
        wanted = known.attn_backend
        if wanted != cell.attn_backend and not (isinstance(wanted, str) and wanted in backend_names(cell.attn_backend)):
            return False
    if known.dtype is not None and known.dtype != cell.dtype:
        return False
    if known.capability is None:
        return True
    if device is None or device.capability is None:
        return False
    return version_tuple_fits(device.capability, (known.capability,), "capability")


def expect_failure(item: pytest.Item, known: KnownBadCell, today: datetime.date) -> None:
    """Mark a test in a known-bad cell as expected to fail, strictly: a cell that works again is news.

    Past its date the entry counts for nothing, and the test fails with the entry's text.
    """
    why = ", ".join(part for part in (known.reason, known.issue) if part)
    if known.until is not None and today > known.until:
        _fail_expired(known.until, why)
    item.add_marker(pytest.mark.xfail(reason=f"[known-bad] {why}", strict=True))


def _fail_expired(until: datetime.date, why: str) -> NoReturn:
    message = f"[known-bad-expired] the xfail_cells entry ended on {until} ({why}): mend the cell or renew the entry"
    pytest.fail(message, pytrace=False)
