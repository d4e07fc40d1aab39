"""Limits of comparisons with float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.comparisons import all_within, close, relative, within
from tests.support.contract import reference
from tests.support.kernels import forced_kernel
from tests.support.models import MATRICES
from tests.support.rounding import HALF_MODEL, limits

pytestmark = pytest.mark.skipif(bool(forced_kernel()), reason="forces kernels itself")


def test_a_wrong_update_is_far_from_every_limit() -> None:
    """In fp32 by orders of magnitude, in half precision too: it lacks one, is half as long, or has another sign."""
    start, end, _, _ = reference("toy", 2, 0.5)
    for name in end:
        path = end[name] - start[name]
        for wrong in (start[name], start[name] + path / 2, start[name] - path):
            error = relative(wrong, end[name], start[name])
            assert error >= 2000 * limits(reference, "toy", 2, 0.5).paths[name], name
    for arithmetic in HALF_MODEL.values():
        allowed = limits(reference, "toy", 2, 0.5, arithmetic=arithmetic).paths
        assert all(allowed[name] < 0.3 for name in MATRICES["toy"])


def test_failures() -> None:
    within(0.0, 0.0)
    close(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), rtol=1e-6, atol=0)
    for error, limit in ((1.1, 1.0), (math.nan, 1.0), (1e-9, 0.0)):
        with pytest.raises(AssertionError, match="where"):
            within(error, limit, "a number")
    with pytest.raises(AssertionError, match=r"second: 2, where 1 is allowed(.|\n)*first: 0.1 of 1"):
        all_within({"first": 0.1, "second": 2.0}, 1.0)
    for value in (1.1, math.nan, math.inf):
        with pytest.raises(AssertionError):
            close(torch.tensor([value]), torch.tensor([1.0]), rtol=1e-6, atol=0)
