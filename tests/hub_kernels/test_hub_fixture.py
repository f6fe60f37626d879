"""The fixture, the marker and the option, in whole runs of pytest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

# pytester forgets what only an inner run imported, and these take seconds.
pytest.importorskip("kernels")
pytest.importorskip("transformers.models.llama.modeling_llama")

import pytest_cudaenv.decorators
import pytest_cudaenv.host.detect
import pytest_cudaenv.plan
import pytest_cudaenv.verdict.hub_engine  # noqa: F401
from tests.hub_kernels.tiny import ROOT

HEAD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import pytest
from pytest_cudaenv import hub_kernels as uses_kernels
from tests.hub_kernels.tiny import FULL, ODD, TINY, tiny_llama
NORM = {{"RMSNorm": f"{{TINY}}:RMSNorm"}}

@pytest.fixture
def model():
    return tiny_llama()

@pytest.fixture
def ids():
    import torch
    return torch.arange(16).view(2, 8) % 64
"""


def run(pytester: pytest.Pytester, suite: str, *args: str) -> Any:
    pytester.makepyfile(test_of_kernels=HEAD + suite)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly", "--cuda-visible=-1", *args)


PROOF = """
@uses_kernels(FULL)
def test_proof(hub_kernels, model, ids):
    with hub_kernels.on(model):
        model(ids)

@uses_kernels(NORM, executed=False)
def test_not_executed_on_purpose(hub_kernels, model):
    hub_kernels.on(model)

def test_clean():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    assert "forward" not in apply_rotary_pos_emb.__dict__
"""


def test_a_pass_is_proven_and_in_the_ledger(pytester: pytest.Pytester) -> None:
    result = run(pytester, PROOF, "--cuda-ledger", "ledger.jsonl", "--junitxml", "junit.xml")
    result.assert_outcomes(passed=3)
    lines = [json.loads(line) for line in (pytester.path / "ledger.jsonl").read_text().splitlines()]
    kernels = {line["id"]: line.get("kernels") for line in lines if line["kind"] == "test"}
    proof = kernels["test_of_kernels.py::test_proof"]
    assert (proof["replaced"], proof["fell_back"], proof["kernels"]) == (8, 0, "on")
    assert {row["layer_name"]: row["calls"] for row in proof["rows"]} == {"RMSNorm": 5, "SiLU": 2, "rotary_pos_emb": 2}
    assert kernels["test_of_kernels.py::test_clean"] is None
    assert '<property name="hub_kernels"' in (pytester.path / "junit.xml").read_text()
    import jsonschema

    import pytest_cudaenv

    schema = json.loads((Path(pytest_cudaenv.__file__).parent / "ledger" / "schema.json").read_text())
    for line in lines:
        jsonschema.validate(line, schema)


OPEN = """
@uses_kernels(NORM)
def test_never_used(hub_kernels):
    pass

@uses_kernels(NORM)
def test_never_ran_in_a_block(hub_kernels, model):
    with hub_kernels.on(model):
        pass

@uses_kernels(NORM)
def test_never_ran(hub_kernels, model):
    hub_kernels.on(model)

@uses_kernels({"RMSNorm": f"{ODD}:InferenceOnly"}, mode="training")
def test_breaks_its_word(hub_kernels, model):
    hub_kernels.on(model)

@uses_kernels({"RMSNorm": f"{ODD}:Nope"})
def test_nowhere(hub_kernels, model):
    hub_kernels.on(model)

def test_watched_nothing(hub_kernels):
    hub_kernels.watch()
"""


def test_what_proves_nothing_fails_with_its_code(pytester: pytest.Pytester) -> None:
    result = run(pytester, OPEN)
    result.assert_outcomes(failed=6)
    result.stdout.fnmatch_lines_random(
        [
            "*[[]kernels-unused] marked with hub_kernels*",
            "*[[]kernels-not-executed] 5 of 5 RMSNorm*",
            "*[[]kernels-claim] RMSNorm*",
            "*[[]kernels-no-layer] RMSNorm*",
            "*[[]kernels-unused] transformers replaced nothing*",
            "*Hub kernels on*",
            "*Hub kernels watched*",
            "transformers had replaced nothing",
        ]
    )


SKIPS = """
@uses_kernels({"RMSNorm": "org/tiny:RMSNorm@v1"})
def test_offline(hub_kernels, model):
    raise AssertionError("not reached")

def test_offline_in_the_body(hub_kernels, model):
    hub_kernels.on(model, {"RMSNorm": "org/tiny:RMSNorm@v1"})
    raise AssertionError("not reached")
"""


