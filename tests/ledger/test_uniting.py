"""Uniting what ledgers say, and the document that carries it: no order, no repetition and no loss."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ledger_strategies import TODAY, Book, judged, ledgers, read_all, to_bytes

from benchmarks.fabricated_ledgers import Line
from pytest_cudaenv.ledger.judge import judge
from pytest_cudaenv.ledger.merge import to_lines
from pytest_cudaenv.ledger.merge_text import lines as text_lines
from pytest_cudaenv.ledger.read import LedgerError, read_lines
from pytest_cudaenv.ledger.results import Results, cell_parts, united

several = st.lists(ledgers(), min_size=1, max_size=4)


def separately(many: list[list[Line]]) -> list[Results]:
    return [read_lines(to_bytes(lines), f"{n}.json").results for n, lines in enumerate(many)]


def document(results: Results) -> list[bytes]:
    return [line.encode() + b"\n" for line in to_lines(results)]


def through_document(results: Results) -> Results:
    return read_lines(document(results), "merged.json").results


@given(several, st.randoms(use_true_random=False))
def test_the_order_of_ledgers_does_not_matter(many: list[list[Line]], chance: random.Random) -> None:
    results = separately(many)
    shuffled = chance.sample(results, len(results))
    assert united(shuffled) == united(results)
    assert document(united(shuffled)) == document(united(results))
    assert text_lines(judge(united(shuffled), today=TODAY)) == text_lines(judge(united(results), today=TODAY))


@given(several, st.randoms(use_true_random=False))
def test_nor_where_they_contradict_each_other(many: list[list[Line]], chance: random.Random) -> None:
    """Ledgers that say to be of one and the same run, as shards that started in the same second could."""
    results = separately([[many[0][0], *lines[1:]] for lines in many])
    shuffled = chance.sample(results, len(results))
    assert united(shuffled) == united(results)
    assert united([united(results[:1]), united(results[1:])]) == united(results)


@given(several)
def test_the_same_ledger_again_changes_nothing(many: list[list[Line]]) -> None:
    results = separately(many)
    assert united([*results, *results]) == united(results)


@given(several, st.integers(0, 4))
def test_merges_can_be_merged(many: list[list[Line]], split: int) -> None:
    results = separately(many)
    whole = united(results)
    first, second = united(results[:split]), united(results[split:])
    assert united([first, second]) == whole
    assert united([through_document(first), through_document(second)]) == whole
    assert united([through_document(whole), *results]) == whole


@given(several)
def test_the_document_loses_nothing(many: list[list[Line]]) -> None:
    results = united(separately(many))
    again = through_document(results)
    assert again == results
    assert document(again) == document(results)
    assert judge(again, today=TODAY) == judge(results, today=TODAY)


@given(several, st.data())
def test_a_cut_copy_of_a_ledger_adds_nothing_to_the_whole_one(many: list[list[Line]], data: st.DataObject) -> None:
    whole = many[0]
    cut = data.draw(st.integers(1, len(whole)))
    told = [line["id"] for line in whole if line["kind"] == "test"]
    assume(len(set(told)) == len(told))  # of a test with two lines the copy can have the first alone: the next test
    results = separately([whole])[0]
    copy = read_lines(to_bytes(whole[:cut]), "0.json").results
    assert united([copy, results]) == results


def test_of_two_copies_the_one_that_knows_of_the_rerun_counts() -> None:
    book = Book().test("t::a", "failed").test("t::a").end()
    copy = list(book)[:2]
    verdict = judged(copy, book)
    assert [r.outcome for _, r in verdict.tests["t::a"].results] == ["passed"]
    assert verdict.tests["t::a"].findings == ("flaky",)


def test_a_document_that_is_cut_short_is_refused() -> None:
    lines = document(read_all(Book().test("t::a").test("t::b").end()))
    for cut in (1, 2, len(lines) - 1):
        with pytest.raises(LedgerError, match="is cut short: merge its ledgers again"):
            read_lines(lines[:cut], "merged.json")


def test_a_document_of_another_version_is_refused() -> None:
    head = json.loads(document(read_all(Book()))[0])
    with pytest.raises(LedgerError, match=r"is of version 2; .* reads merges of version 1"):
        read_lines([json.dumps({**head, "merge": 2}).encode() + b"\n"], "merged.json")


@pytest.mark.parametrize(
    ("cell", "parts"),
    [
        ("flash_attention_2-bf16", ("flash_attention_2", "bf16")),
        ("bf16", ("", "bf16")),
        ("sdpa", ("sdpa", "")),
        ("kernels-community/flash-attn2-fp16", ("kernels-community/flash-attn2", "fp16")),
        ("my-own", ("my-own", "")),
        (None, ("", "")),
    ],
)
def test_a_cell_has_two_axes(cell: str | None, parts: tuple[str, str]) -> None:
    assert cell_parts(cell) == parts
