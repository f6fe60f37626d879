"""The fixture `expectations` in runs: on hosts of several kinds, in device processes, with golden files."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch  # noqa: F401  # inner runs of this process share it: it cannot be imported a second time

from pytest_cudaenv.host.catalog import simulated_device
from pytest_cudaenv.host.devices import Host, renumbered
from pytest_cudaenv.host.software import Software, TorchBuild

SUITE = """
    from pytest_cudaenv import attn_backends, dtypes, requires_cuda

    BY_KIND = {(9, 0): "hopper", (8, 6): "a10g", (8, None): "ampere", ("cuda", 7): "old", "cpu": "cpu"}

    def test_on_a_device(expectations, device):
        print("PICKED", expectations.pick(BY_KIND))

    def test_without_a_device(expectations):
        assert expectations.pick(BY_KIND) == "cpu"

    @attn_backends("eager", "sdpa")
    @dtypes("float32")
    def test_cells(expectations, cell):
        by_cell = {(None, "eager-fp32"): "eager", (None, "sdpa"): "sdpa", None: "nothing"}
        assert expectations.pick(by_cell) == cell.attn_backend
        expectations.check(cell.attn_backend, by_cell)
"""

NO_DEVICE = """
    import pytest_cudaenv.host.detect
    from pytest_cudaenv.host.devices import Host
    from pytest_cudaenv.host.software import Software, TorchBuild
    pytest_cudaenv.host.detect.detect_host = lambda *_: Host(software=Software(torch=TorchBuild("2.13.0+cpu")))
"""
"""A conftest that makes a run of its own process find no NVIDIA device."""


@pytest.mark.parametrize(
    ("name", "picked"), [("h100", "hopper"), ("a10g", "a10g"), ("l4", "ampere"), ("a100", "ampere"), ("t4", "old")]
)
def test_the_value_is_that_of_the_granted_device(pytester: pytest.Pytester, name: str, picked: str) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-s", "--cuda-simulate", name, "--cuda-isolation", "off")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines([f"*PICKED {picked}*"])


def test_the_value_is_that_of_the_cpu_where_no_device_is(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(NO_DEVICE)
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("-s")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*PICKED cpu*"])


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_device_processes_have_it_too(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """On a T4 and an H100 of one host: each test by the device that it was granted."""
    pytester.makepyfile(
        """
        from pytest_cudaenv import requires_cuda

        @requires_cuda(capability="<9.0")
        def test_small(expectations, cuda_device):
            expectations.check("measured", {(7, 5): "measured", (9, 0): "other"})

        @requires_cuda(capability=">=9.0")
        def test_large(expectations, cuda_device):
            expectations.check("measured", {(7, 5): "measured", (9, 0): "other"})

        @requires_cuda(capability="<9.0")
        def test_blackwell(expectations, cuda_device):
            expectations.check([0.5, 2.0], {(10, 0): [0.5, 2.0]})
        """
    )
    pytester.makeconftest(MIXED)
    result = pytester.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "E*[[]expectation[]] needs the value for CUDA 9.0 to be as (9, 0) says; have another: it is 'measured'*",
            'E*    (9, 0): "measured",',
            "E*[[]expectation-missing[]] needs a value for CUDA 7.5; have only (10, 0). To expect:",
            "E*    (7, 5): [[]0.5, 2.0[]],",
        ]
    )
    result.stdout.no_fnmatch_line("*def check*")


MIXED = """
    import pytest_cudaenv.host.detect
    from pytest_cudaenv.host.catalog import simulated_device
    from pytest_cudaenv.host.devices import Host, renumbered
    from pytest_cudaenv.host.software import Software, TorchBuild

    DEVICES = renumbered((simulated_device("t4", 0), simulated_device("h100", 1)))
    SOFTWARE = Software(torch=TorchBuild("2.13.0+cu130", cuda="13.0"))
    pytest_cudaenv.host.detect.detect_host = lambda *_: Host(
        devices=DEVICES, software=SOFTWARE, driver="580.95.05", driver_cuda=(13, 0)
    )
