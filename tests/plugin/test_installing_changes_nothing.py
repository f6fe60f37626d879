"""A suite that does not use the plugin runs with it as without it: one test per way in which that once was false."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.devices import Host

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"

ALONE, SPREAD = (), ("-n", "2")

Run = Callable[..., pytest.RunResult]


@pytest.fixture(params=[ALONE, SPREAD], ids=["alone", "n2"])
def run(request: pytest.FixtureRequest, pytester: pytest.Pytester, blind: None) -> Run:
    """Runs the suite in this process, or over two workers."""
    return lambda *arguments: pytester.runpytest_inprocess(*request.param, *arguments)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for devices fails the run: a suite that does not use the plugin gives no cause to."""

    def look(*_: object, **__: object) -> Host:
        raise AssertionError("a suite that does not use the plugin looked for devices")

    monkeypatch.setattr("pytest_cudaenv.host.detect.detect_host", look)


def assert_silent(result: pytest.RunResult) -> None:
    """Nothing that the plugin prints."""
    result.stdout.no_fnmatch_line("*cudaenv: *")
    result.stderr.no_fnmatch_line("*cudaenv*")


# Names that suites use already, and what they read from the mask -----------------------------------------------

INI = """
[pytest]
markers =
    distributed(num_gpus): needs that many
    cuda: the suite's own
    multi_gpu: the suite's own
"""

CONFTEST = """
import pytest

OPTIONS = ("--dtypes", "--dtype", "--device", "--devices", "--attn-backends", "--attn-backend", "--hub-kernels",
           "--cuda", "--gpu", "--num-gpus", "--visible", "--simulate")

def pytest_addoption(parser):
    for name in OPTIONS:
        parser.addoption(name, default="unset")
    for name in ("device", "dtypes", "gpu"):
        parser.addini(name, "the suite's")
"""

OUR_NAMES = ("dtype", "device", "attn_backend", "cell", "cuda_device", "cuda_devices", "mixed_precision")

MODULES: dict[str, tuple[str, list[str]]] = {
    "parametrized": (
        """
        import pytest

        @pytest.mark.parametrize("dtype", ["half", "float"])
        @pytest.mark.parametrize("attn_backend", ["FLASH_ATTN", "XFORMERS"])
        def test_kernel(dtype, attn_backend):
            assert dtype in ("half", "float") and attn_backend in ("FLASH_ATTN", "XFORMERS")

        @pytest.mark.parametrize("device", ["cpu"])
        def test_device(device):
            assert device == "cpu"
        """,
        [
            "test_kernel[FLASH_ATTN-half]",
            "test_kernel[FLASH_ATTN-float]",
            "test_kernel[XFORMERS-half]",
            "test_kernel[XFORMERS-float]",
            "test_device[cpu]",
        ],
    ),
    "own_fixtures": (
        "import pytest\n"
        + "".join(f"@pytest.fixture\ndef {name}():\n    return 'my {name}'\n" for name in OUR_NAMES)
        + f"def test_once({', '.join(OUR_NAMES)}):\n"
        + "".join(f"    assert {name} == 'my {name}'\n" for name in OUR_NAMES),
        ["test_once"],
    ),
    "own_parameters": (
        """
        import pytest

        @pytest.fixture(scope="module", params=["ring", "ulysses"])
        def attn_backend(request):
            return request.param

        def test_backend(attn_backend):
            assert attn_backend in ("ring", "ulysses")
        """,
        ["test_backend[ring]", "test_backend[ulysses]"],
    ),
    "own_options": (
        """
        def test_options(pytestconfig):
            assert pytestconfig.getoption("--dtypes") == "fp8"
            assert pytestconfig.getoption("--cuda") == "0"
            assert pytestconfig.getoption("--attn-backends") == "unset"
        """,
        ["test_options"],
    ),
    "own_markers": (
        """
        import pytest

        @pytest.mark.distributed(num_gpus=2)
        def test_runs_once_here(request):
            assert request.node.get_closest_marker("distributed").kwargs == {"num_gpus": 2}

        @pytest.mark.cuda
        @pytest.mark.multi_gpu
        def test_marked(): ...
        """,
        ["test_runs_once_here", "test_marked"],
    ),
    "counting": (
        """
        import os
        import pytest

        def device_count():
            return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

        pytestmark = pytest.mark.skipif(device_count() < 2, reason="needs two")

        @pytest.mark.parametrize("rank", range(device_count()))
        def test_rank(rank):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
            assert "CUDA_DEVICE_ORDER" not in os.environ
        """,
        ["test_rank[0]", "test_rank[1]"],
    ),
}
"""Suites in one module each, and the tests that they have."""


