"""The markers, wherever pytest and unittest take a mark, and what becomes of the tests that carry them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import pytest_cudaenv
from pytest_cudaenv.decorators import DECORATORS
from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.problems import PROBLEMS
from pytest_cudaenv.host.software import Software, TorchBuild
from pytest_cudaenv.names import MARKER_LINES, SELECTION_MARKS
from pytest_cudaenv.requirements.markers import MARKERS

OnHost = Callable[[Host], None]

CUDA_BUILD = TorchBuild("2.13.0", cuda="13.0")


def host_of(name: str, **changes: object) -> Host:
    """A host as it would be found, with a CUDA build of torch and nothing else installed."""
    host = replace(simulated_host(name), simulated=None, software=Software(torch=CUDA_BUILD))
    return replace(host, **changes)  # type: ignore[arg-type]


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    """Runs one module in this process."""
    pytester.makepyfile(test_it=source)
    return pytester.runpytest_inprocess("--strict-markers", "-rA", *arguments)


def reported(result: pytest.RunResult) -> dict[str, str]:
    """Test -> how `-rA` says that it ended; a skip as `SKIPPED`, which pytest prints with file and line."""
    ends: dict[str, str] = {}
    for line in result.outlines:
        if match := re.fullmatch(r"(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+?::\S+)(?: - .*)?", line):
            ends[match[2].partition("::")[2]] = match[1]
    return ends


def skips(result: pytest.RunResult) -> list[str]:
    """`test_it.py:3: [code] need; have what`, in the order in which pytest prints them."""
    lines = (re.fullmatch(r"SKIPPED \[\d+\] (.*)", line) for line in result.outlines)
    return [match[1] for match in lines if match]


# Where a marker may stand --------------------------------------------------------------------------------------

UNMET_ON_A_T4 = {
    "requires_cuda(devices=2)": "[cuda-devices] needs 2 CUDA devices; have 1",
    "requires_cuda": None,
    "requires_dtype('bfloat16')": "[dtype-native]",
    "requires_bf16": "[dtype-native]",
    "requires_fp8": "[dtype-native]",
    "requires_fp4": "[dtype-native]",
    "requires_tf32": "[dtype-native]",
    "requires_attn_backend('flash_attention_3')": "[attn-",
    "requires_flash_attn2": "[attn-",
    "requires_flash_attn3": "[attn-",
    "requires_flash_attn4": "[attn-",
    "requires_flex_attention": None,
    "requires_hub_kernels('kernels-community/activation')": "[kernels-missing]",
    "requires_quantization('fp8')": "[quant-",
    "requires_package('no-such-distribution>=1')": "[package-missing]",
    "requires_nccl": "[cuda-devices] needs 2 CUDA devices; have 1",
}
"""A marker -> how the reason begins that a T4 without any package gives it; None: the T4 has what it asks for."""

FORMS = {
    "function": "@{mark}\ndef test_one(): ...\n",
    "class": "@{mark}\nclass TestOne:\n    def test_one(self): ...\n",
    "method": "class TestOne:\n    @{mark}\n    def test_one(self): ...\n",
    "static method": "class TestOne:\n    @{mark}\n    @staticmethod\n    def test_one(): ...\n",
    "class method": "class TestOne:\n    @classmethod\n    @{mark}\n    def test_one(cls): ...\n",
    "TestCase method": "class TestOne(unittest.TestCase):\n    @{mark}\n    def test_one(self): ...\n",
    "TestCase class": "@{mark}\nclass TestOne(unittest.TestCase):\n    def test_one(self): ...\n",
    "base class": "@{mark}\nclass Base:\n    def test_one(self): ...\nclass TestOne(Base, unittest.TestCase): ...\n",
    "pytestmark": "pytestmark = {mark}\ndef test_one(): ...\n",
    "pytestmark list": "pytestmark = [pytest.mark.usefixtures(), {mark}]\ndef test_one(): ...\n",
    "param": "@pytest.mark.parametrize('n', [pytest.param(1, marks={mark})])\ndef test_one(n): ...\n",
    "param list": "@pytest.mark.parametrize('n', [pytest.param(1, marks=[{mark}])])\ndef test_one(n): ...\n",
    "conftest": "def test_one(): ...\n",
    "conftest, last": "def test_one(): ...\n",
}

ADD_MARKER = """
import pytest
import pytest_cudaenv

