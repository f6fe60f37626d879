"""The ids of cells: from marks and ini alone, the same on every host, under every option and variable."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.problems import PROBLEMS

OnHost = Callable[[Host], None]

DEFAULT = ["eager-fp32", "eager-bf16", "sdpa-bf16", "sdpa-fp32", "flash_attention_2-bf16"]
"""The plugin's own cells: no device runs FlashAttention in float32.

In the order in which pytest puts module-scoped parameters: as few fixtures as possible change between two tests.
"""


def collect(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Lists the suite's tests, in this process."""
    return pytester.runpytest_inprocess("--strict-markers", "--collect-only", "-q", *arguments)


def ids(pytester: pytest.Pytester, source: str, *arguments: str) -> list[str]:
    """The tests of one module: `test_one[eager-fp32]`, in the order in which they would run."""
    pytester.makepyfile(test_it="import pytest\nfrom pytest_cudaenv import *\n" + source)
    result = collect(pytester, *arguments)
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def of(*cells: str, test: str = "test_one") -> list[str]:
    return [f"{test}[{cell}]" for cell in cells]


def collection_error(pytester: pytest.Pytester, source: str) -> str:
    """What is printed for a module that must not collect; pytest wraps nothing in it."""
    pytester.makepyfile(test_it="import unittest\nimport pytest\nfrom pytest_cudaenv import *\n" + source)
    result = pytester.runpytest_inprocess("--strict-markers")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    text = result.stdout.str()
    assert "INTERNALERROR" not in text
    return text.partition("ERROR collecting test_it.py")[2].partition("short test summary info")[0]


# The same on every host ----------------------------------------------------------------------------------------

SUITE = """
import unittest
import pytest
from pytest_cudaenv import attn_backends, dtypes, requires_cuda, requires_flash_attn3, xfail_cells

pytestmark = dtypes("float16", "bfloat16", "float32")

@pytest.fixture(scope="module")
def model(cell): return cell

def test_default(cell): ...
def test_backend_only(attn_backend): ...
def test_dtype_only(dtype): ...
def test_pair(dtype, attn_backend): ...
def test_through_a_fixture(model): ...
@attn_backends("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
@xfail_cells(attn_backend="flash_attention_4", capability="==12.*", reason="wrong", until="2026-01-01")
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_all(cell, padding): ...
@attn_backends("kernels-community/flash-attn3@main")
def test_hub(cell): ...
@requires_flash_attn3
@requires_cuda(devices=2)
def test_marked(cuda_devices): ...
class TestClass:
    @attn_backends({"text_config": "flash_attention_2", "vision_config": "sdpa"})
    def test_towers(self, cell): ...
class TestLegacy(unittest.TestCase):
    @requires_flash_attn3
    def test_old(self): ...
"""


def listing(result: pytest.RunResult) -> str:
    """All of stdout but the time that collecting took."""
    assert result.ret == pytest.ExitCode.OK
    return re.sub(r" in \d+\.\d\ds$", "", result.stdout.str().rstrip("\n"))