@pytest.fixture
def suite_of(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Writes the suite that these modules make, under the mask 1,0; answers the names of its tests, sorted."""

    def write(*names: str) -> list[str]:
        pytester.makeini(INI)
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(**{f"test_{name}": MODULES[name][0] for name in names})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        return sorted(f"test_{name}.py::{test}" for name in names for test in MODULES[name][1])

    return write


def passed(result: pytest.RunResult) -> list[str]:
    """The tests that `-rA` reports as passed, sorted."""
    return sorted(line.removeprefix("PASSED ") for line in result.outlines if line.startswith("PASSED "))


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("name", MODULES)
def test_a_suite_with_such_names_runs_as_before(
    pytester: pytest.Pytester, suite_of: Callable[..., list[str]], name: str
) -> None:
    expected = suite_of(name)
    result = pytester.runpytest_inprocess("--strict-markers", "-rA", "--dtypes", "fp8", "--cuda", "0")
    result.assert_outcomes(passed=len(expected))
    assert passed(result) == expected
    assert_silent(result)


@pytest.mark.usefixtures("blind")
def test_suites_with_such_names_run_as_before_over_workers(
    pytester: pytest.Pytester, suite_of: Callable[..., list[str]]
) -> None:
    expected = suite_of(*MODULES)
    result = pytester.runpytest_inprocess("-n", "2", "--strict-markers", "-rA", "--dtypes", "fp8", "--cuda", "0")
    result.assert_outcomes(passed=len(expected))
    assert passed(result) == expected
    assert_silent(result)


@pytest.mark.usefixtures("blind")
def test_a_suite_selects_by_its_own_cuda_marker(pytester: pytest.Pytester, suite_of: Callable[..., list[str]]) -> None:
    suite_of("own_markers", "own_fixtures", "parametrized")
    pytester.runpytest_inprocess("-m", "cuda or multi_gpu").assert_outcomes(passed=1, deselected=7)


def test_a_device_fixture_that_extends_ours_gets_ours(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def device(device):
            return f"wrapped {device}"
        """
    )
    pytester.makepyfile(
        """
        def test_wrapped(device):
            assert device == "wrapped cpu"
        """
    )
    pytester.runpytest_subprocess("-v").assert_outcomes(passed=1)