@pytest.hookimpl(trylast={last})
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(item.module.MARK)
"""


@pytest.mark.parametrize("spelling", ["pytest_cudaenv", "pytest.mark"])
@pytest.mark.parametrize("form", FORMS)
def test_every_marker_works_in_every_place(
    pytester: pytest.Pytester, on_host: OnHost, form: str, spelling: str
) -> None:
    on_host(host_of("t4"))
    if form.startswith("conftest"):
        pytester.makeconftest(ADD_MARKER.format(last=form.endswith("last")))
    modules = {}
    for place, mark in enumerate(UNMET_ON_A_T4):
        head = f"import unittest\nimport pytest\nimport pytest_cudaenv\nMARK = {spelling}.{mark}\n"
        modules[f"test_{place:02}"] = head + FORMS[form].format(mark=f"{spelling}.{mark}")
    pytester.makepyfile(**modules)
    result = pytester.runpytest_inprocess("--strict-markers", "-rs")
    met = sum(start is None for start in UNMET_ON_A_T4.values())
    result.assert_outcomes(skipped=len(modules) - met, passed=met)
    lines = skips(result)
    for place, (mark, start) in enumerate(UNMET_ON_A_T4.items()):
        reasons = [line for line in lines if line.startswith(f"test_{place:02}.py:")]
        assert len(reasons) == int(start is not None), (mark, lines)
        assert start is None or start in reasons[0], (mark, reasons)


def test_every_public_marker_is_a_decorator_with_the_registered_name() -> None:
    for name in MARKERS:
        assert getattr(pytest_cudaenv, name) is DECORATORS[name]
        assert DECORATORS[name].name == name
        assert name in pytest_cudaenv.__all__


def test_the_registered_lines_are_the_signatures() -> None:
    def told(line: str) -> str:
        return line.partition(": ")[0]

    def signature(function: Callable[..., object]) -> str:
        parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        return str(inspect.Signature(parameters))

    assert [told(line) for line in MARKER_LINES] == [
        *(f"{name}{signature(function)}" for name, function in MARKERS.items()),
        *("cuda", "multi_gpu"),
    ]
    assert {"cuda", "multi_gpu"} == SELECTION_MARKS


def test_pytest_lists_the_markers(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--markers")
    result.stdout.fnmatch_lines_random(
        [
            "@pytest.mark.requires_cuda(devices=1, memory=None, capability=None, driver=None, exclusive=False): *",
            "@pytest.mark.attn_backends(*names, exclude=(), model=None): *",
            "@pytest.mark.multi_gpu: *",
        ]
    )


# What merges ---------------------------------------------------------------------------------------------------


def test_class_and_function_markers_merge(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(host_of("h100:2"))
    result = run(
        pytester,
        """
        import pytest
        from pytest_cudaenv import requires_cuda, requires_package

        @requires_package("no-such-one")
        @requires_cuda(devices=2, memory="100GiB", capability=">=8.0")
        class TestMerged:
            @requires_package("no-such-two")
            @requires_cuda(capability="<9")
            def test_all_of_it(self): ...

            @requires_cuda(devices=3, memory="1GiB")
            def test_the_larger_numbers(self): ...

        @requires_cuda(devices=2)
        class TestGranted:
            @requires_cuda(memory="70GiB")
            def test_two(self, cuda_devices):
                assert len(cuda_devices) == 2

            def test_device(self, cuda_device, cuda_devices):
                assert cuda_device == "cuda:0" and cuda_devices == ("cuda:0", "cuda:1")
        """,
    )
    result.assert_outcomes(skipped=2, passed=2)
    first, second = skips(result)
    assert first.startswith("test_it.py:7: ")
    for reason in (
        "[package-missing] needs no-such-one; have none",
        "[package-missing] needs no-such-two; have none",
        "[cuda-capability] needs capability ",
        "[cuda-memory] needs 100.0 GiB of memory; have 79.6 GiB (H100 80GB HBM3)",
    ):
        assert reason in first
    assert re.search(r"needs capability (<9,>=8\.0|>=8\.0,<9); have 9\.0", first)
    assert "[cuda-devices] needs 3 CUDA devices; have 2" in second
    assert "[cuda-memory] needs 100.0 GiB" in second


def test_needs_come_from_the_whole_fixture_closure(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(host_of("t4", devices=()))
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def weights(cuda_device): ...

        @pytest.fixture
        def model(weights): ...
        """
    )
    result = run(
        pytester,
        """
        import pytest

        def test_through_fixtures(model): ...

        @pytest.mark.usefixtures("model")
        def test_through_a_mark(): ...

        @pytest.fixture(autouse=True)
        def around(request): ...

        def test_plain(): ...
        """,
    )
    result.assert_outcomes(skipped=2, passed=1)
    assert [line.partition(": ")[2] for line in skips(result)] == ["[cuda-none] needs a CUDA device; have none"] * 2


