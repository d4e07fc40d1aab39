"""The kinds of weight decay, of Muon and of NorMuon, against the single-process reference, at every stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import training
from tests.support.contract import compare
from tests.support.thinning import full


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("stage", "world", "kind", "variant", "mode"),
    [
        (0, 2, "toy", "muon", "independent"),
        (1, 2, "toy", "muon", "cautious"),
        full(3, 2, "toy", "muon", "independent"),
        full(0, 2, "mixed", "normuon", "cautious"),
        pytest.param(1, 2, "toy", "normuon", "independent", marks=pytest.mark.compat),
        pytest.param(3, 2, "mixed", "normuon", "decoupled", marks=pytest.mark.compat),
        (3, 4, "toy", "normuon", "cautious"),
        full(2, 3, "mixed", "normuon", "cautious"),
        full(3, 3, "wide", "normuon", "independent"),
    ],
)
def test_kinds_of_decay(ranks: Any, stage: int, world: int, kind: str, variant: str, mode: str) -> None:
    """Row moments divide by what the iteration left of a row: its rounding goes in once more, within the tolerance."""
    settings = {"variant": variant, "weight_decay_mode": mode}
    results = ranks(world).run(training.train, stage=stage, kind=kind, clipping=0.5, params=settings)
    compare(results, kind, world, 0.5, variant=variant, decay_mode=mode)