# The workers and the scheduler ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variable", "created"),
    [(["-n", "auto"], "1", "1/1 worker"), (["-n", "auto"], "2", "2/2 workers")],
)
def test_the_number_of_workers_is_xdists_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str, created: str
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", variable)
    pytester.makepyfile("def test_one(): ...")
    result = pytester.runpytest_inprocess(*arguments, "--cuda-simulate", "h100:2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"created: {created}"])


@pytest.mark.parametrize(
    ("arguments", "scheduler"),
    [
        ([], "LoadScheduling"),
        (["--dist", "load"], "LoadScheduling"),
        (["--dist", "loadscope"], "LoadScopeScheduling"),
    ],
)
def test_the_scheduler_is_xdists_own(pytester: pytest.Pytester, arguments: list[str], scheduler: str) -> None:
    pytester.makeconftest(
        """
        import pathlib

        def pytest_sessionfinish(session):
            if (controller := session.config.pluginmanager.getplugin("dsession")) is not None:
                pathlib.Path("scheduler.txt").write_text(type(controller.sched).__name__)
        """
    )
    pytester.makepyfile("def test_one(): ...")
    pytester.runpytest_inprocess("-n", "1", *arguments).assert_outcomes(passed=1)
    assert (pytester.path / "scheduler.txt").read_text() == scheduler


# What a start costs --------------------------------------------------------------------------------------------


def imported(pytester: pytest.Pytester, *arguments: str) -> set[str]:
    """The modules that a run on this suite imports, in a process of its own."""
    # -s, or pytest would capture what Python writes while collecting.
    command = [sys.executable, "-X", "importtime", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines} - {"imported package"}


def added(with_plugin: Iterable[str], without: Iterable[str]) -> set[str]:
    """Top-level names of what the plugin imports beside itself and the standard library."""
    names = {name.partition(".")[0] for name in set(with_plugin) - set(without)}
    return names - {"pytest_cudaenv"} - set(sys.stdlib_module_names)


def test_start_up_imports_no_library(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): ...")
    alone = imported(pytester)
    assert added(alone, imported(pytester, "-p", "no:cudaenv")) == set()
    ours = {name for name in alone if name.startswith("pytest_cudaenv.")}
    assert {name for name in ours if name.split(".")[1] in {"host", "requirements", "grants", "ledger"}} == set()


def test_a_suite_that_uses_the_plugin_imports_neither_torch_nor_transformers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_cudaenv import requires_cuda

        @requires_cuda(devices=16)
        def test_one(): ...
        """
    )
    names = imported(pytester, "--cuda-simulate", "h100:2")
    assert "pytest_cudaenv.requirements.markers" in names
    # Other installed plugins may import what they like.
    of_others = imported(pytester, "-p", "no:cudaenv", "--version")
    assert (names - of_others).isdisjoint({"torch", "transformers", "kernels", "numpy", "accelerate"})


# The one variable, and the environment -------------------------------------------------------------------------

CHECKED = f"""
import os
import subprocess
import sys

NAME = {NVML_CHECK!r}
WHILE_COLLECTING = os.environ.get(NAME)
ASK = "import os; print(os.environ.get({NVML_CHECK!r}))"

def test_value():
    while_collecting, while_running = {{expected}}
    assert WHILE_COLLECTING == while_collecting
    assert os.environ.get(NAME) == while_running
    child = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(while_running)
"""


@pytest.mark.parametrize(
    ("before", "while_collecting", "while_running"),
    [(None, "1", None), ("", "", ""), ("1", "1", "1")],
    ids=["unset", "empty", "set"],
)
def test_the_nvml_check_is_on_while_collecting_only(
    pytester: pytest.Pytester,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    before: str | None,
    while_collecting: str,
    while_running: str | None,
) -> None:
    if before is not None:
        monkeypatch.setenv(NVML_CHECK, before)
    pytester.makepyfile(CHECKED.format(expected=(while_collecting, while_running)))
    run().assert_outcomes(passed=1)
    assert os.environ.get(NVML_CHECK) == before


PASSING = "def test_one(): ..."
BROKEN = "import a_module_that_is_not_there"
USING = """
import pytest

@pytest.mark.requires_cuda(devices=2)
def test_two(): ...
"""


def environment() -> dict[str, str]:
    """The environment, less what pytest itself writes for each test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.mark.parametrize(
    ("source", "arguments", "status"),
    [
        (PASSING, [], pytest.ExitCode.OK),
        (BROKEN, [], pytest.ExitCode.INTERRUPTED),
        (PASSING, ["--no-such-option"], pytest.ExitCode.USAGE_ERROR),
        (PASSING, ["--collect-only"], pytest.ExitCode.OK),
        (USING, ["--cuda-visible", "1"], pytest.ExitCode.OK),
        (USING, ["--cuda-visible", "7"], pytest.ExitCode.USAGE_ERROR),
        (USING, ["--cuda-simulate", "t4", "--cuda-visible", "0", "--cuda-unmet", "fail"], pytest.ExitCode.TESTS_FAILED),
        (BROKEN, ["--cuda-visible", "1"], pytest.ExitCode.INTERRUPTED),
    ],
)
def test_a_run_leaves_the_environment_as_it_was(
    pytester: pytest.Pytester,
    on_host: Callable[[Host], None],
    source: str,
    arguments: list[str],
    status: pytest.ExitCode,
) -> None:
    on_host(simulated_host("h100:2"))
    pytester.makepyfile(source)
    before, finders = environment(), list(sys.meta_path)
    assert pytester.runpytest_inprocess(*arguments).ret == status
    assert environment() == before
    assert sys.meta_path == finders


# Switching it off ----------------------------------------------------------------------------------------------


def test_cuda_false_leaves_marks_without_effect(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeini("[pytest]\ncuda = false\n")
    pytester.makepyfile(
        f"""
        import os
        import pytest
        from pytest_cudaenv import requires_cuda, requires_flash_attn3

        CHECK = os.environ.get({NVML_CHECK!r})

        @requires_cuda(devices=16)
        @requires_flash_attn3
        def test_runs():
            assert CHECK is None

        @pytest.mark.requires_cuda(devices="wrong, and nobody reads it")
        def test_runs_too(): ...
        """
    )
    result = run("--strict-markers", "--cuda-unmet", "fail")
    result.assert_outcomes(passed=2)
    assert_silent(result)


@pytest.mark.parametrize("plugin", ["terminal", "cacheprovider", "xdist", "randomly", "unittest"])
def test_the_plugin_works_without_other_plugins(pytester: pytest.Pytester, plugin: str) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_plain(): ...

        @pytest.mark.requires_cuda
        def test_granted(): ...

        @pytest.mark.requires_cuda(devices=2)
        def test_unmet(): ...
        """
    )
    reports = pytester.inline_run("-p", f"no:{plugin}", "--cuda-simulate", "t4")
    passed, skipped, failed = reports.listoutcomes()
    assert [len(found) for found in (passed, skipped, failed)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        ([], pytest.ExitCode.OK, "*PytestUnknownMarkWarning: Unknown pytest.mark.requires_cuda*"),
        (["--strict-markers"], pytest.ExitCode.INTERRUPTED, "*'requires_cuda' not found in `markers`*"),
    ],
)
def test_marks_without_the_plugin_are_unknown_marks(
    pytester: pytest.Pytester, arguments: list[str], status: pytest.ExitCode, line: str
) -> None:
    pytester.makepyfile("import pytest\n\n@pytest.mark.requires_cuda(devices=16)\ndef test_one(): ...")
    # In a process of its own: pytest remembers the markers that an earlier run has registered.
    result = pytester.runpytest_subprocess("-p", "no:cudaenv", *arguments)
    assert result.ret == status
    result.stdout.fnmatch_lines([line])


# All of it, on a mixed suite -----------------------------------------------------------------------------------

MIXED = '''
"""
>>> 1 + 1
2
"""
import unittest
import warnings

import pytest


@pytest.fixture(scope="module", params=["a", "b"])
def letter(request):
    return request.param

@pytest.fixture
def number():
    yield 1
    warnings.warn("late")

def test_function(): ...
def test_letter(letter): assert letter in "ab"
def test_number(number, tmp_path): assert tmp_path.is_dir()
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="not now")
def test_skipped(): ...
@pytest.mark.xfail(reason="known")
def test_expected(): assert False
@pytest.mark.xfail
def test_unexpected(): ...
@pytest.mark.parametrize("size", [1, 2, 3], ids=str)
def test_sizes(size): ...

class TestClass:
    @pytest.mark.parametrize("flag", [True, False])
    def test_flag(self, flag, letter): ...
    def test_error(self, no_such_fixture): ...
    @staticmethod
    def test_static(): ...

class TestLegacy(unittest.TestCase):
    def setUp(self): self.value = 3
    def test_value(self): self.assertEqual(self.value, 3)
    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
    @unittest.skip("never")
    def test_never(self): ...

def test_with_subtests(subtests):
    for i in range(2):
        with subtests.test(i=i):
            assert i == 0

def doubled(x):
    """
    >>> doubled(2)
    4
    """
    return 2 * x
'''


ENDS = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS", "SUBFAILED")


def test_a_mixed_suite_collects_the_same(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mixed=MIXED)
    arguments = ["--doctest-modules", "--collect-only", "-q"]
    listed = [pytester.runpytest_inprocess(*off, *arguments).outlines for off in ((), ("-p", "no:cudaenv"))]
    ids = [[line for line in lines if "::" in line] for lines in listed]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 23


def test_a_mixed_suite_ends_the_same(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(test_mixed=MIXED)
    results = [run(*off, "--doctest-modules", "-rA") for off in ((), ("-p", "no:cudaenv"))]
    assert results[0].parseoutcomes() == results[1].parseoutcomes()
    ends = [sorted(line for line in result.outlines if line.startswith(ENDS)) for result in results]
    assert ends[0] == ends[1]
    # Subtests came with pytest 9; before, the test that asks for them is an error like any other.
    assert len(ends[0]) == (25 if hasattr(pytest, "Subtests") else 23)
    assert results[0].ret == results[1].ret == pytest.ExitCode.TESTS_FAILED
    assert_silent(results[0])


def test_nothing_of_the_plugin_stands_between_a_suite_and_its_imports(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def ours():
            return [f for f in sys.meta_path if "cudaenv" in type(f).__module__]

        WHILE_COLLECTING = ours()

        def test_nothing_of_ours():
            assert (WHILE_COLLECTING, ours()) == ([], [])
            assert "pynvml" not in sys.modules
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_workers_leave_no_message_behind(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pytester.makepyfile(PASSING, test_using=USING)
    pytester.runpytest_inprocess("-n", "2", "--cuda-simulate", "h100:2").assert_outcomes(passed=2)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("cudaenv")] == []
