"""The kernel report: for each layer and function that a kernel can replace, what ran in its place, and why.

Pure: rows go in as facts; `kernel_rows` reads them off a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_cudaenv.verdict.coded import CodedError

Status = Literal["kernel", "original", "untouched"]

LISTED = 8
"""Rows that a message names before it counts the rest."""


class KernelReportError(CodedError, AssertionError):
    """A kernel was to replace something, and did not. `code` is stable: `kernels-not-replaced`."""


@dataclass(frozen=True)
class Replacement:
    """One layer or function that a kernel can replace, and what runs in its place."""

    name: str
    """Where it is in the model: `model.layers.0.input_layernorm`; functions of a layer end in the function's name."""
    layer_name: str
    """The mapping's key for it: `RMSNorm`, `rotary_pos_emb`."""
    status: Status
    """A kernel's forward, its own forward that a fallback bound again, or nothing was done to it."""
    repository: str | None = None
    """`org/name` of the Hub, or the folder of a local kernel."""
    revision: str | None = None
    """`v1`, a branch, or a commit; None for a local kernel."""
    variant: str | None = None
    """The build variant: `torch213-cxx11-cu130-x86_64-linux`."""
    file: str | None = None
    """The file of the code that ran."""
    mode: str | None = None
    """What it was last replaced for: `INFERENCE`, `TRAINING`, `TRAINING|TORCH_COMPILE`."""
    calls: int = 0
    """How often it ran since it was replaced."""
    reason: str | None = None
    """Why it is not on a kernel: `[code] …`."""
    is_function: bool = False
    """A function is one object for every model of the process."""
    has_backward: bool | None = None
    """What the kernel claims; None: it is not on one."""
    can_torch_compile: bool | None = None

    @property
    def is_replaced(self) -> bool:
        return self.status == "kernel"


