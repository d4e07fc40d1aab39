"""A restore that a scheduler refused left a changed engine; MultiStepLR and ReduceLROnPlateau began anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim import lr_scheduler

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.tools.convert import consolidate_files
from tests.support import training
from tests.support.checkpoints import INDEX, edit
from tests.support.models import batch, build
from tests.support.snapshots import attempted
from tests.support.thinning import full

WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 8}


def half(count: int) -> float:
    return 0.5**count


class Picky(lr_scheduler.StepLR):
    """Takes a state and then does not want it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["last_epoch"] == 2:
            raise RuntimeError("not this one")


SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.9},
    "LambdaLR": {"lr_lambda": half},
    "MultiStepLR": {"milestones": [1, 4], "gamma": 0.5},
    "ReduceLROnPlateau": {"factor": 0.5, "patience": 1},
    # DeepSpeed's.
    "WarmupLR": WARMUP,
    "WarmupDecayLR": {**WARMUP, "total_num_steps": 20},
    "OneCycle": {
        "cycle_min_lr": 0.002,
        "cycle_max_lr": 0.02,
        "cycle_first_step_size": 3,
        "cycle_min_mom": 0.7,
    },
}


def engine_with(scheduler: str, *, seed: int = 7, steps: int = 0, **settings: Any) -> Any:
    """Return an engine with a scheduler of a kind, after some steps."""
    config = training.ds_config(2, **settings)
    keywords: dict[str, Any] = {}
    arguments = SCHEDULERS[scheduler]
    if hasattr(lr_scheduler, scheduler):
        kind = getattr(lr_scheduler, scheduler)
        keywords["lr_scheduler"] = lambda optimizer: kind(optimizer, **arguments)
    else:
        config["scheduler"] = {"type": scheduler, "params": arguments}
    engine = training.initialize(build("toy", seed=seed), config, **keywords)
    take_steps(engine, scheduler, 0, steps)
    return engine


def take_steps(engine: Any, scheduler: str, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*batch(step, 0)))
        engine.step({"metrics": 1.0} if scheduler == "ReduceLROnPlateau" else None)


def saved_with(rank: int, world_size: int, *, folder: str, scheduler: str, **settings: Any) -> None:
    consolidate(engine_with(scheduler, seed=0, steps=2, **settings), folder)


def tried(rank: int, world_size: int, *, folder: str, scheduler: str) -> dict[str, Any]:
    """Return why a restore was refused, what it changed, and what one without the schedule gives."""
    engine = engine_with(scheduler, steps=1)
    message, changed = attempted(engine, lambda: restore(engine, folder))
    take_steps(engine, scheduler, 1, 2)
    schedule = str(engine.lr_scheduler.state_dict())
    restore(engine, folder, scheduler=False)
    is_same = schedule == str(engine.lr_scheduler.state_dict())
    result = {"message": message, "changed": changed, "steps": engine.global_steps, "same": is_same}
    take_steps(engine, scheduler, 2, 3)
    return result


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ("StepLR", "WarmupDecayLR"),
        full("WarmupLR", "StepLR"),
        ("StepLR", "LambdaLR"),
        full("LambdaLR", "StepLR"),
        full("ExponentialLR", "StepLR"),
    ],
)
def test_a_scheduler_of_another_kind(ranks: Any, tmp_path: Path, saved: str, now: str) -> None:
    ranks(2).run(saved_with, folder=str(tmp_path), scheduler=saved)
    for result in ranks(2).run(tried, folder=str(tmp_path), scheduler=now):
        message = result["message"]
        assert now in message and saved in message and "scheduler=False" in message, message
        assert not result["changed"] and result["steps"] == 2 and result["same"]


def taken_over(rank: int, world_size: int, *, folder: str, scheduler: str) -> Any:
    engine = engine_with(scheduler)
    restore(engine, folder)
    return engine.global_steps, str(engine.lr_scheduler.state_dict())


def begun_anew(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Start a new run of another schedule and another momentum from the saved weights."""
    params = {"momentum": 0.8, "restore_from": {"path": folder, "progress": False}}
    engine = engine_with("StepLR", params=params)
    again = engine_with("WarmupLR")
    restore(again, folder)
    return {
        "steps": engine.global_steps,
        "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
        "momentum": engine.basic_optimizer.param_groups[0]["momentum"],
        "weights": [training.full_masters(restored) for restored in (engine, again)],
    }


def test_restores_that_stay_possible(ranks: Any, tmp_path: Path) -> None:
    """The same kind; another kind that counts alike; a set without the class's name; a new run."""
    ranks(2).run(saved_with, folder=str(tmp_path), scheduler="WarmupLR")
    for now in ("WarmupLR", "WarmupDecayLR"):
        restored = ranks(2).run(taken_over, scheduler=now, folder=str(tmp_path))
        assert restored[0] == [2, "{'last_batch_iteration': 1}"]
    edit(tmp_path / INDEX, lambda content: content["progress"].pop("lr_scheduler_class"))
    assert ranks(2).run(taken_over, scheduler="WarmupLR", folder=str(tmp_path))[0][0] == 2
    result = ranks(2).run(begun_anew, folder=str(tmp_path))[0]
    assert (result["steps"], result["schedule"], result["momentum"]) == (0, 0, 0.8)
    training.assert_same_bits(*({"weights": weights} for weights in result["weights"]))


def fails_on_one_rank(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Let the scheduler of the last rank refuse what the other one's takes."""
    engine = engine_with("StepLR", steps=1, precision="fp16")
    engine.optimizer.loss_scaler.cur_scale = 64.0
    if rank == world_size - 1:
        engine.lr_scheduler.__class__ = Picky
    message, changed = attempted(engine, lambda: restore(engine, folder))
    return {"message": message, "changed": changed}


def test_a_scheduler_that_fails_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    """And the loss scale of the other rank, which it had set before."""
    ranks(2).run(saved_with, folder=str(tmp_path), scheduler="StepLR", precision="fp16")
    for result in ranks(2).run(fails_on_one_rank, folder=str(tmp_path)):
        assert "not this one" in result["message"] and not result["changed"], result


def resumed(rank: int, world_size: int, *, folder: str, scheduler: str) -> list[Any]:
    """Return rates and weights after four steps: of one run, and of runs restored after two of them."""
    engine = engine_with(scheduler, steps=2)
    consolidate(engine, f"{folder}/live")
    engine.save_checkpoint(f"{folder}/files", tag="tag")
    consolidate_files(f"{folder}/files", f"{folder}/converted")
    outcomes = []
    for source in ("", "live", "converted"):
        if source:
            engine = engine_with(scheduler)
            restore(engine, f"{folder}/{source}")
        take_steps(engine, scheduler, 2, 4)
        rates = [group["lr"] for group in engine.basic_optimizer.param_groups]
        outcomes.append([rates, training.full_masters(engine)])
        engine.destroy()
    return outcomes


@pytest.mark.parametrize("scheduler", ["OneCycle", "MultiStepLR", "ReduceLROnPlateau"])
def test_a_restored_run_has_the_rates_of_one_that_went_on(ranks: Any, tmp_path: Path, scheduler: str) -> None:
    ((rates, weights), *runs) = ranks(1).run(resumed, folder=str(tmp_path), scheduler=scheduler)[0]
    for restored_rates, restored in runs:
        assert restored_rates == rates
        training.assert_same_bits({"weights": restored}, {"weights": weights})
