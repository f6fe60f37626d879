"""A run reports the same with device processes as without: outcomes, text, counts, files."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

MIXED = """
    import os, sys, unittest, warnings
    import pytest
    from pytest_cudaenv import requires_cuda

    LOG = os.environ["FIXTURE_LOG"]
    if "POISON" in os.environ:
        from concurrent.futures import ThreadPoolExecutor
        POOL = ThreadPoolExecutor(1)
        POOL.submit(int).result()

    def log(text):
        with open(LOG, "a") as file:
            file.write(text + "\\n")

    @pytest.fixture(scope="session")
    def model(cuda_device):
        log("load model")
        yield "model"
        log("free model")

    @pytest.fixture(scope="module")
    def data():
        log("open data")
        yield "data"
        log("close data")

    @pytest.fixture
    def bad_teardown():
        yield
        raise RuntimeError("teardown boom")

    @pytest.fixture
    def bad_setup():
        raise RuntimeError("setup boom")

    def test_cpu_first(data): print("cpu out")
    def test_pass(cuda_device, model, data, tmp_path):
        print("device out")
        (tmp_path / "file").write_text("x")
    @requires_cuda(devices=2)
    def test_two(cuda_devices): assert len(cuda_devices) == 2
    def test_fail(cuda_device, model):
        print("out of fail"); print("err of fail", file=sys.stderr)
        assert [1, 2] == [1, 3]
    def test_skip(cuda_device): pytest.skip("not today")
    @pytest.mark.xfail(reason="known")
    def test_xfail(cuda_device): assert 0
    @pytest.mark.xfail(strict=True)
    def test_xpass_strict(cuda_device): pass
    @pytest.mark.skipif(True, reason="never")
    def test_skipif(cuda_device): pass
    def test_setup_error(cuda_device, bad_setup): pass
    def test_teardown_error(cuda_device, bad_teardown): pass
    def test_warns(cuda_device): warnings.warn("careful", DeprecationWarning)
    def test_properties(cuda_device, record_property): record_property("answer", 42)
    def test_logs(cuda_device, caplog):
        import logging
        logging.getLogger("x").warning("logged")
        assert caplog.messages == ["logged"]
    def test_capsys(cuda_device, capsys):
        print("hello")
        assert capsys.readouterr().out == "hello\\n"
    def test_monkeypatch(cuda_device, monkeypatch): monkeypatch.setenv("X_OF_TEST", "1")
    def test_environ_is_back(cuda_device): assert "X_OF_TEST" not in os.environ
    class TestClass:
        @pytest.mark.parametrize("x", [1, 2])
        def test_method(self, cuda_device, x): assert x < 3
    class LegacyTest(unittest.TestCase):
        @classmethod
        def setUpClass(cls): log("setUpClass")
        @requires_cuda
        def test_legacy(self): self.assertEqual(1, 1)
        @requires_cuda
        def test_legacy_fails(self): self.assertEqual(1, 2)
        def test_legacy_cpu(self): pass
        @unittest.expectedFailure
        @requires_cuda
        def test_expected(self): self.fail()
    def test_cpu_last(data): pass
