"""What a runner promises may neither lack nor skip."""

from __future__ import annotations

import json
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


OWN = """
    import unittest
    import pytest

    BROKEN = True

    @pytest.mark.skipif(BROKEN, reason="needs 2 GPUs")
    def test_words(): pass

    @pytest.mark.skipif("BROKEN", reason="not enough GPUs")
    def test_string(): pass

    @pytest.fixture
    def two(): pytest.skip("requires multiple CUDA GPUs")
    def test_fixture(two): pass

    def test_body():
        if BROKEN: pytest.skip("CUDA is not available")

    @unittest.skipIf(BROKEN, "test requires 2 GPUs")
    class TestDecorated(unittest.TestCase):
        def test_class(self): pass

    class TestCase(unittest.TestCase):
        def test_method(self): self.skipTest("Need at least 2 GPUs, found 1")

    def test_in_a_device_process(cuda_device):
        pytest.skip("needs 2 GPUs")

    # Of anything that was not promised, or is not said plainly:
    @pytest.mark.parametrize(
        "why",
        ["needs 4 GPUs", "requires H200 or newer with 2 GPUs", "too slow on 2 GPUs", "requires peft", "test is slow",
         "requires 2 GPUs or XPU", "not supported on GPU", "no GPU needed", "exactly one GPU", ""],
    )
    def test_other(why): pytest.skip(why)

    def test_ran(): pass
"""

DENIED = {
    "test_words", "test_string", "test_fixture", "test_body", "test_class", "test_method", "test_in_a_device_process"
}  # fmt: skip


def test_a_suites_own_skip_of_what_was_promised_is_a_failure(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=OWN)
    kept = run(pytester, "--cuda-require", "capability>=9.0", "-k", "not fixture and not body")
    kept.assert_outcomes(passed=1, skipped=15, deselected=2)  # two devices were not promised
    for more in ((), ("-n", "2"), ("--cuda-isolation", "off"), ("--cuda-adopt", "skipif"), ("-p", "no:randomly")):
        result = run(pytester, "--cuda-require", "devices>=2", "--cuda-ledger", "ledger.json", *more)
        result.assert_outcomes(passed=1, skipped=10, failed=3, errors=4)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        lines = [json.loads(line) for line in (pytester.path / "ledger.json").read_text().splitlines()]
        tests = {line["id"].rpartition("::")[2]: line for line in lines if line["kind"] == "test"}
        assert {name for name, line in tests.items() if "breach" in line} == DENIED, more
        assert {tests[name]["breach"] for name in DENIED} == {"devices>=2"}
        assert tests["test_body"]["skip"] == "CUDA is not available"
        result.stdout.fnmatch_lines(
            [
                '[[]contract[]] devices>=2 is promised, and the suite skips: "CUDA is not available": [[]skip-*',
                "promised and not run: devices>=2: 7",
            ]
        )


def test_unmet_fail_allows_the_suite_no_skip_for_what_is_lacking_either(pytester: pytest.Pytester) -> None:
    """Whether the host lacks it or not: of the others nothing is known that a host could lack."""
    pytester.makepyfile(test_it=OWN)
    unclear = "too slow on 2 GPUs", "test is slow", "requires 2 GPUs or XPU", "not supported on GPU", "no GPU needed"
    for more in ((), ("-n", "2")):
        result = run(pytester, "--cuda-unmet", "fail", "--cuda-ledger", "ledger.json", *more)
        lines = [json.loads(line) for line in (pytester.path / "ledger.json").read_text().splitlines()]
        tests = {line["id"].rpartition("::")[2]: line for line in lines if line["kind"] == "test"}
        failed = {name for name, line in tests.items() if line["outcome"] in {"failed", "error"}}
        lacking = {f"test_other[{why}]" for why in ("needs 4 GPUs", "requires peft")}
        assert DENIED | lacking <= failed
        assert {tests[name]["breach"] for name in failed} == {"--cuda-unmet=fail"}
        assert not failed & {f"test_other[{why}]" for why in unclear}
        assert tests["test_ran"]["outcome"] == "passed"
        result.stdout.fnmatch_lines(
            ['[[]contract[]] --cuda-unmet=fail allows no skip for what is lacking, and *: "needs 4 GPUs"*']
        )


def test_unmet_fail_and_a_module_that_skips_itself(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="def test_ran(): pass", test_gone="import pytest\npytest.importorskip('no_such_module')\n"
    )
    result = run(pytester, "--cuda-unmet", "fail")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["[[]contract[]] *have 1 module that skipped for it: test_gone.py"])


def test_a_run_whose_tests_all_denied_a_promise_ran_none(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it="import pytest\ndef test_body(): pytest.skip('needs 2 GPUs')\n")
    pytester.makeconftest("def pytest_sessionfinish(session): session.exitstatus = 0\n")
    result = run(pytester, "--cuda-require", "devices>=2")
    result.stdout.fnmatch_lines(["[[]contract[]] needs a test that ran; have none*"])


def test_a_condition_says_more_than_the_words_beside_it(pytester: pytest.Pytester) -> None:
    """What it asks for is held against the promise, where it asks for nothing else."""
    pytester.makepyfile(
        test_it="""
        import pytest

        class torch:  # one that counts wrong
            class cuda:
                device_count = staticmethod(lambda: 1)

        COUNT = 1

        @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="distributed")
        def test_whole(): pass
        @pytest.mark.skipif(torch.cuda.device_count() < 2 or COUNT, reason="distributed, and more")
        def test_sum(): pass
        @pytest.mark.skipif(torch.cuda.device_count() < 4, reason="large")
        def test_more(): pass
        def test_ran(): pass
        """
    )
    result = run(pytester, "--cuda-require", "devices>=2", "-rA")
    result.assert_outcomes(passed=1, errors=1, skipped=2)
    result.stdout.fnmatch_lines(["ERROR *::test_whole*"])


def test_a_module_that_skips_itself_for_something_promised(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="def test_ran(): pass",
        test_gone="import pytest\npytest.skip('requires CUDA', allow_module_level=True)\n",
        test_other="import pytest\npytest.importorskip('no_such_module')\n",
    )
    run(pytester, "--cuda-ledger", "ledger.json").assert_outcomes(passed=1, skipped=2)
    for more in ((), ("-n", "2")):
        result = run(pytester, "--cuda-require", "devices>=2", "--cuda-ledger", "ledger.json", *more)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["[[]contract[]] *have 1 module that skipped for it: test_gone.py"])
        lines = [json.loads(line) for line in (pytester.path / "ledger.json").read_text().splitlines()]
        told = {line["id"]: line for line in lines if line["kind"] == "test"}
        assert told.keys() == {"test_it.py::test_ran", "test_gone.py"}
        assert (told["test_gone.py"]["outcome"], told["test_gone.py"]["breach"]) == ("error", "devices>=2")


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