def test_what_is_not_at_hand_is_a_skip(pytester: pytest.Pytester) -> None:
    result = run(pytester, SKIPS, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*[[]kernels-offline] needs kernel tiny; have offline, not cached*"])


def test_what_is_promised_may_not_skip(pytester: pytest.Pytester) -> None:
    result = run(pytester, SKIPS, "--cuda-unmet=fail")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*[[]kernels-offline]*"])


@pytest.mark.parametrize("variable", ["USE_HUB_KERNELS=0", "DISABLE_KERNEL_MAPPING=1"])
def test_a_variable_that_turns_kernels_off_is_a_skip(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(*variable.split("="))
    result = run(pytester, PROOF, "-rs")
    result.assert_outcomes(skipped=2, passed=1)
    result.stdout.fnmatch_lines([f"*[[]kernels-off] needs Hub kernels turned on; have {variable}*"])


BOTH = """
@uses_kernels(NORM, use="both")
def test_marked(hub_kernels, model, ids):
    with hub_kernels.on(model) as report:
        model(ids)
    report.assert_replaced("RMSNorm")
    hub_kernels.seen = report.kernels

@pytest.mark.parametrize("n", [1, 2])
def test_plain(hub_kernels, n): pass

@uses_kernels(NORM, use="on")
def test_only_on(hub_kernels, model, ids):
    with hub_kernels.on(model):
        model(ids)

def test_other(): pass
"""

MARKED = ["test_marked[kernels-off]", "test_marked[kernels-on]"]
PLAIN = ["test_plain[1]", "test_plain[2]"]
BOTH_PLAIN = [f"test_plain[{n}-kernels-{state}]" for n in (1, 2) for state in ("off", "on")]


def ids_of(pytester: pytest.Pytester, *args: str) -> list[str]:
    result = run(pytester, BOTH, "--collect-only", "-q", *args)
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_ids_come_from_the_marker_and_the_ini_file_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = [*MARKED, *PLAIN, "test_only_on", "test_other"]
    assert ids_of(pytester) == everything
    assert ids_of(pytester, "--cuda-hub-kernels=both") == everything
    monkeypatch.setenv("CUDAENV_HUB_KERNELS", "both")
    assert ids_of(pytester) == everything
    monkeypatch.delenv("CUDAENV_HUB_KERNELS")
    pytester.makeini("[pytest]\ncuda_hub_kernels = both")
    assert ids_of(pytester) == [*MARKED, *BOTH_PLAIN, "test_only_on", "test_other"]
    assert ids_of(pytester, "--cuda-simulate=h100:2") == [*MARKED, *BOTH_PLAIN, "test_only_on", "test_other"]


def test_the_option_only_deselects(pytester: pytest.Pytester) -> None:
    assert ids_of(pytester, "--cuda-hub-kernels=off") == [MARKED[0], "test_other"]
    assert ids_of(pytester, "--cuda-hub-kernels=on") == [MARKED[1], *PLAIN, "test_only_on", "test_other"]


def test_both_states_run(pytester: pytest.Pytester) -> None:
    result = run(pytester, BOTH, "--cuda-ledger", "ledger.jsonl")
    result.assert_outcomes(passed=6)
    lines = [json.loads(line) for line in (pytester.path / "ledger.jsonl").read_text().splitlines()]
    kernels = {line["id"].partition("::")[2]: line.get("kernels") for line in lines if line["kind"] == "test"}
    assert [(kernels[i]["kernels"], kernels[i]["replaced"]) for i in MARKED] == [("off", 0), ("on", 5)]


def test_with_kernels_off_nothing_of_kernels_is_needed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_HUB_KERNELS", "0")
    result = run(pytester, BOTH, "-k", "marked", "-rs")
    result.assert_outcomes(passed=1, skipped=1)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("@uses_kernels(mapping=3)\ndef test_a(hub_kernels): pass", "dict of layer name and kernel"),
        ('@uses_kernels({"RMSNorm": "liger"})\ndef test_a(hub_kernels): pass', "names no kernel's layer"),
        ('@uses_kernels({"RMSNorm": "org/name:L"})\ndef test_a(hub_kernels): pass', "neither version nor revision"),
        ('@uses_kernels(mode="fast")\ndef test_a(hub_kernels): pass', "choose from inference"),
        ('@uses_kernels(use="off")\ndef test_a(hub_kernels): pass', "write 'both'"),
        ("@uses_kernels(NORM)\ndef test_a(): pass", "has no effect here: request the fixture `hub_kernels`"),
    ],
)
def test_a_wrong_marker_is_an_error_while_collecting(pytester: pytest.Pytester, line: str, told: str) -> None:
    result = run(pytester, "\n" + line)
    assert result.ret == 2
    assert told in result.stdout.str()


def test_a_device_is_asked_for_where_there_is_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_of_kernels="def test_a(hub_kernels): pass\n")
    args = ("--collect-only", "-q", "--cuda-simulate=h100", "-m", "cuda")
    assert "test_of_kernels.py::test_a" in pytester.runpytest_inprocess(*args).outlines


def test_a_wrong_choice_is_a_usage_error(pytester: pytest.Pytester) -> None:
    result = run(pytester, BOTH, "--cuda-hub-kernels=maybe")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--cuda-hub-kernels: 'maybe' (option): choose from auto, on, off, both*"])


def test_in_a_device_process_it_is_proven_all_the_same(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_of_kernels=HEAD + PROOF)
    args = ("-p", "no:cacheprovider", "-p", "no:randomly", "--cuda-simulate=h100:2", "--cuda-ledger", "ledger.jsonl")
    result = pytester.runpytest_subprocess(*args, "--cuda-isolation=session", "--junitxml", "junit.xml")
    result.assert_outcomes(passed=3)
    lines = [json.loads(line) for line in (pytester.path / "ledger.jsonl").read_text().splitlines()]
    tests = {line["id"].partition("::")[2]: line for line in lines if line["kind"] == "test"}
    assert tests["test_proof"]["kernels"]["replaced"] == 8
    assert tests["test_proof"]["process"] != tests["test_clean"].get("process")
    assert '<property name="hub_kernels"' in (pytester.path / "junit.xml").read_text()
