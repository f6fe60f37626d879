"""The tables of decorators, against the libraries that are installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement as Pep508

from pytest_cudaenv.host.catalog import simulated_device
from pytest_cudaenv.ledger.adopt import ACCELERATE, GIB, TRANSFORMERS, Known, Rule, granted, skip_reasons
from pytest_cudaenv.migrate import accelerate, transformers

LIBRARIES = {
    "transformers": ("transformers/testing_utils.py", TRANSFORMERS, transformers.MARKS),
    "accelerate": ("accelerate/test_utils/testing.py", ACCELERATE, accelerate.MARKS),
}


def decorators(distribution: str, path: str) -> set[str]:
    """The `require_*` that an installed library defines, read from its source."""
    try:
        source = Path(str(importlib.metadata.distribution(distribution).locate_file(path)))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    return set(re.findall(r"^def (require_\w+)", source.read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_decorator_of_the_library_is_known(name: str) -> None:
    """A new one shows up here: give it a line in the table."""
    path, table, _ = LIBRARIES[name]
    assert decorators(name, path) - set(table) == set()


@pytest.mark.parametrize("name", LIBRARIES)
def test_none_is_made_up(name: str) -> None:
    path, table, marks = LIBRARIES[name]
    assert set(table) - decorators(name, path) == set()
    assert set(marks) <= set(table)


def rules() -> list[tuple[str, Rule]]:
    return [(name, rule) for table in (TRANSFORMERS, ACCELERATE) for name, rule in table.items()]


@pytest.mark.parametrize(("name", "rule"), rules(), ids=[name for name, _ in rules()])
def test_each_means_something(name: str, rule: Rule) -> None:
    """Without arguments each says what it is about: a device, packages, other hardware; or that it asks for nothing."""
    known = rule()
    says_nothing = known == Known()
    assert says_nothing == (name in {"require_fp16", *(n for n in TRANSFORMERS if "deterministic" in n)})
    for spec in known.needs.packages:
        for alternative in spec.split("|"):
            assert Pep508(alternative).name
    assert not known.grant.packages, "the library has looked already, and its own way"
    assert known.grant.devices <= max(known.needs.devices, known.grant.devices)


CUDA: Mapping[str, int] = {
    "require_torch_gpu": 1,
    "require_torch_accelerator": 1,
    "require_torch_multi_gpu": 2,
    "require_torch_multi_accelerator": 2,
    "require_torch_large_gpu": 1,
}


@pytest.mark.parametrize(("name", "count"), CUDA.items())
def test_devices(name: str, count: int) -> None:
    known = TRANSFORMERS[name]()
    assert known.grant.devices == known.needs.devices == count


def test_arguments_count() -> None:
    assert TRANSFORMERS["require_torch_n_accelerators"](n=4).grant.devices == 4
    assert TRANSFORMERS["require_torch_large_accelerator"](memory=80).grant.memory == 80 * GIB
    assert TRANSFORMERS["require_cuda_capability_at_least"](major=8, minor=9).needs.capability == (">=8.9",)
    assert TRANSFORMERS["require_peft_greater_or_equal"](version="0.18").needs.packages == ("peft>=0.18",)


def test_a_large_device_is_taken_whole() -> None:
    """The number says how large it is; what the test uses nobody says, so nobody shares it."""
    assert TRANSFORMERS["require_torch_large_gpu"]().grant.exclusive


@pytest.mark.parametrize(("memory", "count"), [(10, 1), (70, 1), (100, 2), (150, 2), (10**6, 3)])
def test_memory_in_total_is_that_many_devices(memory: int, count: int) -> None:
    known = TRANSFORMERS["require_torch_accelerator_memory"](memory=memory)
    assert granted(known, [simulated_device("h100", n) for n in range(3)]).devices == count


def test_a_check_that_this_host_contradicts_is_told() -> None:
    (reason,) = skip_reasons(TRANSFORMERS["require_torch_gpu"](), (), 1, "require_torch_gpu")
    assert str(reason) == "[skip-disagrees] require_torch_gpu skips; have a host that meets it"


def test_too_many_devices_are_a_reason_of_their_own() -> None:
    (reason,) = skip_reasons(ACCELERATE["require_single_gpu"](), (), 2, "require_single_gpu")
    assert str(reason) == "[cuda-too-many] needs at most 1 CUDA device; have 2"
