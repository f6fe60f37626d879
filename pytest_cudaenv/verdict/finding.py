"""A finding: what was seen of a test that its own assertions do not see."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a test, even if it passed: a failure under `--cuda-strict`, else told at the end."""

    code: str
    """Stable, as a reason's: `state-leak`."""
    text: str
    """Need and have, on one line."""
    remedy: str
    is_failure: bool = False
    """Whether the test fails for it in any case."""

    def __str__(self) -> str:
        return f"[{self.code}] {self.text}. {self.remedy}"

    def as_data(self) -> dict[str, Any]:
        """As reports and ledgers carry it."""
        return {name: value for name, value in asdict(self).items() if name != "is_failure"}
