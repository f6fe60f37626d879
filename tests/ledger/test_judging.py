"""The verdict: what is wrong with a test, a run, a runner, and when that fails a merge."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_strategies import DEVICE, IF_ANY, TODAY, Book, judged, ledgers, read_all

from benchmarks.fabricated_ledgers import A10G, CPU, H200, H200X2, Line
from pytest_cudaenv.ledger.cell_matrix import matrix, outside
from pytest_cudaenv.ledger.judge import KINDS, Verdict
from pytest_cudaenv.ledger.quarantine import Entry

T = "tests/a.py::test_x"


def found(verdict: Verdict, test: str = T) -> tuple[str, ...]:
    return verdict.tests[test].findings


def text_of(verdict: Verdict, kind: str) -> str:
    """The text of the one finding of a kind."""
    (finding,) = verdict.findings[kind]
    return finding.text


# Single tests --------------------------------------------------------------------------------------------------


def test_a_test_that_ran_where_it_should_is_fine() -> None:
    verdict = judged(Book(CPU).test(T, needs=IF_ANY), Book(H200).test(T, needs=IF_ANY))
    assert found(verdict) == ()
    assert not verdict.is_red
    assert {kind: r.outcome for kind, r in verdict.tests[T].kinds.items()} == {"CPU": "passed", "NVIDIA H200": "passed"}


@pytest.mark.parametrize("outcome", ["skipped", "deselected"])
def test_never_ran_anywhere(outcome: str) -> None:
    verdict = judged(Book(CPU).skip(T, DEVICE), Book(H200).skip(T, DEVICE, outcome=outcome))
    assert found(verdict) == ("never-ran",)
    assert verdict.is_red
    assert verdict.why("never-ran") == [
        ("[attn-missing] FA2 needs flash-attn; have none", "Run pip install flash-attn.", [T])
    ]


def test_a_skip_of_the_suites_own_is_told_by_its_text() -> None:
    verdict = judged(Book(CPU).test(T, "skipped", skip="flaky on Tuesdays"))
    assert verdict.why("never-ran") == [("flaky on Tuesdays", "", [T])]


@pytest.mark.parametrize("needs", [DEVICE, IF_ANY], ids=["must", "may"])
def test_ran_on_the_cpu_only(needs: dict[str, Any]) -> None:
    """Nothing but a device is a device, whatever the test passed on."""
    book = Book(CPU).test(T, needs=needs, ran_on="CPU")
    assert found(judged(book, Book(H200).skip(T, needs))) == ("cpu-only", "one-runner")


def test_a_cell_takes_a_device_even_where_no_requirement_is_told() -> None:
    assert found(judged(Book(CPU).test(T, cell="sdpa-bf16", ran_on="CPU"))) == ("cpu-only",)
    assert found(judged(Book(CPU).test(T, cell="bf16", ran_on="CPU"))) == ()


def test_a_plain_test_may_run_on_the_cpu_only() -> None:
    assert found(judged(Book(CPU).test(T), Book(H200).skip(T))) == ()


def test_idle_everywhere() -> None:
    idle = Book(H200).test(T, needs=DEVICE, idle=True)
    assert found(judged(idle)) == ("idle",)
    assert found(judged(idle, Book(A10G).test(T, needs=DEVICE, idle=True))) == ("idle",)
    assert found(judged(idle, Book(A10G).test(T, needs=DEVICE))) == ()
    # What it did on the CPU is no work on a device.
    assert found(judged(idle, Book(CPU).test(T, needs=IF_ANY))) == ("idle",)


def test_promised_but_skipped() -> None:
    breach = Book(H200).skip(T, DEVICE, breach="flash_attention_2")
    verdict = judged(breach, Book(A10G).test(T, needs=DEVICE))
    assert found(verdict) == ("breach", "one-runner")
    assert text_of(verdict, "breach") == ("on h200: flash_attention_2; [attn-missing] FA2 needs flash-attn; have none")
    # As the contract's own runs tell it: an error of its set-up, or of the body that wanted to skip.
    for outcome, seconds in (("error", {"setup": 0.1}), ("failed", {"setup": 0.1, "call": 0.1})):
        refused = Book(H200).skip(T, DEVICE, outcome=outcome, breach="flash_attention_2", seconds=seconds)
        assert found(judged(refused, Book(A10G).test(T, needs=DEVICE))) == ("breach", "one-runner")
    # The same runner ran it in another of its runs: the promise is kept.
    assert "breach" not in found(judged(breach, Book(H200, "2026-11-30T07:00:00+00:00").test(T, needs=DEVICE)))


@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_failed_somewhere_though_it_passed_elsewhere(outcome: str) -> None:
    failed = Book(H200).test(T, outcome, needs=DEVICE, message="AssertionError: off", seconds={"call": 1.0})
    verdict = judged(failed, Book(H200X2).test(T, needs=DEVICE))
    assert found(verdict) == ("failed",)
    assert verdict.tests[T].kinds["NVIDIA H200"].outcome == "passed"
    assert text_of(verdict, "failed") == "on NVIDIA H200 of h200: AssertionError: off"


def test_an_error_before_its_body_has_not_run() -> None:
    verdict = judged(Book(H200).test(T, "error", needs=DEVICE, seconds={"setup": 0.1}, message="driver-not-loaded"))
    assert found(verdict) == ("failed", "never-ran")


@pytest.mark.parametrize("outcome", ["xfailed", "xpassed"])
def test_expected_failures_have_run(outcome: str) -> None:
    assert found(judged(Book(H200).test(T, outcome, needs=DEVICE))) == ()


def test_a_rerun_of_a_runner_counts_and_what_was_before_it_is_told() -> None:
    first = Book(H200, "2026-11-30T08:00:00+00:00").test(T, "failed", needs=DEVICE)
    second = Book(H200, "2026-11-30T09:00:00+00:00").test(T, needs=DEVICE)
    assert found(judged(first, second)) == found(judged(second, first)) == ("flaky",)
    third = Book(H200, "2026-11-30T10:00:00+00:00").test(T, "failed", needs=DEVICE)
    assert found(judged(third, second, first)) == ("failed",)


def test_a_rerun_that_skips_takes_nothing_back() -> None:
    ran = Book(H200, "2026-11-30T08:00:00+00:00").test(T, needs=DEVICE)
    assert found(judged(ran, Book(H200, "2026-11-30T09:00:00+00:00").skip(T, DEVICE))) == ()


def test_shards_of_a_runner_add_up() -> None:
    verdict = judged(
        Book(H200, arguments=["--shard", "1"]).test("t::a", needs=DEVICE),
        Book(H200, arguments=["--shard", "2"]).test("t::b", needs=DEVICE),
    )
    (runner,) = verdict.runners
    assert (len(runner.runs), runner.ran, runner.failed) == (2, 2, 0)


def test_reruns_within_a_run_are_told() -> None:
    assert found(judged(Book(CPU).test(T, attempts=3))) == ("flaky",)
    assert found(judged(Book(CPU).test(T, "failed", attempts=3))) == ("failed",)


def test_used_cuda_undeclared() -> None:
    verdict = judged(Book(H200).test(T, unmarked=True))
    assert found(verdict) == ("unmarked",)
    assert list(verdict.tests[T].kinds) == ["NVIDIA H200"]


def test_what_a_pass_left_or_did_not_prove() -> None:
    seen, left = {"code": "witness-unseen", "text": "needs sdpa"}, {"code": "state-leak", "text": "needs it back"}
    verdict = judged(Book(H200).test(T, findings=[left, seen, left]), Book(CPU).test(T, findings=[left]))
    assert found(verdict) == ("unwitnessed", "finding")
    assert [one.text for kind in found(verdict) for one in verdict.findings[kind]] == [
        "[witness-unseen] needs sdpa",
        "[state-leak] needs it back",
    ]
    assert not verdict.red
    assert judged(Book(H200).test(T, findings=[seen]), forbid=["unwitnessed"]).red == ("unwitnessed",)
    assert found(judged(Book(H200).test(T, "failed", findings=[seen]))) == ("failed",)
    hidden = {"code": "oom-skipped", "text": "needs its device memory to have run"}
    assert found(judged(Book(H200).test(T, "skipped", findings=[hidden]))) == ("never-ran", "finding")


# Runs and runners ----------------------------------------------------------------------------------------------


def test_a_missing_runner_is_red_and_an_unexpected_one_is_said() -> None:
    verdict = judged(Book(CPU).test(T), Book(A10G).test(T), expected=["CPU", "h200x2"])
    assert [finding.subject for finding in verdict.findings["missing-runner"]] == ["h200x2"]
    assert [finding.subject for finding in verdict.findings["unexpected-runner"]] == ["a10g"]
    assert verdict.red == ("missing-runner",)


def test_nothing_ran_on_a_runner() -> None:
    empty = Book(H200, arguments=["--shard", "2"]).end(status=5)
    assert judged(Book(CPU).test(T), empty).red == ("empty-runner",)
    # One shard may be empty.
    assert not judged(Book(CPU).test(T), empty, Book(H200).test(T)).is_red


def test_a_run_that_ended_before_its_tests_is_red() -> None:
    verdict = judged(Book(CPU).selected("t::a", "t::b", "t::c").test("t::a").cut())
    assert verdict.red == ("cut-short", "never-ran")
    assert text_of(verdict, "cut-short") == "0.json ended before 2 tests that it had selected, without an end"
    assert verdict.why("never-ran") == [("its run ended before it", "", ["t::b", "t::c"])]


def test_also_one_that_gave_up() -> None:
    verdict = judged(Book(CPU).selected("t::a", "t::b").test("t::a").end(status=2))
    assert (
        text_of(verdict, "cut-short") == "0.json ended before 1 test that it had selected, with pytest's exit status 2"
    )


def test_but_not_if_another_run_of_the_runner_reached_them() -> None:
    short = Book(CPU).selected("t::a", "t::b").test("t::a").cut()
    rerun = Book(CPU, "2026-11-30T09:00:00+00:00").selected("t::b").skip("t::b").end()
    assert "cut-short" not in judged(short, rerun).findings
    elsewhere = Book(H200).test("t::b")
    assert "cut-short" in judged(short, elsewhere).findings


def test_a_run_without_an_end_that_tells_not_what_it_had_selected() -> None:
    assert (
        judged(Book(CPU).test(T).cut())
        .findings["cut-short"][0]
        .text.endswith("ended and does not tell what it had selected, without an end")
    )


# What fails a merge --------------------------------------------------------------------------------------------


def test_kinds_can_be_allowed_and_forbidden() -> None:
    books = [Book(CPU).skip(T, DEVICE), Book(H200).test(T, needs=DEVICE)]
    assert not judged(*books[1:]).is_red
    assert judged(*books[:1]).red == ("empty-runner", "never-ran")
    verdict = judged(*books[:1], allow=["never-ran", "empty-runner", "failed"])
    assert (verdict.red, verdict.allowed) == ((), ("empty-runner", "never-ran"))
    assert judged(*books, allow=["empty-runner"]).findings["one-runner"]
    assert judged(*books, allow=["empty-runner"], forbid=["one-runner"]).red == ("one-runner",)


@given(st.lists(ledgers(), min_size=1, max_size=3), st.sets(st.sampled_from(sorted(KINDS))))
def test_a_merge_is_red_if_and_only_if_a_red_kind_has_findings(many: list[list[Line]], allow: set[str]) -> None:
    verdict = judged(*many, allow=allow)
    red = {kind for kind, findings in verdict.findings.items() if findings and KINDS[kind].is_red}
    assert set(verdict.red) == red - allow
    assert set(verdict.allowed) == red & allow
    for kind, findings in verdict.findings.items():
        of_tests = {finding.subject for finding in findings}
        if KINDS[kind].is_of_tests:
            assert of_tests == {test for test, judged_ in verdict.tests.items() if kind in judged_.findings}


@given(st.lists(ledgers(), min_size=1, max_size=3))
def test_every_test_is_either_run_or_told_to_have_never_run(many: list[list[Line]]) -> None:
    verdict = judged(*many)
    for test, by_run in read_all(*many).tests.items():
        ran = any(result.kind is not None for result in by_run.values())
        assert ("never-ran" in found(verdict, test)) != ran
    assert verdict.ran == sum("never-ran" not in judged_.findings for judged_ in verdict.tests.values())
    for runner in verdict.runners:
        assert sum(runner.outcomes.values()) == runner.ran + runner.not_run
    for row in matrix(verdict):
        for square in row.by_kind.values():
            assert square.tests >= square.ran >= max(square.failed, square.idle)


def test_the_matrix_counts_the_tests_that_belong_somewhere() -> None:
    verdict = judged(
        Book(CPU).test("t::plain").skip("t::must", DEVICE).test("t::c[sdpa-bf16]", needs=IF_ANY, cell="sdpa-bf16"),
        Book(H200).test("t::plain").test("t::must", "failed", DEVICE).skip("t::c[sdpa-bf16]", IF_ANY, cell="sdpa-bf16"),
    )
    rows = {
        (row.backend, row.dtype): {kind: (s.tests, s.ran, s.failed) for kind, s in row.by_kind.items()}
        for row in matrix(verdict)
    }
    assert rows == {
        ("sdpa", "bf16"): {"NVIDIA H200": (1, 0, 0), "CPU": (1, 1, 0)},
        ("", ""): {"NVIDIA H200": (1, 1, 1), "CPU": (1, 1, 0)},
    }


def test_what_stands_in_no_square_is_said() -> None:
    cpu = Book(CPU).test("t::plain").skip("t::must", DEVICE).skip("t::must_too", DEVICE)
    assert outside(judged(cpu)) == (
        "No runner had a CUDA device: 2 tests that cannot do without one stand in no square."
    )
    assert sum(square.tests for row in matrix(judged(cpu)) for square in row.by_kind.values()) == 1
    # A runner with a device has a column, in which they stand.
    both = judged(cpu, Book(H200).test("t::plain"))
    assert outside(both) == ""
    assert matrix(both)[0].by_kind["NVIDIA H200"].tests == 2
    assert outside(judged(Book(CPU).test("t::plain"))) == ""


# Drift ---------------------------------------------------------------------------------------------------------


def timed(book: Book, **by_test: float) -> Book:
    for name, seconds in by_test.items():
        book.test(f"t::{name}", needs=DEVICE, seconds={"call": seconds})
    return book


@pytest.mark.parametrize(
    ("before", "now", "drifts"),
    [
        (1.0, 2.6, True),
        (1.0, 1.9, False),  # not by more than a second
        (60.0, 89.0, False),  # not by more than half
        (60.0, 91.0, True),
        (0.001, 0.9, False),
        (2.0, 0.5, False),
    ],
)
def test_time_drifts_by_a_ratio_and_an_amount(before: float, now: float, drifts: bool) -> None:
    verdict = judged(timed(Book(H200), a=now), baseline=read_all(timed(Book(H200), a=before)))
    assert ("drift-time" in verdict.findings) == drifts
    assert not verdict.is_red


def test_memory_and_parity_drift_likewise() -> None:
    old = Book(H200).test("t::a", needs=DEVICE, memory=1000 * 1024**2, parity={"ratio": 0.4})
    new = Book(H200).test("t::a", needs=DEVICE, memory=1200 * 1024**2, parity={"ratio": 0.6})
    verdict = judged(new, baseline=read_all(old), forbid=["drift-parity"])
    assert text_of(verdict, "drift-memory") == "on NVIDIA H200: 1000 MiB -> 1.2 GiB"
    assert text_of(verdict, "drift-parity") == "on NVIDIA H200: 0.40 -> 0.60"
    assert "drift-parity" in verdict.red
    same = Book(H200).test("t::a", needs=DEVICE, memory=1050 * 1024**2, parity={"ratio": 0.45})
    assert not {kind for kind in judged(same, baseline=read_all(old)).findings if kind.startswith("drift")}


def test_a_busier_machine_is_one_line_and_not_a_thousand() -> None:
    names = [f"n{n}" for n in range(30)]
    before = timed(Book(H200), **dict.fromkeys(names, 4.0))
    slower = timed(Book(H200), **{**dict.fromkeys(names, 8.0), "n7": 13.0})
    verdict = judged(slower, baseline=read_all(before))
    assert [finding.subject for finding in verdict.findings["drift-time"]] == ["t::n7"]
    assert verdict.drift.shifts == {"NVIDIA H200": 2.0}


def test_the_fastest_of_several_runs_and_passes_alone_are_compared() -> None:
    old = read_all(timed(Book(H200), a=2.0))
    noisy = timed(Book(H200), a=9.0)
    calm = timed(Book(H200X2), a=2.1)
    assert "drift-time" not in judged(noisy, calm, baseline=old).findings
    failed = Book(H200).test("t::a", "failed", DEVICE, seconds={"call": 60})
    assert "drift-time" not in judged(failed, baseline=old).findings


def test_what_ran_on_a_kind_of_device_and_no_longer_does_is_lost() -> None:
    old = read_all(Book(H200).test("t::a", needs=IF_ANY).test("t::b", needs=DEVICE).test("t::gone", needs=DEVICE))
    new = Book(H200).skip("t::a", IF_ANY).test("t::b", needs=DEVICE), Book(CPU).test("t::a", needs=IF_ANY)
    verdict = judged(*new, baseline=old)
    assert [(f.subject, f.text) for f in verdict.findings["lost"]] == [
        ("t::a", "NVIDIA H200: [attn-missing] FA2 needs flash-attn; have none")
    ]
    assert "lost" in verdict.red
    # A merge without any such device has no say in it; what is missing there is a runner.
    assert "lost" not in judged(Book(CPU).test("t::a", needs=IF_ANY), baseline=old).findings


# Quarantine ----------------------------------------------------------------------------------------------------

UNTIL = TODAY + datetime.timedelta(days=1)


def entry(*tests: str, **members: Any) -> Entry:
    return Entry(tests or (T,), "@me", **{"until": UNTIL, "reason": "known", **members})


FAILED = Book(H200).test(T, "failed", DEVICE, message="off").test("t::b", needs=DEVICE)
PASSED = Book(H200).test(T, needs=DEVICE).test("t::b", needs=DEVICE)


def test_a_failure_in_quarantine_is_told_and_does_not_fail_the_merge() -> None:
    verdict = judged(FAILED, quarantine=[entry()])
    assert found(verdict) == ("quarantined",)
    assert not verdict.is_red
    assert text_of(verdict, "quarantined") == "@me, until 2026-12-01: failed on NVIDIA H200 of h200: off"


def test_an_entry_counts_on_its_last_day_and_fails_after_it() -> None:
    assert not judged(FAILED, quarantine=[entry(until=TODAY)]).is_red
    verdict = judged(FAILED, quarantine=[entry(until=TODAY - datetime.timedelta(days=2))])
    assert verdict.red == ("failed", "quarantine-expired")
    assert text_of(verdict, "quarantine-expired") == "2 days ago"


def test_an_entry_that_excuses_nothing_is_stale() -> None:
    assert text_of(judged(PASSED, quarantine=[entry()]), "quarantine-stale") == (
        "1 of its tests ran, and nothing of them needs excusing"
    )
    assert text_of(judged(PASSED, quarantine=[entry("t::no*")]), "quarantine-stale") == "it matches no test"
    assert judged(PASSED, quarantine=[entry()]).red == ("quarantine-stale",)
    assert not judged(PASSED, quarantine=[entry(flaky=True)]).is_red


def test_an_entry_of_tests_that_ran_nowhere_is_undecided() -> None:
    skipped = Book(H200).skip(T, DEVICE).test("t::b", needs=DEVICE)
    assert "quarantine-stale" not in judged(skipped, quarantine=[entry()]).findings


def test_an_entry_can_be_about_some_runners() -> None:
    other = Book(A10G).test(T, "failed", DEVICE)
    assert not judged(FAILED, quarantine=[entry(runners=("h200",))]).is_red
    assert judged(FAILED, other, quarantine=[entry(runners=("h200",))]).red == ("failed",)
    assert not judged(FAILED, other, quarantine=[entry(runners=("h200",)), entry(runners=("a10g",))]).is_red
    # Nothing of it ran there: no say.
    assert "quarantine-stale" not in judged(PASSED, quarantine=[entry(runners=("a10g",))]).findings


def test_an_entry_can_excuse_other_things() -> None:
    skipped = Book(H200).skip(T, DEVICE).test("t::b", needs=DEVICE)
    assert judged(skipped, quarantine=[entry()]).red == ("never-ran",)
    assert not judged(skipped, quarantine=[entry(excuses=("never-ran",))]).is_red
    stale = judged(PASSED, quarantine=[entry(excuses=("never-ran",))])
    assert stale.red == ("quarantine-stale",)
