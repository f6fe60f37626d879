"""A run reports the same with device processes as without: outcomes, text, order, counts, files.

Every behaviour has a suite that shows it. It runs with isolation off and on, and what pytest's plugins are told and
what the terminal shows are compared whole.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

import pytest

from tests.isolation import suites
from tests.isolation.comparing import Run, alike, differences, files, run


@dataclass(frozen=True)
class Case:
    """A behaviour: the options of the run that shows it, and the suite, where it has one of its own."""

    options: str = ""
    suite: str = ""
    plugins: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    only_outcomes: bool = False
    """Whether the text may differ, as that of an inner run may, which sees its devices alone."""
    before: str | None = None
    """Options of a run before the one that is compared."""
    leaves: tuple[str, ...] = ()
    """Files that the run writes, and that are compared as well."""
    shows: str | None = None
    """What the run's text must hold, so that the comparison is of what it says."""
    ordered: bool = True
    levels: tuple[str, ...] = ("session",)


EVERY = ("session", "module", "function")

CASES = {
    "everything": Case("-rA", levels=EVERY),
    "verbose": Case("-vv -rA --tb=long --showlocals"),
    "quiet": Case("-q --tb=line --no-header"),
    "-x": Case("-x -v", levels=EVERY),
    "--maxfail": Case("--maxfail=3 -v"),
    "-s": Case("-s"),
    "--capture=sys": Case("--capture=sys -rA"),
    "--capture=tee-sys": Case("--capture=tee-sys"),
    "--capture=no --show-capture": Case("--capture=no"),
    "--show-capture": Case("--show-capture=stderr"),
    "--lf": Case("--lf -v", before=""),
    "--ff": Case("--ff -v", before=""),
    "--sw": Case("--sw -v", before="--sw"),
    "--sw-skip": Case("--sw --sw-skip -v", before="--sw"),
    "--nf --cache-clear": Case("--nf --cache-clear -v", before=""),
    "-W error": Case("-W error -rA"),
    "warnings": Case("-rA", suite=suites.WARNING, shows="in teardown", levels=EVERY),
    "warnings disabled": Case("--disable-warnings", suite=suites.WARNING),
    "-p no:warnings": Case("-p no:warnings", suite=suites.WARNING),
    "log": Case("--log-level=INFO -rA", suite=suites.LOGGING, shows="from a device process", levels=EVERY),
    "--log-cli-level": Case("--log-cli-level=INFO", suite=suites.LOGGING, shows="from a device process", levels=EVERY),
    "--log-file": Case("--log-file=log.txt --log-file-level=INFO", suite=suites.LOGGING, leaves=("log.txt",)),
    "junitxml": Case(
        "--junitxml=report.xml -o junit_logging=all", suite=suites.JUNIT, leaves=("report.xml",), levels=EVERY
    ),
    "junitxml of all": Case("--junitxml=report.xml", leaves=("report.xml",)),
    "junitxml xunit1": Case("--junitxml=report.xml -o junit_family=xunit1", suite=suites.JUNIT, leaves=("report.xml",)),
    "reruns": Case(
        "-rR", suite=suites.RERUNS, plugins=("rerunfailures",), shows="RERUN test_one.py::test_fails_once", levels=EVERY
    ),
    "--reruns": Case("--reruns 1 -v -x", suite=suites.RERUNS, plugins=("rerunfailures",)),
    "--only-rerun": Case("--reruns 1 --only-rerun Key -v", suite=suites.RERUNS, plugins=("rerunfailures",)),
    "reruns -n 2": Case("-n 2 --reruns 1", suite=suites.RERUNS, plugins=("rerunfailures", "xdist"), ordered=False),
    "timeouts": Case("-rA", suite=suites.TIMEOUTS, plugins=("timeout",), shows="from pytest-timeout", levels=EVERY),
    "--timeout": Case("--timeout 1 -k call", suite=suites.TIMEOUTS, plugins=("timeout",), shows="from pytest-timeout"),
    "hypothesis": Case("-rA", suite=suites.HYPOTHESIS, plugins=("hypothesispytest",), shows="x=5,"),
    "hypothesis's statistics": Case(
        "--hypothesis-show-statistics --hypothesis-seed=0",
        suite=suites.HYPOTHESIS,
        plugins=("hypothesispytest",),
        shows="test_one.py::test_device:",
    ),
    "randomly": Case("-rA -vv --randomly-seed=7", suite=suites.RANDOM, plugins=("randomly",), levels=EVERY),
    "randomly -n 2": Case("-n 2 --randomly-seed=7", suite=suites.RANDOM, plugins=("randomly", "xdist"), ordered=False),
    "-p no:logging": Case("-p no:logging -rA"),
    "-p no:tmpdir": Case("-p no:tmpdir"),
    "-p no:capture": Case("-p no:capture -k 'not caps and not capfd'"),
    "-p no:cacheprovider": Case("-p no:cacheprovider"),
    "-p no:junitxml": Case("-p no:junitxml --deselect test_one.py::test_properties"),
    "-p no:terminal": Case("-p no:terminal"),
    "--durations": Case("--durations=2", suite=suites.TIMED, shows="s setup    test_one.py::test_slow_setup"),
    "--runxfail": Case("--runxfail"),
    "exit in call": Case(
        "-v --deselect test_one.py::test_teardown", suite=suites.LEAVING, shows="enough of call", levels=EVERY
    ),
    "exit in setup": Case("-v -k setup", suite=suites.LEAVING, shows="enough of setup"),
    "exit in teardown": Case("-v -k teardown", suite=suites.LEAVING, shows="enough of teardown", levels=EVERY),
    "exit without code": Case("-v -k without", suite=suites.LEAVING, shows="enough"),
    "shouldstop": Case("-v", suite=suites.STOPPING, shows="stopped by a test"),
    "shouldfail": Case("-v", suite=suites.FAILING_RUN, shows="failed by a test"),
    "subtests": Case("-rA", suite=suites.SUBTESTS, shows="contains 1 failed subtest", levels=EVERY),
    "subtests verbose": Case("-v", suite=suites.SUBTESTS, shows="SUBFAILED"),
    "tmp_path": Case("-v --basetemp=temporary", suite=suites.TEMPORARY, levels=EVERY),
    "tmp_path of failed": Case("--basetemp=temporary -o tmp_path_retention_policy=failed", suite=suites.TEMPORARY),
    "conftest's hooks": Case("", suite=suites.HOOKS, files={"conftest": suites.HOOKS_CONFTEST}, levels=EVERY),
    "anyio": Case("-rA", suite=suites.ANYIO, plugins=("anyio.pytest_plugin",)),
    "pytester": Case("test_one.py test_two.py", suite=suites.PYTESTER, only_outcomes=True),
    "-n 2": Case("-n 2 -v -rA", plugins=("xdist",), ordered=False, levels=EVERY),
    "-n 2 subtests": Case("-n 2 -rA", suite=suites.SUBTESTS, plugins=("xdist",), ordered=False),
    "-n 2 warnings": Case("-n 2 -rA", suite=suites.WARNING, plugins=("xdist",), ordered=False),
    "-n 2 tmp_path": Case("-n 2 --basetemp=temporary", suite=suites.TEMPORARY, plugins=("xdist",), ordered=False),
    "--dist loadfile": Case("-n 2 --dist loadfile -rA", plugins=("xdist",), ordered=False),
    "--dist loadscope": Case("-n 2 --dist loadscope", plugins=("xdist",), ordered=False),
    "--dist loadgroup": Case("-n 2 --dist loadgroup -v", plugins=("xdist",), ordered=False),
    "--dist worksteal": Case("-n 2 --dist worksteal", plugins=("xdist",), ordered=False),
}

