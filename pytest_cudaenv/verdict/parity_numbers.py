"""Comparing two sets of tensors against a third: which leaves, which positions, row by row. Pure; knows no model.

The rule is FlashAttention's: a candidate is right if it is about as far from a reference in higher precision as the
plain computation in its own precision is. See `limits` for what is added to it and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from pytest_cudaenv.verdict.coded import CodedError

SHIFT = 0.3
"""Added and taken away again to measure rounding, as in FlashAttention-3's tests."""


class ParityError(CodedError, AssertionError):
    """Numbers that are wrong, or a comparison that would prove nothing. `code` is stable: `parity-empty`."""


FEW = 16
"""Elements below which a leaf's own low error says little: a loss's is one draw, and may be nothing by chance."""

IS_REST = 0.5
"""Low error as a share of the largest value from which a leaf is nothing but rounding."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of an output, and where its rows have their sequence."""

    tensor: Any
    sequence: int | None = None
    """The axis of the sequence where the kind of output decides it (keys and values of a cache); None: by its size."""


@dataclass(frozen=True)
class Row:
    """One row of the batch in one leaf; or a whole leaf, where it has no batch axis."""

    path: str
    row: int | None
    error: float
    """Largest distance of the candidate from the reference."""
    reference_error: float
    """The same of the low reference; NaN where there is none."""
    floor: float
    limit: float
    index: tuple[int, ...]
    """Where the error is, in the leaf."""
    count: int
    """How many elements were compared."""

    @property
    def ratio(self) -> float:
        """The error as a share of what is allowed: above 1 the row is wrong."""
        if self.error == 0:
            return 0.0
        return self.error / self.limit if self.limit > 0 else float("inf")


@dataclass(frozen=True)
class Rule:
    """How far a candidate may be off."""

    dtype: Any
    """The candidate's precision, in which rounding is measured."""
    k: float = 2.0
    table: tuple[float, float] | None = None
    """(rtol, atol) in place of a low reference."""
    ulps: float | None = None
    """In place of a low reference: units of the last place of the row's largest value."""
    typical: float = 0.0
    """See `typical_error`: what a low error is taken for at least, as a share of the row's largest value."""
    scale: float = 0.0
    """The largest value of all leaves together, where they are terms of one computation (gradients).

    Some are nothing but the rest of large terms that cancel out (of a key's bias, which no softmax feels): eager itself
    gets them wrong altogether, and only what they are small against can tell how large a rest may be.
    """


def leaves(output: Any, path: str = "") -> dict[str, Leaf]:
    """The floating-point tensors of an output by their paths: tuples, mappings, dataclasses, caches, nested."""
    found = all_leaves(output, path)
    return {name: leaf for name, leaf in found if leaf.sequence is not None or leaf.tensor.is_floating_point()}


