"""A restore wrote weights, moments and counters, and only then raised KeyError from the scheduler or the loss scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.checkpoint.index import INDEX_NAME
from deepspeed_muon.tools.convert import convert_to_universal
from tests.support import training
from tests.support.checkpoints import INDEX, edit
from tests.support.models import build
from tests.support.snapshots import attempted
from tests.support.thinning import full

WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 8}


def half(count: int) -> float:
    return 0.5**count


SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.9},
    "WarmupLR": WARMUP,
    "WarmupDecayLR": {**WARMUP, "total_num_steps": 20},
    "LambdaLR": {"lr_lambda": half},
}


def engine_with(scheduler: str, *, seed: int, stage: int = 2, steps: int = 0, **settings: Any) -> Any:
    """Return an engine with a scheduler of a kind, after some steps."""
    config = training.ds_config(stage, **settings)
    keywords: dict[str, Any] = {}
    if scheduler.startswith("Warmup"):
        config["scheduler"] = {"type": scheduler, "params": SCHEDULERS[scheduler]}
    else:
        kind = getattr(torch.optim.lr_scheduler, scheduler)
        keywords["lr_scheduler"] = lambda optimizer: kind(optimizer, **SCHEDULERS[scheduler])
    engine = training.initialize(build("toy", seed=seed), config, **keywords)
    training.train_steps(engine, steps, 0, 1)
    return engine


def saved_with(rank: int, world_size: int, *, folder: str, scheduler: str, **settings: Any) -> None:
    engine = engine_with(scheduler, seed=0, steps=2, **settings)
    consolidate(engine, folder)


def tried(rank: int, world_size: int, *, folder: str, scheduler: str) -> dict[str, Any]:
    """Return why a restore was refused, what it changed, and what one without the schedule gives."""
    engine = engine_with(scheduler, seed=7, steps=1)
    message, changed = attempted(engine, lambda: restore(engine, folder))
    training.run_step(engine, 1, 0, 1, 1)
    schedule = engine.lr_scheduler.state_dict()
    restore(engine, folder, scheduler=False)
    result = {
        "message": message,
        "changed": changed,
        "steps": engine.global_steps,
        "kept": str(schedule) == str(engine.lr_scheduler.state_dict()),
    }
    training.run_step(engine, 2, 0, 1, 1)
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
        assert not result["changed"] and result["steps"] == 2 and result["kept"]


def taken_over(rank: int, world_size: int, *, folder: str, scheduler: str, arguments: Any = None) -> Any:
    engine = engine_with(scheduler, seed=7)
    restore(engine, folder, **(arguments or {}))
    return engine.global_steps, str(engine.lr_scheduler.state_dict())


def begun_anew(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Start a new run of another schedule and another momentum from the saved weights."""
    params = {"momentum": 0.8, "restore_from": {"path": folder, "progress": False}}
    engine = engine_with("StepLR", seed=7, params=params)
    again = engine_with("WarmupLR", seed=7)
    restore(again, folder)
    return {
        "steps": engine.global_steps,
        "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
        "momentum": engine.basic_optimizer.param_groups[0]["momentum"],
        "weights": [training.full_masters(one) for one in (engine, again)],
    }


def test_what_still_restores(ranks: Any, tmp_path: Path) -> None:
    """The same kind; another kind that counts alike; a set without the class's name; what skips the schedule."""
    ranks(2).run(saved_with, folder=str(tmp_path), scheduler="WarmupLR")
    arguments: dict[str, Any] = {"folder": str(tmp_path)}
    for now in ("WarmupLR", "WarmupDecayLR"):
        assert ranks(2).run(taken_over, scheduler=now, **arguments)[0] == [2, "{'last_batch_iteration': 1}"]
    edit(tmp_path / INDEX, lambda content: content["progress"].pop("lr_scheduler_class"))
    assert ranks(2).run(taken_over, scheduler="WarmupLR", **arguments)[0][0] == 2
    with_another = {"scheduler": "StepLR", "arguments": {"scheduler": False}}
    steps, schedule = ranks(2).run(taken_over, **with_another, **arguments)[1]
    assert steps == 2 and "'last_epoch': 0" in schedule
    result = ranks(2).run(begun_anew, **arguments)[0]
    assert (result["steps"], result["schedule"], result["momentum"]) == (0, 0, 0.8)
    own, saved = result["weights"]
    assert own.keys() == saved.keys() and all(torch.equal(own[name], saved[name]) for name in own)


class Picky(torch.optim.lr_scheduler.StepLR):
    """Takes a state and then does not want it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["last_epoch"] == 2:
            raise RuntimeError("not this one")


def one_rank_fails(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Let the scheduler of the last rank refuse what the other one's takes."""
    engine = engine_with("StepLR", seed=7, steps=1, precision="fp16")
    engine.optimizer.loss_scaler.cur_scale = 64.0
    if rank == world_size - 1:
        engine.lr_scheduler.__class__ = Picky
    message, changed = attempted(engine, lambda: restore(engine, folder))
    return {"message": message, "changed": changed}


def test_a_scheduler_that_fails_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    """And the loss scale of the other rank, which it had set before."""
    ranks(2).run(saved_with, folder=str(tmp_path), scheduler="StepLR", precision="fp16")
    for result in ranks(2).run(one_rank_fails, folder=str(tmp_path)):
        assert "not this one" in result["message"] and not result["changed"], result


def saved_for_universal(rank: int, world_size: int, *, folder: str) -> None:
    engine = engine_with("StepLR", seed=0, steps=2, precision="fp16")
    engine.save_checkpoint(folder)


def tried_universal(rank: int, world_size: int, *, folder: str, stage: int) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 300} if stage == 3 else {}
    settings = {"precision": "fp16", "extra": {"checkpoint": {"load_universal": True}}, "zero": zero}
    engine = engine_with("StepLR", seed=7, stage=stage, steps=1, **settings)
    message, changed = attempted(engine, lambda: engine.load_checkpoint(folder))
    training.run_step(engine, 1, 0, 1, 1)
    return {"message": message, "changed": changed}


@pytest.mark.parametrize(
    ("stage", "change"),
    [(2, {"cur_scale": "x"}), full(1, {"cur_scale": 0}), (3, {"cur_iter": -3}), full(2, "x")],
)
def test_a_universal_checkpoint_with_a_bad_loss_scale(
    ranks: Any, tmp_path: Path, stage: int, change: Any
) -> None:
    ranks(2).run(saved_for_universal, folder=str(tmp_path / "saved"))
    convert_to_universal(tmp_path / "saved", tmp_path / "universal" / "step")
    record = tmp_path / "universal" / "step" / "zero" / INDEX_NAME
    saved = json.loads(record.read_text())["progress"]["loss_scale"]
    assert saved["cur_scale"] > 0
    bad = {**saved, **change} if isinstance(change, dict) else change
    edit(record, lambda content: content["progress"].update(loss_scale=bad))
    for result in ranks(2).run(tried_universal, folder=str(tmp_path / "universal"), stage=stage):
        assert INDEX_NAME in result["message"] and "loss" in result["message"], result
        assert not result["changed"]
