"""Whatever is killed at whatever moment: no test is lost or reported twice, no device stays locked, none is left."""

from __future__ import annotations

from pathlib import Path

from tests.isolation.storm import storm

KILLS = 20
"""`python -m tests.isolation.storm 200` is for those who have minutes."""


def test_a_storm_of_kills(tmp_path: Path) -> None:
    outcome = storm(tmp_path, KILLS, seed=1)
    assert outcome.kills.total() == KILLS
    assert len(outcome.kills) == 3
    assert not outcome.lost, outcome.output
    assert not outcome.twice, outcome.output
    assert not outcome.stuck
    assert not outcome.left
    assert "INTERNALERROR" not in outcome.output
