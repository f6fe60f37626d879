"""The verdict in its forms: text, Markdown, annotations, JUnit, and the page's data; whatever ids hold."""

from __future__ import annotations

import datetime
import html
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_strategies import DEVICE, IF_ANY, NASTY, TODAY, Book, judged, ledgers, to_bytes

from benchmarks.fabricated_ledgers import A10G, CPU, H200, Line
from pytest_cudaenv.ledger.judge import Verdict, judge
from pytest_cudaenv.ledger.merge_junit import junit
from pytest_cudaenv.ledger.merge_markdown import annotation_lines, command, line_of, markdown
from pytest_cudaenv.ledger.merge_page import page, page_data
from pytest_cudaenv.ledger.merge_text import lines
from pytest_cudaenv.ledger.quarantine import Entry
from pytest_cudaenv.ledger.read import LedgerError, read_lines

T = "tests/a.py::test_x"


def all_forms(verdict: Verdict) -> list[str]:
    return [
        "\n".join(lines(verdict)),
        markdown(verdict),
        "\n".join(annotation_lines(verdict, Path("/nowhere"))),
        "".join(junit(verdict)),
        "".join(page(verdict)),
    ]


@given(st.lists(ledgers(), min_size=1, max_size=3), st.data())
def test_whatever_was_read_can_be_written(many: list[list[Line]], data: st.DataObject) -> None:
    """Damaged ledgers among them: what is wrong with one is found while it is read, or does not matter."""
    read = []
    for lines_ in many:
        line = data.draw(st.sampled_from(lines_))
        inner = line.get("host", line) if data.draw(st.booleans()) else line
        member = data.draw(st.sampled_from(sorted(inner)))
        inner[member] = data.draw(st.sampled_from([inner[member], None, 3, "x", [], {}, [3], {"x": "y"}]))
        try:
            read.append(read_lines(to_bytes(lines_), "x.json").results)
        except LedgerError:
            continue
    for results in read:
        for form in all_forms(judge(results, today=TODAY)):
            form.encode("utf-8", "backslashreplace")


# Text ----------------------------------------------------------------------------------------------------------


def test_the_text_tells_what_is_red_first_and_what_to_do() -> None:
    verdict = judged(
        Book(CPU).test("t::plain").skip(T, DEVICE),
        Book(H200).test("t::plain").skip(T, DEVICE).test("t::f", "failed", DEVICE, message="off"),
        expected=["cpu", "h200", "a10g"],
        allow=["failed"],
    )
    assert lines(verdict) == [
        "RED: 1 missing runner, 1 never ran anywhere (3 tests, 2 ran; 2 runs of 2 runners)",
        "",
        "  cpu   CPU              1 ran  0 failed  1 not run  0 s",
        "  h200  1 x NVIDIA H200  2 ran  1 failed  1 not run  0 s",
        "",
        "RED missing runner: 1",
        "         a10g",
        "           no ledger is of this runner: its job was cancelled, or kept none",
        "",
        "RED never ran anywhere: 1",
        "       1 [attn-missing] FA2 needs flash-attn; have none",
        "         Run pip install flash-attn.",
        "         tests/a.py::test_x",
        "",
        "allowed: 1 failed somewhere",
        "also: 1 ran on one runner only",
    ]


def test_many_tests_are_counted_and_few_named() -> None:
    book = Book(CPU)
    for n in range(1000):
        book.skip(f"t::test_{n:04}", DEVICE)
    book.test("t::plain")
    text = lines(judged(book))
    assert "RED never ran anywhere: 1,000" in text
    assert "         t::test_0000, t::test_0001, t::test_0002, t::test_0003, t::test_0004 and 995 more" in text
    assert len(text) < 30


def test_a_fine_merge_says_so_in_a_line() -> None:
    assert lines(judged(Book(CPU).test("t::a")))[0] == "fine: 1 test, 1 ran; 1 run of 1 runner"


# Markdown ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", NASTY)
def test_markdown_shows_ids_as_they_are(test: str) -> None:
    text = markdown(judged(Book(CPU).test(test, "failed", message=f"off | `{test}`\nsecond line")))
    told = re.search(r"<code>(.*?)</code>: (.*)", text)
    assert told is not None
    id_, message = (html.unescape(part) for part in told.groups())
    shown = " ".join(test.encode("utf-8", "backslashreplace").decode().split())
    assert id_ == shown
    assert message == f"on cpu: off | `{shown}` second line"
    # Nothing in them is left that Markdown or GitHub would take for its own.
    assert not set(told[1] + told[2]) & set("|`*_<>[]@~\\\n")


