"""What a collection tells the command: nothing is lost on the way, and a part of it is never taken for the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_cudaenv.ledger.record import needs, requirement_from
from pytest_cudaenv.ledger.suite import Suite, SuiteError, SuiteTest, Told, Uncollected, lines_of, read_suite
from pytest_cudaenv.requirements.attention_backends import BACKENDS, AttnBackend
from pytest_cudaenv.requirements.capability import at_least, exactly
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.reason import Rank, Reason
from pytest_cudaenv.requirements.requirement import Requirement


def some(*values: object) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(st.sampled_from(values), unique=True, max_size=3).map(tuple)


REASONS = st.builds(Reason, st.text(), st.text(), st.text(), st.text(), st.sampled_from(list(Rank)))

REQUIREMENTS = st.builds(
    Requirement,
    devices=st.integers(0, 16),
    device_if_any=st.booleans(),
    memory=st.integers(0, 2**40),
    capability=some(">=8.0", "<10", "==9.0"),
    driver=some(">=12.4", "<14"),
    exclusive=st.booleans(),
    dtypes=some("bfloat16", "tf32", "float8_e4m3fn"),
    attn_backends=some("eager", "sdpa", "flash_attention_3", "org/kernel@main:fn"),
    cell_dtype=st.sampled_from([None, "bfloat16"]),
    hub_kernels=some(HubKernel("a/b"), HubKernel("a/b", version=1), HubKernel("a/c", revision="main")),
    needs_kernels=st.booleans(),
    quantization=some("gptq", "fp8"),
    packages=some("torch>=2", "a | b"),
    nccl=st.booleans(),
    isolated=st.booleans(),
    model_reasons=st.lists(REASONS, max_size=2).map(tuple),
)


@settings(deadline=None)
@given(REQUIREMENTS)
def test_needs_and_back(requirement: Requirement) -> None:
    told = json.loads(json.dumps(needs(requirement)))
    again = requirement_from(told)
    assert again == requirement
    assert needs(again) == needs(requirement)
    # What is equal is not always of one kind: True is 1, and a list is no tuple.
    assert repr(again) == repr(requirement)


def test_needs_tell_of_every_field() -> None:
    """A field that is added and forgotten in REQUIREMENTS would be lost unseen."""
    drawn = {
        "devices": 1, "device_if_any": True, "memory": 1, "capability": [">=9"], "driver": [">=12"],
        "exclusive": True, "dtypes": ["tf32"], "attn_backends": ["sdpa"], "cell_dtype": "bfloat16",
        "hub_kernels": [{"repo": "a/b", "version": 1}], "needs_kernels": True, "quantization": ["fp8"],
        "packages": ["a"], "nccl": True, "isolated": True,
        "model_reasons": [{"code": "c", "need": "n", "have": "h", "remedy": "r", "rank": 3}],
    }  # fmt: skip
    assert set(drawn) == set(vars(Requirement()))
    assert needs(requirement_from(drawn)) == drawn


@pytest.mark.parametrize(
    "told",
    [
        {"device": 1},
        {"devices": "1"},
        {"devices": True},
        {"exclusive": 1},
        {"packages": "peft"},
        {"packages": [1]},
        {"hub_kernels": ["a/b"]},
        {"hub_kernels": [{"repo": "nothing"}]},
        {"model_reasons": [{"code": "x"}]},
        {"model_reasons": [{"code": "c", "need": "n", "have": "h", "remedy": "r", "rank": 9}]},
        {"cell_dtype": 3},
    ],
    ids=str,
)
def test_needs_that_cannot_be_read_are_named(told: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"needs: '?{next(iter(told))}"):
        requirement_from(told)


OWN = AttnBackend("ring", modules=("ring",), capabilities=at_least(8, 0), dtypes_on={"fp8": exactly("9.x", 9, (10, 3))})

SUITES = st.builds(
    Suite,
    tests=st.lists(
        st.builds(
            SuiteTest,
            id=st.text(min_size=1),
            file=st.text(),
            requirement=REQUIREMENTS,
            sources=st.lists(st.tuples(st.text(), REQUIREMENTS), max_size=2).map(tuple),
            cell=st.none() | st.text(),
            skips=st.none() | st.text(),
        ),
        max_size=2,
    ).map(tuple),
    told=st.builds(
        Told, runners=st.lists(st.text()).map(tuple), assume=st.lists(st.text()).map(tuple),
        simulate=st.none() | st.text(), default_memory=st.none() | st.integers(), deselected=st.integers(),
    ),
    backends=st.lists(st.sampled_from([OWN, BACKENDS["flash_attention_3"], AttnBackend("plain")])).map(tuple),
    uncollected=st.lists(st.builds(Uncollected, st.text(), st.text(), st.booleans()), max_size=2).map(tuple),
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(SUITES)
def test_a_suite_and_back(suite: Suite) -> None:
    assert read_suite(list(lines_of(suite))) == suite


@settings(deadline=None, max_examples=40)
@given(SUITES, st.data())
def test_a_part_is_not_the_whole(suite: Suite, data: st.DataObject) -> None:
    lines = list(lines_of(suite))
    kept = data.draw(st.integers(0, len(lines) - 1))
    with pytest.raises(SuiteError):
        read_suite(lines[:kept])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cut short"),
        ("nothing", "line 1 is none"),
        ("[]", "no collected suite"),
        ('{"kind":"run","ledger":1}', "no collected suite"),
        ('{"kind":"suite","version":2}', "version 2, and version 1 is known"),
        ('{"kind":"suite","version":1}\n{"kind":"end","tests":0}', "first line cannot be read"),
        ('{"kind":"suite","version":1,"told":{"x":1},"backends":[]}\n{"kind":"end","tests":0}', "first line"),
        ('{"kind":"suite","version":1,"told":{},"backends":[]}\n{"kind":"test"}', "line 2 is none"),
    ],
)
def test_what_is_no_suite_is_refused(text: str, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        read_suite(text.splitlines())
