"""Tests with kernels off and on: which are generated in both states."""

from __future__ import annotations

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.cells import PACKAGE
from pytest_cudaenv.names import HUB_KERNELS, KERNEL_STATES
from pytest_cudaenv.requirements.markers import MARKERS, KernelUse


def kernel_use(node: pytest.Item) -> KernelUse | None:
    """What the closest marker of a test says; None without one.

    Raises CollectError, with the marker's signature, for a mark whose arguments are wrong.
    """
    mark = node.get_closest_marker(HUB_KERNELS)
    if mark is None:
        return None
    try:
        use = compat.check_call(HUB_KERNELS, MARKERS[HUB_KERNELS], *mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    assert isinstance(use, KernelUse)
    return use


def parametrize(metafunc: pytest.Metafunc, *, by_default: bool) -> None:
    """Generate a test with kernels off and on, where its marker says so, or the ini file does and the marker does not.

    As the last of its parameters. Raises CollectError for a wrong marker.
    """
    names = compat.metafunc_fixtures(metafunc, PACKAGE) - compat.parametrized_names(metafunc)
    if HUB_KERNELS not in names:
        return
    use = kernel_use(metafunc.definition)
    wanted = None if use is None else use.use
    if wanted == "both" or (wanted is None and by_default):
        states, ids = tuple(KERNEL_STATES), tuple(KERNEL_STATES.values())
        metafunc.definition.add_marker(pytest.mark.parametrize(HUB_KERNELS, states, ids=ids, indirect=True))
