"""What the running test was given, for code that cannot request a fixture (unittest, helpers)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pytest_cudaenv.grants.grant import Grant
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.requirements.reason import Reason

if TYPE_CHECKING:
    import torch

    from pytest_cudaenv.cells import Cell
    from pytest_cudaenv.verdict.expectations import Expectations
    from pytest_cudaenv.verdict.memory import Meter
    from pytest_cudaenv.verdict.parity import AssertParity, Parity
    from pytest_cudaenv.verdict.witness import Watch


class NoGrantError(RuntimeError):
    """The running test declared no device, or no test is running."""


class Offers(Protocol):
    """What is made for a running test above this floor."""

    @property
    def expectations(self) -> Expectations:
        """The fixture of that name."""
        ...

    @property
    def assert_parity(self) -> AssertParity:
        """The fixture of that name."""
        ...

    @property
    def cuda_memory(self) -> Meter:
        """The fixture of that name."""
        ...

    def attn_witness(self, model: Any) -> Watch:
        """A watch over one block."""
        ...

    def cells(
        self,
        running: Current,
        *attn_backends: str | Mapping[str, str],
        dtypes: Sequence[str] | None,
        exclude: Sequence[str],
        model: type | None,
    ) -> Iterator[Cell]:
        """The cells that can run here, after each other; the others are reported."""
        ...


@dataclass(frozen=True)
class Current:
    """The running test's grant, and what fixtures give to those that can request some."""

    nodeid: str
    grant: Grant
    seed: int
    refuse: Callable[[Sequence[Reason]], NoReturn] = field(repr=False, compare=False)
    """Ends the running test as one whose needs are not met."""
    offers: Offers = field(repr=False, compare=False)
    asked: bool = True
    """Whether the test declared that it takes a device."""

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """The granted devices; empty where the test runs on the CPU.

        Raises NoGrantError where the test asked for none.
        """
        if not self.asked:
            raise NoGrantError(f"this test was granted no device: {_HOW}")
        return self.grant.devices

    @property
    def device(self) -> torch.device:
        """The first granted device as a `torch.device`; the CPU on a host without NVIDIA devices."""
        import torch

        return torch.device(str(self.devices[0]) if self.devices else "cpu")

    @property
    def expectations(self) -> Expectations:
        """Values by capability and cell, as the fixture `expectations`: of the CPU where no device was asked for."""
        return self.offers.expectations

    def cells(
        self,
        *attn_backends: str | Mapping[str, str],
        dtypes: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        model: type | None = None,
    ) -> Iterator[Cell]:
        """The cells of these attention backends and dtypes, for a `unittest.TestCase` to go through as subtests.

            for cell in pytest_cudaenv.current().cells("eager", "sdpa", dtypes=("float32", "bfloat16")):
                with self.subTest(cell=cell.id):
                    model = cell.build(LlamaForCausalLM, config)

        Without names the project's defaults, as for the fixture `cell`; pairs that no device could run are left out,
        as there. A cell that this host or `model` (a class) cannot run is reported as a skipped subtest with its
        reasons, or as `--cuda-unmet` and the runner's promises have it; where none can, the test itself is. Each cell
        starts from the test's seed. Raises ValueError with the choices for an unknown name, TypeError outside of a
        `unittest.TestCase`.
        """
        return self.offers.cells(self, *attn_backends, dtypes=dtypes, exclude=exclude, model=model)

    def assert_parity(self, *args: Any, **kwargs: Any) -> Parity:
        """As the fixture `assert_parity`, in the cell that `cells` is at."""
        return self.offers.assert_parity(*args, **kwargs)

    def attn_witness(self, model: Any = None) -> Watch:
        """A block that is watched, as of the fixture: `with current().attn_witness(model) as seen:`."""
        return self.offers.attn_witness(model)

    @property
    def cuda_memory(self) -> Meter:
        """As the fixture `cuda_memory`: where the host has no device the test is skipped with its reason.

        Raises NoGrantError where the host has one and the test was granted none.
        """
        return self.offers.cuda_memory


_HOW = "put @requires_cuda on the test (or a class above it), or request the fixture `device`"

# Python calls `current()` from anywhere and without an argument, so what runs now is kept here: one test at a time.
_running: list[Current] = []


def current() -> Current:
    """What the running test was given: `pytest_cudaenv.current().device` in a `unittest.TestCase`.

    Raises NoGrantError where it does not use the plugin; what it gives of a device does where the test asked for none.
    """
    if not _running:
        raise NoGrantError(f"no test with a grant is running: {_HOW}")
    return _running[-1]


def enter(running: Current) -> None:
    """Note that a test runs, until `leave`."""
    _running.append(running)


def leave(nodeid: str) -> None:
    """Forget a test; harmless where it has none."""
    while _running and _running[-1].nodeid == nodeid:
        _running.pop()