"""

SECOND = """
    import os
    def test_again(cuda_device): pass
    def test_cpu(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("FIXTURE_LOG", str(pytester.path / "log"))
    pytester.makepyfile(test_one=MIXED, test_two=SECOND)
    return pytester


def outcomes(result: pytest.RunResult) -> list[str]:
    """Each test's outcome, in the order of `-rA`'s lines, without what differs between any two runs."""
    lines = [re.sub(r" in [0-9.]+s.*", "", line) for line in result.outlines]
    return [line for line in lines if re.match(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|SUBFAILED)\b", line)]


def run(suite: pytest.Pytester, level: str, *arguments: str) -> pytest.RunResult:
    (suite.path / "log").write_text("")
    return suite.runpytest_subprocess("--cuda-simulate", "h100:2", "--cuda-isolation", level, "-rA", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("session",), ("module",), ("function",), ("session", "-x"), ("session", "--maxfail=2"), ("session", "-s"),
        ("session", "--capture=sys"), ("session", "-n", "2"), ("function", "-n", "2"), ("session", "--setup-show"),
        ("session", "-p", "no:tmpdir", "--deselect", "test_one.py::test_pass"), ("session", "-p", "no:cacheprovider"),
        ("session", "-W", "error", "--deselect", "test_one.py::test_warns"),
        ("session", "-n", "2", "--dist", "loadfile"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_outcomes(suite: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    level, *options = arguments
    without, with_processes = run(suite, "off", *options), run(suite, level, *options)
    assert "INTERNALERROR" not in with_processes.stdout.str() + with_processes.stderr.str()
    assert outcomes(without)
    assert sorted(outcomes(with_processes)) == sorted(outcomes(without))
    assert with_processes.parseoutcomes() == without.parseoutcomes()
    assert with_processes.ret == without.ret


@pytest.mark.parametrize(
    "arguments",
    [("session",), ("function", "-x"), ("session", "-n", "2", "--dist", "loadgroup"), ("session", "--setup-show")],
    ids=" ".join,
)
def test_outcomes_in_fresh_interpreters(
    suite: pytest.Pytester, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    level, *options = arguments
    without = run(suite, "off", *options)
    monkeypatch.setenv("POISON", "1")
    with_interpreters = run(suite, level, *options)
    text = with_interpreters.stdout.str() + with_interpreters.stderr.str()
    assert "INTERNALERROR" not in text
    assert "[no-fork]" in text
    assert sorted(outcomes(with_interpreters)) == sorted(outcomes(without))
    assert with_interpreters.ret == without.ret


def test_text_of_failures_sections_and_warnings(suite: pytest.Pytester) -> None:
    def body(result: pytest.RunResult) -> str:
        text = result.stdout.str()
        text = text[text.index("= ERRORS =") : text.index("short test summary")]
        text = re.sub(r"0x[0-9a-f]+|in [0-9.]+s", "", text)
        return "\n".join(line for line in text.splitlines() if not line.startswith("cudaenv:"))

    assert body(run(suite, "session")) == body(run(suite, "off"))


def test_warnings_of_the_collection_are_shown_once(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_warns="import warnings\nwarnings.warn('at import')\ndef test_it(cuda_device): pass")
    for level in ("off", "session"):
        run(suite, level, "test_warns.py").assert_outcomes(passed=1, warnings=1)


def test_junitxml(suite: pytest.Pytester) -> None:
    def cases(level: str) -> list[tuple[object, ...]]:
        run(suite, level, "--junitxml", "report.xml")
        tree = ElementTree.parse(suite.path / "report.xml")
        return [
            (
                case.get("classname"), case.get("name"), [child.tag for child in case],
                [(p.get("name"), p.get("value")) for p in case.iter("property")],
            )
            for case in tree.iter("testcase")
        ]  # fmt: skip

    assert cases("session") == cases("off")


def test_last_failed_and_stepwise(suite: pytest.Pytester) -> None:
    for arguments in (("--lf",), ("--sw", "--sw-skip")):
        collected = []
        for level in ("off", "session"):
            suite.run("rm", "-rf", ".pytest_cache")
            run(suite, level, *arguments)
            collected.append(sorted(outcomes(run(suite, level, *arguments))))
        assert collected[0] == collected[1], arguments


def test_wide_fixtures_live_as_long_as_the_grant_fits(suite: pytest.Pytester) -> None:
    """A session fixture on devices is loaded once for each change of grant; a module's once in each process."""
    run(suite, "session")
    lines = (suite.path / "log").read_text().splitlines()
    # One device, two devices, one device: the model is needed in the first and in the third process.
    assert lines.count("load model") == lines.count("free model") == 2
    assert lines.count("open data") == lines.count("close data") == 2


def test_a_failing_subtest_fails_its_test(suite: pytest.Pytester) -> None:
    if not hasattr(pytest, "Subtests"):
        pytest.skip("subtests came with pytest 9")
    suite.makepyfile(
        test_sub="""
        def test_it(cuda_device, subtests):
            with subtests.test("one"): assert 0
            with subtests.test("two"): pass
        """
    )
    for arguments in ((), ("-n", "2")):
        found = [outcomes(run(suite, level, "test_sub.py", *arguments)) for level in ("off", "session")]
        assert sorted(found[0]) == sorted(found[1])
        assert "FAILED test_sub.py::test_it - contains 1 failed subtest" in found[1]


@pytest.mark.parametrize("code", [None, 9])
def test_pytest_exit_ends_the_run(suite: pytest.Pytester, code: int | None) -> None:
    suite.makepyfile(
        test_exit=f"""
        import pytest
        def test_leave(cuda_device): pytest.exit("enough", {code})
        def test_never(cuda_device): pass
        """
    )
    results = [run(suite, level, "test_exit.py") for level in ("off", "session")]
    assert results[0].ret == results[1].ret
    for result in results:
        result.stdout.fnmatch_lines(["*Exit: enough*"])
        assert "test_never" not in result.stdout.str()
