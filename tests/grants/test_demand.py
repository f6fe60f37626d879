"""Who may take which devices: cases, and properties of every decision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import GPUS, SIZES, A, B, C, GiB

from pytest_cudaenv.grants.demand import Demand, decide, waits_for_others


class TestDecide:
    """Who may take what, as a pure function."""

    def test_prefers_the_order_of_the_candidates(self) -> None:
        assert decide(Demand((C, A, B), 2), (), {C: [None]}) == (A, B)

    def test_all_or_none(self) -> None:
        assert decide(Demand((A, B), 2), (), {A: [None]}) is None

    def test_budgets_share_a_device_while_they_fit(self) -> None:
        five = Demand((A,), 1, 5 * GiB, SIZES)
        assert decide(five, (), {A: [5 * GiB] * 3}) == (A,)
        assert decide(replace(five, memory=20 * GiB), (), {A: [5 * GiB]}) is None
        assert decide(five, (), {A: [None]}) is None

    def test_whole_does_not_join_sharers(self) -> None:
        assert decide(Demand((A,), 1), (), {A: [1]}) is None

    @pytest.mark.parametrize("total", [{}, {A: 5 * GiB}, {A: 4 * GiB}], ids=["unknown", "equal", "smaller"])
    def test_a_budget_of_all_there_is_takes_the_device_whole(self, total: dict[str, int]) -> None:
        demand = Demand((A,), 1, 5 * GiB, total)
        assert demand.budget(A) is None
        assert decide(demand, (), {}) == (A,)
        assert decide(demand, (), {A: [1]}) is None

    def test_passes_an_earlier_request_that_needs_other_devices(self) -> None:
        assert decide(Demand((C,), 1), (Demand((A, B), 2),), {A: [None]}) == (C,)

    def test_takes_nothing_that_an_earlier_request_collects(self) -> None:
        assert decide(Demand((A, B), 1), (Demand((A, B), 2),), {A: [None]}) is None

    def test_takes_what_is_left_when_an_earlier_request_is_served(self) -> None:
        assert decide(Demand((A, B), 1), (Demand((A, B), 1),), {}) == (B,)

    def test_sharers_do_not_starve_one_who_wants_the_device_whole(self) -> None:
        small = Demand((A, B), 1, GiB, SIZES)
        whole = Demand((A, B), 1)
        assert decide(small, (whole,), {A: [GiB, GiB], B: [GiB]}) == (A,)  # B, with fewer sharers, is being emptied
        assert decide(replace(small, candidates=(B,)), (whole,), {A: [GiB, GiB], B: [GiB]}) is None

    def test_a_budget_that_waits_keeps_its_room(self) -> None:
        large = Demand((A,), 1, 20 * GiB, SIZES)
        assert decide(Demand((A,), 1, 4 * GiB, SIZES), (large,), {A: [10 * GiB]}) is None

    def test_other_runs_are_to_blame_only_where_our_own_would_not_do(self) -> None:
        one = Demand((A, B), 1)
        assert not waits_for_others(one, (), {A: [None]})  # B is held by our own run
        assert waits_for_others(one, (), {A: [None], B: [None]})

    def test_another_run_that_waits_is_to_blame_only_if_it_waits_for_others(self) -> None:
        pair = Demand((A, B), 2)
        assert not waits_for_others(Demand((A,), 1), (pair,), {})
        assert waits_for_others(Demand((A,), 1), (pair,), {B: [None]})


budgets = st.none() | st.integers(1, 30)
demands = st.builds(
    lambda uuids, count, memory: Demand(tuple(uuids), min(count, len(uuids)), memory, dict.fromkeys(GPUS, 24)),
    st.lists(st.sampled_from(GPUS), min_size=1, unique=True),
    st.integers(1, 4),
    budgets,
)


def legal(budgets: Sequence[int | None]) -> bool:
    return len(budgets) <= 1 or (None not in budgets and sum(b or 0 for b in budgets) <= 24)


held_states = st.fixed_dictionaries(
    {}, optional={u: st.lists(st.none() | st.integers(1, 23), max_size=4).filter(legal) for u in GPUS}
)


@given(demands, st.lists(demands, max_size=4), held_states)
def test_a_decision_is_legal(demand: Demand, ahead: list[Demand], held: dict[str, list[int | None]]) -> None:
    chosen = decide(demand, ahead, held)
    if chosen is None:
        return
    assert len(set(chosen)) == demand.count
    assert list(chosen) == [uuid for uuid in demand.candidates if uuid in chosen]
    assert all(legal([*held.get(uuid, []), demand.budget(uuid)]) for uuid in chosen)


@given(demands, st.lists(demands, max_size=4), held_states)
def test_a_decision_delays_nobody_ahead(demand: Demand, ahead: list[Demand], held: dict[str, list[int | None]]) -> None:
    """Each of those ahead, asked in turn, has as many fitting devices after the decision as before it."""
    chosen = decide(demand, ahead, held)
    if chosen is None:
        return
    before, after = dict(held), {u: [*held.get(u, []), *([demand.budget(u)] if u in chosen else [])] for u in GPUS}
    for earlier in ahead:
        fits = earlier.fitting(before)
        assert len(earlier.fitting(after)) >= len(fits)
        for state in (before, after):
            for uuid in fits:
                state[uuid] = [*state.get(uuid, []), earlier.budget(uuid)]


@given(demands, held_states)
def test_without_a_queue_whatever_fits_is_taken_at_once(demand: Demand, held: dict[str, list[int | None]]) -> None:
    fits = sum(legal([*held.get(uuid, []), demand.budget(uuid)]) for uuid in demand.candidates)
    assert (decide(demand, (), held) is not None) == (fits >= demand.count)


@given(st.lists(demands, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_everybody_is_served_however_many_come_after(requests: list[Demand], chance: random.Random) -> None:
    """Small requests keep coming for ever; each of the first ones is served while they do."""
    queue = list(enumerate(requests))
    running: list[tuple[Demand, tuple[str, ...], int]] = []
    small = Demand(GPUS, 1, 1, dict.fromkeys(GPUS, 24))
    waited_for = {n for n, _ in queue}
    for now in range(2000):
        running = [(d, uuids, end) for d, uuids, end in running if end > now]
        queue.append((len(requests) + now, small))
        for entry in chance.sample(queue, len(queue)):
            ahead = [demand for number, demand in queue if number < entry[0]]
            held = {u: [d.budget(u) for d, uuids, _ in running if u in uuids] for u in GPUS}
            chosen = decide(entry[1], ahead, held)
            if chosen is not None:
                assert all(legal([*held[u], entry[1].budget(u)]) for u in chosen)
                running.append((entry[1], chosen, now + chance.randint(1, 4)))
                queue.remove(entry)
                waited_for.discard(entry[0])
        if not waited_for:
            return
    pytest.fail(f"starved: {waited_for}")
