"""Suites of device and CPU tests, each of which shows a behaviour of pytest or of another plugin."""

MIXED = """
    import os, sys, unittest, warnings
    import pytest
    from pytest_cudaenv import requires_cuda

    LOG = os.environ.get("FIXTURE_LOG", os.devnull)
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
    def test_pass(cuda_device, model, data):
        print("device out")
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
    @pytest.mark.xfail
    def test_xpass(cuda_device): pass
    @pytest.mark.skipif(True, reason="never")
    def test_skipif(cuda_device): pass
    def test_setup_error(cuda_device, bad_setup): pass
    def test_teardown_error(cuda_device, bad_teardown): pass
    def test_warns(cuda_device): warnings.warn("careful", DeprecationWarning)
    class OwnWarning(UserWarning): pass
    def test_warns_of_its_own(cuda_device):
        warnings.warn(OwnWarning("careful"))
        with pytest.warns(OwnWarning, match="expected"): warnings.warn(OwnWarning("expected"))
    def test_properties(cuda_device, record_property):
        record_property("answer", 42)
        record_property("pair", (1, [2.5, None]))
    def test_logs(cuda_device, caplog):
        import logging
        logging.getLogger("x").warning("logged")
        assert caplog.messages == ["logged"]
    def test_logs_and_fails(cuda_device):
        import logging
        logging.getLogger("x").warning("logged before the failure")
        assert 0
    def test_capsys(cuda_device, capsys):
        print("hello")
        assert capsys.readouterr().out == "hello\\n"
    def test_capfd_disabled(cuda_device, capfd):
        os.write(1, b"low\\n")
        assert capfd.readouterr().out == "low\\n"
        with capfd.disabled(): print("not captured")
    def test_monkeypatch(cuda_device, monkeypatch): monkeypatch.setenv("X_OF_TEST", "1")
    def test_environ_is_back(cuda_device): assert "X_OF_TEST" not in os.environ
    def test_chained(cuda_device):
        try: raise KeyError("first")
        except KeyError as error: raise ValueError("second") from error
    class TestClass:
        @pytest.mark.parametrize("x", [1, 2], ids=["a b/c::d", "\\u00e4[1]"])
        def test_method(self, cuda_device, x): assert x < 2
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
        @unittest.expectedFailure
        @requires_cuda
        def test_unexpected(self): pass
        @requires_cuda
        def test_cleanup_fails(self): self.addCleanup(lambda: 1 / 0)
        @requires_cuda
        def test_skips(self): self.skipTest("no")
        @unittest.skip("never")
        @requires_cuda
        def test_skipped(self): pass
    @requires_cuda
    class BrokenTest(unittest.TestCase):
        @classmethod
        def setUpClass(cls): raise RuntimeError("no class")
        def test_one(self): pass
        def test_two(self): pass
    def test_cpu_last(data): pass
"""

SECOND = """
    import os
    def test_again(cuda_device): pass
    def test_cpu(): pass
"""

JUNIT = """
    import pytest
    @pytest.fixture(scope="session")
    def noted(record_testsuite_property): record_testsuite_property("kind", "H100")
    def test_attribute(cuda_device, record_xml_attribute, noted):
        record_xml_attribute("assertions", "3")
        print("out")
    def test_suite(cuda_device, record_testsuite_property, noted): record_testsuite_property("count", 2)
    def test_property(cuda_device, record_property): record_property("answer", 42)
    def test_cpu(record_testsuite_property): record_testsuite_property("here", 1)
"""

POISONING = """
    from concurrent.futures import ThreadPoolExecutor
    POOL = ThreadPoolExecutor(1)
    POOL.submit(int).result()
    def test_cpu_of_it(): pass
"""

