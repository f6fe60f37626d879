"""`pytest-cudaenv merge`: files in, files out, and an exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_strategies import DEVICE, IF_ANY, NASTY, Book

from benchmarks.fabricated_ledgers import A10G, CPU, H200, H200X2, ledger, suite, write
from pytest_cudaenv import cli

Call = Callable[..., tuple[int, str, str]]

T = "tests/a.py::test_x"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """(exit status, stdout, stderr) of `pytest-cudaenv merge` in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def merge(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["merge", *arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return status, captured.out, captured.err

    return merge


@pytest.fixture
def good(tmp_path: Path) -> None:
    """Two ledgers with which nothing is wrong."""
    write(tmp_path / "cpu.json", Book(CPU).test(T, needs=IF_ANY))
    write(tmp_path / "h200.json", Book(H200).test(T, needs=IF_ANY))


def test_zero_where_all_is_fine(call: Call, good: None) -> None:
    assert call("cpu.json", "h200.json", "--expect", "cpu", "--expect", "h200")[0] == 0


def test_one_where_something_is_red_and_zero_where_it_is_allowed(call: Call, good: None) -> None:
    status, out, err = call("cpu.json")
    assert (status, err) == (1, "")
    assert out.startswith("RED: 1 ran on the CPU only")
    status, out, _ = call("cpu.json", "--allow", "cpu-only")
    assert status == 0
    assert "allowed: 1 ran on the CPU only" in out
    assert call("cpu.json", "h200.json", "--expect", "b200")[0] == 1
    assert call("cpu.json", "h200.json", "--expect", "cpu", "--forbid", "unexpected-runner")[0] == 1


def test_two_for_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["merge"], ["merge", "x.json", "--allow", "everything"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(arguments)
        assert raised.value.code == 2
    assert "never-ran" in capsys.readouterr().err


def test_one_bad_ledger_takes_nothing_from_the_others(call: Call, good: None, tmp_path: Path) -> None:
    write(tmp_path / "simulated.json", Book(A10G, simulated="a10g").test(T))
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "foreign.json").write_text("<xml/>")
    (tmp_path / "torn.json").write_bytes((tmp_path / "cpu.json").read_bytes()[:-20])
    names = ["cpu", "simulated", "empty", "foreign", "none", "torn", "h200"]
    status, out, err = call(*(f"{name}.json" for name in names), "--json", "out.json")
    assert status == 2
    assert "fine: 1 test, 1 ran; 2 runs of 2 runners" in out
    assert err.splitlines() == [
        "pytest-cudaenv: note: torn.json: its last line is cut short; the 3 lines before it count",
        "pytest-cudaenv: error: simulated.json: is of a simulated host (a10g): nothing in it ran on such a device",
        "pytest-cudaenv: error: empty.json: is empty: the run ended before its tests were known",
        "pytest-cudaenv: error: foreign.json: is not a ledger: its first line is not an object in JSON",
        "pytest-cudaenv: error: none.json: cannot be read: No such file or directory",
    ]
    assert call("out.json")[1] == out


def test_two_where_nothing_is_left(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("")
    status, out, err = call("empty.json")
    assert (status, out) == (2, "")
    assert err.endswith("pytest-cudaenv: error: no ledger is left to merge\n")


def test_folders_are_searched(call: Call, good: None, tmp_path: Path) -> None:
    (tmp_path / "all/ledger-cpu").mkdir(parents=True)
    (tmp_path / "all/notes.txt").write_text("no ledger")
    (tmp_path / "cpu.json").rename(tmp_path / "all/ledger-cpu/cpu.jsonl")
    (tmp_path / "h200.json").rename(tmp_path / "all/h200.json")
    assert call("all", "--expect", "cpu", "--expect", "h200")[0] == 0
    (tmp_path / "none").mkdir()
    status, _, err = call("all", "none")
    assert status == 2
    assert "none: no .json or .jsonl file is in this folder" in err


def test_every_form_is_written(call: Call, good: None, tmp_path: Path) -> None:
    forms = ["--json", "o.json", "--markdown", "o.md", "--junit", "o.xml", "--html", "o.html"]
    assert call("cpu.json", "h200.json", *forms)[0] == 0
    assert json.loads((tmp_path / "o.json").read_text().splitlines()[0])["kind"] == "merge"
    assert (tmp_path / "o.md").read_text().startswith("## 🟢 pytest-cudaenv: fine")
    assert [suite.get("name") for suite in ET.parse(tmp_path / "o.xml").getroot()] == ["NVIDIA H200", "CPU"]
    assert (tmp_path / "o.html").read_text().startswith("<!doctype html>")
    status, _, err = call("cpu.json", "h200.json", "--html", "no/such/folder.html")
    assert status == 2
    assert "no/such/folder.html: cannot be written: No such file or directory" in err


def test_ids_that_no_encoding_can_write(call: Call, tmp_path: Path) -> None:
    book = Book(CPU)
    for test in NASTY:
        book.test(test, "failed", message=test)
    path = write(tmp_path / "nasty.json", iter([]))
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in book))
    forms = ["--json", "o.json", "--markdown", "o.md", "--junit", "o.xml", "--html", "o.html"]
    assert call("nasty.json", *forms)[0] == 1
    ET.parse(tmp_path / "o.xml")
    assert call("o.json")[0] == 1


def test_as_a_step_of_a_workflow(call: Call, good: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("earlier\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    status, out, _ = call("cpu.json", "none.json", "--github")
    assert status == 2
    assert "::error file=tests/a.py,title=cudaenv%3A ran on the CPU only::tests/a.py::test_x" in out
    assert "::error title=cudaenv%3A not merged::none.json: cannot be read: No such file or directory" in out
    assert summary.read_text().startswith("earlier\n## 🔴 pytest-cudaenv: RED")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    status, _, err = call("cpu.json", "h200.json", "--github")
    assert status == 2
    assert "the variable GITHUB_STEP_SUMMARY is not set" in err


def test_a_quarantine(call: Call, tmp_path: Path) -> None:
    write(tmp_path / "cpu.json", Book(CPU).test(T, "failed", message="off"))
    text = f'[[quarantine]]\ntests = "{T}"\nowner = "@me"\nreason = "known"\nuntil = '
    (tmp_path / "q.toml").write_text(text + "2999-01-01")
    assert call("cpu.json", "--quarantine", "q.toml")[0] == 0
    (tmp_path / "q.toml").write_text(text + "2020-01-01")
    status, out, _ = call("cpu.json", "--quarantine", "q.toml")
    assert status == 1
    assert "RED expired quarantine: 1" in out
    for content in (text, "\xff"):
        (tmp_path / "q.toml").write_text(content, encoding="latin-1")
        status, out, err = call("cpu.json", "--quarantine", "q.toml")
        assert status == 2
        assert "RED: 1 failed somewhere" in out  # without it
        assert "pytest-cudaenv: error: q.toml: " in err


def test_a_baseline(call: Call, tmp_path: Path) -> None:
    write(tmp_path / "old.json", Book(H200).test(T, needs=DEVICE, seconds={"call": 1.0}))
    write(tmp_path / "new.json", Book(H200).test(T, needs=DEVICE, seconds={"call": 5.0}))
    assert call("old.json", "--json", "base.json")[0] == 0
    status, out, _ = call("new.json", "--baseline", "base.json")
    assert status == 0
    assert "also: 1 slower than the baseline" in out
    assert "on NVIDIA H200: 1.00 s -> 5.00 s" in out
    assert call("new.json", "--baseline", "base.json", "--forbid", "drift-time")[0] == 1


def test_a_fabricated_suite_of_four_runners(call: Call, tmp_path: Path) -> None:
    cases = suite(1000)
    files = [write(tmp_path / f"{p.name}.json", ledger(cases, p, failing=0)) for p in (CPU, A10G, H200, H200X2)]
    expected = [part for p in (CPU, A10G, H200, H200X2) for part in ("--expect", p.name)]
    assert call(*files, *expected, "--json", "m.json")[0] == 0
    # Without the runner of two devices, its tests have run nowhere.
    status, out, _ = call(*files[:3])
    assert status == 1
    must = sum(dict(case.needs).get("devices", 0) == 2 for case in cases)
    assert f"RED never ran anywhere: {must}" in out
    assert must > 0
    first = (tmp_path / "m.json").read_bytes()
    call(*reversed(files), "m.json", "--json", "again.json")
    assert (tmp_path / "again.json").read_bytes() == first


def test_other_commands_load_nothing_of_it() -> None:
    code = "import sys; from pytest_cudaenv import cli; cli.main(['devices', '--simulate', 't4']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONUTF8": "1"}
    )
    assert "pytest_cudaenv.cli" in done.stdout
    assert "pytest_cudaenv.merge_command" not in done.stdout
    assert "pytest_cudaenv.ledger.judge" not in done.stdout