if not hasattr(pytest, "Subtests"):  # pytest 9.0 brought them
    CASES = {name: case for name, case in CASES.items() if case.suite is not suites.SUBTESTS}


def make(pytester: pytest.Pytester, case: Case) -> None:
    pytester.makepyfile(**{"test_one": case.suite or suites.MIXED, "test_two": suites.SECOND, **case.files})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_alike(pytester: pytest.Pytester, case: Case) -> None:
    make(pytester, case)
    runs, left = [], []
    for level in ("off", *case.levels):
        for name in (*case.leaves, "counts", ".hypothesis"):
            pytester.run("rm", "-rf", name)
        if case.before is not None:
            pytester.run("rm", "-rf", ".pytest_cache")
            run(pytester, level, *case.before.split())
        runs.append(run(pytester, level, *shlex.split(case.options), plugins=case.plugins))
        left.append([alike((pytester.path / name).read_text()) for name in case.leaves])
    without, *others = runs
    if case.shows is not None:
        assert case.shows in "\n".join(without.lines)
    assert "INTERNALERROR" not in "\n".join(without.lines + without.errors)
    for other in others:
        assert other.outcomes == without.outcomes or not case.ordered
        if not case.only_outcomes:
            assert not (diff := differences(without, other, ordered=case.ordered)), "\n".join(diff)
    assert all(found == left[0] for found in left)


