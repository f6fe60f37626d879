"""The quarantine's file: what an entry means, and what is refused."""

from __future__ import annotations

import datetime
import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_strategies import NASTY

from pytest_cudaenv.ledger.quarantine import Entry, QuarantineError, parse_quarantine

ENTRY = """
[[quarantine]]
tests = "tests/a.py::test_x[sdpa-*]"
owner = "@me"
issue = "https://example.org/1"
until = 2027-01-31
"""


def test_an_entry_with_everything() -> None:
    text = ENTRY + 'reason = "off"\nrunners = ["h200"]\nflaky = true\nexcuses = ["failed", "idle"]\n'
    assert parse_quarantine(text) == (
        Entry(
            ("tests/a.py::test_x[sdpa-*]",),
            "@me",
            datetime.date(2027, 1, 31),
            "off",
            "https://example.org/1",
            ("h200",),
            True,
            ("failed", "idle"),
        ),
    )


def test_dates_may_be_texts_and_a_file_may_be_empty() -> None:
    assert parse_quarantine(ENTRY.replace("2027-01-31", '"2027-01-31"')) == parse_quarantine(ENTRY)
    assert parse_quarantine(ENTRY.replace("2027-01-31", "2027-01-31T10:00:00Z")) == parse_quarantine(ENTRY)
    assert parse_quarantine("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[quarantine", "is not TOML"),
        ("[quarantine]\n", r"has something other than \[\[quarantine\]\]"),
        ("quarantine = [3]\n", "entry 1: is not a table"),
        (ENTRY + "x = 1\n", "entry 1: unknown x"),
        (ENTRY.replace("2027-01-31", '"soon"'), "entry 1: until = 'soon' is no date"),
        (ENTRY.replace("until", "#"), "entry 1: no until"),
        (ENTRY.replace("until = 2027-01-31", "until = 7"), "entry 1: no until"),
        (ENTRY.replace("owner", "#"), "entry 1: no owner"),
        (ENTRY.replace('"@me"', "3"), "entry 1: owner, reason and issue are texts"),
        (ENTRY.replace("issue", "#"), "entry 1: neither reason nor issue"),
        (ENTRY.replace("tests =", "#"), "entry 1: no tests"),
        (
            ENTRY + ENTRY.replace('"tests/a.py::test_x[sdpa-*]"', "[1]"),
            "entry 2: tests, runners and excuses are a text",
        ),
        (ENTRY + 'excuses = ["everything"]\n', "entry 1: excuses 'everything'"),
        (ENTRY + 'flaky = "yes"\n', "entry 1: flaky is true or false"),
    ],
)
def test_what_is_wrong_is_told_with_the_grammar(text: str, message: str) -> None:
    with pytest.raises(QuarantineError, match=message) as raised:
        parse_quarantine(text)
    assert "\n" not in str(raised.value)


def matching(*globs: str) -> list[str]:
    return Entry(globs, "@me", datetime.date(2027, 1, 1)).matching(dict.fromkeys(NASTY))


def test_brackets_are_brackets() -> None:
    assert matching("tests/a.py::TestY::test_x[sdpa-*]") == ["tests/a.py::TestY::test_x[sdpa-bf16]"]
    assert matching("tests/b.py::*") == [test for test in NASTY if test.startswith("tests/b.py::")]
    assert matching("*::test_?") == ["tests/a.py::test_x"]
    assert matching("nothing", "test_file_alone.py") == ["test_file_alone.py"]


@given(st.sampled_from(NASTY), st.data())
def test_a_glob_made_from_an_id_matches_it(test: str, data: st.DataObject) -> None:
    assert matching(test) == [test]
    start = data.draw(st.integers(0, len(test)))
    end = data.draw(st.integers(start, len(test)))
    assert test in matching(test[:start] + "*" + test[end:])
    if start < len(test):
        assert test in matching(test[:start] + "?" + test[start + 1 :])


@given(st.text("ab*?.", max_size=8), st.text("ab.", max_size=8))
def test_without_brackets_it_is_what_fnmatch_says(glob: str, test: str) -> None:
    entry = Entry((glob,), "@me", datetime.date(2027, 1, 1))
    assert bool(entry.matching({test: None})) == fnmatch.fnmatchcase(test, glob)
