"""Reading ledgers: what they say, and what is wrong with those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_strategies import DEVICE, Book, ledgers, read_all, to_bytes

import pytest_cudaenv.ledger
from benchmarks.fabricated_ledgers import A10G, CPU, H200, H200X2, Line, ledger, suite
from pytest_cudaenv.ledger.read import LedgerError, read, read_lines
from pytest_cudaenv.ledger.results import UNREACHED, Result, Results

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(pytest_cudaenv.ledger.__file__).parent / "schema.json").read_text(encoding="utf-8"))
)


def only(results: Results, test: str) -> Result:
    """What the one run says of a test."""
    (result,) = results.tests[test].values()
    return result


def error_of(data: bytes) -> str:
    """The one line that tells what is wrong with a file."""
    with pytest.raises(LedgerError) as raised:
        read_lines(data.splitlines(keepends=True), "x.json")
    message = str(raised.value)
    assert message.startswith("x.json: ")
    assert "\n" not in message
    return message.removeprefix("x.json: ")


@given(ledgers())
def test_ledgers_of_these_tests_are_what_the_schema_allows(lines: list[Line]) -> None:
    for line in lines:
        SCHEMA.validate(line)


@pytest.mark.parametrize("profile", [CPU, A10G, H200, H200X2], ids=lambda profile: profile.name)
def test_fabricated_ledgers_are_too(profile) -> None:
    for line in ledger(suite(200), profile, failing=0.1):
        SCHEMA.validate(line)


def test_a_ledger_tells_of_its_run_and_tests() -> None:
    book = (
        Book(H200)
        .selected("t::a", "t::b")
        .test("t::a", needs=DEVICE, memory=7, parity={"ratio": 0.5}, cell="sdpa-bf16")
    )
    results = read_all(book.end(status=1))
    (run,) = results.runs.values()
    assert (run.runner, run.devices, run.kinds, run.tells_selected) == (
        "h200",
        "1 x NVIDIA H200",
        ("NVIDIA H200",),
        True,
    )
    assert run.end is not None
    assert run.end["status"] == 1
    result = only(results, "t::a")
    assert (result.outcome, result.kind, result.cell, result.memory, result.parity) == (
        "passed", "NVIDIA H200", "sdpa-bf16", 7, 0.5,
    )  # fmt: skip
    assert result.seconds == pytest.approx(0.12)
    assert result.takes_device
    assert only(results, "t::b").outcome == UNREACHED


def test_a_run_without_a_profile_goes_by_its_visible_devices() -> None:
    runs = read_all(Book(CPU, runner=None), Book(H200X2, runner=None)).runs.values()
    assert [run.runner for run in runs] == ["CPU", "2 x NVIDIA H200"]


def test_where_a_test_ran_that_does_not_tell_it() -> None:
    """A plain test runs on the CPU; one that used CUDA undeclared, on what the host has."""
    results = read_all(Book(H200).test("t::plain").test("t::unmarked", unmarked=True).test("t::x", "error"))
    assert [only(results, f"t::{name}").kind for name in ("plain", "unmarked", "x")] == ["CPU", "NVIDIA H200", None]


def test_an_error_ran_if_it_got_as_far_as_its_body() -> None:
    book = (
        Book(CPU)
        .test("t::setup", "error", seconds={"setup": 1})
        .test("t::end", "error", seconds={"setup": 1, "call": 1})
    )
    results = read_all(book)
    assert only(results, "t::setup").kind is None
    assert only(results, "t::end").kind == "CPU"


def test_of_two_lines_of_a_test_the_later_counts_and_a_failure_leaves_its_trace() -> None:
    failed_first = Book().test("t::a", "failed", message="first").test("t::a")
    assert only(read_all(failed_first), "t::a")[:1] == ("passed",)
    assert only(read_all(failed_first), "t::a").attempts == 2
    told_again = Book().test("t::a").test("t::a", "error", message="fixture's end")
    assert only(read_all(told_again), "t::a").outcome == "error"
    assert only(read_all(told_again), "t::a").attempts == 1


@given(ledgers(), st.data())
def test_a_ledger_cut_anywhere_is_good_up_to_its_last_whole_line(lines: list[Line], data: st.DataObject) -> None:
    whole = b"".join(to_bytes(lines))
    head = len(to_bytes(lines)[0])
    cut = data.draw(st.integers(head, len(whole)))
    kept = whole[:cut].splitlines(keepends=True)
    reading = read_lines(kept, "x.json")
    is_torn = not whole[:cut].endswith(b"\n") and not _is_json(kept[-1])
    assert bool(reading.notes) == is_torn
    assert reading.results == read_lines(kept[:-1] if is_torn else kept, "x.json").results
    if is_torn:
        assert reading.notes[0] == f"x.json: its last line is cut short; the {len(kept) - 1} lines before it count"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


RUN = to_bytes(Book())[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: the run ended before its tests were known"),
        (b"\n\n", "is empty: the run ended before its tests were known"),
        (RUN[:40], "is cut short in its first line: the run told nothing"),
        (b"<?xml version='1.0'?>\n<testsuites/>\n", "is not a ledger: its first line is not an object in JSON"),
        (b"\x1f\x8b\x08\x00\x00", "is not a ledger: its first line is not an object in JSON"),
        (b"[1, 2]\n", "is not a ledger: its first line is not an object in JSON"),
        (b"[" * 100_000, "is not a ledger: its first line is not an object in JSON"),
        (b'{"tests": []}\n', "has no line of kind run at its head: it is not a ledger"),
        (
            b'{"kind": "test", "id": "a", "outcome": "passed"}\n',
            "has no line of kind run at its head: it is not a ledger",
        ),
        (b'{"kind": "run", "ledger": 1}\n', "line 1 has no host: it is not a line of a ledger"),
        (RUN + b"nonsense\n" + RUN, "line 2 is damaged: it is not an object in JSON"),
        (RUN + b"\xff\xfe\n", "line 2 is damaged: it is not an object in JSON"),
        (RUN + b"3\n", "line 2 is damaged: it is not an object in JSON"),
        (RUN + RUN, "holds two runs: each needs a file of its own"),
        (RUN + b'{"kind": "test", "outcome": "passed"}\n', "line 2 has no id: it is not a line of a ledger"),
        (
            RUN + b'{"kind": "test", "id": "a", "outcome": "great"}\n',
            "has the outcome 'great', which no ledger of version 1 has",
        ),
        (
            RUN + b'{"kind": "test", "id": "a", "outcome": "passed", "requirement": 7}\n',
            "line 2 has no 7: it is not a line of a ledger",
        ),
        (
            RUN + b'{"kind": "test", "id": 4, "outcome": "passed"}\n',
            "line 2 has something where a ledger has something else: 4 is not text",
        ),
    ],
)  # fmt: skip
def test_what_is_no_ledger_is_told_in_a_line(data: bytes, message: str) -> None:
    assert error_of(data) == message


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(2, "merge with the pytest-cudaenv that wrote it"), (0, "write it again with a newer pytest-cudaenv")],
)
def test_other_versions_are_refused(version: int, remedy: str) -> None:
    message = error_of(json.dumps({**json.loads(RUN), "ledger": version}).encode() + b"\n")
    assert message.startswith(f"is of version {version}; ")
    assert message.endswith(f"reads ledgers of version 1: {remedy}")


def test_ledgers_of_simulated_hosts_are_refused() -> None:
    book = Book(H200, simulated="h200:2").test("t::a")
    assert error_of(b"".join(to_bytes(book))) == ("is of a simulated host (h200:2): nothing in it ran on such a device")


@given(ledgers(), st.data())
def test_damage_of_any_kind_gives_one_line_and_no_other_error(lines: list[Line], data: st.DataObject) -> None:
    """Members that are missing or of another type, wherever they are."""
    line = data.draw(st.sampled_from(lines))
    member = data.draw(st.sampled_from(sorted(line)))
    damaged = {**line, member: data.draw(st.sampled_from([None, 3, "x", [], {}, [3], {"x": "y"}]))}
    if data.draw(st.booleans()):
        del damaged[member]
    refusals: list[str] = []
    try:
        read_lines(to_bytes(damaged if each is line else each for each in lines), "x.json")
    except LedgerError as error:
        refusals.append(str(error))
    assert all(refusal.startswith("x.json: ") and "\n" not in refusal for refusal in refusals)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"none\.json: cannot be read: No such file"):
        read(tmp_path / "none.json")