def test_the_listing_is_the_same_to_the_byte_on_every_host(
    pytester: pytest.Pytester, on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(SUITE)
    on_host(Host())
    expected = listing(collect(pytester))
    assert expected.endswith("\n81 tests collected")
    for arguments in (
        ["--cuda-simulate", "t4"],
        ["--cuda-simulate", "h100:2"],
        ["--cuda-simulate", "gb10"],
        ["--cuda-simulate", "h100:2", "--cuda-assume", "flash-attn-3==3.0.0", "--cuda-assume", "torch==2.6.0+cpu"],
        ["-n", "2"],
        ["-n", "2", "--cuda-simulate", "h100:2"],
        ["--cuda-unmet", "fail"],
        ["-p", "no:xdist"],
    ):
        assert listing(collect(pytester, *arguments)) == expected, arguments
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert listing(collect(pytester)) == expected
    assert listing(collect(pytester, "--cuda-simulate", "h100:2")) == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert listing(collect(pytester, "--cuda-simulate", "h100:2")) == expected
    on_host(Host(problem=PROBLEMS["gpu-lost"]))
    assert listing(collect(pytester)) == expected


def test_workers_of_different_hosts_collect_the_same(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(
        """
        import os

        worker = os.environ.get("PYTEST_XDIST_WORKER", "controller")
        os.environ["CUDAENV_SIMULATE"] = {"gw0": "t4", "gw1": "h100:2", "controller": "gb10"}[worker]
        """
    )
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-n", "2", "-k", "test_marked or test_old")
    result.assert_outcomes(skipped=2)


# What makes them -----------------------------------------------------------------------------------------------


def test_default_cells(pytester: pytest.Pytester) -> None:
    assert ids(pytester, "def test_one(cell): ...") == of(*DEFAULT)


def test_one_axis(pytester: pytest.Pytester) -> None:
    assert ids(pytester, "def test_one(attn_backend): ...") == of("eager", "sdpa", "flash_attention_2")
    assert ids(pytester, "def test_one(dtype): ...") == of("fp32", "bf16")


def test_the_mark_is_the_list(pytester: pytest.Pytester) -> None:
    source = "@attn_backends('flex_attention', 'flash-attn-3')\n@dtypes('fp16', 'float64')\ndef test_one(cell): ..."
    assert ids(pytester, source) == of("flex_attention-fp16", "flex_attention-fp64", "flash_attention_3-fp16")


def test_ids_do_not_depend_on_the_order_of_the_arguments(pytester: pytest.Pytester) -> None:
    marks = "@attn_backends('sdpa')\n@dtypes('float32')\n"
    assert ids(pytester, marks + "def test_one(cell): ...") == of("sdpa-fp32")
    assert ids(pytester, marks + "def test_one(attn_backend, dtype, cell): ...") == of("sdpa-fp32")
    assert ids(pytester, marks + "def test_one(cell, dtype, attn_backend): ...") == of("sdpa-fp32")


def test_exclude_leaves_out_of_the_default_or_the_list(pytester: pytest.Pytester) -> None:
    assert ids(pytester, "@attn_backends(exclude='flash_attention_2')\ndef test_one(cell): ...") == of(*DEFAULT[:4])
    source = "@attn_backends('eager', 'sdpa', exclude=['eager'])\n@dtypes(exclude='bf16')\ndef test_one(cell): ..."
    assert ids(pytester, source) == of("sdpa-fp32")


def test_a_backend_for_each_sub_config(pytester: pytest.Pytester) -> None:
    backend = "{'text_config': 'flash_attention_2', 'vision_config': 'sdpa', '': 'eager'}"
    source = f"@attn_backends('sdpa', {backend})\ndef test_one(cell): ..."
    assert ids(pytester, source) == of("sdpa-fp32", "sdpa-bf16", "text=flash_attention_2+vision=sdpa+model=eager-bf16")


def test_the_closest_list_wins(pytester: pytest.Pytester) -> None:
    source = """
pytestmark = [attn_backends("eager", "sdpa"), dtypes("float32")]

def test_one(cell): ...

@attn_backends("flex_attention")
class TestClass:
    def test_two(self, cell): ...
    @attn_backends("sdpa")
    @dtypes("bfloat16", "float16")
    def test_three(self, cell): ...
"""
    assert sorted(ids(pytester, source)) == sorted(
        [
            *of("eager-fp32", "sdpa-fp32"),
            *of("flex_attention-fp32", test="TestClass::test_two"),
            *of("sdpa-bf16", "sdpa-fp16", test="TestClass::test_three"),
        ]
    )


def test_ini_changes_the_default(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ncuda_attn_backends = sdpa flex_attention\ncuda_dtypes = float16\n")
    source = "def test_one(cell): ...\n@attn_backends('eager')\ndef test_two(cell): ..."
    # pytest orders tests by their module-scoped parameters, not the same in each release.
    assert sorted(ids(pytester, source)) == sorted(
        [*of("sdpa-fp16", "flex_attention-fp16"), *of("eager-fp16", test="test_two")]
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cuda-attn-backends", "sdpa"], DEFAULT[2:4]),
        (["--cuda-attn-backends", "sdpa", "--cuda-attn-backends", "fa2"], DEFAULT[2:]),
        (["--cuda-dtypes", "float32"], [DEFAULT[0], DEFAULT[3]]),
        (["--cuda-dtypes", "fp16"], []),
        (["--cuda-attn-backends", "flash_attention_2", "--cuda-dtypes", "bf16"], DEFAULT[4:]),
        (["--cuda-attn-backends", "flex_attention"], []),
    ],
)
def test_options_deselect_and_add_nothing(pytester: pytest.Pytester, arguments: list[str], expected: list[str]) -> None:
    source = "def test_one(cell): ...\ndef test_plain(): ...\n@requires_cuda\ndef test_device(): ..."
    listed = ids(pytester, source, *arguments)
    assert listed == [*of(*expected), "test_plain", "test_device"]


def test_variables_deselect_and_add_nothing(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAENV_ATTN_BACKENDS", "eager flex_attention")
    monkeypatch.setenv("CUDAENV_DTYPES", "float32")
    assert ids(pytester, "def test_one(cell): ...") == of("eager-fp32")


def test_options_count_what_they_deselect(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(Host())
    pytester.makepyfile("def test_one(cell): ...")
    result = collect(pytester, "--cuda-dtypes", "fp32")
    result.stdout.fnmatch_lines(["2/5 tests collected (3 deselected) in *"])


def test_k_tells_the_dtypes_apart(pytester: pytest.Pytester) -> None:
    source = "@attn_backends('sdpa')\n@dtypes('float16', 'bfloat16', 'float32')\ndef test_one(cell): ..."
    assert ids(pytester, source, "-k", "fp16") == of("sdpa-fp16")
    assert ids(pytester, source, "-k", "bf16") == of("sdpa-bf16")


def test_a_test_that_is_parametrized_besides_keeps_its_cells_together(pytester: pytest.Pytester) -> None:
    source = """
pytestmark = [attn_backends("eager", "sdpa"), dtypes("float32")]

@pytest.mark.parametrize("padding", ["left", "right"])
def test_one(padding, cell): ...

@pytest.mark.parametrize("padding", ["left", "right"])
def test_two(cell, padding): ...
"""
    assert ids(pytester, source) == [
        *of("eager-fp32-left", "eager-fp32-right"),
        *of("eager-fp32-left", "eager-fp32-right", test="test_two"),
        *of("sdpa-fp32-left", "sdpa-fp32-right"),
        *of("sdpa-fp32-left", "sdpa-fp32-right", test="test_two"),
    ]


def test_default_cells_of_a_parametrized_test_have_the_same_ids_as_listed_ones(pytester: pytest.Pytester) -> None:
    body = "@pytest.mark.parametrize('padding', ['left', 'right'])\ndef test_one(cell, padding): ..."
    marks = "@attn_backends('eager', 'sdpa', 'flash_attention_2')\n@dtypes('float32', 'bfloat16')\n"
    assert sorted(ids(pytester, body)) == sorted(ids(pytester, marks + body))


# Overriding ----------------------------------------------------------------------------------------------------


def test_a_direct_parametrization_takes_the_place_of_one_axis(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.parametrize('dtype', ['int8', 'int4'])\ndef test_one(attn_backend, dtype): ..."
    assert sorted(ids(pytester, source)) == sorted(
        f"test_one[{backend}-{dtype}]"
        for backend in ("eager", "sdpa", "flash_attention_2")
        for dtype in ("int8", "int4")
    )


def test_an_overriding_fixture_is_the_suites(pytester: pytest.Pytester) -> None:
    source = """
@pytest.fixture(scope="module", params=["ring"])
def attn_backend(request): return request.param

@dtypes("float32")
def test_one(attn_backend, dtype): ...
"""
    assert ids(pytester, source) == of("ring-fp32")


# Errors that name the choices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--cuda-attn-backends", "flash"],
            "*--cuda-attn-backends: unknown attention backend 'flash'*choose from eager, *",
        ),
        (["--cuda-dtypes", "int7"], "*--cuda-dtypes: unknown dtype 'int7'*choose from *bf16*"),
        (["--cuda-simulate", "h1000"], "*--cuda-simulate: unknown device 'h1000'; choose from p100, *"),
        (["--cuda-simulate", "h100:99"], "*--cuda-simulate: 'h100:99': the count is a number from 1 to 16"),
        (["--cuda-assume", "flash-attn>=2"], "*--cuda-assume 'flash-attn>=2': write DIST or DIST==VERSION, *"),
        (
            ["-o", "cuda_attn_backends=flash"],
            "*ini cuda_attn_backends: unknown attention backend 'flash'*choose from *",
        ),
        (["-o", "cuda_dtypes=int7"], "*ini cuda_dtypes: unknown dtype 'int7'*choose from *"),
    ],
)
def test_unknown_names_are_usage_errors(pytester: pytest.Pytester, arguments: list[str], line: str) -> None:
    pytester.makepyfile("def test_one(cell): ...")
    result = pytester.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


@pytest.mark.parametrize("variable", ["CUDAENV_ATTN_BACKENDS", "CUDAENV_DTYPES", "CUDAENV_SIMULATE", "CUDAENV_UNMET"])
def test_unknown_names_in_variables_are_usage_errors(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "nonsense")
    pytester.makepyfile("def test_one(cell): ...")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'nonsense'*choose from *"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "@attn_backends(exclude=['eager', 'sdpa', 'flash_attention_2'])\ndef test_one(cell): ...",
            "test_it.py::test_one: @attn_backends leaves no attn_backend",
        ),
        (
            "@dtypes('bf16', exclude='bfloat16')\ndef test_one(dtype): ...",
            "test_it.py::test_one: @dtypes leaves no dtype",
        ),
        (
            "@attn_backends('flash_attention_2', 'flash_attention_3')\n@dtypes('float32')\ndef test_one(cell): ...",
            "test_it.py::test_one: no cell is left, for no device runs flash_attention_2-fp32, flash_attention_3-fp32",
        ),
        (
            "@attn_backends('sdpa')\ndef test_one(): ...",
            "test_it.py::test_one: @attn_backends has no effect here: request the fixture `cell` or `attn_backend`",
        ),
        (
            "@dtypes('float32')\ndef test_one(attn_backend): ...",
            "@dtypes has no effect here: request the fixture `cell` or `dtype`",
        ),
        (
            "class TestLegacy(unittest.TestCase):\n    @attn_backends('sdpa')\n    def test_one(self): ...",
            "test_it.py::TestLegacy::test_one: @attn_backends has no effect here: a unittest.TestCase method cannot "
            "take fixtures; go through pytest_cudaenv.current().cells(…) in it, or move it to a function or a plain "
            "class",
        ),
    ],
    ids=["no backend", "no dtype", "impossible", "no fixture", "other fixture", "TestCase method"],
)
def test_lists_that_make_no_cell_are_collection_errors(pytester: pytest.Pytester, source: str, message: str) -> None:
    assert message in " ".join(collection_error(pytester, source).split())


