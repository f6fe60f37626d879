"""What a conftest fills inside device processes comes back, and a fixture can tell which process it runs in."""

from __future__ import annotations

import pytest

CONFTEST = """
    import os, pytest, pytest_cudaenv
    RESULTS, ENDED = [], []
    def note(what):
        process = pytest_cudaenv.device_process()
        here = RESULTS if process is None else process.output.setdefault("results", [])
        here.append(what)
    def pytest_runtest_makereport(item, call):
        if call.when == "call": note(item.name)
    @pytest.fixture(scope="session", autouse=True)
    def resource():
        yield
        note("end of session")
    def pytest_cudaenv_device_process_finished(output, is_complete):
        RESULTS.extend(output.get("results", []))
        ENDED.append(is_complete)
    def pytest_sessionfinish(session):
        output = getattr(session.config, "workeroutput", None)
        if output is not None: output["results"], output["ended"] = RESULTS, ENDED
    def pytest_testnodedown(node):
        RESULTS.extend(node.workeroutput["results"])
        ENDED.extend(node.workeroutput["ended"])
    def pytest_terminal_summary(terminalreporter):
        terminalreporter.line(f"results: {' '.join(sorted(RESULTS))}")
        terminalreporter.line(f"ended: {sorted(ENDED)}")
"""

SUITE = """
    import os
    from pytest_cudaenv import requires_cuda
    def test_cpu(): pass
    def test_a(cuda_device): pass
    def test_b(cuda_device): pass
    @requires_cuda(devices=2)
    def test_c(cuda_devices): pass
"""


def run(pytester: pytest.Pytester, *arguments: str, level: str = "session") -> pytest.RunResult:
    return pytester.runpytest_subprocess("--cuda-simulate", "h100:4", "--cuda-isolation", level, *arguments)


@pytest.mark.parametrize(("level", "processes"), [("off", 0), ("session", 2), ("function", 3)])
def test_what_a_conftest_fills_comes_back(pytester: pytest.Pytester, level: str, processes: int) -> None:
    """Also what the last teardown of a process adds."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SUITE)
    result = run(pytester, level=level)
    result.assert_outcomes(passed=4)
    ends = " ".join(["end of session"] * (processes + 1))
    result.stdout.fnmatch_lines([f"results: {ends} test_a test_b test_c test_cpu", f"ended: {[True] * processes}"])


def test_it_comes_back_from_workers_by_their_own_output(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SUITE)
    result = run(pytester, "-n", "2", level="function")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["results: * test_a test_b test_c test_cpu", "ended: [[]True, True, True[]]"])


def test_a_death_loses_what_was_not_sent(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        """
        import os
        def test_a(cuda_device): pass
        def test_dies(cuda_device): os._exit(1)
        def test_z(cuda_device): pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["results: end of session test_z", "ended: [[]False, True[]]"])


def test_it_is_plain_data(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest_cudaenv
        def pytest_cudaenv_device_process_finished(output): print("\\noutput:", output)
        """
    )
    pytester.makepyfile(
        """
        import pathlib, pytest_cudaenv
        def test_it(cuda_device):
            pytest_cudaenv.device_process().output.update(
                number=1.5, pair=(1, None), nested={"a": [True]}, path=pathlib.PurePosixPath("x"), one={1})
        """
    )
    result = run(pytester, "-s")
    output = "{'number': 1.5, 'pair': (1, None), 'nested': {'a': [True]}, 'path': \"PurePosixPath('x')\", 'one': '{1}'}"
    assert f"output: {output}" in result.outlines


def test_a_hook_that_fails_is_an_error_of_the_running_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_cudaenv_device_process_finished(output): raise KeyError('mine')")
    pytester.makepyfile(SUITE)
    for arguments in ((), ("-n", "1")):
        result = run(pytester, *arguments)
        result.assert_outcomes(passed=4, errors=2)
        result.stdout.fnmatch_lines(["*KeyError: 'mine'"])
        assert "INTERNALERROR" not in result.stdout.str()


IDS = """
    import pytest, pytest_cudaenv
    from pytest_cudaenv import requires_cuda
    def note(id):
        process = pytest_cudaenv.device_process()
        assert id == ("main" if process is None else process.id) or id.startswith("gw")
        with open("ids", "a") as file: file.write(id + "\\n")
    def test_cpu(cuda_process_id): note(cuda_process_id)
    def test_a(cuda_device, cuda_process_id): note(cuda_process_id)
    def test_b(cuda_device, cuda_process_id): note(cuda_process_id)
    @requires_cuda(devices=2)
    def test_c(cuda_process_id): note(cuda_process_id)
"""


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (("--cuda-isolation", "off"), ["main"] * 4),
        ((), ["main", "main-1", "main-1", "main-2"]),
        (("--cuda-isolation", "function"), ["main", "main-1", "main-2", "main-3"]),
        (("-n", "1"), ["gw0", "gw0-1", "gw0-1", "gw0-2"]),
    ],
)
def test_a_process_has_an_id_of_its_own(pytester: pytest.Pytester, arguments: tuple[str, ...], ids: list[str]) -> None:
    pytester.makepyfile(IDS)
    run(pytester, *arguments).assert_outcomes(passed=4)
    assert (pytester.path / "ids").read_text().split() == ids
