"""Ledgers for tests: a builder for the ones that a test spells out, and strategies for arbitrary ones."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

from benchmarks.fabricated_ledgers import A10G, CPU, H200, H200X2, Line, Profile, run_line
from pytest_cudaenv.ledger.judge import Verdict, judge
from pytest_cudaenv.ledger.read import read_lines
from pytest_cudaenv.ledger.results import Results, united

TODAY = datetime.date(2026, 11, 30)

NASTY = (
    "tests/a.py::test_x",
    "tests/a.py::TestY::test_x[sdpa-bf16]",
    "tests/a.py::test_z[</script><script>alert(1)</script>]",
    "tests/b.py::test_ünïcode[日本-\u202e-\x07]",
    "tests/b.py::test_surrogate[\udcff]",
    "tests/b.py::test_p[a|b`c*_~<b>&amp;%0A::error::]",
    "tests/b.py::test_q[a::b-1]",
    "test_file_alone.py",
)
"""Ids with everything in them that some output could take for its own."""

DEVICE = {"devices": 1}
"""The needs of a test that must have a device."""
IF_ANY = {"device_if_any": True}

REASON = {
    "code": "attn-missing",
    "need": "FA2 needs flash-attn",
    "have": "none",
    "remedy": "Run pip install flash-attn.",
}


def to_bytes(lines: Iterable[Line]) -> list[bytes]:
    """As a file has them."""
    return [json.dumps(line).encode() + b"\n" for line in lines]


def read_all(*ledgers: Iterable[Line]) -> Results:
    """What several ledgers say together."""
    return united(read_lines(to_bytes(lines), f"{n}.json").results for n, lines in enumerate(ledgers))


def judged(*ledgers: Iterable[Line], **arguments: Any) -> Verdict:
    """The verdict on several ledgers."""
    return judge(read_all(*ledgers), **{"today": TODAY, **arguments})


class Book:
    """Builds a ledger line by line; it has an end, unless that is cut off."""

    def __init__(self, profile: Profile = H200, started: str = "2026-11-30T08:00:00+00:00", **facts: Any) -> None:
        devices = [f"GPU-{profile.name}-{n}" for n in range(profile.count)]
        run = {**run_line(profile, devices, started), **facts}
        self.kind = profile.device or "CPU"
        self.lines: list[Line] = [{k: v for k, v in run.items() if v is not None}]
        self.numbers: dict[str, int] = {}
        self.ending: list[Line] = []
        self.end()

    def __iter__(self) -> Iterator[Line]:
        return iter([*self.lines, *self.ending])

    def test(self, test: str, outcome: str = "passed", needs: dict[str, Any] | None = None, **members: Any) -> Book:
        """Add a test's line; the needs of a test that takes a device put it on the runner's."""
        line = {"kind": "test", "id": test, "outcome": outcome, **members}
        if needs:
            line["requirement"] = self._number(needs)
        if outcome in {"passed", "failed", "xfailed", "xpassed"}:
            if needs:
                line.setdefault("ran_on", self.kind)
            line.setdefault("seconds", {"setup": 0.01, "call": 0.1, "teardown": 0.01})
        self.lines.append(line)
        return self

    def skip(self, test: str, needs: dict[str, Any] | None = None, **members: Any) -> Book:
        """Add a test that its needs kept from running."""
        return self.test(test, members.pop("outcome", "skipped"), needs, **{"reasons": [REASON], **members})

    def selected(self, *tests: str) -> Book:
        """Add what the run had selected."""
        self.lines.append({"kind": "collected", "ids": list(tests)})
        return self

    def end(self, status: int = 0) -> Book:
        """End with that status of pytest."""
        self.ending = [{"kind": "end", "finished": "2026-11-30T09:00:00+00:00", "status": status}]
        return self

    def cut(self) -> Book:
        """Have no end, as after a kill."""
        self.ending = []
        return self

    def _number(self, needs: dict[str, Any]) -> int:
        key = json.dumps(needs, sort_keys=True)
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.lines.append({"kind": "requirement", "number": self.numbers[key], "needs": needs})
        return self.numbers[key]


# Arbitrary ledgers ---------------------------------------------------------------------------------------------

texts = st.text("aZ 0[]|<&\"'\\\n\x07é日\u2028\U0001f600", max_size=12)
ids = st.sampled_from(NASTY) | st.builds(
    "tests/{}.py::test_{}{}".format,
    st.sampled_from("ab"),
    st.sampled_from("xy"),
    st.sampled_from(["", "[sdpa-bf16]", "[eager-fp32]", "[bf16]"]),
)
cells = st.sampled_from([None, "sdpa-bf16", "eager-fp32", "bf16", "my-own-backend-fp16", "flash_attention_2"])
reasons = st.lists(
    st.fixed_dictionaries(
        {"code": st.sampled_from(["attn-missing", "cuda-none"]), "need": texts, "have": texts},
        optional={"remedy": texts},
    ),
    max_size=2,
)
seconds = st.floats(0, 1000, allow_nan=False)
requirements = st.sampled_from([{}, DEVICE, {"devices": 2, "memory": 1024**3}, IF_ANY, {"attn_backends": ["sdpa"]}])
promises = st.lists(st.sampled_from(["devices>=2", "bf16"]), unique=True)


@st.composite
def test_lines(draw: st.DrawFn, numbers: int) -> Line:
    """A line of a test whose requirement has a number below that."""
    line = draw(
        st.fixed_dictionaries(
            {
                "kind": st.just("test"),
                "id": ids,
                "outcome": st.sampled_from(
                    ["passed", "failed", "error", "skipped", "xfailed", "xpassed", "deselected"]
                ),
            },
            optional={
                "reasons": reasons,
                "skip": texts,
                "ran_on": st.sampled_from(["CPU", "NVIDIA H200", "NVIDIA A10G"]),
                "worker": st.just("gw0"),
                "seconds": st.fixed_dictionaries({}, optional={"setup": seconds, "call": seconds, "teardown": seconds}),
                "waited": seconds,
                "memory": st.integers(0, 2**40),
                "attempts": st.integers(1, 4),
                "idle": st.booleans(),
                "breach": texts,
                "unmarked": st.booleans(),
                "findings": st.lists(
                    st.fixed_dictionaries(
                        {"code": st.sampled_from(["state-leak", "witness-unseen"]), "text": texts},
                        optional={"remedy": texts},
                    ),
                    max_size=2,
                ),
                "message": texts,
                "parity": st.fixed_dictionaries({}, optional={"ratio": st.floats(0, 2)}),
            },
        )
    )
    if (cell := draw(cells)) is not None:
        line["cell"] = cell
    if numbers and draw(st.booleans()):
        line["requirement"] = draw(st.integers(0, numbers - 1))
    return line


@st.composite
def ledgers(draw: st.DrawFn) -> list[Line]:
    """Any ledger that the schema allows, of a few runners and tests."""
    profile = draw(st.sampled_from([CPU, A10G, H200, H200X2]))
    started = f"2026-11-{draw(st.integers(10, 12))}T08:00:00+00:00"
    book = Book(profile, started, promises=draw(promises))
    if draw(st.booleans()):
        del book.lines[0]["runner"]
    lines = book.lines
    if draw(st.booleans()):
        book.selected(*draw(st.lists(ids, max_size=4)))
    needs = draw(st.lists(requirements, max_size=3))
    lines += [{"kind": "requirement", "number": n, "needs": fields} for n, fields in enumerate(needs)]
    lines += draw(st.lists(test_lines(len(needs)), max_size=5))
    return list(book.end(draw(st.integers(0, 5))) if draw(st.booleans()) else book.cut())
