"""Every comparison with a float64 reference goes through here, so that pytest's summary can list the nearest ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests/conftest.py imports this module before anything may import torch
    from torch import Tensor

NEAR = 0.5
"""Above this share of its limit a comparison may fail on the next machine: tests/conftest.py reports it."""


@dataclass(frozen=True)
class Comparison:
    """An error and its limit."""

    what: str
    error: float
    limit: float

    @property
    def ratio(self) -> float:
        """Above 1 the comparison fails."""
        if math.isnan(self.error):
            return math.inf
        if self.limit:
            return self.error / self.limit
        return math.inf if self.error else 0.0


_nearest: Comparison | None = None


def within(error: float, limit: float, what: str = "") -> None:
    """Fail unless ``error`` is at most ``limit``; NaN fails.

    Args:
        error: How far a result is from the reference.
        limit: Argued from what is rounded; see :mod:`tests.support.rounding`.
        what: Names the result.
    """
    global _nearest
    comparison = Comparison(what, float(error), float(limit))
    if _nearest is None or comparison.ratio > _nearest.ratio:
        _nearest = comparison
    assert comparison.ratio <= 1, f"{what}: {error:.4g}, where {limit:.4g} is allowed"


def all_within(errors: Mapping[str, float], limits: Mapping[str, float] | float, what: str = "") -> None:
    """Fail unless every error is at most the limit of its name, or the common one; show all of them."""
    of_name = {name: limits if isinstance(limits, float) else limits[name] for name in errors}
    try:
        for name, error in errors.items():
            within(error, of_name[name], f"{what} {name}".strip())
    except AssertionError as failure:
        told = "".join(f"\n  {name}: {error:.3g} of {of_name[name]:.3g}" for name, error in errors.items())
        raise AssertionError(f"{failure}{told}") from None


def close(
    actual: Tensor, expected: Tensor, *, rtol: float, atol: float, equal_nan: bool = False, what: str = ""
) -> None:
    """Do what :func:`torch.testing.assert_close` does, and record how near it was."""
    import torch

    if actual.shape == expected.shape and actual.numel() and (rtol or atol):
        one, other = actual.detach().double(), expected.detach().double()
        share = (one - other).abs() / (atol + rtol * other.abs())
        share = share[one != other]  # equal infinities, and zeros where nothing is allowed
        if share.numel() and not bool(share.isnan().any()):
            within(float(share.max()), 1.0, what)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)


def relative(actual: Tensor, expected: Tensor, start: Tensor) -> float:
    """Return the norm of the difference of two paths from ``start``, relative to the expected one."""
    path = expected.double() - start.double()
    return float((actual.double() - expected.double()).norm() / path.norm())


def take_nearest() -> Comparison | None:
    """Return the comparison of the running test that came nearest to its limit, and forget it."""
    global _nearest
    comparison, _nearest = _nearest, None
    return comparison
