"""After a restore MultiStepLR and ReduceLROnPlateau began anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim import lr_scheduler

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.tools.convert import consolidate_files
from tests.support import training
from tests.support.models import batch, build

SCHEDULERS: dict[str, dict[str, Any]] = {
    "OneCycle": {
        "cycle_min_lr": 0.002,
        "cycle_max_lr": 0.02,
        "cycle_first_step_size": 3,
        "cycle_min_mom": 0.7,
    },
    "MultiStepLR": {"milestones": [1, 4], "gamma": 0.5},
    "ReduceLROnPlateau": {"factor": 0.5, "patience": 1},
}


def engine_with(scheduler: str, seed: int) -> Any:
    config, keywords = training.ds_config(1), {}
    arguments = SCHEDULERS[scheduler]
    if scheduler == "OneCycle":
        config["scheduler"] = {"type": scheduler, "params": arguments}
    else:
        kind = getattr(lr_scheduler, scheduler)
        keywords["lr_scheduler"] = lambda optimizer: kind(optimizer, **arguments)
    return training.initialize(build("toy", seed=seed), config, **keywords)


def take_steps(engine: Any, scheduler: str, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*batch(step, 0)))
        engine.step({"metrics": 1.0} if scheduler == "ReduceLROnPlateau" else None)


def resumed(rank: int, world_size: int, *, folder: str, scheduler: str) -> list[Any]:
    """Return rates and weights after four steps: of one run, and of runs restored after two of them."""
    engine = engine_with(scheduler, seed=0)
    take_steps(engine, scheduler, 0, 2)
    consolidate(engine, f"{folder}/live")
    engine.save_checkpoint(f"{folder}/files", tag="tag")
    found = []
    for source in ("", "live", "converted"):
        if source:
            engine = engine_with(scheduler, seed=7)
            restore(engine, f"{folder}/{source}")
        else:
            consolidate_files(f"{folder}/files", f"{folder}/converted")
        take_steps(engine, scheduler, 2, 4)
        found.append(
            [[group["lr"] for group in engine.basic_optimizer.param_groups], training.full_masters(engine)]
        )
        engine.destroy()
    return found


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_restored_run_has_the_rates_of_one_that_went_on(ranks: Any, tmp_path: Path, scheduler: str) -> None:
    ((rates, weights), *others) = ranks(1).run(resumed, folder=str(tmp_path), scheduler=scheduler)[0]
    for restored_rates, restored in others:
        assert restored_rates == rates
        assert all(restored[name].equal(weight) for name, weight in weights.items())
