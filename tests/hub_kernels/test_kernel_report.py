"""The kernel report: what it accepts as proof, and what it says where there is none."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.ledger.record import Ledger, Report
from pytest_cudaenv.verdict.kernel_report import KernelReport, KernelReportError, Replacement

ROW = Replacement("model.norm", "RMSNorm", "kernel", "org/name", "v1", "torch-universal", "layers.py", "INFERENCE", 1)
LOST = Replacement("model.act", "SiLU", "original", reason="[kernels-mode] SiLU needs a mapping for TRAINING")

rows = st.lists(
    st.builds(
        Replacement,
        st.text("ab.", min_size=1, max_size=6),
        st.sampled_from(["RMSNorm", "SiLU", "rotary_pos_emb"]),
        st.sampled_from(["kernel", "original", "untouched"]),
        calls=st.integers(0, 2),
        reason=st.none() | st.just("[kernels-mode] why"),
    ),
    max_size=12,
)


def code_of(call: object) -> str | None:
    try:
        call()  # type: ignore[operator]
    except KernelReportError as error:
        return str(error)[1:].partition("]")[0]
    return None


@given(rows)
def test_assert_replaced_passes_exactly_where_every_layer_runs_a_kernel(found: list[Replacement]) -> None:
    report = KernelReport.of(found)
    for name in ("RMSNorm", "SiLU"):
        mine = [row for row in found if row.layer_name == name]
        everything = bool(mine) and all(row.status == "kernel" for row in mine)
        assert (code_of(lambda name=name: report.assert_replaced(name, executed=False)) is None) == everything
        ran = everything and all(row.calls for row in mine)
        assert (code_of(lambda name=name: report.assert_replaced(name)) is None) == ran


@given(rows)
def test_no_fallback_passes_exactly_where_nothing_but_the_allowed_fell_back(found: list[Replacement]) -> None:
    report = KernelReport.of(found)
    rest = [row for row in found if row.layer_name != "SiLU" and row.status != "kernel"]
    assert (code_of(lambda: report.assert_no_fallback(allow={"SiLU"})) is None) == (bool(found) and not rest)


@given(rows)
def test_data_counts_every_row_and_is_json(found: list[Replacement]) -> None:
    data = json.loads(json.dumps(KernelReport.of(found).as_data()))
    assert sum(row["layers"] for row in data["rows"]) == len(found) == data["replaced"] + data["fell_back"]
    assert sum(row["calls"] for row in data["rows"]) == sum(row.calls for row in found)


@given(rows)
def test_off_passes_exactly_where_no_kernel_runs(found: list[Replacement]) -> None:
    report = KernelReport.of(found, kernels="off")
    expected = "kernels-not-off" if any(row.status == "kernel" for row in found) else None
    assert code_of(lambda: report.assert_replaced("RMSNorm")) == expected
    assert code_of(report.assert_no_fallback) == expected


@pytest.mark.parametrize(
    ("found", "call", "code", "text"),
    [
        ([ROW], lambda r: r.assert_replaced("Rope"), "kernels-layer", "no Rope .* have RMSNorm"),
        ([], lambda r: r.assert_replaced(), "kernels-not-replaced", "no kernel replaced anything"),
        ([LOST], lambda r: r.assert_replaced(), "kernels-not-replaced", "no kernel replaced anything"),
        ([ROW, LOST], lambda r: r.assert_replaced("SiLU"), "kernels-not-replaced", r"1 of 1 SiLU(.|\n)*kernels-mode"),
        ([replace(ROW, calls=0)], lambda r: r.assert_replaced(), "kernels-not-executed", "1 of 1 RMSNorm"),
        ([ROW, LOST], lambda r: r.assert_no_fallback(), "kernels-fallback", "1 of 2 fell back: SiLU"),
        ([], lambda r: r.assert_no_fallback(), "kernels-none", "nothing here"),
    ],
)
def test_each_failure_has_its_code(found: list[Replacement], call: object, code: str, text: str) -> None:
    with pytest.raises(KernelReportError, match=text) as caught:
        call(KernelReport.of(found))  # type: ignore[operator]
    assert caught.value.code == code


def test_calls_that_cannot_be_counted_are_no_proof() -> None:
    report = KernelReport.of([ROW], counted=False)
    with pytest.raises(KernelReportError, match="kernels-uncounted"):
        report.assert_replaced("RMSNorm")
    report.assert_replaced("RMSNorm", executed=False)


def test_a_long_list_is_cut_and_counted() -> None:
    lost = [replace(LOST, name=f"model.layers.{i}.act") for i in range(20)]
    with pytest.raises(KernelReportError, match="and 12 more"):
        KernelReport.of(lost).assert_replaced("SiLU")


def test_a_frozen_report_does_not_change() -> None:
    found = [ROW]
    report = KernelReport(lambda: list(found))
    found.append(LOST)
    assert len(report.rows) == 2
    report.freeze()
    found.clear()
    assert report.rows == (ROW, LOST)


def test_table_names_what_ran_and_why_not() -> None:
    table = str(KernelReport.of([ROW, LOST]))
    assert table.splitlines()[1].split()[:4] == ["RMSNorm", "model.norm", "kernel", "org/name@v1"]
    assert "torch-universal" in table
    assert "1 x SiLU: [kernels-mode]" in table
    assert KernelReport.of([]).table() == "nothing that a kernel can replace"


def test_the_ledger_carries_it() -> None:
    class Kept(io.StringIO):
        def close(self) -> None:
            """Be read after the ledger is done."""

    file = Kept()
    ledger = Ledger(file, {"kind": "run"})
    record = {"kernels": KernelReport.of([ROW, LOST]).as_data()}
    ledger.add(Report("test_a.py::test_a", "call", "passed", record=record))
    ledger.end(0, 1.0)
    line = next(line for line in map(json.loads, file.getvalue().splitlines()) if line["kind"] == "test")
    assert line["kernels"]["replaced"] == 1
    assert [row["layer_name"] for row in line["kernels"]["rows"]] == ["RMSNorm", "SiLU"]