def test_the_tables_of_the_markdown() -> None:
    verdict = judged(
        Book(CPU).test("t::c[sdpa-bf16]", needs=IF_ANY, cell="sdpa-bf16"),
        Book(H200).test("t::c[sdpa-bf16]", "failed", IF_ANY, cell="sdpa-bf16", message="off"),
        Book(A10G).skip("t::c[sdpa-bf16]", IF_ANY, cell="sdpa-bf16"),
    )
    table = [line for line in markdown(verdict).splitlines() if line.startswith("|")]
    assert "| cpu | CPU | 1 | 0 | 0 | 0 s |" in table
    assert "| sdpa | bf16 | ⚪ none of 1 | 1 of 1, ❌ 1 failed | ✅ 1 of 1 |" in table
    assert len({line.count("|") for line in table[:5]}) == 1


def test_the_markdown_stays_far_from_githubs_limit() -> None:
    book = Book(CPU)
    for n in range(5000):
        book.skip(f"tests/{'long' * 20}.py::test_{n:04}", DEVICE, reasons=[], skip=f"reason {n}" * 5)
        book.test(f"tests/{'long' * 20}.py::test_f{n:04}", "failed", message="off" * 50)
    text = markdown(judged(book))
    assert len(text.encode()) < 200_000
    assert "and 4,950 more" in text


# Annotations ---------------------------------------------------------------------------------------------------


def test_a_command_escapes_what_would_end_its_parts() -> None:
    text = command("error", {"file": "a,b:c%.py", "title": "x\r\ny"}, "100 %: a,b\nsecond")
    assert text == "::error file=a%2Cb%3Ac%25.py,title=x%0D%0Ay::100 %25: a,b%0Asecond"


def test_an_annotation_stands_at_the_tests_line(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a.py").write_text(
        "import pytest\n\nif True:\n    def test_x(): pass\n\n"
        "class TestY:\n    class TestZ:\n        @pytest.mark.skip\n        async def test_x(self): pass\n"
    )
    (tmp_path / "tests/broken.py").write_text("def (")
    assert line_of("tests/a.py::test_x[a::b]", tmp_path) == 4
    assert line_of("tests/a.py::TestY::TestZ::test_x[c]", tmp_path) == 9
    for unknown in ("tests/a.py::test_none", "tests/none.py::test_x", "tests/broken.py::test_x", "tests/a.py"):
        assert line_of(unknown, tmp_path) is None
    verdict = judged(Book(CPU).test(T, "failed", message="off"), expected=["cpu", "h200"])
    assert annotation_lines(verdict, tmp_path) == [
        "::error title=cudaenv%3A missing runner::"
        "h200: no ledger is of this runner: its job was cancelled, or kept none",
        "::error file=tests/a.py,line=4,title=cudaenv%3A failed somewhere::tests/a.py::test_x: on cpu: off",
    ]


def test_of_many_as_many_annotations_as_github_shows(tmp_path: Path) -> None:
    book = Book(CPU)
    for n in range(40):
        book.test(f"{NASTY[3]}{n}", "failed", message="off\n::error::injected")
    told = annotation_lines(judged(book), tmp_path)
    assert len(told) == 10
    assert told[-1] == "::error title=cudaenv::and 31 more: the step's summary has them"
    assert all("\n" not in line and line.startswith("::error ") for line in told)


# JUnit ---------------------------------------------------------------------------------------------------------


def suites(verdict: Verdict) -> dict[str, ET.Element]:
    root = ET.fromstring("".join(junit(verdict)).encode("utf-8", "backslashreplace"))
    found = {str(suite.get("name")): suite for suite in root}
    for suite in found.values():
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases))
        for state, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert suite.get(name) == str(sum(case.find(state) is not None for case in cases))
    return found


def state_of(suite: ET.Element, name: str) -> str:
    (case,) = (case for case in suite.findall("testcase") if case.get("name") == name)
    return ",".join(f"{child.tag} {child.get('message')}" for child in case if child.tag != "properties")


