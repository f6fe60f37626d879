"""Cells: one (attention backend, dtype) combination each, the same on every host.

The fixtures are in `fixtures.cells`; here is what a cell is, and how tests come by theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.fixtures.cells import CellLists, backend_id, dtype_id
from pytest_cudaenv.grants.current import current
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.requirements import attention
from pytest_cudaenv.requirements.markers import MARKERS, Axis, Backend
from pytest_cudaenv.requirements.reason import Reason

if TYPE_CHECKING:
    import torch

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Cell:
    """One (attention backend, dtype) combination on the device of the running test."""

    attn_backend: str | dict[str, str]
    """As `attn_implementation` takes it: a name, or a dict with a name per sub-config."""
    dtype: torch.dtype
    device: torch.device

    @property
    def id(self) -> str:
        """`sdpa-bf16`, as in the test's id."""
        return f"{backend_id(self.attn_backend)}-{dtype_id(str(self.dtype).removeprefix('torch.'))}"

    def build(
        self,
        model_class: type,
        config: Any,
        *,
        attn_backend: str | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> Any:
        """A randomly initialised model of a transformers class, in eval mode: this backend, dtype and device.

        The weights depend on the class, the config and `seed` alone: in every cell they are the same numbers,
        drawn in float32 and rounded to the dtype. `attn_backend` and `dtype` replace the cell's own, for a
        reference (`attn_backend="eager", dtype=torch.float64`). The config is copied, for a config remembers the
        backend that it was used with.

        Skips the test where the class or its head size rules the backend out. Raises TypeError for a class that
        transformers cannot build from a config, AssertionError where the model does not use the backend asked for.
        """
        import torch

        backend = self.attn_backend if attn_backend is None else attn_backend
        backend = backend if isinstance(backend, str) else dict(backend)
        dtype = self.dtype if dtype is None else dtype
        from_config = getattr(model_class, "_from_config", None)
        if from_config is None:
            raise TypeError(f"{model_class.__name__} has no _from_config: cell.build takes a transformers model class")
        running = current()
        device = running.devices[0] if running.devices else None
        if reasons := build_reasons(backend, model_class, config, device):
            running.refuse(reasons)

        def instance(name: Any, in_dtype: torch.dtype) -> Any:
            return from_config(copy.deepcopy(config), attn_implementation=name, dtype=in_dtype, **kwargs)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weights = instance("eager" if _supports_eager(backend) else backend, torch.float32).state_dict()
            model = instance(backend, dtype)
        model.load_state_dict(weights)
        _check_backend(model, backend)
        return model.eval().to(self.device)


def _supports_eager(backend: Any) -> bool:
    # Every class has eager, and weights do not depend on the backend; a dict names sub-configs only.
    return isinstance(backend, str)


def _check_backend(model: Any, backend: str | Mapping[str, str]) -> None:
    """transformers may replace the backend and go on; a cell that names one backend must not run another."""
    used = getattr(model.config, "_attn_implementation", None)
    if isinstance(backend, str) and used not in {backend, *attention.stand_ins(backend)}:
        raise AssertionError(f"{type(model).__name__} was asked for {backend} and uses {used}")


def build_reasons(
    backend: str | Mapping[str, str], model_class: type, config: Any, device: CudaDevice | None
) -> list[Reason]:
    """Why a class with this config cannot use a backend on a device (None: the CPU): its flags and its head size."""
    reasons: list[Reason] = []
    for sub, name in [("", backend)] if isinstance(backend, str) else list(backend.items()):
        part = getattr(config, sub, config) if sub else config
        if not sub:
            reasons += attention.model_reasons(name, model_class)
        head_dim = _head_dim(part)
        if head_dim is not None and (reason := attention.head_dim_reason(name, head_dim, device)) is not None:
            reasons.append(reason)
    return reasons


def _head_dim(config: Any) -> int | None:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and getattr(config, "num_attention_heads", None):
        head_dim = getattr(config, "hidden_size", 0) // config.num_attention_heads
    return head_dim if isinstance(head_dim, int) and head_dim > 0 else None


def backend_names(backend: Backend) -> tuple[str, ...]:
    """The names in a backend, without its sub-configs."""
    return (backend,) if isinstance(backend, str) else tuple(dict.fromkeys(name for _, name in backend))


def parametrize(metafunc: pytest.Metafunc, lists: CellLists) -> None:
    """Give a test the lists of its `attn_backends` and `dtypes` marks, in place of the fixtures' parameters.

    As marks and in front: pytest then leaves the fixture's own parameters alone, and ids begin with the cell, backend
    before dtype, whether the lists come from marks or from the project's defaults, and in every release of pytest.
    Raises CollectError where a list is empty.
    """
    names = compat.metafunc_fixtures(metafunc, PACKAGE) - compat.parametrized_names(metafunc)
    axes = {"attn_backend": ("attn_backends", lists.backends, backend_id), "dtype": ("dtypes", lists.dtypes, dtype_id)}
    requested = [name for name in axes if name in metafunc.fixturenames and name in names]
    has_list = any(metafunc.definition.get_closest_marker(axes[name][0]) for name in requested)
    if not has_list and len(requested) < len(axes):
        return
    for name in reversed(requested):
        marker, default, make_id = axes[name]
        values = axis_of(metafunc.definition, marker).of(default)
        if not values:
            raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: @{marker} leaves no {name}")
        ids = [make_id(v) for v in values]  # type: ignore[arg-type]  # each axis comes with its own function
        mark = pytest.mark.parametrize(name, values, ids=ids, indirect=True, scope="module")
        metafunc.definition.add_marker(mark, append=False)


def axis_of(node: pytest.Item, marker: str) -> Axis:
    """The axis that the closest mark of a test declares; the empty one where there is none.

    Raises CollectError, with the marker's signature, for a mark whose arguments are wrong.
    """
    mark = node.get_closest_marker(marker)
    if mark is None:
        return Axis()
    try:
        axis = compat.check_call(marker, MARKERS[marker], *mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    assert isinstance(axis, Axis)
    return axis


@dataclass(frozen=True)
class CellParameters:
    """The cell of a generated test, as parameters: None along an axis that the test does not have."""

    attn_backend: Backend | None = None
    dtype: str | None = None

    @property
    def id(self) -> str | None:
        """`sdpa-bf16`; None for a test without a cell."""
        parts = [backend_id(self.attn_backend)] if self.attn_backend is not None else []
        parts += [dtype_id(self.dtype)] if self.dtype is not None else []
        return "-".join(parts) or None

    @property
    def is_impossible(self) -> bool:
        """Whether no device could ever run this pair (FlashAttention in float32)."""
        dtype = self.dtype
        return dtype is not None and not all(attention.takes_dtype(name, dtype) for name in self.backends)

    @property
    def parts(self) -> dict[str, str]:
        """The backend of each sub-config (`""`: of the model itself), where the cell names them."""
        return {} if self.attn_backend is None or isinstance(self.attn_backend, str) else dict(self.attn_backend)

    @property
    def backends(self) -> tuple[str, ...]:
        return () if self.attn_backend is None else backend_names(self.attn_backend)


def cell_of(item: pytest.Item, ours: frozenset[str]) -> CellParameters:
    """The cell of a generated test, from the parameters of those fixtures that are this plugin's."""
    parameters = compat.parameters(item)
    backend = parameters.get("attn_backend") if "attn_backend" in ours else None
    dtype = parameters.get("dtype") if "dtype" in ours else None
    return CellParameters(backend, dtype if isinstance(dtype, str) else None)


def without_impossible(generated: Iterable[Any]) -> list[Any]:
    """The generated tests less the pairs that no device could ever run.

    Raises CollectError where a test loses all its cells: a test without cells would pass for a skip.
    """
    kept: list[Any] = []
    dropped: dict[str, list[str]] = {}
    survivors: set[str] = set()
    for node in generated:
        name = getattr(node, "originalname", None)
        if isinstance(node, pytest.Function) and name is not None:
            cell = cell_of(node, compat.our_fixtures(node, PACKAGE))
            if cell.is_impossible:
                dropped.setdefault(node.nodeid.partition("[")[0], []).append(str(cell.id))
                continue
            survivors.add(node.nodeid.partition("[")[0])
        kept.append(node)
    for nodeid in dropped.keys() - survivors:
        raise pytest.Collector.CollectError(
            f"{nodeid}: no cell is left, for no device runs {', '.join(dropped[nodeid])}"
        )
    return kept
