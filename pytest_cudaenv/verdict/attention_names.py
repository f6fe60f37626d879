"""Names of attention that a test asks about: one that nobody knows is a slip, and not something that never ran."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from pytest_cudaenv.requirements.attention import UnknownBackendError, backend_name, registered
from pytest_cudaenv.requirements.names import spelled, unknown_name
from pytest_cudaenv.verdict.attention_ops import KERNELS, canonical
from pytest_cudaenv.verdict.attention_taps import MODELING, NOTHING_KNOWN
from pytest_cudaenv.verdict.coded import CodedError

NATIVE = "native_mha"
"""What the witness calls the fast path of torch's own modules."""


class UnknownAttentionError(CodedError, ValueError):
    """A name that is neither an attention backend nor a kernel of sdpa. `code` is `witness-name`."""


def known_backend(name: str, seen: Iterable[str] = ()) -> str:
    """The canonical name of a backend; `seen` are names of calls that were seen, which are known by that.

    Known are those of markers (a project's own by the hook, and Hub kernels, included) and what is registered in
    transformers' `AttentionInterface`. Raises UnknownAttentionError, which says what may have been meant.
    """
    found = canonical(name) if isinstance(name, str) else name
    others = {*seen, *in_transformers(), NATIVE, NOTHING_KNOWN}
    if found in others:
        return found
    try:
        backend_name(found)
    except UnknownBackendError:
        raise _unknown(name, "attention backend", others) from None
    return found


def known_kernel(name: str) -> str:
    """A kernel of sdpa, as it is. Raises UnknownAttentionError, which says what may have been meant."""
    if name in KERNELS:
        return name
    text = unknown_name("kernel of sdpa", name, spelled((kernel, kernel) for kernel in KERNELS), ", ".join(KERNELS))
    raise UnknownAttentionError("witness-name", text)


def known_name(name: str, seen: Iterable[str] = ()) -> str:
    """A backend's canonical name, or a kernel of sdpa. Raises UnknownAttentionError."""
    if name in KERNELS:
        return name
    try:
        return known_backend(name, seen)
    except UnknownAttentionError:
        raise _unknown(name, "attention backend or kernel of sdpa", {*seen, *in_transformers(), *KERNELS}) from None


def in_transformers() -> frozenset[str]:
    """The names in transformers' registry, if this process has imported it."""
    modeling = sys.modules.get(MODELING)
    names: set[str] = set()
    for registry in (
        getattr(modeling, "AttentionInterface", None),
        getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None),
    ):
        for table in ("_global_mapping", "_local_mapping"):
            names |= {str(name) for name in getattr(registry, table, None) or ()}
    return frozenset(names)


def _unknown(name: object, kind: str, others: Iterable[str]) -> UnknownAttentionError:
    known = registered()
    also = sorted(set(others) - known.keys() - {NATIVE, NOTHING_KNOWN})
    pairs = [(spelling, b.name) for b in known.values() for spelling in (b.name, *b.aliases)]
    choices = ", ".join([*known, *(n for n in also if not n.startswith("paged|"))])
    spellings = spelled([*pairs, *((other, other) for other in also)])
    text = unknown_name(kind, name, spellings, f"{choices}, or a Hub kernel org/name[@revision][:function]")
    return UnknownAttentionError("witness-name", text)