def test_a_list_on_a_testcase_class_is_a_collection_error(pytester: pytest.Pytester) -> None:
    source = "@attn_backends('sdpa')\nclass TestLegacy(unittest.TestCase):\n    def test_one(self): ..."
    pytester.makepyfile(test_it="import unittest\nfrom pytest_cudaenv import *\n" + source)
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["*@attn_backends has no effect here: a unittest.TestCase method cannot take fixtures*"]
    )


def test_a_list_on_a_class_may_serve_some_of_its_tests(pytester: pytest.Pytester) -> None:
    source = """
@attn_backends("sdpa")
@dtypes("float32")
class TestClass:
    def test_one(self, cell): ...
    def test_plain(self): ...
"""
    assert ids(pytester, source) == ["TestClass::test_one[sdpa-fp32]", "TestClass::test_plain"]


# Running -------------------------------------------------------------------------------------------------------


def test_a_module_scoped_model_is_built_once_for_each_cell(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    body = """
        import pathlib
        import pytest
        from pytest_cudaenv import attn_backends, dtypes

        pytestmark = [attn_backends("eager", "sdpa", "flash_attention_2"), dtypes("float32", "bfloat16")]

        @pytest.fixture(scope="module")
        def model(cell):
            with pathlib.Path("built.txt").open("a") as file:
                print(__name__, cell.id, file=file)
            return cell

        @pytest.mark.parametrize("padding", ["left", "right"])
        def test_forward(model, padding, cell): assert model is cell
        def test_generate(model, attn_backend, dtype): assert (model.attn_backend, model.dtype) == (attn_backend, dtype)
    """
    pytester.makepyfile(test_a=body, test_b=body)
    result = pytester.runpytest_subprocess("-rs", "--cuda-simulate", "h100")
    result.assert_outcomes(passed=24, skipped=6)
    built = (pytester.path / "built.txt").read_text().splitlines()
    cells = ["eager-fp32", "eager-bf16", "sdpa-bf16", "sdpa-fp32"]
    assert built == [f"{module} {cell}" for module in ("test_a", "test_b") for cell in cells]


@pytest.mark.parametrize("how", ["param", "hook"])
def test_a_list_that_comes_too_late_is_refused(pytester: pytest.Pytester, how: str) -> None:
    """It could not make cells any more, and would do nothing without a word."""
    marks = "marks=attn_backends('flex_attention')" if how == "param" else ""
    pytester.makepyfile(
        f"""
        import pytest
        from pytest_cudaenv import attn_backends
        @pytest.mark.parametrize("x", [pytest.param(1, {marks})])
        def test_it(cell, x): pass
        """
    )
    if how == "hook":
        pytester.makeconftest(
            """
            import pytest
            def pytest_collection_modifyitems(items):
                for item in items:
                    item.add_marker(pytest.mark.attn_backends("flex_attention"))
            """
        )
    result = pytester.runpytest_inprocess()
    assert result.ret in {pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR}
    output = result.stdout.str() + result.stderr.str()
    assert "@attn_backends came too late to make its cells: put it on the function, class or module" in output
