"""Other plugins go on working beside device processes."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from tests.isolation.comparing import run

SIMULATE = ("--cuda-simulate", "h100:2", "--cuda-isolation", "session")


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["plain", "xdist"])
def test_coverage_counts_what_device_tests_run(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """Without any setting of the user's, and without files left behind."""
    pytester.makepyfile(
        library="def on_cpu():\n    return 1\n\ndef on_device():\n    two = 2\n    return two\n",
        test_it="import library\ndef test_cpu(): library.on_cpu()\ndef test_device(cuda_device): library.on_device()",
    )
    result = pytester.runpytest_subprocess(*SIMULATE, *workers, "--cov=library", "--cov-report=term")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["library.py *5 * 0 *100%"])
    assert [path.name for path in pytester.path.glob(".coverage*")] == [".coverage"]


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["plain", "xdist"])
def test_reruns_survive_a_death(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(
        """
        import os, pytest, signal
        def times(name):
            with open(name, "a") as file: file.write("x")
            return os.path.getsize(name)
        @pytest.mark.flaky(reruns=2)
        def test_dies_once(cuda_device):
            if times("died") < 2: os.kill(os.getpid(), signal.SIGKILL)
        @pytest.mark.flaky(reruns=2)
        def test_fails_once(cuda_device): assert times("failed") > 1
        @pytest.mark.flaky(reruns=1)
        def test_dies_always(cuda_device):
            times("always")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE, *workers)
    assert result.parseoutcomes() == {"passed": 2, "failed": 1, "rerun": 3}
    assert (pytester.path / "always").read_text() == "xx"


def test_each_repeated_attempt_has_its_line(pytester: pytest.Pytester) -> None:
    """Also one that ended with its process, after others in the same one; and the stack, where there is one."""
    pytester.makepyfile(
        """
        import os, pytest, signal
        @pytest.mark.flaky(reruns=3)
        def test_it(cuda_device):
            with open("times", "a") as file: file.write("x")
            if os.path.getsize("times") == 3: os.abort()
            assert 0
        """
    )
    reports = run(pytester, "session", plugins=("rerunfailures",)).of_kind("report")
    texts = [report["longreprtext"] for report in reports if report["outcome"] in ("failed", "rerun")]
    assert [text.count(" Reproduce (seed ") for text in texts] == [1, 1, 1, 1]
    assert ["was killed by SIGABRT during call" in text for text in texts] == [False, False, True, False]
    assert ["- Python stack -" in text for text in texts] == [False, False, True, False]


@pytest.mark.parametrize("arguments", [("-p", "randomly"), ("-p", "randomly", "-n", "2")], ids=["plain", "xdist"])
def test_random_order(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytester.makepyfile(
        test_a="def test_a(cuda_device): ...\ndef test_b(): ...\ndef test_c(cuda_device): ...",
        test_b="def test_a(cuda_device): ...\ndef test_b(): ...\ndef test_c(cuda_device): ...",
    )
    pytester.runpytest_subprocess(*SIMULATE, *arguments, "-p", "no:cacheprovider").assert_outcomes(passed=6)


def test_hypothesis(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from hypothesis import given, settings, strategies as st
        @settings(max_examples=20, deadline=None)
        @given(st.integers())
        def test_passes(x): assert x == x
        @settings(max_examples=20, deadline=None)
        @given(x=st.integers())
        def test_fails(cuda_device, x): assert x < 5
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE, "-p", "hypothesispytest")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_fails(*", "*x=5,*"])


def cover(pytester: pytest.Pytester, level: str, *arguments: str) -> tuple[str, dict[str, object]]:
    """The report of a run with coverage, and the measured data by file, with contexts."""
    from coverage import CoverageData

    result = pytester.runpytest_subprocess(
        "--cuda-simulate", "h100:2", "--cuda-isolation", level, "--cov=library", "--cov-report=term-missing", *arguments
    )
    assert result.ret == 0, result.stdout.str()
    [report] = [line for line in result.outlines if line.startswith("library.py")]
    names = [path.name for path in pytester.path.glob(".coverage*") if path.name != ".coveragerc"]
    assert names == [".coverage"]
    data = CoverageData(str(pytester.path / ".coverage"))
    data.read()
    [file] = data.measured_files()
    contexts = {line: sorted(c) for line, c in data.contexts_by_lineno(file).items()}
    return report, {
        "contexts": contexts,
        "arcs": sorted(data.arcs(file) or []),
        "lines": sorted(data.lines(file) or []),
    }


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("", "--cov-branch"),
        ("parallel = true", "--cov-context=test"),
        ("dynamic_context = test_function", ""),
        ("concurrency = multiprocessing,thread", "-n 2 --cov-branch --cov-context=test"),
    ],
)
def test_coverage_is_the_same(pytester: pytest.Pytester, config: str, arguments: str) -> None:
    (pytester.path / ".coveragerc").write_text(f"[run]\n{config}\n")
    pytester.makepyfile(
        library="""
        def on_cpu(x):
            return 1 if x else 2
        def on_device(x):
            if x:
                return 3
            return 4
        def never():
            return 5
        """,
        test_it="""
        import library, pytest
        def test_cpu(): library.on_cpu(1)
        def test_device(cuda_device): library.on_device(1)
        def test_both(cuda_device): library.on_device(0)
        """,
    )
    assert cover(pytester, "function", *arguments.split()) == cover(pytester, "off", *arguments.split())
    in_two_runs = []
    for level in ("off", "session"):
        cover(pytester, level, *arguments.split(), "-k", "cpu or device")
        in_two_runs.append(cover(pytester, level, *arguments.split(), "-k", "both", "--cov-append"))
    assert in_two_runs[0] == in_two_runs[1] == cover(pytester, "session", *arguments.split())


@pytest.mark.parametrize("arguments", ["--cov-context=test", "--cov-context=test -n 2"])
def test_contexts_are_the_same_from_fresh_interpreters(pytester: pytest.Pytester, arguments: str) -> None:
    pytester.makepyfile(
        library="def work(x):\n    if x:\n        return 1\n    return 2\n",
        test_it="""
        import library, pytest
        from concurrent.futures import ThreadPoolExecutor
        POOL = ThreadPoolExecutor(1)
        POOL.submit(int).result()
        @pytest.fixture
        def worked(cuda_device):
            library.work(0)
            yield
            library.work(1)
        def test_cpu(): library.work(1)
        def test_device(cuda_device): library.work(1)
        def test_fixture(worked): pass
        """,
    )
    found = cover(pytester, "session", *arguments.split())
    assert found == cover(pytester, "off", *arguments.split())
    assert "test_it.py::test_fixture|teardown" in str(found)
    assert "test_it.py::test_device|run" in str(found)


def test_html_report_is_the_same(pytester: pytest.Pytester) -> None:
    """Rows, outcomes, captured output, and the extras that a conftest and a fixture add."""
    pytester.makeconftest(
        """
        import pytest
        from pytest_html import extras
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            if call.when == "call":
                report.extras = [*getattr(report, "extras", []), extras.text(item.name, name="of conftest")]
                report.description = item.name
            return report
        def pytest_html_results_table_header(cells): cells.append("<th>What</th>")
        def pytest_html_results_table_row(report, cells):
            cells.append("<td>" + getattr(report, "description", "") + "</td>")
        """
    )
    pytester.makepyfile(
        """
        import pytest
        from pytest_html import extras as made
        def test_cpu(): print("of cpu")
        def test_device(cuda_device, extras):
            extras.append(made.json({"answer": 42}))
            print("of device")
        def test_fails(cuda_device): assert 0
        def test_skips(cuda_device): pytest.skip("no")
        """
    )

    def tests(level: str, *arguments: str) -> object:
        plugins = ("-p", "metadata", "-p", "html")
        options = (*plugins, "--html=report.html", "--self-contained-html", *arguments)
        pytester.runpytest_subprocess("--cuda-simulate", "h100:2", "--cuda-isolation", level, *options)
        text = (pytester.path / "report.html").read_text()
        [blob] = re.findall(r'data-jsonblob="([^"]*)"', text)
        found = json.loads(html.unescape(blob))["tests"]
        for rows in found.values():
            for row in rows:
                row["duration"] = None
                row["resultsTableRow"] = [c for c in row["resultsTableRow"] if "col-duration" not in c]
        # Nor the level and the mask in the line that reproduces a failure, which are what differs.
        own = r"gw\d|--cuda-isolation \w+|CUDA_VISIBLE_DEVICES=\S+ CUDA_DEVICE_ORDER=\w+ "
        return sorted(re.sub(own, "", str(row)) for row in found.items())

    expected = tests("off")
    assert "of conftest" in str(expected)
    assert "of device" in str(expected)
    assert tests("session") == tests("function") == expected
    assert tests("session", "-n", "2") == tests("off", "-n", "2")


SNAPSHOTS = """
    import os, pytest
    def test_cpu(snapshot): assert "on the cpu" == snapshot
    def test_device(cuda_device, snapshot):
        assert {"on": "device"} == snapshot
        assert "second" == snapshot
    @pytest.mark.parametrize("x", [1, 2])
    def test_many(cuda_device, snapshot, x): assert x == snapshot
    def test_named(cuda_device, snapshot): assert "named" == snapshot(name="by name")
"""


@pytest.fixture
def snapshots(pytester: pytest.Pytester) -> Path:
    pytester.makepyfile(test_it=SNAPSHOTS)
    snap(pytester, "off", "--snapshot-update")
    return pytester.path / "__snapshots__" / "test_it.ambr"


def snap(pytester: pytest.Pytester, level: str, *arguments: str) -> list[str]:
    """The run's exit status, and the lines of syrupy's summary."""
    options = ("-p", "syrupy", "--cuda-simulate", "h100:2", "--cuda-isolation", level)
    result = pytester.runpytest_subprocess(*options, *arguments)
    text = result.outlines
    start = next((n for n, line in enumerate(text) if "snapshot report summary" in line), len(text))
    lines = [line for line in text[start:] if re.match(r"\d+ snapshot|Unused|Re-run|  ", line)]
    return [str(int(result.ret)), *lines]


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["plain", "xdist"])
def test_snapshots_of_device_processes_are_in_use(
    pytester: pytest.Pytester, snapshots: Path, workers: tuple[str, ...]
) -> None:
    """Passed, changed, unused and known-bad ones: syrupy's summary, its exit status and its files are the same."""
    module, written = pytester.path / "test_it.py", snapshots.read_text()
    tests = module.read_text()
    without_one = tests.replace("test_named(cuda_device, snapshot)", "test_named(cuda_device)").replace(
        'assert "named" == snapshot(name="by name")', "pass"
    )
    changed = tests.replace('"second"', '"another"').replace("def test_named", "@pytest.mark.xfail\ndef test_named")
    for source, *options in (
        (tests, "--snapshot-details"),
        (tests, "-k", "many"),
        (without_one,),
        (without_one, "--snapshot-update"),
        (changed.replace('"named"', '"other"'),),
    ):
        module.write_text(source)
        found = []
        for level in ("off", "session"):
            snapshots.write_text(written)
            found.append([snap(pytester, level, *options, *workers), snapshots.read_text()])
        assert found[0] == found[1], options
        assert len(found[0][0]) > 1


def test_a_death_leaves_no_snapshot_unused(pytester: pytest.Pytester, snapshots: Path) -> None:
    module, written = pytester.path / "test_it.py", snapshots.read_text()
    module.write_text(module.read_text() + "def test_z_dies(cuda_device): os._exit(1)\n")
    for options in ((), ("--snapshot-update",), ("--snapshot-update", "-n", "2")):
        assert not [line for line in snap(pytester, "session", *options) if "unused" in line or "removed" in line]
        assert snapshots.read_text() == written