def test_wide_fixtures_live_as_long_as_the_grant_fits(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session fixture on devices is loaded once for each change of grant; a module's once in each process."""
    monkeypatch.setenv("FIXTURE_LOG", str(pytester.path / "log"))
    make(pytester, Case())
    run(pytester, "session")
    lines = (pytester.path / "log").read_text().splitlines()
    # One device, two devices, one device: the model is needed in the first and in the third process.
    assert lines.count("load model") == lines.count("free model") == 2
    assert lines.count("open data") == lines.count("close data") == 2


@pytest.mark.parametrize("option", ["--setup-show", "--setup-only", "--setup-plan"])
def test_setups_are_shown(pytester: pytest.Pytester, option: str) -> None:
    """Each process sets up what it needs, so lines come more often; which ones come is the same."""
    make(pytester, Case())
    found = []
    for level in ("off", "session", "function"):
        text = "\n".join(run(pytester, level, option).lines)
        found.append(set(re.findall(r"(SETUP|TEARDOWN) +([SMCF]) (model|data|cuda_device|tmp_path)\b", text)))
        found[-1] |= set(re.findall(r"test_one.py::\w+ \(fixtures used: .*\)", text))
    assert ("SETUP", "S", "model") in found[0]
    assert found[0] == found[1] == found[2]


def subtest_lines(of: Run) -> list[str]:
    return [line for line in of.lines if "SUBFAILED" in line or "subTest" in line]


def test_subtests_of_unittest(pytester: pytest.Pytester) -> None:
    """pytest captures its own progress letters of them; here they reach the terminal. All else is the same."""
    suite = """
        import unittest
        from pytest_cudaenv import requires_cuda
        class LegacyTest(unittest.TestCase):
            @requires_cuda
            def test_subtests(self):
                for x in range(3):
                    with self.subTest(x=x): self.assertNotEqual(x, 1)
            @requires_cuda
            def test_skips(self):
                with self.subTest(x=1): self.skipTest("no")
    """
    make(pytester, Case(suite=suite))
    for options in ([], ["-n", "2"]):
        runs = [run(pytester, level, *options, plugins=("xdist",)) for level in ("off", "session", "function")]
        assert len({str(sorted(r.outcomes)) for r in runs}) == 1
        assert len({r.ret for r in runs}) == 1
        assert (
            len({str(sorted(line for line in r.lines if "SUBFAILED" in line or "subTest" in line)) for r in runs}) == 1
        )


def test_temporary_folders_are_kept_as_ever(pytester: pytest.Pytester) -> None:
    """Which ones are left depends on the outcome of their tests alone."""
    make(pytester, Case(suite=suites.TEMPORARY))
    for options in ([], ["-o", "tmp_path_retention_policy=failed"]):
        found = []
        for level in ("off", "session", "function"):
            run(pytester, level, "--basetemp=temporary", *options)
            found.append(files(pytester.path / "temporary"))
        assert found[0] == found[1]
        assert [name for name in found[0] if "fails" in name]
        # Each process makes a session's folder of its own.
        assert {re.sub(r"shared\d", "shared", name) for name in found[2]} == {
            re.sub(r"shared\d", "shared", name) for name in found[0]
        }


@pytest.mark.parametrize(
    "arguments", ["session", "function -x", "session -n 2 --dist loadgroup", "session --setup-show -s"]
)
def test_outcomes_in_fresh_interpreters(
    pytester: pytest.Pytester, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pytest process cannot be forked, the reports are the same as well."""
    make(pytester, Case())
    level, *options = arguments.split()
    without = run(pytester, "off", *options, plugins=("xdist",))
    monkeypatch.setenv("POISON", "1")
    other = run(pytester, level, *options, plugins=("xdist",))
    assert any("[no-fork]" in line for line in other.lines)
    assert sorted(other.outcomes) == sorted(without.outcomes)
    assert other.ret == without.ret


@pytest.mark.parametrize("level", EVERY)
def test_junitxml_from_fresh_interpreters(pytester: pytest.Pytester, level: str) -> None:
    """The same file, with the attributes and properties that tests record; and the same warnings."""
    make(pytester, Case(suite=suites.JUNIT, files={"test_poison": suites.POISONING}))
    runs, texts = [], []
    for isolation in ("off", level):
        options = "--junitxml=report.xml -o junit_logging=all -o junit_family=xunit1"  # the other keeps few attributes
        runs.append(run(pytester, isolation, *options.split()))
        texts.append(alike((pytester.path / "report.xml").read_text()))
    assert any("[no-fork]" in line for line in runs[1].lines)
    for recorded in ('assertions="3"', 'name="kind" value="H100"', 'name="count"', 'name="answer" value="42"'):
        assert recorded in texts[0]
    assert texts[1] == texts[0]
    found = [[r for r in of.of_kind("warning") if "[no-fork]" not in r["text"]] for of in runs]
    assert found[0] == found[1]
    assert found[0]
