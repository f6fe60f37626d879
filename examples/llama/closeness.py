"""The one comparison that the suite makes."""

from __future__ import annotations

import torch

# How far a correct backend may be from eager one precision higher, as a multiple of eager's own distance from it in
# the cell's dtype; the floor is for cells whose own distance happens to be nothing.
FACTOR, FLOOR = 4.0, 1e-6


def assert_as_good_as_eager(candidate: torch.Tensor, low: torch.Tensor, reference: torch.Tensor) -> None:
    """The candidate is about as far from the reference as eager in its own dtype is.

    A fixed tolerance would be too loose for float32 or too tight for bfloat16: a correct backend differs from the
    reference by as much as its dtype makes eager differ.
    """
    assert reference.abs().max() > 0, "nothing to compare"
    assert candidate.isfinite().all()
    error = (candidate.double() - reference.double()).abs().max()
    allowed = FACTOR * (low.double() - reference.double()).abs().max() + FLOOR
    assert error <= allowed, f"off by {error:.3g}, where eager's own error allows {allowed:.3g}"
