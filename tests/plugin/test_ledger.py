"""A run's ledger: complete, true while it is written, and as its schema says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import pytest_cudaenv
from tests.signals import heed_signals

SCHEMA = json.loads((Path(pytest_cudaenv.__file__).parent / "ledger" / "schema.json").read_text())

SUITE = """
    import os, time, unittest
    import pytest
    from pytest_cudaenv import attn_backends, dtypes, requires_cuda, requires_package
    def test_cpu(): pass
    def test_one(cuda_device): time.sleep(0.05)
    @requires_cuda(devices=2, memory="8GB")
    def test_two(cuda_devices): pass
    @requires_cuda(devices=4)
    def test_four(cuda_devices): pass
    def test_fails(cuda_device): assert 1 == 2, "not equal"
    @pytest.fixture
    def bad(): raise RuntimeError("bad fixture")
    def test_error(bad): pass
    @pytest.fixture
    def bad_later():
        yield
        raise RuntimeError("bad teardown")
    def test_teardown_error(cuda_device, bad_later): pass
    @pytest.mark.skip(reason="not now")
    def test_skipped(): pass
    def test_skips(): pytest.skip("in the body")
    @pytest.mark.xfail
    def test_xfails(cuda_device): assert 0
    @pytest.mark.xfail
    def test_xpasses(cuda_device): pass
    @pytest.mark.flaky(reruns=2)
    def test_flaky(cuda_device):
        with open("tries", "a") as file: file.write("x")
        assert os.path.getsize("tries") % 2 == 0
    @attn_backends("eager", "sdpa")
    @dtypes("bf16")
    def test_cells(cell): pass
    class TestLegacy(unittest.TestCase):
        @requires_cuda
        def test_it(self): pass
        def test_subs(self):
            with self.subTest("a"): pass
    def test_ünïcode(): pass
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(pytester: pytest.Pytester, *arguments: str) -> tuple[pytest.RunResult, list[dict[str, Any]]]:
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100:2", "--cuda-ledger", "out/ledger.json", *arguments)
    lines = lines_of(pytester.path / "out" / "ledger.json")
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    return result, lines


def told(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {line["id"].partition("::")[2]: line for line in lines if line["kind"] == "test"}


def selected(lines: list[dict[str, Any]]) -> set[str]:
    return {nodeid for line in lines if line["kind"] == "collected" for nodeid in line["ids"]}


OUTCOMES = {
    "test_cpu": "passed", "test_one": "passed", "test_two": "passed", "test_four": "skipped", "test_fails": "failed",
    "test_error": "error", "test_teardown_error": "error", "test_skipped": "skipped", "test_skips": "skipped",
    "test_xfails": "xfailed", "test_xpasses": "xpassed", "test_flaky": "passed", "test_cells[eager-bf16]": "passed",
    "test_cells[sdpa-bf16]": "passed", "TestLegacy::test_it": "passed", "TestLegacy::test_subs": "passed",
    "test_ünïcode": "passed",
}  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("-n", "2"), ("--cuda-isolation", "off")], ids=" ".join)
def test_a_whole_run(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytester.makepyfile(test_it=SUITE)
    result, lines = run(pytester, *arguments)
    tests = told(lines)
    assert {name: test["outcome"] for name, test in tests.items()} == OUTCOMES
    assert lines[0]["kind"] == "run"
    assert lines[-1] == {**lines[-1], "kind": "end", "status": 1}
    assert {i for line in lines if line["kind"] == "collected" for i in line["ids"]} == {
        t["id"] for t in tests.values()
    }
    assert result.ret == 1

    first = lines[0]
    assert first["simulated"] == "h100:2"
    assert len(first["host"]["devices"]) == len(first["host"]["visible"]) == 2
    assert {"setting": "--cuda-simulate h100:2", "origin": "option"} in first["settings"]
    assert first["software"]["distributions"]["torch"]

    uuids = set(first["host"]["visible"])
    assert set(tests["test_two"]["devices"]) == uuids
    assert tests["test_one"]["ran_on"] == "NVIDIA H100 80GB HBM3"
    assert ("process" in tests["test_one"]) == (arguments != ("--cuda-isolation", "off"))
    assert tests["test_one"]["seconds"]["call"] >= 0.05
    assert "devices" not in tests["test_cpu"]
    assert tests["test_flaky"]["attempts"] == 2
    assert tests["test_cells[sdpa-bf16]"]["cell"] == "sdpa-bf16"
    assert [r["code"] for r in tests["test_four"]["reasons"]] == ["cuda-devices"]
    assert "ran_on" not in tests["test_four"]
    assert (tests["test_skipped"]["skip"], tests["test_skips"]["skip"]) == ("not now", "in the body")
    assert "not equal" in tests["test_fails"]["message"]
    assert "bad teardown" in tests["test_teardown_error"]["message"]
    assert ("worker" in tests["test_one"]) == ("-n" in arguments)

    requirements = {line["number"]: line for line in lines if line["kind"] == "requirement"}
    needs = requirements[tests["test_two"]["requirement"]]
    assert (needs["needs"]["devices"], needs["needs"]["memory"]) == (2, 8 * 10**9)
    assert {source["where"] for source in needs["sources"]} == {
        "@requires_cuda(devices=2, memory='8GB')", "fixture cuda_devices"
    }  # fmt: skip
    assert tests["test_one"]["requirement"] == tests["test_fails"]["requirement"]


def test_what_was_not_reached_is_known(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=SUITE)
    _, lines = run(pytester, "-x")
    ran = told(lines)
    assert len(selected(lines)) == len(OUTCOMES)
    assert set(ran) == {"test_cpu", "test_one", "test_two", "test_four", "test_fails"}


def test_what_was_deselected_for_its_needs_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=SUITE)
    _, lines = run(pytester, "--cuda-unmet", "deselect", "-k", "four or one")
    tests = told(lines)
    assert {name: test["outcome"] for name, test in tests.items()} == {"test_four": "deselected", "test_one": "passed"}


