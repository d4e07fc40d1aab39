"""NorMuon and the kinds of weight decay, against the single-process reference, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import training
from tests.support.contract import compare
from tests.support.models import MATRICES
from tests.support.thinning import full
from tests.support.training import full_rows

# Row moments divide by what Newton-Schulz left of a row, so its rounding (see MUON_TOLERANCE) goes into the result once
# more at most: the same tolerances hold.


@pytest.mark.parametrize(
    ("stage", "world", "kind", "mode"),
    [
        full(0, 1, "toy", "decoupled"),
        (0, 2, "mixed", "cautious"),
        pytest.param(1, 2, "toy", "independent", marks=pytest.mark.compat),
        full(1, 4, "wide", "decoupled"),
        full(2, 1, "toy", "cautious"),
        (2, 4, "toy", "decoupled"),
        pytest.param(3, 2, "mixed", "decoupled", marks=pytest.mark.compat),
        (3, 4, "toy", "cautious"),
        full(3, 3, "wide", "independent"),
        full(2, 3, "mixed", "cautious"),
    ],
)
def test_normuon_matches_the_reference(ranks: Any, stage: int, world: int, kind: str, mode: str) -> None:
    settings = {"variant": "normuon", "weight_decay_mode": mode}
    results = ranks(world).run(training.train, stage=stage, kind=kind, clipping=0.5, params=settings)
    compare(results, kind, world, 0.5, variant="normuon", decay_mode=mode)
    for result in results:
        assert result["bytes_sent"] == result["planned_bytes"]
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES[kind])


@pytest.mark.parametrize(("stage", "mode"), [(0, "independent"), (1, "cautious"), (3, "independent")])
def test_weight_decay_modes(ranks: Any, stage: int, mode: str) -> None:
    results = ranks(2).run(training.train, stage=stage, params={"weight_decay_mode": mode})
    compare(results, "toy", 2, 0.0, decay_mode=mode)


# Stage 3 of DeepSpeed applies stale gradients of parameters that got none.
@pytest.mark.parametrize("stage", [0, 2])
def test_rows_without_gradient_are_left_alone(ranks: Any, stage: int) -> None:
    """A matrix that takes no part keeps its value and its row moments, while the others go on."""
    report = ranks(2).run(idle_rows, stage=stage)[0]
    assert report["idle"] == 0.0, "nothing has moved them from zero"
    assert report["used"] > 0.0
    assert torch.equal(report["kept"], report["later"])


def idle_rows(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Train one step without the idle matrix, one with it, one without it."""
    engine = training.make_engine(training.ds_config(stage, params={"variant": "normuon"}), "unused")
    found = []
    for step, use in enumerate((False, True, False)):
        engine.module.use_idle = use
        training.run_step(engine, step, rank, world_size, 1)
        found.append(full_rows(engine)["idle.weight"])
    engine.destroy()
    return {
        "idle": float(found[0].sum()),
        "used": float(found[1].sum()),
        "kept": found[1],
        "later": found[2],
    }
