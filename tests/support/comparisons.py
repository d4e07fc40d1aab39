"""The comparisons with a float64 reference; pytest's summary lists those that came nearest to their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests/conftest.py imports this module before anything may import torch
    from torch import Tensor

NEAR = 0.5
"""Above this fraction of its limit a comparison may fail on another machine: tests/conftest.py reports it."""


@dataclass(frozen=True)
class Comparison:
    """An error and its limit; ``name`` says of which result."""

    name: str
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


def within(error: float, limit: float, name: str = "") -> None:
    """Fail unless the error of the result ``name`` is at most ``limit``; NaN fails.

    :mod:`tests.support.rounding` measures limits.
    """
    global _nearest
    comparison = Comparison(name, float(error), float(limit))
    if _nearest is None or comparison.ratio > _nearest.ratio:
        _nearest = comparison
    assert comparison.ratio <= 1, f"{name}: {error:.4g}, where {limit:.4g} is allowed"


def all_within(errors: Mapping[str, float], limits: Mapping[str, float] | float, quantity: str = "") -> None:
    """Fail unless every error is at most the limit of its name, or the common one; the message lists all of them."""
    limit_of = {name: limits if isinstance(limits, float) else limits[name] for name in errors}
    try:
        for name, error in errors.items():
            within(error, limit_of[name], f"{quantity} {name}".strip())
    except AssertionError as failure:
        lines = [f"\n  {name}: {error:.3g} of {limit_of[name]:.3g}" for name, error in errors.items()]
        raise AssertionError(f"{failure}{''.join(lines)}") from None


def close(actual: Tensor, expected: Tensor, *, rtol: float, atol: float, name: str = "") -> None:
    """Call :func:`torch.testing.assert_close` and record the ratio of the largest error to its limit."""
    import torch

    if actual.shape == expected.shape and actual.numel() and (rtol or atol):
        x, y = actual.detach().double(), expected.detach().double()
        ratios = (x - y).abs() / (atol + rtol * y.abs())
        ratios = ratios[x != y]  # without equal infinities, and zeros whose limit is zero
        if ratios.numel() and not bool(ratios.isnan().any()):
            within(float(ratios.max()), 1.0, name)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def relative(actual: Tensor, expected: Tensor, start: Tensor | None = None) -> float:
    """Return the norm of the difference of two tensors, or paths from ``start``, relative to that of the expected."""
    path = expected.double() if start is None else expected.double() - start.double()
    return float((actual.double() - expected.double()).norm() / path.norm())


def take_nearest() -> Comparison | None:
    """Return the comparison that came nearest to its limit since the last call."""
    global _nearest
    comparison, _nearest = _nearest, None
    return comparison
