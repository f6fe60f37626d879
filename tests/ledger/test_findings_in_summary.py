"""What a summary tells of findings: each message once, a handful of a code, and every test in some line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.ledger.summary import MESSAGES, Summary


def told(found: list[tuple[str, str, str]]) -> list[str]:
    """The lines of a summary of (test, message, remedy), all of one code."""
    summary = Summary()
    for nodeid, text, remedy in found:
        findings = [{"code": "witness-other", "text": text, "remedy": remedy}]
        summary.add(nodeid, "call", "passed", {"findings": findings})
    return summary.lines()


def test_each_message_has_its_tests_and_one_remedy() -> None:
    lines = told([("a", "have 1", "Mend it."), ("b", "have 2", "Mend it."), ("c", "have 2", "Mend it.")])
    assert lines == [
        "[witness-other] 2: have 2",
        "       b, c",
        "[witness-other] 1: have 1",
        "       a",
        "       Mend it.",
    ]


def test_remedies_that_differ_are_all_told() -> None:
    lines = told([("a", "have 1", "Mend it."), ("b", "have 2", "Move it.")])
    assert lines[2::3] == ["       Mend it.", "       Move it."]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1))
def test_no_test_is_left_out(found: list[tuple[int, int]]) -> None:
    lines = told([(f"t{test}", f"have {text}", "Mend it.") for test, text in found])
    heads = [line for line in lines if line.startswith("[")]
    texts = {text for _, text in found}
    assert len(heads) == min(len(texts), MESSAGES) + (len(texts) > MESSAGES)
    if len(texts) > MESSAGES:
        assert f"{len(texts) - MESSAGES} more messages" in heads[-1]
    counts = [int(head.partition("] ")[2].partition(":")[0]) for head in heads[:MESSAGES]]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts[: len(texts)]) <= len({*found})
