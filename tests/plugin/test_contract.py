"""What a runner promises may neither lack nor skip."""

from __future__ import annotations

import os

import pytest

SUITE = """
    import pytest
    from pytest_cudaenv import requires_cuda, requires_flash_attn3, requires_package
    def test_cpu(): pass
    def test_one(cuda_device): pass
    @requires_cuda(devices=2)
    def test_two(cuda_devices): pass
    @requires_cuda(devices=4)
    def test_four(cuda_devices): pass
    @requires_flash_attn3
    def test_fa3(cuda_device): pass
    @requires_package("no-such-package")
    def test_package(): pass
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("--cuda-simulate", "h100:2", *arguments)


@pytest.fixture(autouse=True)
def _suite(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=SUITE)


@pytest.mark.parametrize(
    ("promise", "line"),
    [
        (
            "devices>=4",
            "*ERROR: [[]contract[]] devices>=4 is promised: needs 4 CUDA devices; have 2 *[[]cuda-devices[]]*",
        ),
        ("capability>=10.0", "*capability>=10.0 is promised: needs capability >=10.0; have 9.0*"),
        ("memory>=141GB", "*memory>=141GB is promised: *"),
        ("flash_attention_3", "*flash_attention_3 is promised: FA3 needs flash-attn-3; have none [[]attn-missing[]]*"),
        ("fp4", "*fp4 is promised: *[[]dtype-native[]]*"),
        ("no-such-package>=2", "*no-such-package>=2 is promised: *[[]package-missing[]]*"),
    ],
)
def test_what_is_promised_and_not_here_ends_the_run_before_its_first_test(
    pytester: pytest.Pytester, promise: str, line: str
) -> None:
    for workers in ((), ("-n", "2")):
        result = run(pytester, "--cuda-require", promise, *workers)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([line])
        assert "test_it.py" not in result.stdout.str()


def test_everything_that_is_lacking_is_told_at_once(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--cuda-require", "devices>=4", "--cuda-require", "fp4", "--cuda-require", "bf16")
    assert len([line for line in result.errlines if line.startswith("ERROR")]) == 2


@pytest.mark.parametrize(
    "text", ["devices>2", "devices>=two", "capability>=x", "memory>=many", "!!", "", "devices>=0", "memory=80GB"]
)
def test_a_promise_that_means_nothing_is_a_usage_error(pytester: pytest.Pytester, text: str) -> None:
    result = run(pytester, "--cuda-require", text)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --cuda-require: *; write devices>=2, capability>=9.0*"])


def test_kept_promises_change_nothing(pytester: pytest.Pytester) -> None:
    """More than was promised may be skipped."""
    arguments = ("--cuda-require", "devices>=2", "--cuda-require", "capability>=9.0", "--cuda-require", "bf16")
    result = run(pytester, *arguments)
    result.assert_outcomes(passed=3, skipped=3)
    assert result.ret == 0


def test_a_skip_of_what_was_promised_is_a_failure(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed and broken is found out where a test tries it: too late for the first look."""
    site = pytester.mkdir("site")
    site.joinpath("flash_attn_interface.py").write_text("raise ImportError('no such symbol')")
    metadata = site / "flash_attn_3-3.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    arguments = ("-k", "fa3 or four or package")
    result = run(pytester, *arguments)
    result.assert_outcomes(skipped=3, deselected=3)
    for more in ((), ("-n", "1"), ("--cuda-isolation", "off"), ("--cuda-unmet", "deselect")):
        result = run(pytester, *arguments, "--cuda-require", "flash_attention_3", *more)
        failed = result.parseoutcomes()
        assert failed.get("errors", 0) == 1, more
        result.stdout.fnmatch_lines(
            ["*[[]contract[]] flash_attention_3 is promised: [[]attn-broken[]] FA3 must import*no such symbol*"]
        )
        result.stdout.fnmatch_lines(["promised and not run: flash_attention_3: 1", "*test_it.py::test_fa3*"])


@pytest.mark.parametrize(("least", "status"), [("2", 0), ("3", 1)])
def test_min_ran(pytester: pytest.Pytester, least: str, status: int) -> None:
    for workers in ((), ("-n", "2")):
        result = run(pytester, "--cuda-min-ran", least, *workers)
        assert result.ret == status
        if status:
            result.stdout.fnmatch_lines(["[[]contract[]] needs 3 tests that ran on a CUDA device*; have 2"])


def test_no_test_ran_is_no_success_whatever_a_conftest_makes_of_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        def pytest_sessionfinish(session, exitstatus):
            if exitstatus == 5: session.exitstatus = 0
        """
    )
    assert run(pytester, "-k", "nothing").ret == 0
    result = run(pytester, "-k", "nothing", "--cuda-require", "devices>=2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["[[]contract[]] needs a test that ran; have none*"])
    result = run(pytester, "-k", "four", "--cuda-require", "devices>=2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED


INI = """
    [pytest]
    cuda_runners =
        # what our machines are
        h100x2: devices=h100:2 requires=bf16 cost=8 label=gpu label=h100
        b200: devices=b200 package=peft>=0.18
        cpu: cost=0.5
"""


def test_profiles_of_runners(pytester: pytest.Pytester) -> None:
    pytester.makeini(INI)
    run(pytester, "--cuda-runner", "h100x2").assert_outcomes(passed=3, skipped=3)
    result = run(pytester, "--cuda-runner", "b200")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*capability>=10.0 is promised*", "*memory of b200 is promised*"])
    result = run(pytester, "--cuda-runner", "a100")
    result.stderr.fnmatch_lines(["ERROR: --cuda-runner: 'a100': choose from b200, cpu, h100x2"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("h100", "a line begins with NAME:"),
        ("a: devices=x900", "*x900*"),
        ("a: gpu=2", "'gpu=2': choose from devices=, package=, requires=, cost=, label="),
        ("a: cost=dear", "cost='dear' is no number"),
        ("a: requires=devices>2", "*devices is promised as devices>=*"),
        ("a: cost=1\n        a: cost=2", "the name is there twice"),
    ],
)
def test_a_wrong_profile_is_a_usage_error(pytester: pytest.Pytester, line: str, message: str) -> None:
    pytester.makeini(f"[pytest]\ncuda_runners =\n        {line}\n")
    result = run(pytester, "--cuda-runner", "a")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: cuda_runners: *{message.replace('[', '[[]')}*"])
