"""Which key is meant: a table, and what holds of every set of keys."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.verdict.expectation_keys import (
    InvalidKeyError,
    Key,
    Place,
    best,
    parse_key,
    read_key,
    write_key,
)

H100 = Place("cuda", (9, 0), "sdpa-bf16", "2.13")
A10G = Place("cuda", (8, 6), "sdpa-bf16", "2.13")
CPU = Place("cpu", None, "sdpa-fp32", "2.13")


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ((9, 0), Key("cuda", 9, 0)),
        ((8, None), Key("cuda", 8)),
        ("cpu", Key("cpu")),
        ("cuda", Key("cuda")),
        (None, Key()),
        ("default", Key()),
        # As transformers spells them.
        ((None, None), Key()),
        (("cuda", None), Key("cuda")),
        (("cuda", 8), Key("cuda", 8)),
        (("cuda", (8, 6)), Key("cuda", 8, 6)),
        (("cuda", (8, None)), Key("cuda", 8)),
        (("rocm", (9, 4)), Key("rocm", 9, 4)),
        (("xpu", 3), Key("xpu", 3)),
        (("cpu", None), Key("cpu")),
        # With a cell and a release.
        ((9, 0, "sdpa-bf16"), Key("cuda", 9, 0, "sdpa", "bf16")),
        ((8, None, "bf16", "torch 2.13"), Key("cuda", 8, None, None, "bf16", "2.13")),
        (("cpu", "torch2.9"), Key("cpu", torch="2.9")),
        (("cuda", (8, 6), "flash_attention_2"), Key("cuda", 8, 6, "flash_attention_2")),
        ((None, "eager-fp32"), Key(None, None, None, "eager", "fp32")),
        (("default", "fp32"), Key(dtype="fp32")),
        ((9, 0, "kernels-community/flash-attn3-bf16"), Key("cuda", 9, 0, "kernels-community/flash-attn3", "bf16")),
    ],
)  # fmt: skip
def test_what_a_key_names(key: Hashable, named: Key) -> None:
    assert parse_key(key) == named
    assert parse_key(read_key(write_key(key))) == named


@pytest.mark.parametrize(
    "key",
    [9, 9.0, (9,), (), "cdua", "bf16", (9, "0"), (True, 0), ("cpu", 8), ("cpu", (8, 0)), ("cuda", (8, 6, 1)), (9, 0, 1),
     (9, 0, "sdpa", "bf16"), (9, 0, ""), (9, 0, "torch 2"), (9, 0, "torch 2.1", "torch 2.2"), (None, 9), (-1, 0),
     ("cuda", 8, 6), (9, 0, None), ("cuda", (None, 6))],
)  # fmt: skip
def test_what_is_no_key_is_refused_with_the_grammar(key: Hashable) -> None:
    with pytest.raises(InvalidKeyError, match="write \\(major, minor\\)"):
        best([(9, 0), key], H100)


@pytest.mark.parametrize(
    ("place", "keys", "match"),
    [
        (H100, [(9, 0), (9, None), "cuda", None, "cpu"], (9, 0)),
        (A10G, [(8, 0), (8, None), "cuda", None], (8, None)),
        (A10G, [(8, 0), (9, 0), ("cuda", None), None], ("cuda", None)),
        (A10G, [(8, 0), (9, None), "cpu", None], None),
        (CPU, [(9, 0), "cpu", None], "cpu"),
        (CPU, [(9, 0), "cuda", "default"], "default"),
        (H100, [(9, 0), (9, 0, "sdpa-bf16"), (9, 0, "eager-bf16")], (9, 0, "sdpa-bf16")),
        (H100, [(9, 0, "bf16"), (9, 0, "sdpa-bf16"), (9, 0, "sdpa")], (9, 0, "sdpa-bf16")),
        (H100, [(9, 0, "fp32"), (9, 0)], (9, 0)),
        (H100, [(9, 0, "torch 2.13"), (9, 0, "torch 2.12"), (9, 0)], (9, 0, "torch 2.13")),
        (H100, [(9, None, "sdpa"), (9, 0), (9, 0, "sdpa")], (9, 0, "sdpa")),
        (Place("cuda", None), [(9, 0), "cuda"], "cuda"),
        (Place("cuda", (9, 0)), [(9, 0, "sdpa"), (9, None)], (9, None)),
        # transformers' own suite: no value of another vendor, and none of another generation.
        (H100, [("rocm", (9, 4)), ("cuda", 8), (None, None)], (None, None)),
    ],
)
def test_the_key_that_is_meant(place: Place, keys: list[Hashable], match: Hashable) -> None:
    assert best(keys, place) == [match]


@pytest.mark.parametrize(
    ("place", "keys"),
    [
        (H100, []),
        (H100, [(8, None), (9, 4), "cpu", ("rocm", (9, 0)), ("cuda", (8, 0)), (9, 0, "eager-bf16")]),
        (CPU, [(9, 0), "cuda", ("xpu", None)]),
    ],
)
def test_nothing_matches_from_afar(place: Place, keys: list[Hashable]) -> None:
    assert best(keys, place) == []


@pytest.mark.parametrize(
    ("place", "keys", "equal"),
    [
        (H100, [(9, 0), ("cuda", (9, 0)), None], [(9, 0), ("cuda", (9, 0))]),
        (H100, [(9, 0, "sdpa"), (9, 0, "bf16"), (9, 0)], [(9, 0, "sdpa"), (9, 0, "bf16")]),
        (H100, [(9, 0), (9, None, "sdpa-bf16")], [(9, 0), (9, None, "sdpa-bf16")]),
        (CPU, [None, "default"], [None, "default"]),
    ],
)
def test_keys_of_which_none_names_more_are_equally_good(
    place: Place, keys: list[Hashable], equal: list[Hashable]
) -> None:
    assert best(keys, place) == equal


_refinements = st.lists(
    st.sampled_from(["sdpa-bf16", "sdpa", "bf16", "eager-fp32", "fp32", "torch 2.13", "torch 2.12"]), max_size=2
).filter(lambda parts: sum(p.startswith("torch") for p in parts) == len(parts) // 2)
_heads = st.one_of(
    st.tuples(st.integers(7, 10), st.one_of(st.none(), st.integers(0, 6))),
    st.sampled_from([("cpu",), ("cuda",), (None,), ("cuda", 8), ("cuda", (8, 6)), ("cuda", (9, 0)), ("rocm", 9)]),
)
keys_of_all_kinds = st.builds(lambda head, rest: (*head, *rest), _heads, _refinements)
places = st.builds(
    lambda capability, cell, torch: Place("cpu" if capability is None else "cuda", capability, cell, torch),
    st.one_of(st.none(), st.sampled_from([(8, 0), (8, 6), (9, 0), (10, 0)])),
    st.sampled_from([None, "sdpa-bf16", "eager-fp32", "sdpa-fp32", "bf16", "sdpa"]),
    st.sampled_from([None, "2.13", "2.12"]),
)
several = st.lists(keys_of_all_kinds, max_size=6, unique=True)


@given(several, places, st.randoms(use_true_random=False))
def test_the_order_of_the_keys_does_not_matter(keys: list[Hashable], place: Place, random: object) -> None:
    shuffled = list(keys)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert set(best(keys, place)) == set(best(shuffled, place))


@given(several, places)
def test_what_is_meant_fits_and_nothing_that_fits_is_better(keys: list[Hashable], place: Place) -> None:
    found = best(keys, place)
    fitting = [key for key in keys if parse_key(key).fits(place)]
    assert bool(found) == bool(fitting)
    assert set(found) <= set(fitting)
    if len(found) == 1:
        assert all(parse_key(found[0]).names_all_of(parse_key(key)) for key in fitting)


@given(several, places)
def test_a_key_that_does_not_fit_changes_nothing(keys: list[Hashable], place: Place) -> None:
    assert best(keys, place) == best([key for key in keys if parse_key(key).fits(place)], place)


@given(several, places)
def test_the_exact_key_beats_every_other(keys: list[Hashable], place: Place) -> None:
    """What is told to be pasted is the one that is meant from then on."""
    exact = place.key(keys)
    assert parse_key(exact).fits(place)
    others = [key for key in keys if parse_key(key) != parse_key(exact)]
    assert best([*others, exact], place) == [exact]


@given(keys_of_all_kinds)
def test_a_key_reads_as_it_was_written(key: Hashable) -> None:
    assert read_key(write_key(key)) == key
