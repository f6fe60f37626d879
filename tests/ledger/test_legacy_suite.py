"""A suite that knows nothing of the plugin, adopted by its ini file alone: what becomes of each test on three hosts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("parameterized")

SUITE = Path(__file__).parents[2] / "examples" / "adoption"
EXPECTED: dict[str, Any] = json.loads((SUITE / "expected.json").read_text())


def test_the_suite_knows_nothing_of_the_plugin() -> None:
    sources = sorted((SUITE / "tests").glob("*.py"))
    assert sources
    for path in sources:
        assert "cudaenv" not in path.read_text()


@pytest.mark.parametrize("host", EXPECTED["hosts"])
def test_every_test_is_classified(
    pytester: pytest.Pytester,
    run: Callable[..., tuple[pytest.RunResult, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    host: str,
) -> None:
    shutil.copytree(SUITE, pytester.path, dirs_exist_ok=True)
    monkeypatch.setenv("FABRICATED", host)
    _, outcomes = run(*([] if host == "cpu" else ["--cuda-simulate", host]))
    place = EXPECTED["hosts"].index(host)
    seen = {}
    for nodeid, found in outcomes.items():
        passed = found["outcome"] == "passed"
        assert passed or found["outcome"] == "skipped", (nodeid, found)
        seen[nodeid] = (found["ran_on"] or "passed") if passed else " ".join(found["codes"])
    assert seen == {nodeid: by_host[place] for nodeid, by_host in EXPECTED["tests"].items()}
    assert len(seen) >= 60