def test_a_skip_is_located_at_the_test_with_every_reason_in_one_line(
    pytester: pytest.Pytester, on_host: OnHost
) -> None:
    on_host(host_of("t4"))
    result = run(
        pytester,
        """
        import unittest
        import pytest
        from pytest_cudaenv import requires_bf16, requires_cuda

        @requires_cuda(devices=2)
        @requires_bf16
        @pytest.mark.parametrize("n", [1])
        def test_function(n): ...

        class TestLegacy(unittest.TestCase):
            @requires_cuda(memory="20GiB")
            def test_method(self): ...
        """,
    )
    result.assert_outcomes(skipped=2)
    function, method = skips(result)
    assert re.fullmatch(
        r"test_it\.py:5: \[cuda-devices\] needs 2 CUDA devices; have 1 \| "
        r"\[dtype-native\] bf16 needs capability 8\.0; have 7\.5 \(T4\)",
        function,
    )
    assert method == "test_it.py:11: [cuda-memory] needs 20.0 GiB of memory; have 15.0 GiB (T4)"


# What a decorator refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            None,
            "@requires_flash_attn3 was applied to None: put @requires_flash_attn3 below @parameterized.expand, "
            "which leaves no function behind",
        ),
        (3, "@requires_flash_attn3 goes on a function or a class, not on int 3"),
        (lambda: None, "@requires_flash_attn3 goes on a function or a class, not on function <function <lambda>*"),
        (object(), "@requires_flash_attn3 goes on a function or a class, not on object <object object*"),
    ],
    ids=["None", "int", "lambda", "instance"],
)
def test_a_decorator_refuses_what_is_no_test(target: object, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        pytest_cudaenv.requires_flash_attn3(target)
    assert caught.match(re.escape(message).replace(r"\*", ".*"))
    with pytest.raises(TypeError, match=r"goes on a function or a class|applied to None"):
        pytest_cudaenv.requires_cuda(devices=2)(target)


def test_requires_cuda_refuses_none_without_arguments() -> None:
    with pytest.raises(TypeError, match="@requires_cuda was applied to None"):
        pytest_cudaenv.requires_cuda(None)


@pytest.mark.parametrize("name", MARKERS)
def test_no_decorator_takes_none(name: str) -> None:
    with pytest.raises(TypeError, match="None"):
        DECORATORS[name](None)


EXPANDED = """
import unittest
from parameterized import parameterized
from pytest_cudaenv import requires_flash_attn3

class TestLegacy(unittest.TestCase):
    {first}
    {second}
    def test_old(self, n): ...
"""


def test_a_decorator_above_parameterized_expand_is_an_error(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(host_of("t4"))
    source = EXPANDED.format(first="@requires_flash_attn3", second="@parameterized.expand([(1,), (2,)])")
    result = run(pytester, source)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["E*TypeError: @requires_flash_attn3 was applied to None: put @requires_flash_attn3 below*"]
    )


def test_a_decorator_below_parameterized_expand_holds_for_each_case(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(host_of("t4"))
    source = EXPANDED.format(first="@parameterized.expand([(1,), (2,)])", second="@requires_flash_attn3")
    result = run(pytester, source)
    result.assert_outcomes(skipped=2)
    assert all("FA3" in line for line in skips(result))


WRONG = {
    "requires_cuda(device=2)": ("unexpected keyword argument 'device'", "requires_cuda(devices=1"),
    "requires_cuda(devices=0)": ("devices=0: write a number of devices, 1 or more", "requires_cuda(devices=1"),
    "requires_cuda(devices='two')": ("devices='two': write a number of devices", "requires_cuda(devices=1"),
    "requires_cuda(devices=True)": ("devices=True: write a number of devices", "requires_cuda(devices=1"),
    "requires_cuda(memory='30')": ("memory='30': write a number and a unit", "memory=None"),
    "requires_cuda(capability='9.0')": ("capability='9.0': write a PEP 440 specifier", "capability=None, driver=None"),
    "requires_cuda(capability=9.0)": ("capability=9.0: write a PEP 440 specifier", "capability=None, driver=None"),
    "requires_cuda(driver='new')": ("driver='new': write a PEP 440 specifier", "driver=None, exclusive=False)"),
    "requires_cuda(exclusive='yes')": ("exclusive='yes': write True or False", "driver=None, exclusive=False)"),
    "requires_attn_backend('flash')": ("unknown attention backend 'flash'", "flash_attention_3"),
    "requires_attn_backend()": ("missing 1 required positional argument: 'name'", "requires_attn_backend(name)"),
    "requires_dtype('int7')": ("int7", "bf16, fp8_e4m3"),
    "requires_dtype()": ("name at least one dtype", "requires_dtype(*names)"),
    "requires_bf16(scaled=True)": ("unexpected keyword argument 'scaled'", "requires_bf16()"),
    "requires_quantization('fp17')": ("fp17", "bitsandbytes"),
    "requires_package('peft >= >= 1')": ("peft >= >= 1", "requires_package(*specs)"),
    "requires_package()": ("name at least one package", "requires_package(*specs)"),
    "attn_backends('flash')": ("unknown attention backend 'flash'", "attn_backends(*names"),
    "attn_backends('sdpa', exclude='flash')": ("unknown attention backend 'flash'", "attn_backends(*names"),
    "attn_backends('sdpa', model=3)": ("model=3: give the model class", "attn_backends(*names"),
    "dtypes('int7')": ("int7", "bf16, fp8_e4m3"),
    "xfail_cells(reason='broken')": ("say which cells", "xfail_cells(attn_backend"),
    "xfail_cells(dtype='bfloat16')": ("say why: reason= or issue=", "xfail_cells(attn_backend"),
    "xfail_cells(dtype='bfloat16', reason='x', until='soon')": (
        "until='soon': write a date",
        "xfail_cells(attn_backend",
    ),
}


@pytest.mark.parametrize("spelling", ["pytest_cudaenv", "pytest.mark"])
def test_wrong_arguments_are_collection_errors_with_signature_and_choices(
    pytester: pytest.Pytester, spelling: str
) -> None:
    modules = {}
    for place, mark in enumerate(WRONG):
        head = "import pytest\nimport pytest_cudaenv\n"
        modules[f"test_{place:02}"] = f"{head}@{spelling}.{mark}\ndef test_one(cell): ...\n"
    pytester.makepyfile(**modules)
    result = pytester.runpytest_inprocess("--strict-markers", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=len(WRONG))
    result.stdout.no_fnmatch_line("*INTERNALERROR*")
    parts = re.split(r"^_+ ERROR collecting test_(\d\d)\.py _+$", result.stdout.str(), flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    for place, (mark, (wrong, signature)) in enumerate(WRONG.items()):
        text = " ".join(texts[f"{place:02}"].split())
        assert wrong in text, (mark, text)
        assert signature in text, (mark, text)
        assert f"Usage: {mark.partition('(')[0]}(" in text, (mark, text)


@pytest.mark.parametrize("place", ["decorator", "conftest"])
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "n2"])
def test_wrong_arguments_end_the_run_without_a_crash(
    pytester: pytest.Pytester, place: str, workers: tuple[str, ...]
) -> None:
    if place == "conftest":
        pytester.makeconftest(
            """
            import pytest

            def pytest_collection_modifyitems(items):
                for item in items:
                    item.add_marker(pytest.mark.requires_cuda(devices=0))
            """
        )
    mark = "@pytest.mark.requires_cuda(devices=0)\n" if place == "decorator" else ""
    result = run(pytester, f"import pytest\n\n{mark}def test_one(): ...\n", *workers)
    output = result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in output
    assert "devices=0: write a number of devices, 1 or more. Usage: requires_cuda(devices=1" in output
    assert result.ret in ({pytest.ExitCode.INTERRUPTED, pytest.ExitCode.TESTS_FAILED} if workers else {2, 4})
    result.assert_outcomes(errors=result.parseoutcomes().get("errors", 0))


# Selection -----------------------------------------------------------------------------------------------------

SELECTED = """
import unittest
import pytest
from pytest_cudaenv import requires_cuda, requires_flash_attn3, requires_nccl, requires_package

def test_plain(): ...
@requires_package("pytest")
def test_package(): ...
@requires_cuda
def test_one(): ...
@requires_cuda(devices=2)
def test_two(): ...
@pytest.mark.requires_cuda(2)
def test_two_by_position(): ...
@requires_nccl
def test_nccl(): ...
@requires_flash_attn3
def test_backend(): ...
def test_fixture(cuda_device): ...
def test_device(device): ...
@pytest.fixture
def model(cuda_devices): ...
@requires_cuda(devices=4)
def test_closure(model): ...
class TestLegacy(unittest.TestCase):
    @requires_cuda(devices=2)
    def test_method(self): ...
    def test_plain(self): ...
"""

MULTI = ["test_two", "test_two_by_position", "test_nccl", "test_closure", "TestLegacy::test_method"]
CUDA = ["test_one", *MULTI[:3], "test_backend", "test_fixture", "test_device", *MULTI[3:]]
PLAIN = ["test_plain", "test_package", "TestLegacy::test_plain"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("cuda", CUDA), ("multi_gpu", MULTI), ("not cuda", PLAIN), ("cuda and not multi_gpu", sorted({*CUDA} - {*MULTI}))],
)
@pytest.mark.parametrize("name", ["none", "h100:2"])
def test_selection_goes_by_need_on_every_host(
    pytester: pytest.Pytester, on_host: OnHost, expression: str, expected: list[str], name: str
) -> None:
    on_host(Host() if name == "none" else host_of(name))
    result = run(pytester, SELECTED, "--collect-only", "-q", "-m", expression)
    listed = [line.partition("::")[2] for line in result.outlines if "::" in line]
    assert sorted(listed) == sorted(expected)


