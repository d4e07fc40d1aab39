"""The contract: the update does not depend on stage, ranks, accumulation or clipping, and it is the reference's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support import training
from tests.support.contract import compare
from tests.support.models import MATRICES
from tests.support.thinning import usual

CASES = list(itertools.product((0, 1, 2, 3), (1, 2, 3, 4), (1, 2), (0.0, 0.5)))
# The fast core: every stage with every world size once, accumulation and clipping alternating (pairwise).
CORE = {
    (stage, world, accumulation, clipping)
    for stage, world, accumulation, clipping in CASES
    if (accumulation == 2) == bool((stage + world) % 2) and (clipping > 0) == bool((stage + world // 2) % 2)
}


@pytest.mark.compat
@pytest.mark.kernels
@pytest.mark.parametrize(("stage", "world", "accumulation", "clipping"), usual(CASES, CORE))
def test_matches_the_reference(
    ranks: Any, stage: int, world: int, accumulation: int, clipping: float
) -> None:
    results = ranks(world).run(training.train, stage=stage, accumulation=accumulation, clipping=clipping)
    compare(results, "toy", accumulation * world, clipping)
    total = sum(result["orthogonalized"] for result in results)
    assert total == len(MATRICES["toy"]), "Newton-Schulz runs once per matrix and step over all ranks"
