"""Comparing, pasting and golden files, without pytest around them."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.verdict import golden
from pytest_cudaenv.verdict.expectation_keys import Place
from pytest_cudaenv.verdict.expectations import Expectations, spelled_key
from pytest_cudaenv.verdict.expected_values import difference, plain, rounded, spelled
from tests.verdict.test_expectation_keys import places, several

ROOT = str(Path(__file__).parents[2])

H100 = Place("cuda", (9, 0), "sdpa-bf16", "2.13")


def at(place: Place, **more: Any) -> Expectations:
    """What a test at a place is given."""
    return Expectations(lambda: place, **more)


def failed(action: Callable[[], object]) -> str:
    with pytest.raises(AssertionError) as caught:
        action()
    return str(caught.value)


def pasted(message: str) -> dict[Hashable, Any]:
    """The entry that a message tells to paste."""
    found = ast.literal_eval("{" + message.splitlines()[1].strip() + "}")
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.25, 1.25),
        (3, 3),
        (True, True),
        ("Hello", "Hello"),
        ([1, 2.5, "x", None], (1, 2.5, "x", None)),
        ({"a": [1.0], "b": {"c": "x"}}, {"b": {"c": "x"}, "a": [1.0]}),
        (torch.tensor([[1.0, 2.0]]), [[1.0, 2.0]]),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.000001]], dtype=torch.float64)),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), [1.0, 2.015625]),
        (torch.tensor(3.5), 3.5),
        (torch.tensor([1.0], requires_grad=True), [1.0]),
        (numpy.array([1, 2]), torch.tensor([1, 2])),
        (numpy.float32(1.1), 1.1),
        ([torch.tensor([1.5]), numpy.array(2.5)], [[1.5], 2.5]),
        (torch.tensor([1.5], dtype=torch.float8_e4m3fn), [1.5]),
        (["", "x"], ["", "x"]),
        ([[], [1]], [[], [1]]),
    ],
)
def test_values_that_agree(value: Any, expected: Any) -> None:
    at(H100).check(value, {(9, 0): expected})


@pytest.mark.parametrize(
    ("value", "expected", "told"),
    [
        (1.0, 1.5, "it is 1.0, and not 1.5: off by 0.5"),
        (3, 4, "it is 3, and not 4"),
        (True, 1, "it is True (bool), and not 1 (number)"),
        ("1", 1, "it is '1' (str), and not 1 (number)"),
        ("Hello Ann", "Hello Anna", "from character 9 on"),
        ("Hello Ann", "Hallo Ann", "from character 1 on"),
        ([1, 2, 3], [1, 2], "it has 3 elements, and not 2"),
        ([[1, 2], [3]], [[1, 2], [3, 4]], "at [1] it has 1 elements, and not 2"),
        ({"a": 1}, {"b": 1}, "it has the keys ['a'], and not ['b']"),
        (torch.tensor([1.0, 2.0, 3.0]), [1.0, 2.1, 3.5], "at [2] it is 3.0, and not 3.5: off by 0.5"),
        (torch.tensor([[1.0, 2.0]]), [1.0, 2.0], "it has 1 elements, and not 2"),
        (torch.tensor([1, 2]), [1, 3], "at [1] it is 2, and not 3: off by 1, where 0 is allowed (1 of 2 differ)"),
        ([1.0, {"x": [2.0, 9.0]}], [1.0, {"x": [2.0, 3.0]}], "at [1]['x'][1] it is 9.0"),
        (torch.tensor([1.0001]), [1.0], "at [0] it is 1.000"),
        (None, 1, None),
        # The worst of what may not differ at all, and by what is allowed where it may.
        ([1, 100, 3], [2, 200, 3], "at [1] it is 100, and not 200"),
        (torch.tensor([100.0, 1e-3]), [100.1, 2e-3], "at [0] it is 100.0"),
    ],
)
def test_values_that_differ(value: Any, expected: Any, told: str | None) -> None:
    message = failed(lambda: at(H100).check(value, {(9, 0): expected}))
    if told is None:
        assert message.startswith("[expectation-empty]")
        return
    assert message.startswith("[expectation] needs the value for CUDA 9.0 in sdpa-bf16 to be as (9, 0) says")
    assert told in message
    assert pasted(message) == {(9, 0, "sdpa-bf16"): rounded(value)}


def test_tolerances_are_those_given_alone() -> None:
    at(H100).check(1.05, {None: 1.0}, atol=0.1)
    at(H100).check(105, {None: 100}, rtol=0.06)
    assert "where 0.04 is allowed" in failed(lambda: at(H100).check(1.05, {None: 1.0}, rtol=0.04))
    assert "where 0 is allowed" in failed(lambda: at(H100).check(1.00000001, {None: 1.0}, rtol=0))
    for wrong in (math.nan, math.inf, -0.1):
        with pytest.raises(ValueError, match="write a finite number"):
            at(H100).check(1.0, {None: 1.0}, rtol=wrong)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (math.nan, "finite"),
        ([1.0, math.inf], "finite"),
        (torch.tensor([0.0, math.nan]), "finite"),
        (torch.tensor([-math.inf], dtype=torch.bfloat16), "finite"),
        ([], "empty"),
        ({}, "empty"),
        ("", "empty"),
        ([[], [""]], "empty"),
        (None, "empty"),
        (torch.ones(3)[1:][:0], "empty"),
        (torch.ones(2, 0), "empty"),
        ([1.0, numpy.ones((0, 3))], "empty"),
        ([1.0, {2, 3}], "type"),
        (1j, "type"),
        (torch.tensor([1j]), "type"),
        ({1: 2}, "type"),
    ],
)
def test_what_is_vacuous_is_refused_on_both_sides(value: Any, code: str) -> None:
    """Also where nothing is expected here: what may not be expected may not be pasted."""
    for expected in ({None: value}, {None: 1.0}, {}):
        assert failed(lambda e=expected: at(H100).check(value, e)).startswith(f"[expectation-{code}] the value")  # type: ignore[misc]
    message = failed(lambda: at(H100).check(1.0, {(9, None): value}))
    assert message.startswith(f"[expectation-{code}] the expected value of (9, None)")


def test_a_missing_match_tells_what_to_paste() -> None:
    value = {
        "loss": torch.tensor(1 / 3),
        "text": 'say "hi"\n',
        "ids": torch.tensor([[1, 2]]),
        "low": [numpy.float16(0.1)],
    }
    message = failed(lambda: at(H100).check(value, {(8, None): 1, "cpu": 2}))
    first = message.splitlines()[0]
    assert first == (
        "[expectation-missing] needs a value for CUDA 9.0 in sdpa-bf16; have only (8, None), \"cpu\". To expect:"
    )  # fmt: skip
    assert pasted(message) == {
        (9, 0, "sdpa-bf16"): {"loss": 0.33333334, "text": 'say "hi"\n', "ids": [[1, 2]], "low": [0.099976]}
    }
    at(H100).check(value, {(8, None): 1, **pasted(message)})


def test_two_that_are_equally_good_are_both_named() -> None:
    message = failed(lambda: at(H100).check(1.0, {(9, 0): 1.0, (9, None, "sdpa-bf16"): 1.0}))
    assert message.startswith("[expectation-ambiguous] needs one value for CUDA 9.0 in sdpa-bf16; have ")
    assert '(9, 0) and (9, None, "sdpa-bf16")' in message
    message = failed(lambda: at(H100).pick({None: 1.0, "default": 1.0}))
    assert 'have None and "default"' in message


def test_many_values_are_not_pasted() -> None:
    message = failed(lambda: at(H100).check(torch.ones(1001), {}))
    assert len(message) < 400
    assert "1001 values: check a slice of them" in message


def test_pick_gives_the_value_as_it_is() -> None:
    value = object()
    assert at(H100).pick({(9, 0): value, None: 1}) is value
    message = failed(lambda: at(H100).pick({(8, 0): value}))
    assert message.startswith("[expectation-missing]")
    assert "check(value, {…}) in place of pick" in message


def test_what_is_no_dict_or_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match="write a dict"):
        at(H100).check(1, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="write a name"):
        at(H100)("")
    with pytest.raises(TypeError, match="write a name"):
        at(H100)({(9, 0): 1})  # type: ignore[arg-type]


_numbers = st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False, width=32))
_dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
_tensors = st.builds(
    lambda values, dtype: torch.tensor(values, dtype=torch.float64).to(dtype),
    st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=4),
    _dtypes,
)


def _is_usable(value: Any) -> bool:
    try:
        plain(value)
    except AssertionError:
        return False
    return True


values_of_all_kinds = st.recursive(
    st.one_of(_numbers, st.text(max_size=5), st.booleans(), _tensors),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
).filter(_is_usable)


tolerances = st.one_of(st.none(), st.sampled_from([0.0, 1e-9, 1e-3, 0.1]))


@given(values_of_all_kinds, several, places, tolerances, tolerances)
def test_what_is_pasted_is_what_is_expected_from_then_on(
    value: Any, keys: list[Hashable], place: Place, rtol: float | None, atol: float | None
) -> None:
    """Whatever a dict had, and however narrow the tolerances are."""
    expected: dict[Any, Any] = dict.fromkeys(keys, "something else")
    message = failed(lambda: at(place).check(value, expected, rtol=rtol, atol=atol))
    assert message.startswith("[expectation")
    ((key, entry),) = pasted("\n" + message[message.rindex("\n    ") :].strip("\n")).items()
    for old in [old for old in expected if spelled_key(old) == spelled_key(key)]:
        del expected[old]
    same = {k: v for k, v in expected.items() if _names(k) != _names(key)}
    at(place).check(value, {**same, key: entry}, rtol=rtol, atol=atol)


def _names(key: Hashable) -> object:
    from pytest_cudaenv.verdict.expectation_keys import parse_key

    return parse_key(key)


@given(values_of_all_kinds)
def test_a_value_agrees_with_itself_and_reads_as_it_is_spelled(value: Any) -> None:
    assert difference(value, value, 0.0, 0.0) is None
    assert ast.literal_eval(spelled(plain(value))) == plain(value)


# Golden files ---------------------------------------------------------------------------------------------------


def test_a_golden_file_is_written_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "expectations"
    cpu, updating = Place("cpu", None, "eager-fp32"), {"folder": folder, "module": "test_it", "updates": True}
    at(H100, **updating)("text").check("Anna")
    at(cpu, **updating)("text").check("Ann")
    at(cpu, **updating)("numbers").check(torch.tensor([1 / 3]))
    path = folder / "test_it.json"
    assert path.read_text() == (
        "{\n  \"numbers\": {\n    \"('cpu', 'eager-fp32')\": [0.33333334]\n  },\n"
        '  "text": {\n    "(\'cpu\', \'eager-fp32\')": "Ann",\n    "(9, 0, \'sdpa-bf16\')": "Anna"\n  }\n}\n'
    )
    assert [entry.name for entry in folder.iterdir()] == ["test_it.json"]
    reading = {"folder": folder, "module": "test_it"}
    at(H100, **reading)("text").check("Anna")
    assert at(cpu, **reading)("text").pick() == "Ann"
    message = failed(lambda: at(cpu, **reading)("text").check("Bob"))
    assert message.startswith("[expectation] ")
    assert f'in {path}, under "text"; --cuda-update-expectations writes it' in message
    assert failed(lambda: at(H100, **reading)("numbers").check(1.0)).startswith("[expectation-missing]")
    assert failed(lambda: at(H100, **reading)("new").check(1.0)).startswith("[expectation-missing]")


def test_an_update_changes_only_what_is_wrong(tmp_path: Path) -> None:
    """A key that a person made wider stays while it is right, and gets a closer one beside it where it is not."""
    path = tmp_path / "test_it.json"
    path.write_text('{"loss": {"cuda": 1.5, "(\'cuda\', (9, 0), \'sdpa-bf16\')": 2.5}, "text": {"(9, None)": "Anna"}}')
    before = path.read_text()
    updating: dict[str, Any] = {"folder": tmp_path, "module": "test_it", "updates": True}
    at(H100, **updating)("text").check("Anna")
    at(Place("cuda", (8, 6)), **updating)("loss").check(1.5)
    assert path.read_text() == before
    at(H100, **updating)("loss").check(3.5)
    assert golden.read(path)["loss"] == {"cuda": 1.5, (9, 0, "sdpa-bf16"): 3.5}
    at(Place("cuda", (8, 6)), **updating)("loss").check(4.5)
    assert golden.read(path)["loss"] == {"cuda": 1.5, (8, 6): 4.5, (9, 0, "sdpa-bf16"): 3.5}


def test_an_update_names_torch_where_a_key_does(tmp_path: Path) -> None:
    path = tmp_path / "test_it.json"
    path.write_text('{"loss": {"(9, 0, \'torch 2.13\')": 1.5}}')
    at(H100, folder=tmp_path, module="test_it", updates=True)("loss").check(2.5)
    assert golden.read(path)["loss"] == {(9, 0, "torch 2.13"): 1.5, (9, 0, "sdpa-bf16", "torch 2.13"): 2.5}
    at(H100, folder=tmp_path, module="test_it")("loss").check(2.5)


def test_two_values_of_one_name_in_one_update_are_a_failure(tmp_path: Path) -> None:
    run = at(H100, folder=tmp_path, module="test_it", updates=True)
    run("loss").check(1.5)
    run("loss").check(1.5)
    assert failed(lambda: run("loss").check(2.5)).startswith('[expectation-name] needs one value of "loss"')
    assert golden.read(tmp_path / "test_it.json")["loss"] == {(9, 0, "sdpa-bf16"): 1.5}


def test_nothing_vacuous_is_written(tmp_path: Path) -> None:
    run = at(H100, folder=tmp_path, module="test_it", updates=True)
    for value in (math.nan, [], torch.ones(0)):
        failed(lambda v=value: run("loss").check(v))  # type: ignore[misc]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"a": 1}',
        '{"a": {"cdua": 1}}',
        '{"a": {"(9, 0": 1}}',
        '{"a": {"cpu": NaN}}',
        '{"a": {}, "a": {}}',
        '{"a": {"cpu": 1, "cpu": 2}}',
        '{"a": {"[9, 0]": 1}}',
    ],
)
def test_what_is_no_golden_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_it.json").write_text(text)
    with pytest.raises(ValueError, match=r"test_it\.json is no golden file"):
        at(H100, folder=tmp_path, module="test_it")("a").check(1.0)


WRITER = """
import sys
from pathlib import Path
from pytest_cudaenv.verdict import golden
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 20):
    golden.write(Path(sys.argv[1]), f"name {number}", (9, 0), number)
"""


def test_processes_do_not_lose_each_others_values(tmp_path: Path) -> None:
    path = tmp_path / "expectations" / "test_it.json"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, str(20 * i)], env={**os.environ, "PYTHONPATH": ROOT}) for i in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert golden.read(path) == {f"name {number}": {(9, 0): number} for number in range(60)}
    json.loads(path.read_text())