class KernelReport:
    """What kernels replaced; it goes on counting until its block ends.

    `kernels` is "on" or "off": off, every assertion holds only if no kernel ran.
    """

    def __init__(
        self, read: Callable[[], Iterable[Replacement]], *, kernels: Literal["on", "off"] = "on", counted: bool = True
    ) -> None:
        self._read: Callable[[], Iterable[Replacement]] | None = read
        self._rows: tuple[Replacement, ...] = ()
        self.kernels = kernels
        self.counted = counted
        """Whether calls are counted; under `torch.compile` they cannot be."""
        self.modes: list[str] = []
        """The modes that kernels were chosen for, oldest first; `train()` and `eval()` add to them."""
        self.is_watched = False
        """Whether transformers put the kernels in; a report without rows then says nothing of the model."""

    @classmethod
    def of(cls, rows: Sequence[Replacement], **facts: Any) -> KernelReport:
        """A report of rows that change no more."""
        return cls(lambda: rows, **facts)

    def freeze(self) -> None:
        """Keep the rows as they are now: what they are read off is about to be put back."""
        self._rows, self._read = self.rows, None

    @property
    def rows(self) -> tuple[Replacement, ...]:
        """Every layer and function that a kernel can replace."""
        return self._rows if self._read is None else tuple(self._read())

    @property
    def replaced(self) -> tuple[Replacement, ...]:
        """Those that run a kernel."""
        return tuple(row for row in self.rows if row.is_replaced)

    @property
    def fell_back(self) -> tuple[Replacement, ...]:
        """Those that do not."""
        return tuple(row for row in self.rows if not row.is_replaced)

    def assert_replaced(self, *names: str, executed: bool = True) -> None:
        """Every layer of these layer names runs a kernel and, with `executed`, has run at least once.

        Without names: whatever was replaced, which must be something. Raises KernelReportError.
        """
        if self.kernels == "off":
            return self._assert_off()
        rows = self.rows
        known = sorted({row.layer_name for row in rows})
        for name in names:
            if name not in known:
                raise KernelReportError("kernels-layer", f"no {name} that a kernel can replace; have {_listed(known)}")
        chosen = [row for row in rows if (row.layer_name in names if names else row.is_replaced)]
        if not chosen:
            raise KernelReportError("kernels-not-replaced", f"no kernel replaced anything; have {_listed(known)}")
        wrong = [row for row in chosen if not row.is_replaced]
        if wrong:
            count = f"{len(wrong)} of {len(chosen)} {_listed(sorted({row.layer_name for row in wrong}))}"
            raise KernelReportError("kernels-not-replaced", f"{count} run without a kernel{_why(wrong)}")
        if executed:
            self._assert_executed(chosen)

    def _assert_executed(self, rows: Sequence[Replacement]) -> None:
        if not self.counted:
            text = "calls are not counted under torch.compile: pass executed=False, or run the model eagerly"
            raise KernelReportError("kernels-uncounted", text)
        if idle := [row for row in rows if not row.calls]:
            count = f"{len(idle)} of {len(rows)} {_listed(sorted({row.layer_name for row in idle}))}"
            raise KernelReportError("kernels-not-executed", f"{count} were replaced and never ran{_why(idle)}")

    def assert_no_fallback(self, allow: Collection[str] = ()) -> None:
        """Everything that a kernel can replace runs one, but for the layer names in `allow`.

        Raises KernelReportError.
        """
        if self.kernels == "off":
            return self._assert_off()
        allowed = {allow} if isinstance(allow, str) else set(allow)
        rows = self.rows
        if not rows:
            raise KernelReportError("kernels-none", "nothing here that a kernel can replace")
        if wrong := [row for row in rows if not row.is_replaced and row.layer_name not in allowed]:
            names = _listed(sorted({row.layer_name for row in wrong}))
            raise KernelReportError("kernels-fallback", f"{len(wrong)} of {len(rows)} fell back: {names}{_why(wrong)}")

    def _assert_off(self) -> None:
        if ran := self.replaced:
            names = _listed(sorted({row.layer_name for row in ran}))
            raise KernelReportError("kernels-not-off", f"kernels are off, and {len(ran)} layers run one: {names}")

    def table(self) -> str:
        """The rows as text, one line each, equal ones counted together."""
        empty = "transformers had replaced nothing" if self.is_watched else "nothing that a kernel can replace"
        return "\n".join(_table(self.rows)) or empty

    @property
    def title(self) -> str:
        """What stands above its table."""
        return f"Hub kernels {'watched' if self.is_watched else self.kernels}"

    __str__ = table

    def as_data(self) -> dict[str, Any]:
        """As reports and ledgers carry it: equal rows counted together, `layers` says how many they are."""
        rows = self.rows
        groups: dict[tuple[Any, ...], list[Replacement]] = {}
        for row in rows:
            key = (row.layer_name, row.status, row.repository, row.revision, row.variant, row.mode, row.reason)
            groups.setdefault(key, []).append(row)
        return {
            "kernels": self.kernels,
            "replaced": sum(row.is_replaced for row in rows),
            "fell_back": sum(not row.is_replaced for row in rows),
            "modes": list(self.modes),
            "rows": [_grouped(group) for group in groups.values()],
        }


def _grouped(rows: Sequence[Replacement]) -> dict[str, Any]:
    first = rows[0]
    data = {
        "layer_name": first.layer_name,
        "status": first.status,
        "layers": len(rows),
        "calls": sum(row.calls for row in rows),
        "first": first.name,
        "repository": first.repository,
        "revision": first.revision,
        "variant": first.variant,
        "file": first.file,
        "mode": first.mode,
        "reason": first.reason,
    }
    return {name: value for name, value in data.items() if value is not None}


def _table(rows: Sequence[Replacement]) -> list[str]:
    head = ("layer", "name", "status", "kernel", "variant", "mode", "calls")
    lines = [head] + [
        (
            row.layer_name,
            row.name or "(the model)",
            row.status,
            "-" if row.repository is None else row.repository + (f"@{row.revision}" if row.revision else ""),
            row.variant or "-",
            row.mode or "-",
            str(row.calls),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if not rows:
        return []
    reasons = Counter((row.layer_name, row.reason) for row in rows if row.reason)
    return told + [f"{count} x {name}: {reason}" for (name, reason), count in reasons.items()]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _why(rows: Sequence[Replacement]) -> str:
    """The rows with their reasons, for the end of a message."""
    lines = [f"\n  {row.name}: {row.status}" + (f", {row.reason}" if row.reason else "") for row in rows[:LISTED]]
    rest = len(rows) - LISTED
    return "".join(lines) + (f"\n  and {rest} more" if rest > 0 else "")