def test_a_suite_for_each_kind_of_device() -> None:
    verdict = judged(
        Book(CPU).test(f"{T}[c]", needs=IF_ANY, cell="sdpa-bf16").test("t::only_cpu", needs=IF_ANY).test("t::plain"),
        Book(H200)
        .test(f"{T}[c]", "failed", IF_ANY, cell="sdpa-bf16", message="off")
        .skip("t::only_cpu", IF_ANY)
        .skip("t::never", DEVICE)
        .test("t::bad", "xfailed", DEVICE)
        .test("t::quarantined", "failed", DEVICE, message="off"),
        quarantine=[Entry(("t::quarantined",), "@me", datetime.date(2027, 1, 1), "known")],
    )
    found = suites(verdict)
    assert list(found) == ["NVIDIA H200", "CPU", "not run anywhere", "verdict"]
    assert state_of(found["CPU"], "test_x[c]") == ""
    assert state_of(found["NVIDIA H200"], "test_x[c]") == "failure off"
    assert state_of(found["NVIDIA H200"], "bad") == "skipped expected to fail, and did"
    assert state_of(found["NVIDIA H200"], "quarantined") == "skipped in quarantine: off"
    reason = "[attn-missing] FA2 needs flash-attn; have none"
    assert state_of(found["not run anywhere"], "never") == f"failure {reason}"
    assert state_of(found["verdict"], "only_cpu") == f"failure ran on the CPU only: {reason}"
    assert len(found["verdict"].findall("testcase")) == 1
    properties = {p.get("name"): p.get("value") for p in found["NVIDIA H200"].findall("properties/property")}
    assert properties["runner"] == "h200"
    assert properties["torch build"] == "CUDA 13.0"
    case = found["NVIDIA H200"].find("testcase[@name='test_x[c]']")
    assert case is not None
    assert case.get("classname") == "tests.a"
    assert {p.get("name"): p.get("value") for p in case.findall("properties/property")} == {
        "runners": "h200", "cell": "sdpa-bf16", "findings": "failed",
    }  # fmt: skip


@given(st.lists(ledgers(), min_size=1, max_size=3))
def test_junit_has_a_failure_if_and_only_if_the_merge_is_red(many: list[list[Line]]) -> None:
    verdict = judged(*many)
    bad = sum(int(suite.get(name, 0)) for suite in suites(verdict).values() for name in ("failures", "errors"))
    assert bool(bad) == verdict.is_red


# The page ------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The tags, the attributes, and the text of scripts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def test_no_id_leaves_the_pages_data() -> None:
    book = Book(CPU)
    for test in NASTY:
        book.test(test, "failed", message=test, cell=test)
    text = "".join(page(judged(book)))
    parser = Elements()
    parser.feed(text)
    assert [tag for tag, _ in parser.tags].count("script") == 2
    data = json.loads(parser.scripts[0])
    files, names = data["files"], data["names"]
    places = [int(n) for n in data["columns"]["file"].split(",")]
    ids = [f"{files[place]}::{name}" if name else files[place] for place, name in zip(places, names, strict=True)]
    assert sorted(ids) == sorted(NASTY)


def test_the_page_refers_to_nothing_outside_itself() -> None:
    text = "".join(page(judged(Book(H200).test(T, needs=DEVICE))))
    parser = Elements()
    parser.feed(text)
    for tag, attributes in parser.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes
        assert "style" not in attributes  # the policy forbids them
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    policy = next(a["content"] for tag, a in parser.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_the_pages_columns_tell_every_result() -> None:
    verdict = judged(
        Book(CPU).test(T, needs=IF_ANY, seconds={"call": 1.5}).skip("t::b", DEVICE),
        Book(H200).test(T, needs=IF_ANY, seconds={"call": 0.25}, memory=3 * 1024**3, attempts=2),
    )
    data = page_data(verdict)
    sides = {side["runner"]: side for side in data["sides"]}
    assert data["names"] == ["b", "test_x"]
    assert (sides["cpu"]["outcome"], sides["h200"]["outcome"]) == ("sp", ".p")
    assert (sides["cpu"]["ms"], sides["h200"]["ms"], sides["h200"]["mib"]) == (",1500", ",250", ",3072")
    assert sides["h200"]["more"] == {"1": {"attempts": 2}}
    assert data["kinds"][int(sides["h200"]["kind"].split(",")[1])] == "NVIDIA H200"
    (why,) = data["whys"]
    assert why == [["attn-missing", "FA2 needs flash-attn; have none", "Run pip install flash-attn.", 1]]