"""
"""A conftest that makes a run of its own process find a T4 and an H100."""

GOLDEN = """
    import os
    from pytest_cudaenv import attn_backends, dtypes, requires_cuda

    SHIFT = float(os.environ.get("SHIFT", "0"))

    def test_alone(expectations): expectations("loss").check(1.5 + SHIFT)

    @requires_cuda(capability="<9.0")
    def test_small(expectations, cuda_device): expectations("device").check("t4")

    @requires_cuda(capability=">=9.0")
    def test_large(expectations, cuda_device): expectations("device").check("h100")

    @requires_cuda(capability=">=9.0")
    @attn_backends("eager", "sdpa")
    @dtypes("float32")
    def test_cells(expectations, cell): expectations("cells").check([cell.attn_backend])
"""


@pytest.mark.parametrize("twin", ["option", "environment", "ini"])
def test_golden_files_are_written_only_when_told_to(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, twin: str
) -> None:
    pytester.makeconftest(MIXED)
    pytester.makepyfile(test_golden=GOLDEN)
    path = pytester.path / "expectations" / "test_golden.json"
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(
        ['E*    in expectations/test_golden.json, under "loss"; --cuda-update-expectations writes it']
    )
    assert not path.exists()
    arguments: tuple[str, ...] = ()
    if twin == "option":
        arguments = ("--cuda-update-expectations", "-n", "2")
    elif twin == "environment":
        monkeypatch.setenv("CUDAENV_UPDATE_EXPECTATIONS", "1")
    else:
        pytester.makeini("[pytest]\ncuda_update_expectations = true")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["*cudaenv: --cuda-update-expectations*", "golden values written: 5"])
    assert json.loads(path.read_text()) == {
        "cells": {"(9, 0, 'eager-fp32')": ["eager"], "(9, 0, 'sdpa-fp32')": ["sdpa"]},
        "device": {"(7, 5)": "t4", "(9, 0)": "h100"},
        "loss": {"cpu": 1.5},
    }
    monkeypatch.delenv("CUDAENV_UPDATE_EXPECTATIONS", raising=False)
    pytester.makeini("[pytest]")
    pytester.runpytest_subprocess().assert_outcomes(passed=5)
    monkeypatch.setenv("SHIFT", "0.5")
    result = pytester.runpytest_subprocess("-k", "alone")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(['E*[[]expectation[]] needs the value for the CPU to be as "cpu" says*off by 0.5*'])


def test_what_a_simulated_host_computes_is_not_written(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GOLDEN)
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100", "--cuda-update-expectations")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--cuda-update-expectations: what a simulated host computes is not that host's*"])


def test_a_fixture_of_a_plugin_that_is_switched_off_says_so(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ncuda = false")
    pytester.makepyfile("def test_it(expectations): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*`cuda = false` in the ini file switches pytest-cudaenv off*"])


def test_a_suites_own_fixture_of_that_name_is_the_suites(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.fixture
        def expectations(): return 7
        def test_it(expectations, request):
            assert expectations == 7
            assert not list(request.node.iter_markers("cuda"))
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*cudaenv:*")


def test_it_must_be_requested_by_name(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_sly(request): request.getfixturevalue('expectations')")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*[[]no-grant[]]*request `expectations` as an argument*"])


def test_transformers_expectations_move_by_an_import(
    pytester: pytest.Pytester, on_host: Callable[[Host], None]
) -> None:
    """The dicts and calls stay as they are; what transformers takes from afar is missing."""
    software = Software(torch=TorchBuild("2.13.0+cu130", cuda="13.0"))
    devices = renumbered((simulated_device("h100", 0),))
    on_host(Host(devices=devices, software=software, driver="580.95.05", driver_cuda=(13, 0)))
    pytester.makepyfile(
        """
        import unittest
        from pytest_cudaenv.migrate.transformers import Expectations, require_torch_gpu

        @require_torch_gpu
        class OldTest(unittest.TestCase):
            def test_same(self):
                expectations = Expectations({("cuda", (8, 6)): "a", ("cuda", 9): "b", ("rocm", (9, 4)): "c"})
                self.assertEqual(expectations.get_expectation(), "b")
                self.assertEqual(Expectations({(None, None): 1, ("cuda", 8): 2}).get_expectation(), 1)

            def test_from_afar(self):
                Expectations({("cuda", 8): "a", ("cuda", 7): "b"}).get_expectation()
        """
    )
    result = pytester.runpytest_inprocess("--cuda-isolation", "off")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(['*[[]expectation-missing[]] needs a value for CUDA 9.0; have only ("cuda", 8), *'])