RERUNS = """
    import os, pytest
    os.makedirs("counts", exist_ok=True)
    def times(name):
        with open(f"counts/{name}", "a") as file: file.write("x")
        return os.path.getsize(f"counts/{name}")
    @pytest.fixture(scope="module")
    def resource():
        yield times("resource")
    @pytest.mark.flaky(reruns=2)
    def test_fails_once(cuda_device): assert times("once") > 1
    @pytest.mark.flaky(reruns=2, reruns_delay=0.1)
    def test_fails_always(cuda_device): assert not times("always")
    @pytest.mark.flaky(reruns=2, condition=False)
    def test_on_no_condition(cuda_device): assert not times("never")
    @pytest.mark.flaky(reruns=2, only_rerun=["OSError"])
    def test_of_another_kind(cuda_device): raise KeyError(times("kind"))
    @pytest.mark.flaky(reruns=1)
    def test_fixture(cuda_device, resource): assert resource > 1
    def test_unmarked(cuda_device): assert times("unmarked") > 1
    def test_subprocess_counts(cuda_device, request): assert request.node.execution_count == 1
"""

TIMEOUTS = """
    import pytest, time
    @pytest.fixture
    def slow_setup(): time.sleep(30)
    @pytest.fixture
    def slow_teardown():
        yield
        time.sleep(30)
    @pytest.mark.timeout(0.3)
    def test_call(cuda_device): time.sleep(30)
    def test_after(cuda_device): pass
    @pytest.mark.timeout(0.3)
    def test_setup(cuda_device, slow_setup): pass
    @pytest.mark.timeout(0.3)
    def test_teardown(cuda_device, slow_teardown): pass
    @pytest.mark.timeout(0.3, func_only=True)
    def test_function_only(cuda_device): time.sleep(30)
    def test_cpu(): pass
"""

# What is counted is of booleans: integers are drawn from the constants of local modules too, and this package is
# one where it is installed from a checkout.
HYPOTHESIS = """
    from hypothesis import event, given, settings, strategies as st
    @settings(max_examples=20, deadline=None)
    @given(st.booleans())
    def test_cpu(x): event(str(x))
    @settings(max_examples=20, deadline=None)
    @given(x=st.booleans())
    def test_device(cuda_device, x): event(str(x))
    @settings(max_examples=20, deadline=None, print_blob=False)
    @given(x=st.integers())
    def test_fails(cuda_device, x): assert x < 5
"""

RANDOM = """
    import random, pytest
    @pytest.mark.parametrize("n", range(8))
    def test_device(cuda_device, n): print(random.random()); assert n % 4
    @pytest.mark.parametrize("n", range(4))
    def test_cpu(n): print(random.random()); assert n
"""

LOGGING = """
    import logging
    def test_cpu(): logging.getLogger("x").info("from the pytest process")
    def test_device(cuda_device): logging.getLogger("x").info("from a device process")
    def test_device_fails(cuda_device):
        logging.getLogger("x").error("before it fails")
        assert 0
"""

TIMED = """
    import time, pytest
    @pytest.fixture
    def slow_setup(): time.sleep(0.5)
    def test_slow(cuda_device): time.sleep(0.6)
    def test_quick(cuda_device): pass
    def test_slow_setup(cuda_device, slow_setup): pass
"""

LEAVING = """
    import pytest
    @pytest.fixture
    def leaves(): pytest.exit("enough of setup", 7)
    @pytest.fixture
    def leaves_late():
        yield
        pytest.exit("enough of teardown", 8)
    @pytest.fixture(scope="module")
    def resource():
        yield
        print("printed while resource is torn down")
    def test_first(cuda_device, resource): pass
    def test_call(cuda_device, resource): pytest.exit("enough of call", 9)
    def test_setup(cuda_device, leaves): pass
    def test_teardown(cuda_device, leaves_late): pass
    def test_without_code(cuda_device): pytest.exit("enough")
    def test_never(cuda_device): pass
"""

SUBTESTS = """
    import pytest
    def test_sub(cuda_device, subtests):
        with subtests.test("one"): assert 0
        with subtests.test("two", x=1): pass
        with subtests.test("three"): pytest.skip("no")
    def test_all_pass(cuda_device, subtests):
        with subtests.test("one"): pass
"""