def test_a_device_process_or_worker_that_dies(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, signal
        WORKER = os.getpid()
        def test_before(cuda_device): pass
        def test_dies(cuda_device): os.kill(os.getpid(), signal.SIGKILL)
        def test_kills_worker(): os.kill(WORKER, signal.SIGKILL)
        def test_after(cuda_device): pass
        """
    )
    _, lines = run(pytester, "-n", "1")
    found = {name: test["outcome"] for name, test in told(lines).items()}
    assert found == {
        "test_before": "passed", "test_dies": "failed", "test_kills_worker": "failed", "test_after": "passed"
    }  # fmt: skip
    assert lines[-1]["kind"] == "end"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_is_written_as_it_goes(pytester: pytest.Pytester, number: signal.Signals) -> None:
    """After Ctrl-C it has an end, after `kill -9` it has none; whole lines it has either way."""
    pytester.makepyfile(
        """
        import time
        def test_a(cuda_device): pass
        def test_b(): pass
        def test_long():
            open("started", "w").close()
            time.sleep(60)
        def test_never(): pass
        """
    )
    command = [sys.executable, "-m", "pytest", "--cuda-simulate", "h100", "--cuda-ledger", "ledger.json"]
    process = subprocess.Popen(
        command, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_signals
    )
    until = time.monotonic() + 60
    while not (pytester.path / "started").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.wait(timeout=60)
    lines = lines_of(pytester.path / "ledger.json")
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    assert {"test_a", "test_b"} <= set(told(lines))
    assert "test_never" not in told(lines)
    assert (lines[-1]["kind"] == "end") == (number == signal.SIGINT)


def test_a_file_that_cannot_be_written_ends_the_run_before_it_begins(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    (pytester.path / "taken").write_text("")
    result = pytester.runpytest_subprocess("--cuda-ledger", "taken/ledger.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --cuda-ledger *taken/ledger.json: *: name a file that can be written"])


def test_collecting_alone_keeps_no_books(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(cuda_device): pass")
    pytester.runpytest_subprocess("--collect-only", "--cuda-simulate", "h100", "--cuda-ledger", "ledger.json")
    assert not (pytester.path / "ledger.json").exists()