# What becomes of a test whose need is not met ------------------------------------------------------------------

UNMET = """
import pytest
from pytest_cudaenv import requires_cuda

def test_plain(): ...

@requires_cuda(devices=2)
def test_two(): ...
"""


def test_unmet_skips_by_default(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(host_of("t4"))
    run(pytester, UNMET).assert_outcomes(passed=1, skipped=1)


def test_unmet_deselect_leaves_it_out(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(host_of("t4"))
    run(pytester, UNMET, "--cuda-unmet", "deselect").assert_outcomes(passed=1, deselected=1)


def test_unmet_fail_is_an_error_with_the_reason(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(host_of("t4"))
    result = run(pytester, UNMET, "--cuda-unmet", "fail")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "[[]cuda-devices[]] needs 2 CUDA devices; have 1 (--cuda-unmet=fail)",
            "Run it on a runner with as many GPUs, or widen the mask.",
        ]
    )


@pytest.mark.parametrize("origin", ["environment", "ini"])
def test_unmet_has_an_environment_and_an_ini_twin(
    pytester: pytest.Pytester, on_host: OnHost, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    on_host(host_of("t4"))
    if origin == "environment":
        monkeypatch.setenv("CUDAENV_UNMET", "deselect")
        pytester.makeini("[pytest]\ncuda_unmet = fail\n")
    else:
        pytester.makeini("[pytest]\ncuda_unmet = deselect\n")
    result = run(pytester, UNMET)
    result.assert_outcomes(passed=1, deselected=1)
    told = {"environment": "CUDAENV_UNMET", "ini": "ini cuda_unmet"}[origin]
    result.stdout.fnmatch_lines([f"cudaenv: --cuda-unmet deselect ({told})"])


def test_unmet_names_its_choices(pytester: pytest.Pytester) -> None:
    result = run(pytester, UNMET, "--cuda-unmet", "ignore")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--cuda-unmet: 'ignore' (option): choose from skip, deselect, fail"])


# A device that is here and cannot be used ----------------------------------------------------------------------

ASKING = """
import pytest
from pytest_cudaenv import requires_cuda, requires_flash_attn3

def test_plain(): ...
@requires_cuda
def test_marked(): ...
@requires_flash_attn3
def test_backend(): ...
def test_fixture(cuda_device): ...
def test_device(device): ...
def test_cell(cell): ...
def test_mixed_precision(mixed_precision): ...
"""


@pytest.mark.parametrize("code", PROBLEMS)
def test_a_device_that_cannot_be_used_is_an_error_and_never_a_cpu_run(
    pytester: pytest.Pytester, on_host: OnHost, code: str
) -> None:
    problem = PROBLEMS[code]
    on_host(Host(problem=problem))
    result = run(pytester, ASKING)
    result.assert_outcomes(passed=1, errors=10)
    assert skips(result) == []
    assert reported(result)["test_plain"] == "PASSED"
    result.stdout.fnmatch_lines([f"*[[]{code}[]] needs a CUDA device; have {problem.have[:20]}*", f"*{problem.remedy}"])
    result.stdout.fnmatch_lines([f"cudaenv: NVIDIA device present but unusable: {problem.have} [[]{code}[]]*"])


def test_unmet_deselect_does_not_hide_a_device_that_cannot_be_used(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(Host(problem=PROBLEMS["gpu-lost"]))
    run(pytester, ASKING, "--cuda-unmet", "deselect").assert_outcomes(passed=1, errors=10)


def test_a_mistaken_mask_skips_device_tests_and_stops_those_that_would_use_the_cpu(
    pytester: pytest.Pytester, on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(host_of("h100:2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    result = run(pytester, ASKING, "-k", "plain or marked or fixture or device or mixed")
    ends = reported(result)
    assert ends == {"test_plain": "PASSED", "test_device": "ERROR", "test_mixed_precision": "ERROR"}
    assert [line.partition(": ")[2] for line in skips(result)] == [
        "[cuda-mask] needs a CUDA device; have 2 hidden by a mistaken mask"
    ] * 2
    result.stdout.fnmatch_lines(
        ["*CUDA_VISIBLE_DEVICES=7 ends at the token '7' (7 is out of range: CUDA counts 2 here*"]
    )


@pytest.mark.parametrize("mask", ["0,0", "1,0,1"])
def test_a_mask_under_which_cuda_fails_is_an_error(
    pytester: pytest.Pytester, on_host: OnHost, monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    on_host(host_of("h100:2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    result = run(pytester, ASKING, "-k", "plain or marked or device")
    assert reported(result) == {"test_plain": "PASSED", "test_marked": "ERROR", "test_device": "ERROR"}
    result.stdout.fnmatch_lines([f"*CUDA_VISIBLE_DEVICES={mask} names one device twice*"])


@pytest.mark.parametrize("mask", ["-1", "", "NoDevFiles"])
def test_devices_that_are_hidden_on_purpose_skip(
    pytester: pytest.Pytester, on_host: OnHost, monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    on_host(host_of("h100:2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    result = run(pytester, ASKING, "-k", "plain or marked or mixed")
    result.assert_outcomes(passed=2, skipped=1, deselected=10 - 2)
    assert skips(result) == ["test_it.py:5: [cuda-hidden] needs a CUDA device; have 2 hidden by CUDA_VISIBLE_DEVICES"]


def test_device_is_the_cpu_where_devices_are_hidden_on_purpose(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    pytester.makepyfile(
        """
        import unittest
        import pytest
        import pytest_cudaenv

        def test_device(device):
            assert str(device) == "cpu" and pytest_cudaenv.current().device == device

        @pytest_cudaenv.attn_backends("eager")
        @pytest_cudaenv.dtypes("float32")
        def test_cell(cell):
            import torch
            assert (cell.attn_backend, cell.dtype, cell.device) == ("eager", torch.float32, torch.device("cpu"))
            assert cell.id == "eager-fp32"

        class TestLegacy(unittest.TestCase):
            @pytest_cudaenv.requires_cuda
            def test_old(self): raise AssertionError
        """
    )
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100:2", "-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*test_*.py:*[[]cuda-hidden[]] needs a CUDA device; have 2 hidden by*"])


def test_an_amd_gpu_is_no_cuda_device(pytester: pytest.Pytester, on_host: OnHost) -> None:
    on_host(Host(amd_devices=2, software=Software(torch=TorchBuild("2.13.0", hip="7.1"))))
    result = run(pytester, ASKING, "-k", "plain or marked or fixture or mixed")
    assert result.parseoutcomes()["passed"] == 2
    assert [line.partition(": ")[2].partition("]")[0] for line in skips(result)] == ["[vendor-rocm"] * 2
    assert "needs a CUDA device; have 2 AMD GPU(s), no CUDA device" in skips(result)[0]
    result.stdout.fnmatch_lines(["cudaenv: no NVIDIA device, 2 AMD GPU(s) that are not CUDA devices*ROCm 7.1*"])


# Grants --------------------------------------------------------------------------------------------------------


def test_a_test_is_granted_the_devices_that_fit(pytester: pytest.Pytester, on_host: OnHost) -> None:
    small, large = simulated_host("t4").devices[0], simulated_host("h100").devices[0]
    on_host(
        host_of(
            "t4", devices=(replace(small, index=0), replace(large, index=1)), fastest_first=(small.uuid, large.uuid)
        )
    )
    result = run(
        pytester,
        """
        import unittest
        import pytest
        import pytest_cudaenv
        from pytest_cudaenv import current, requires_cuda

        def test_first(cuda_device):
            assert (cuda_device.name, str(cuda_device)) == ("Tesla T4", "cuda:0")

        @requires_cuda(capability=">=9.0")
        def test_fitting(cuda_device):
            assert (cuda_device.capability, str(cuda_device)) == ((9, 0), "cuda:1")
            assert current().devices == (cuda_device,)

        class TestLegacy(unittest.TestCase):
            @requires_cuda(devices=2)
            def test_current(self):
                self.assertEqual(current().devices, ("cuda:0", "cuda:1"))
                self.assertEqual(current().nodeid, "test_it.py::TestLegacy::test_current")

        def test_undeclared(request):
            with pytest.raises(pytest_cudaenv.grants.current.NoGrantError, match="no test with a grant is running"):
                current()
        """,
        "--cuda-isolation",
        "off",
    )
    result.assert_outcomes(passed=4)


# Cells that are known to be bad --------------------------------------------------------------------------------

KNOWN_BAD = """
import pytest
from pytest_cudaenv import dtypes, requires_cuda, xfail_cells

@requires_cuda
@xfail_cells(capability="{capability}", reason="FA4 is wrong here", issue="#123"{until})
def test_one():
    assert {holds}
"""


@pytest.mark.parametrize(
    ("capability", "until", "holds", "end", "line"),
    [
        ("==9.*", "", False, "XFAIL", "XFAIL test_it.py::test_one - [[]known-bad[]] FA4 is wrong here, #123"),
        ("==9.*", ", until='2999-01-31'", False, "XFAIL", "XFAIL test_it.py::test_one - [[]known-bad[]] FA4 is wrong*"),
        ("==9.*", "", True, "FAILED", "*[[]XPASS(strict)[]] [[]known-bad[]] FA4 is wrong here, #123*"),
        ("==12.*", "", True, "PASSED", "*1 passed*"),
        ("==12.*", "", False, "FAILED", "*assert False*"),
        ("==9.*", ", until='2001-01-31'", True, "ERROR", "*[[]known-bad-expired[]] the xfail_cells entry ended on "
         "2001-01-31 (FA4 is wrong here, #123): mend the cell or renew*"),
        ("==12.*", ", until='2001-01-31'", True, "PASSED", "*1 passed*"),
    ],
)  # fmt: skip
def test_known_bad_cells(
    pytester: pytest.Pytester, on_host: OnHost, capability: str, until: str, holds: bool, end: str, line: str
) -> None:
    on_host(host_of("h100"))
    result = run(pytester, KNOWN_BAD.format(capability=capability, until=until, holds=holds))
    assert reported(result) == {"test_one": end}
    result.stdout.fnmatch_lines([line])


def test_a_known_bad_backend_or_dtype_names_its_cells_only(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    pytester.makepyfile(
        test_it="""
        from pytest_cudaenv import attn_backends, dtypes, xfail_cells

        @attn_backends("eager", "sdpa")
        @dtypes("float32", "bfloat16")
        @xfail_cells(attn_backend="sdpa", dtype="bf16", reason="one cell")
        def test_one(cell):
            assert cell.id != "sdpa-bf16"

        @attn_backends("eager", "sdpa")
        @dtypes("float32")
        @xfail_cells(attn_backend="sdpa", capability=">=1.0", reason="on devices")
        def test_on_devices(cell): ...
        """
    )
    result = pytester.runpytest_subprocess("-rA", "--cuda-simulate", "h100")
    assert reported(result) == {
        "test_one[eager-fp32]": "PASSED",
        "test_one[eager-bf16]": "PASSED",
        "test_one[sdpa-fp32]": "PASSED",
        "test_one[sdpa-bf16]": "XFAIL",
        "test_on_devices[eager-fp32]": "PASSED",
        "test_on_devices[sdpa-fp32]": "PASSED",
    }