WARNING = """
    import warnings, pytest
    warnings.warn("while collecting")
    class Own(UserWarning): pass
    class Odd(UserWarning):
        def __init__(self, one, two): super().__init__(f"{one} {two}")
    def test_own(cuda_device): warnings.warn(Own("own"))
    def test_odd(cuda_device): warnings.warn(Odd("o", "dd"))
    @pytest.mark.filterwarnings("error")
    def test_error(cuda_device): warnings.warn("error")
    @pytest.mark.filterwarnings("ignore")
    def test_ignored(cuda_device): warnings.warn("ignored")
    def test_recwarn(cuda_device, recwarn):
        warnings.warn("seen")
        assert len(recwarn) == 1
    @pytest.fixture
    def warns_late():
        yield
        warnings.warn("in teardown")
    def test_late(cuda_device, warns_late): pass
    def test_resource(cuda_device):
        open("file", "w")
    def test_twice(cuda_device):
        for _ in range(2): warnings.warn("twice")
"""

STOPPING = """
    import pytest
    def test_stops(cuda_device, request): request.session.shouldstop = "stopped by a test"
    def test_never(cuda_device): pass
"""

FAILING_RUN = """
    import pytest
    def test_fails_the_run(cuda_device, request): request.session.shouldfail = "failed by a test"
    def test_never(cuda_device): pass
"""

TEMPORARY = """
    import pytest
    SEEN = "tmp-seen.txt"
    @pytest.fixture(scope="session")
    def shared(tmp_path_factory):
        path = tmp_path_factory.mktemp("shared") / "file"
        path.write_text("kept")
        return path
    def test_cpu(tmp_path, shared): (tmp_path / "cpu").write_text("x")
    def test_passes(cuda_device, tmp_path): (tmp_path / "passes").write_text("x")
    def test_fails(cuda_device, tmp_path):
        (tmp_path / "fails").write_text("x")
        assert 0
    def test_old(cuda_device, tmpdir): tmpdir.join("old").write("x")
    def test_cpu_still_has_it(shared): assert shared.read_text() == "kept"
"""

HOOKS = """
    import pytest
    from pytest_cudaenv import requires_cuda
    def test_passes(cuda_device): pass
    def test_fails(cuda_device): assert 0
    def test_knows_its_report(cuda_device, after): assert 0
    @pytest.fixture
    def after(request):
        yield
        assert request.node.rep_call.failed
    def test_counts(cuda_device, request): assert request.session.testsfailed == 2
    def test_option(cuda_device, request): assert request.config.getoption("verbose") == 0
    def test_cache(cuda_device, cache):
        cache.set("mine/value", [1])
        assert cache.get("mine/value", None) == [1]
    def test_cache_here(request): assert request.config.cache.get("mine/value", None) == [1]
"""

HOOKS_CONFTEST = """
    import pytest
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        setattr(item, f"rep_{call.when}", report)
        report.extra_of_conftest = {"phase": call.when, "what": item.name}
        report.sections.append(("Of conftest", item.name))
        return report
    def pytest_report_teststatus(report, config):
        if report.when == "call" and report.passed: return "passed", "P", "GREAT"
    def pytest_runtest_logreport(report): print("conftest saw", report.nodeid, report.when, report.outcome)
    def pytest_runtest_logstart(nodeid): print("conftest saw the start of", nodeid)
"""

ANYIO = """
    import pytest
    @pytest.fixture
    def anyio_backend(): return "asyncio"
    @pytest.fixture
    async def resource(cuda_device):
        yield 41
    @pytest.mark.anyio
    async def test_async(resource):
        import anyio
        await anyio.sleep(0)
        assert resource == 41
    @pytest.mark.anyio
    async def test_async_fails(resource): assert resource == 42
"""

PYTESTER = """
    pytest_plugins = ["pytester"]
    def test_inner(cuda_device, pytester):
        pytester.makepyfile("import pytest\\ndef test_passes(cuda_device): pass\\ndef test_fails(): assert 0\\n"
            "def test_warns():\\n    import warnings; warnings.warn('w')")
        result = pytester.runpytest_inprocess("-p", "pytest_cudaenv.plugin", "--cuda-simulate", "h100:2")
        result.assert_outcomes(passed=2, failed=1, warnings=1)
    def test_subprocess(cuda_device, pytester):
        pytester.makepyfile("def test_passes(cuda_device): pass\\ndef test_fails(cuda_device): assert 0")
        result = pytester.runpytest_subprocess(
            "-p", "pytest_cudaenv.plugin", "--cuda-simulate", "h100:2", "--cuda-isolation", "session")
        result.assert_outcomes(passed=1, failed=1)
    def test_after(cuda_device): assert 0
"""
