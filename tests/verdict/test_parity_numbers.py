"""The comparison alone: rows, masks, floor, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pytest_cudaenv.verdict import parity_numbers as numbers  # noqa: E402
from pytest_cudaenv.verdict.parity_numbers import (  # noqa: E402
    Leaf,
    ParityError,
    Rule,
    compare,
    floor,
    leaves,
    limits,
    unravel,
    worst,
)

SETTINGS = settings(deadline=None, database=None, max_examples=60)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def noisy(seed: int, shape: tuple[int, ...], dtype: object, scale: float = 1.0) -> tuple[Leaf, Leaf, Leaf]:
    """Candidate, reference and low reference, each rounded on a way of its own."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    eps = torch.finfo(dtype).eps
    sides = [
        (reference * (1 + eps * torch.randn(shape, generator=generator, dtype=torch.float64))).to(dtype)
        for _ in range(2)
    ]
    return Leaf(sides[0]), Leaf(reference), Leaf(sides[1])


def check(candidate: Leaf, reference: Leaf, low: Leaf | None, dtype: object, **more: object) -> list[numbers.Row]:
    return compare(
        {"x": candidate}, {"x": reference}, None if low is None else {"x": low}, Rule(dtype), **{"batch": None} | more
    )


@SETTINGS
@given(st.integers(0, 10**6), DTYPES, st.integers(0, 6), st.integers(0, 4), st.sampled_from([1e-4, 1.0, 1e3]))
def test_one_wrong_element_fails_its_row_and_no_other(
    seed: int, dtype: object, row: int, place: int, scale: float
) -> None:
    candidate, reference, low = noisy(seed, (7, 5, 16), dtype, scale)
    candidate.tensor[row, place, 3] += 0.25 * scale
    wrong = [r.row for r in check(candidate, reference, low, dtype, batch=7) if r.ratio > 1]
    assert row in wrong
    at = numbers.worst(check(candidate, reference, low, dtype, batch=7))
    assert (at.row, at.index) == (row, (row, place, 3))


@SETTINGS
@given(st.integers(0, 10**6), DTYPES, st.integers(1, 5))
def test_masked_positions_do_not_count_and_all_others_do(seed: int, dtype: object, hidden: int) -> None:
    candidate, reference, low = noisy(seed, (3, 6, 8), dtype)
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, :hidden] = 0
    clean = check(candidate, reference, low, dtype, batch=3, mask=mask)
    candidate.tensor[1, :hidden] = float("nan")
    reference.tensor[1, 0] = 1e6
    assert check(candidate, reference, low, dtype, batch=3, mask=mask) == clean
    assert [r.count for r in clean] == [48, 48 - 8 * hidden, 48]
    candidate.tensor[1, hidden, 0] += 1
    assert check(candidate, reference, low, dtype, batch=3, mask=mask)[1].ratio > 1


@SETTINGS
@given(st.integers(0, 10**6), DTYPES, st.sampled_from([1e-6, 1e-3, 0.5, 1.0, 40.0]))
def test_the_floor_is_about_one_rounding_of_the_largest_value(seed: int, dtype: object, scale: float) -> None:
    reference = noisy(seed, (64,), dtype, scale)[1].tensor
    largest = float(reference.abs().max())
    eps = torch.finfo(dtype).eps
    assert largest * eps / 2 <= floor(reference, dtype) <= 4 * max(largest, min(1, largest)) * eps


def test_the_floor_of_values_around_one_is_flash_attentions() -> None:
    x = torch.linspace(-1, 1, 33, dtype=torch.float64)
    low = x.bfloat16()
    assert floor(x, torch.bfloat16) == 2 * float(((low + 0.3 - 0.3) - low).abs().max())
    assert floor(torch.zeros(3, dtype=torch.float64), torch.bfloat16) == 0


@SETTINGS
@given(st.lists(st.floats(0, 1e3), min_size=4, max_size=20), st.floats(0.5, 4))
def test_a_hard_row_gives_no_other_row_more_room(low: list[float], k: float) -> None:
    low.sort()
    before = limits(low, [0.0] * len(low), k)
    after = limits([*low[:-1], low[-1] * 1000 + 1], [0.0] * len(low), k)
    assert after[:-1] == before[:-1]
    assert all(allowed >= k * own for allowed, own in zip(before, low, strict=True))


@SETTINGS
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_three_of_four_do_not_exceed_the_upper_quartile(values: list[float]) -> None:
    quartile = numbers.upper_quartile(values)
    assert 4 * sum(value <= quartile for value in values) >= 3 * len(values)
    assert len(values) < 4 or 4 * sum(value >= quartile for value in values) >= len(values)
    assert quartile in values


