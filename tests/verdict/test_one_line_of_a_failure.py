"""Where one line is shown of a failure of this plugin's own it begins with the code; its traceback shows the place."""

from __future__ import annotations

import pytest

SUITE = """
    import pytest, unittest
    from pytest_cudaenv.verdict.expected_values import failure
    from pytest_cudaenv.verdict.kernel_errors import HubKernelError, KernelFaultError
    from pytest_cudaenv.verdict.parity_numbers import ParityError
    from pytest_cudaenv.verdict.seen import WitnessError

    ERRORS = [
        ParityError("parity", "wrong numbers\\na table"), WitnessError("witness-other", "needs sdpa"),
        HubKernelError("kernels-nowhere", "no build"), KernelFaultError("kernels-fault", "it lies"),
        failure("expectation-missing", "no value"),
    ]

    @pytest.mark.parametrize("error", ERRORS, ids=range(5))
    def test_it(error):
        raise error

    @pytest.fixture
    def broken():
        raise ERRORS[0]

    def test_fixture(broken): ...

    class TestCase(unittest.TestCase):
        def test_case(self):
            raise ERRORS[1]

    class OwnError(Exception):
        code = "E1"

    def test_own_error():
        raise OwnError("[x] not this plugin's")

    def test_raises():
        with pytest.raises(WitnessError) as caught:
            raise ERRORS[1]
        assert caught.value.code == "witness-other"
"""


@pytest.mark.parametrize("style", ["long", "short", "native", "line"])
def test_the_code_comes_first(pytester: pytest.Pytester, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(test_it=SUITE)
    result = pytester.runpytest_inprocess("-rfE", f"--tb={style}", "-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=7, errors=1)
    result.stdout.fnmatch_lines(
        [
            "FAILED test_it.py::test_it[[]0[]] - [[]parity[]] wrong numbers",
            "FAILED test_it.py::test_it[[]1[]] - [[]witness-other[]] needs sdpa",
            "FAILED test_it.py::test_it[[]2[]] - [[]kernels-nowhere[]] no build",
            "FAILED test_it.py::test_it[[]3[]] - [[]kernels-fault[]] it lies",
            "FAILED test_it.py::test_it[[]4[]] - [[]expectation-missing[]] no value",
            "FAILED test_it.py::TestCase::test_case - [[]witness-other[]] needs sdpa",
            "FAILED test_it.py::test_own_error - test_it.OwnError: [[]x[]] not this*",
            "ERROR test_it.py::test_fixture - [[]parity[]] wrong numbers",
        ]
    )
    if style != "line":
        result.stdout.fnmatch_lines(["*raise error*", "*ParityError: [[]parity[]] wrong numbers", "*test_it.py*:*"])
    else:
        result.stdout.fnmatch_lines(["*test_it.py:*: [[]parity[]] wrong numbers"])


def test_it_crosses_to_the_controller(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist")
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(test_it=SUITE)
    result = pytester.runpytest_subprocess("-n", "1", "-rf", "-p", "no:randomly", "-k", "test_it and 0")
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_it[[]0[]] - [[]parity[]] wrong numbers"])
