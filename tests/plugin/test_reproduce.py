"""The line to paste: what it keeps of a command line, and that it fails as the run did when a shell runs it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.compat import Flag
from pytest_cudaenv.reproduce import given_options, kept, shell_line, target

FLAGS = {
    "-x": Flag("maxfail", 0), "-s": Flag("capture", 0), "-n": Flag("numprocesses", 1), "-k": Flag("keyword", 1),
    "-p": Flag("plugins", 1), "-o": Flag("override_ini", 1), "-c": Flag("inifilename", 1), "-m": Flag("markexpr", 1),
    "--cov": Flag("cov_source", "?"), "--many": Flag("many", "+"), "--pair": Flag("pair", 2),
    "--runslow": Flag("runslow", 0), "--rootdir": Flag("rootdir", 1), "-v": Flag("verbose", 0),
    "--lf": Flag("lf", 0), "--cuda-simulate": Flag("cuda_simulate", 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("tests/test_a.py -x -s", "-s"),
        ("-xsv tests", "-s"),
        ("-n2 tests", ""),
        ("-n 2 -n 0 tests", "-n 0"),
        ("-n0 tests", "-n 0"),
        ("-xn2 -pno:randomly", "-p no:randomly"),
        ("-p no:randomly tests -o timeout=3 -c other.ini", "-p no:randomly -o timeout=3 -c other.ini"),
        ("--cov tests", ""),
        ("--cov --lf tests", ""),
        ("--many a b --pair c d e --runslow", "--many a b --pair c d --runslow"),
        (
            "--rootdir=here --rootdir there --unknown=1 --unknown",
            "--rootdir=here --rootdir there --unknown=1 --unknown",
        ),
        ("-k 'a or b' -m slow --cuda-simulate h100:2 -- -s", "--cuda-simulate h100:2"),
        ("-sZ tests -c", "-s -Z -c"),
    ],
)
def test_what_is_kept(arguments: str, expected: str) -> None:
    options = list(given_options(shlex.split(arguments), FLAGS))
    assert kept(options, selection=False) == shlex.split(expected)


def test_selections_go_on_to_override_those_of_the_ini_file() -> None:
    options = list(given_options(["-m", "slow", "-k", "a b", "-x"], FLAGS))
    assert kept(options, selection=True) == ["-m", "slow", "-k", "a b"]


@given(words=st.lists(st.sampled_from([*FLAGS, "tests", "a b", "-", "--", "-xs", "-n4", "--cov=x", "-Z"])))
def test_no_command_line_is_too_strange(words: list[str]) -> None:
    """Nothing is invented, and nothing is put in another order."""
    left = iter("".join(words))
    assert all(
        letter in left for letter in "".join(kept(list(given_options(words, FLAGS)), selection=True)) if letter != "-"
    )


@given(name=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30))
def test_a_shell_reads_what_was_written(name: str) -> None:
    assert shlex.split(shell_line({"A_B": name}, ["pytest", name])) == [f"A_B={name}", "pytest", name]


@pytest.mark.parametrize(
    ("nodeid", "path", "directory", "expected"),
    [
        ("tests/test_a.py::test[x]", "/r/tests/test_a.py", "/r", "tests/test_a.py::test[x]"),
        ("tests/test_a.py::C::test", "/r/tests/test_a.py", "/r/tests", "test_a.py::C::test"),
        ("test_a.py::test[a::b]", "/r/test_a.py", "/r/other", "../test_a.py::test[a::b]"),
        ("-a.py::test", "/r/-a.py", "/r", "./-a.py::test"),
        ("doc.txt", "/r/doc.txt", "/", "r/doc.txt"),
    ],
)
def test_the_id_is_as_seen_from_the_folder_of_the_run(nodeid: str, path: str, directory: str, expected: str) -> None:
    assert target(nodeid, Path(path), Path(directory)) == expected


# Pasted -----------------------------------------------------------------------------------------------------------


def lines_in(text: str) -> list[str]:
    """The commands below the headings."""
    return re.findall(r"^(?:E +)?-+ Reproduce.*-+\n(.*)$", text, re.MULTILINE)


def paste(line: str, folder: Path) -> str:
    """What a shell prints that is given this line, with nothing of the run's environment that a user would not have."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "PYTEST"))}
    done = subprocess.run(
        ["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=environ
    )
    return done.stdout + done.stderr


SUITE = """
    import os, pytest, random
    from pytest_cudaenv import requires_cuda
    def facts(*more):
        return f"FACTS {os.environ.get('CUDA_VISIBLE_DEVICES')} {random.random()} {more} ENDED"
    def test_passes(cuda_device): pass
    @pytest.mark.parametrize("x", ["a b", "it's", 'say "hi" $HOME `x` \\\\', "[1]::2", "*?;&|<>(){}!#~"])
    def test_fails(cuda_device, x): assert 0, facts(x)
    @requires_cuda(devices=2)
    class TestTwo:
        def test_two(self, cuda_devices): assert 0, facts([d.uuid for d in cuda_devices])
    @pytest.fixture
    def bad(cuda_device): assert 0, facts()
    def test_error(bad): pass
    @pytest.fixture
    def bad_end(cuda_device):
        yield
        assert 0, "and in teardown"
    def test_both(bad_end): assert 0, facts()
    def test_cpu(): assert 0, "of the CPU"
"""


@pytest.mark.parametrize("level", ["off", "session"])
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["plain", "xdist"])
def test_every_failure_ends_with_a_line_that_fails_the_same_way(
    pytester: pytest.Pytester, level: str, workers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    pytester.makepyfile(SUITE)
    arguments = ("--cuda-simulate", "h100:4", "--cuda-isolation", level, "--junitxml=report.xml", "-x", "--maxfail=99")
    result = pytester.runpytest_subprocess(*arguments, *workers)
    assert result.parseoutcomes() == {"passed": 1, "failed": 8, "errors": 2}
    lines = lines_in(result.stdout.str())
    assert len(lines) == 8, "one for each device test, and none for the CPU's"
    assert len(set(lines)) == 8
    report = ElementTree.parse(pytester.path / "report.xml")
    in_junit = [line for node in report.iter() if node.text for line in lines_in(node.text)]
    assert sorted(in_junit) == sorted(lines)
    first, *_, last = sorted(lines)
    for line in (
        first,
        last,
        next(line for line in lines if "say" in line),
        next(line for line in lines if "two" in line),
    ):
        text = paste(line, pytester.path)
        assert re.search(r"1 (failed|error) in", text), (line, text)
        [seen] = set(re.findall(r"FACTS .*? ENDED", text))
        if not workers:
            assert seen in result.stdout.str(), (line, seen)
    assert all(" -n" not in line and "junitxml" not in line and "CUDA_VISIBLE_DEVICES=" in line for line in lines)


def test_the_seed_is_in_the_heading(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest_cudaenv
        def test_it(cuda_device): assert 0, f"SEED {pytest_cudaenv.current().seed} ENDED"
        """
    )
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100", "-p", "randomly", "--randomly-seed=77")
    [seed] = set(re.findall(r"SEED (\d+) ENDED", result.stdout.str()))
    result.stdout.fnmatch_lines([f"*--- Reproduce (seed {seed}) ---*", "*--randomly-seed=77*"])
    [line] = lines_in(result.stdout.str())
    assert f"SEED {seed} ENDED" in paste(line, pytester.path)


@pytest.mark.parametrize("arguments", [(), ("-n", "1")], ids=" ".join)
def test_a_death_is_one_line_of_the_summary_on_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """There pytest shortens no message: of a text of many lines it would show them all, again."""
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile("import os\ndef test_dies(cuda_device): os._exit(7)")
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100", "--cuda-isolation", "session", *arguments)
    result.assert_outcomes(failed=1)
    summary = result.outlines[result.outlines.index(next(x for x in result.outlines if "test summary" in x)) :]
    assert len(summary) == 3
    assert summary[1].endswith("ended with exit status 7 during call")
    [_] = lines_in(result.stdout.str())


def test_a_death_has_its_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import os\ndef test_dies(cuda_device): os._exit(7)\ndef test_after(cuda_device): pass")
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100", "--cuda-isolation", "function")
    result.assert_outcomes(passed=1, failed=1)
    [line] = lines_in(result.stdout.str())
    assert "ended with exit status 7 during call" in paste(line, pytester.path)


def test_a_rerun_has_one_line_at_its_last_failure(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(cuda_device): assert 0")
    for level in ("off", "session"):
        result = pytester.runpytest_subprocess(
            "--cuda-simulate", "h100", "--cuda-isolation", level, "--reruns=2", "-p", "no:cacheprovider"
        )
        assert result.parseoutcomes() == {"failed": 1, "rerun": 2}
        [line] = lines_in(result.stdout.str())
        assert "1 failed in" in paste(line, pytester.path)


def test_what_the_environment_told_is_told_again(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the plugin and of pytest, a mask that has been narrowed, and an ini file that asks for workers."""
    pytester.makeini("[pytest]\naddopts = -n 2 -m 'not slow'\nmarkers = slow\ncuda_visible = 1")
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--size', type=int, default=1)")
    pytester.makepyfile(
        """
        import os, pytest
        @pytest.mark.slow
        def test_it(cuda_device, request):
            size, mask = request.config.getoption("size"), os.environ["CUDA_VISIBLE_DEVICES"]
            assert 0, f"FACTS {mask} {cuda_device.uuid} {size} ENDED"
        """
    )
    monkeypatch.setenv("CUDAENV_SIMULATE", "h200:4")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly --size 3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for level in ("off", "session"):
        result = pytester.runpytest_subprocess("-m", "slow", "--cuda-isolation", level)
        result.assert_outcomes(failed=1)
        [seen] = set(re.findall(r"FACTS 3 \S+ 3 ENDED", result.stdout.str()))
        [line] = lines_in(result.stdout.str())
        text = paste(line, pytester.path)
        assert seen in text, (line, text)
        assert "1 failed in" in text


@pytest.mark.parametrize("started", ["above", "below", "elsewhere"])
def test_the_same_rootdir_is_found(pytester: pytest.Pytester, started: str) -> None:
    """From the folder of the run: above an ini file that the pasted path alone would find, below one, or told."""
    inner = pytester.mkdir("inner")
    tests = inner / "tests"
    tests.mkdir()
    (inner / "pytest.ini").write_text("[pytest]\n")
    (tests / "test_it.py").write_text(
        "import random\ndef test_it(cuda_device, request):\n"
        "    assert 0, f'FACTS {random.random()} {request.node.nodeid} {request.config.rootpath} ENDED'\n"
    )
    folder, arguments = {
        "above": (pytester.path, ["."]),
        "below": (tests, ["test_it.py"]),
        "elsewhere": (pytester.mkdir("else"), ["../inner/tests", "--rootdir", "../inner/tests"]),
    }[started]
    if started == "above":
        pytester.makeini("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--cuda-simulate", "h100", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    [seen] = set(re.findall(r"FACTS [0-9].* ENDED", done.stdout))
    [line] = lines_in(done.stdout)
    text = paste(line, folder)
    assert seen in text, (line, text)


def test_what_was_held_from_another_test_is_granted_alone(pytester: pytest.Pytester) -> None:
    """In the pytest process a test keeps the last one's devices, which alone would not be its first choice."""
    pytester.makepyfile(
        """
        from pytest_cudaenv import requires_cuda
        @requires_cuda(devices=2)
        def test_two(cuda_devices): assert 0, f"FACTS {cuda_devices[1].uuid} ENDED"
        def test_one(cuda_device): assert 0, f"FACTS {cuda_device.uuid} ENDED"
        """
    )
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100:2")
    facts = re.findall(r"^E +AssertionError: (FACTS .* ENDED)", result.stdout.str(), re.MULTILINE)
    for line, seen in zip(lines_in(result.stdout.str()), facts, strict=True):
        assert seen in paste(line, pytester.path)


def test_a_teardown_that_was_left_from_another_test_has_no_line(pytester: pytest.Pytester) -> None:
    """It is reported under the next one, whose own failure has its line."""
    pytester.makepyfile(
        test_a="""
        import pytest
        @pytest.fixture(scope="module")
        def wide(cuda_device):
            yield
            raise RuntimeError("late")
        def test_a(wide): pass
        def test_cpu(): pass
        """,
        test_b="def test_b(cuda_device): assert 0",
    )
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100", "--cuda-isolation", "session")
    result.assert_outcomes(passed=2, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*teardown of test_a.py::test_a, at the end of its device process*"])
    [line] = lines_in(result.stdout.str())
    assert line.endswith(" test_b.py::test_b")