def all_leaves(output: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """The same of every tensor, whatever its numbers are."""
    if hasattr(output, "is_floating_point") and hasattr(output, "shape"):
        yield path or "output", Leaf(output)
    elif isinstance(output, Mapping):
        for name, value in output.items():
            yield from all_leaves(value, f"{path}.{name}" if path else str(name))
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from all_leaves(value, f"{path}[{index}]")
    elif (cached := cache_tensors(output)) is not None:
        for name, value in cached:
            yield f"{path or 'cache'}.{name}", Leaf(value, value.dim() - 2)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from all_leaves(getattr(output, field.name), f"{path}.{field.name}" if path else field.name)


def cache_tensors(output: Any) -> list[tuple[str, Any]] | None:
    """Keys and values of one of transformers' caches, layer by layer; None for anything else."""
    parts = [output]
    if hasattr(output, "self_attention_cache") and hasattr(output, "cross_attention_cache"):
        parts = [output.self_attention_cache, output.cross_attention_cache]
    if not all(isinstance(getattr(part, "layers", None), list) and hasattr(part, "update") for part in parts):
        return None
    found: list[tuple[str, Any]] = []
    for part in parts:
        prefix = "" if part is parts[0] else "cross."
        for index, layer in enumerate(part.layers):
            for name in ("keys", "values"):
                tensor: Any = getattr(layer, name, None)
                if hasattr(tensor, "is_floating_point") and tensor.dim() >= 2 and tensor.numel():
                    found.append((f"{prefix}{name}[{index}]", tensor))
    return found


def floor(reference: Any, dtype: Any) -> float:
    """What rounding alone does to values of this size: `2 * max|(x + 0.3 - 0.3) - x|` in a dtype.

    Values that are all below 1 are measured as if the largest were 1, and the result made smaller again: else the 0.3
    would decide, and hide any error of small values (a gradient of 1e-3 in bfloat16 would have a floor twice its size).
    """
    scale = min(1.0, float(reference.abs().max()))
    if scale == 0:
        return 0.0
    x = (reference.double() / scale).to(dtype)
    # One unit in the last place at least: values may happen to be exact (a loss is one number).
    least = _unit(dtype) * float(x.double().abs().max()) / 2
    return 2 * scale * max(least, float(((x + SHIFT - SHIFT) - x).double().abs().max()))


def _unit(dtype: Any) -> float:
    import torch

    return float(torch.finfo(dtype).eps)


def limits(low: Sequence[float], floors: Sequence[float], k: float) -> list[float]:
    """What each row may be off: `k * max(its own low error, the upper quartile of all rows') + its floor`.

    The row's own low error lets a row be wrong that is hard in this precision, without letting others be wrong with it,
    which the batch's largest would: of four rows or more the worst has no say about the others. The quartile is for
    rows whose low error happens to be small, though nothing about the row is better. Measured on 24,300 rows of honest
    cells (four tiny models, three dtypes, 50 seeds; `python -m benchmarks verdict`): the worst row needs 1.16 of what
    its own low error allows, 1.09 with the median, 0.94 with the quartile, 0.88 with the largest.
    """
    if not low:
        return []
    quartile = upper_quartile(low)
    return [k * max(own, quartile) + noise for own, noise in zip(low, floors, strict=True)]


def upper_quartile(values: Sequence[float]) -> float:
    """The value that three of four do not exceed; 0 of none."""
    return sorted(values)[math.ceil(0.75 * len(values)) - 1] if values else 0.0


def typical_error(reference: Mapping[str, Leaf], low: Mapping[str, Leaf]) -> float:
    """The upper quartile, over leaves, of the low error as a share of the largest value.

    For gradients, most of which have one row only: a parameter whose low error happens to be small is allowed what is
    usual. Measured (18,000 honest ones): the worst needs 1.35 of what is allowed without, 0.81 with it. Leaves that
    eager gets wrong altogether tell nothing of the others.
    """
    shares = []
    for path, leaf in reference.items():
        largest = float(leaf.tensor.abs().max()) if leaf.tensor.numel() else 0.0
        if largest > 0 and path in low:
            share = float((low[path].tensor.double() - leaf.tensor.double()).abs().max()) / largest
            if share < IS_REST:
                shares.append(share)
    return upper_quartile(shares)


def sequence_axis(shape: Sequence[int], length: int, hint: int | None) -> int | None:
    """The axis of an output that a mask of so many positions is about; None where there is none."""
    if hint is not None:
        return hint if shape[hint] <= length else None
    order = (2, 1) if len(shape) == 4 else (1,)  # attention maps: batch, head, query, key
    return next((axis for axis in order if len(shape) > axis and shape[axis] == length), None)


def kept(tensor: Any, leaf: Leaf, mask: Any | None, batch: int | None) -> Any | None:
    """Which positions of a tensor count: a boolean tensor that broadcasts to it; None where all do."""
    if mask is None or tensor.dim() < 2 or tensor.shape[0] != mask.shape[0] or batch != mask.shape[0]:
        return None
    axis = sequence_axis(tuple(tensor.shape), int(mask.shape[1]), leaf.sequence)
    if axis is None:
        return None
    visible = mask[:, -int(tensor.shape[axis]) :].bool()  # a sliding cache keeps the last positions
    shape = [1] * tensor.dim()
    shape[0], shape[axis] = visible.shape
    return visible.reshape(shape).to(tensor.device)


def compare(
    candidate: Mapping[str, Leaf],
    reference: Mapping[str, Leaf],
    low: Mapping[str, Leaf] | None,
    rule: Rule,
    *,
    batch: int | None = None,
    mask: Any | None = None,
) -> list[Row]:
    """Every row of every leaf. `mask` is (batch, sequence), 0 where a position does not count.

    Raises ParityError where the comparison would prove nothing.
    """
    sides = {"candidate": candidate, "reference": reference} | ({} if low is None else {"low reference": low})
    check_shapes(sides)
    check_masked_rows(mask)
    check_storage(candidate, reference)
    found: dict[str, list[Row]] = {}
    shares: list[float] = []
    first = next((path for path, leaf in candidate.items() if leaf.tensor.numel() > 1), None)
    # Those of few elements last: what the others say of rounding is said of them as well.
    for path, leaf in sorted(candidate.items(), key=lambda pair: pair[1].tensor.numel() < FEW):
        positions = kept(leaf.tensor, leaf, mask, batch)
        tensors = {name: side[path].tensor.detach() for name, side in sides.items()}
        device = leaf.tensor.device
        values = {name: tensor.to(device=device).double() for name, tensor in tensors.items()}
        _check_values(path, values, positions)
        if path == first:
            _check_constant(path, values, positions)
        typical = max(rule.typical, upper_quartile(shares)) if leaf.tensor.numel() < FEW else rule.typical
        found[path] = _rows(path, values, replace(rule, typical=typical), positions, batch, shares)
    rows = [row for path in candidate for row in found[path]]
    if not any(row.count for row in rows):
        raise ParityError(
            "parity-empty", f"nothing was compared: {_told(candidate)}. Compare outputs that have elements"
        )
    return rows


def check_shapes(sides: Mapping[str, Mapping[str, Leaf]]) -> None:
    """Every side has the same leaves, of the same shapes; there is one, and none is empty."""
    candidate = sides["candidate"]
    if not candidate:
        raise ParityError("parity-empty", "nothing was compared: the candidate's output has no floating-point tensor")
    for name, side in sides.items():
        if different := sorted(set(candidate) ^ set(side)):
            who = name if different[0] in candidate else "candidate"
            raise ParityError(
                "parity-shape",
                f"the {who} has no {different[0]} ({len(different)} outputs differ); `compare=` picks some",
            )
        for path, leaf in side.items():
            have, need = tuple(leaf.tensor.shape), tuple(candidate[path].tensor.shape)
            if have != need:
                raise ParityError(
                    "parity-shape", f"{path} is {list(need)} in the candidate, {list(have)} in the {name}"
                )
    for path, leaf in candidate.items():
        if not leaf.tensor.numel():
            raise ParityError("parity-empty", f"nothing was compared: {path} is {list(leaf.tensor.shape)}, no elements")


def check_masked_rows(mask: Any | None) -> None:
    """Every row of a mask has a position that counts."""
    if mask is None:
        return
    if not mask.numel():
        raise ParityError("parity-empty", "nothing was compared: the attention mask has no elements")
    if hidden := [index for index, any_ in enumerate(mask.bool().any(dim=1).tolist()) if not any_]:
        told = ", ".join(map(str, hidden[:8]))
        raise ParityError("parity-all-masked", f"attention_mask hides every position of row {told}: it proves nothing")


def check_storage(candidate: Mapping[str, Leaf], reference: Mapping[str, Leaf]) -> None:
    """No tensor is compared with itself."""
    mine = {storage(leaf.tensor): path for path, leaf in candidate.items()}
    for path, leaf in reference.items():
        if (other := mine.get(storage(leaf.tensor))) is not None:
            text = f"{other} of the candidate and {path} of the reference are the same memory; clone one of them"
            raise ParityError("parity-same-storage", text)


def storage(tensor: Any) -> tuple[str, int]:
    """The memory that a tensor lives in."""
    return str(tensor.device), int(tensor.untyped_storage().data_ptr())


def _visible(tensor: Any, positions: Any | None) -> Any:
    return tensor if positions is None else tensor[positions.expand_as(tensor)]


def _check_values(path: str, values: Mapping[str, Any], positions: Any | None) -> None:
    broken = {}
    for name, tensor in values.items():
        if not bool(_visible(tensor, positions).isfinite().all()):
            broken[name] = tensor
    if not broken:
        return
    name, tensor = next(iter(broken.items()))
    wrong = ~tensor.isfinite()
    if positions is not None:
        wrong &= positions
    index = tuple(wrong.nonzero()[0].tolist())
    who = " and ".join(broken)
    count = int(wrong.sum())
    raise ParityError(
        "parity-nonfinite",
        f"{path} is not finite in the {who}: {float(tensor[index])} at {list(index)}, {count} such elements; "
        "NaN equals nothing, and infinity hides every error",
    )


def _check_constant(path: str, values: Mapping[str, Any], positions: Any | None) -> None:
    for name in ("candidate", "reference"):
        visible = _visible(values[name], positions)
        if visible.numel() > 1 and bool((visible == visible.reshape(-1)[0]).all()):
            value = float(visible.reshape(-1)[0])
            text = f"every element of {path} is {value:g} in the {name}: any backend would agree"
            raise ParityError("parity-constant", text)


def _rows(
    path: str, values: Mapping[str, Any], rule: Rule, positions: Any | None, batch: int | None, shares_seen: list[float]
) -> list[Row]:
    """A leaf's rows. Adds to `shares_seen` what each row's low error is as a share of its largest value."""
    candidate, reference, low = values["candidate"], values["reference"], values.get("low reference")
    by_row = batch is not None and candidate.dim() > 0 and candidate.shape[0] == batch
    shape = tuple(candidate.shape)
    errors = _by_row((candidate - reference).abs(), positions, by_row)
    wanted = _by_row(reference, positions, by_row)
    lows = None if low is None else _by_row((low - reference).abs(), positions, by_row)
    floors = [floor(row, rule.dtype) if row.numel() else 0.0 for row in _compact(wanted)]
    low_errors = [float("nan")] * len(errors)
    if rule.table is not None:
        rtol, atol = rule.table
        # As a share of what each element may be off, so that the worst element is the one that counts.
        shares = [e / (atol + rtol * r.abs()) for e, r in zip(errors, wanted, strict=True)]
    else:
        shares = list(errors)
        if rule.ulps is not None:
            unit = rule.ulps * _unit(rule.dtype)
            rest = _unit(rule.dtype) * rule.scale
            allowed = [unit * _largest(row) + noise + rest for row, noise in zip(wanted, floors, strict=True)]
        elif lows is not None:
            low_errors = [_largest(row) for row in lows]
            rest = _unit(rule.dtype) * rule.scale
            largest = [_largest(row) for row in wanted]
            seen = zip(low_errors, largest, strict=True)
            shares_seen += [error / size for error, size in seen if 0 < error < IS_REST * size]
            are_rests = [error >= IS_REST * size for error, size in zip(low_errors, largest, strict=True)]
            floors = [noise + rest * is_rest for noise, is_rest in zip(floors, are_rests, strict=True)]
            if not rule.scale:
                _check_low(path, low_errors, largest)
            usual = [max(error, rule.typical * size) for error, size in zip(low_errors, largest, strict=True)]
            allowed = limits(usual, floors, rule.k)
        else:
            allowed = floors
    found = []
    for number, (error, share) in enumerate(zip(errors, shares, strict=True)):
        visible = share.nan_to_num(nan=-1.0)
        at = int(visible.reshape(-1).argmax())
        index = unravel(at, shape[1:] if by_row else shape)
        worst = float(error.reshape(-1)[at])
        if rule.table is not None:
            limit = rule.table[1] + rule.table[0] * float(wanted[number].reshape(-1)[at].abs())
        else:
            limit = allowed[number]
        count = int((~error.isnan()).sum())
        found.append(
            Row(
                path,
                number if by_row else None,
                worst,
                low_errors[number],
                floors[number],
                limit,
                (number, *index) if by_row else index,
                count,
            )
        )
    return [row for row in found if row.count]


def _check_low(path: str, low_errors: Sequence[float], largest: Sequence[float]) -> None:
    """The low reference is near the reference: else it is not the same computation, and would allow anything."""
    size = max(largest)
    for number, error in enumerate(low_errors):
        if size > 0 and error >= IS_REST * size:
            text = f"{path} of eager in the cell's dtype is {error:.3g} off the reference in row {number}, whose values"
            raise ParityError(
                "parity-reference",
                f"{text} are at most {size:.3g}: other weights, other inputs, or a dtype that cannot do this",
            )


def _by_row(tensor: Any, positions: Any | None, by_row: bool) -> list[Any]:
    """A tensor's rows, NaN where a position does not count (all that does is finite: it was checked)."""
    if positions is not None:
        tensor = tensor.masked_fill(~positions, float("nan"))
    return list(tensor.unbind(0)) if by_row else [tensor]


def _compact(rows: Sequence[Any]) -> Iterator[Any]:
    for row in rows:
        yield row[~row.isnan()]


def _largest(row: Any) -> float:
    visible = row[~row.isnan()].abs()
    return float(visible.max()) if visible.numel() else 0.0


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of the `position`-th element of a tensor of this shape."""
    index: list[int] = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        index.append(rest)
    return tuple(reversed(index))


def worst(rows: Sequence[Row]) -> Row:
    """The row that uses most of what it is allowed; of those that are exact, the first."""
    return max(rows, key=lambda row: row.ratio)


def _told(side: Mapping[str, Leaf]) -> str:
    return ", ".join(f"{path} is {list(leaf.tensor.shape)}" for path, leaf in list(side.items())[:4])