def test_a_gradient_that_is_only_the_rest_of_larger_ones_is_not_judged_by_itself() -> None:
    reference, low = Leaf(torch.full((4,), 1e-9)), Leaf(torch.tensor([1e-4, 2e-4, -1e-4, 3e-4]))
    candidate = Leaf(torch.tensor([-12e-4, 2e-4, -1e-4, 3e-4]))
    reference.tensor[0] = 2e-9
    for scale, is_right in ((1e-6, False), (1.0, True)):
        rule = Rule(torch.bfloat16, k=3, scale=scale)
        (row,) = compare({"x": candidate}, {"x": reference}, {"x": low}, rule)
        assert (row.ratio <= 1) == is_right
    exact = {"x": reference, "y": Leaf(torch.tensor([1.0, 2.0])), "z": Leaf(torch.tensor([1.0, 2.0]))}
    off = {"x": low, "y": Leaf(torch.tensor([1.0, 2.02])), "z": Leaf(torch.tensor([1.0, 2.002]))}
    assert numbers.typical_error(exact, off) == pytest.approx(0.01, rel=1e-4)


@SETTINGS
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_unravel_is_the_index(shape: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, math.prod(shape) - 1))
    flat = torch.arange(math.prod(shape)).reshape(shape)
    assert int(flat[unravel(position, shape)]) == position


def test_what_proves_nothing_is_refused_by_name() -> None:
    good = noisy(0, (2, 3), torch.float32)
    nan = Leaf(good[1].tensor.clone())
    nan.tensor[0, 1] = float("nan")
    cases = {
        "parity-empty": (Leaf(torch.empty(0, 5)), Leaf(torch.empty(0, 5))),
        "parity-constant": (Leaf(torch.ones(2, 3)), Leaf(torch.ones(2, 3))),
        "parity-nonfinite": (Leaf(nan.tensor.clone()), nan),
        "parity-same-storage": (Leaf(good[1].tensor), Leaf(good[1].tensor.view(2, 3))),
        "parity-shape": (Leaf(torch.rand(2, 4)), good[1]),
    }
    for code, (candidate, reference) in cases.items():
        with pytest.raises(ParityError) as caught:
            check(candidate, reference, None, torch.float32)
        assert caught.value.code == code
    with pytest.raises(ParityError, match=r"no floating-point tensor") as caught:
        compare({}, {}, None, Rule(torch.float32))
    with pytest.raises(ParityError, match=r"hides every position of row 1\b") as caught:
        check(*good, torch.float32, batch=2, mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    assert caught.value.code == "parity-all-masked"


def test_nan_in_the_low_reference_alone_is_refused_too() -> None:
    """Any error would be within what is allowed."""
    candidate, reference, low = noisy(0, (2, 3), torch.float16)
    low.tensor[1, 1] = float("inf")
    with pytest.raises(ParityError, match="not finite in the low reference: inf at"):
        check(candidate, reference, low, torch.float16)


def test_leaves_of_nested_outputs_and_caches() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), 0)
    output = {"logits": torch.rand(1), "ids": torch.arange(3), "deep": (None, [torch.rand(2)]), "cache": cache}
    found = numbers.leaves(output)
    assert list(found) == ["logits", "deep[1][0]", "cache.keys[0]", "cache.values[0]"]
    assert found["cache.keys[0]"].sequence == 2
    assert list(numbers.leaves(torch.rand(2))) == ["output"]


def test_a_table_is_judged_element_by_element() -> None:
    reference = torch.tensor([[1.0, 1000.0]], dtype=torch.float64)
    candidate = torch.tensor([[1.1, 1000.5]])
    rule = Rule(torch.float32, table=(1e-3, 1e-3))
    (row,) = compare({"x": Leaf(candidate)}, {"x": Leaf(reference)}, None, rule, batch=1)
    assert row.index == (0, 0)
    assert row.ratio == pytest.approx(50, rel=1e-3)


@pytest.mark.parametrize(
    ("low_error", "error", "is_right"), [(0.0, 3e-6, True), (0.0, 3e-4, False), (1e-3, 1e-3, True)]
)
def test_a_number_whose_low_error_is_nothing_by_chance(low_error: float, error: float, is_right: bool) -> None:
    """A loss is one draw: its own low error may be nothing, though rounding is as everywhere in the output."""
    logits = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(4, 16)
    loss = torch.tensor(4.8, dtype=torch.float64)
    noise = 1e-6 * torch.linspace(1, -1, 64, dtype=torch.float64).reshape(4, 16)
    reference = leaves({"loss": loss, "logits": logits})
    low = leaves({"loss": loss + low_error, "logits": logits + noise})
    candidate = leaves({"loss": loss + error, "logits": logits - noise})
    rows = compare(candidate, reference, low, Rule(torch.float32), batch=4)
    assert [row.path for row in rows] == ["loss"] + ["logits"] * 4
    assert (worst(rows).ratio <= 1) is is_right
