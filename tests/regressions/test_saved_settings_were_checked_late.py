"""A load replaced weights and counters before it refused a saved setting, or took one that this run refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.errors import MuonError
from deepspeed_muon.tools.convert import convert_to_universal
from tests.support import training
from tests.support.snapshots import differences, snapshot

L2 = {"adam_w_mode": False}
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def saved(rank: int, world_size: int, *, folder: str, stage: int, params: Any, precision: str) -> None:
    engine = training.make_engine(training.ds_config(stage, params=params, precision=precision))
    training.run_step(engine, 0, rank, world_size, 1)
    engine.save_checkpoint(folder, tag="tag")
    consolidate(engine, f"{folder}/set")


def loaded(
    rank: int,
    world_size: int,
    *,
    folder: str,
    stage: int,
    by: str,
    params: Any,
    precision: str = "fp32",
    **options: Any,
) -> dict[str, Any]:
    """Load into an engine with other settings, and take a step."""
    extra = UNIVERSAL if by == "universal" else None
    config = training.ds_config(stage, params=params, precision=precision, extra=extra)
    engine = training.make_engine(config, seed=7)
    training.run_step(engine, 0, rank, world_size, 1)
    before = snapshot(engine)
    if precision == "fp16":
        engine.optimizer.loss_scaler.cur_scale = 64.0

    def load() -> None:
        if by == "restore":
            restore(engine, f"{folder}/set", **options)
        else:
            engine.load_checkpoint(folder, **options)

    # RuntimeError: what DeepSpeed makes of an error inside its load.
    message = training.refusal(load, (MuonError, RuntimeError))
    result = {
        "message": message,
        "changes": differences(before, snapshot(engine)),
        "rates": [group["lr"] for group in engine.basic_optimizer.param_groups],
        "scale": float(getattr(engine.optimizer, "loss_scale", 0.0)),
    }
    training.run_step(engine, 1, rank, world_size, 1)
    return result


@pytest.mark.parametrize(
    ("stage", "by", "then", "now", "named"),
    [
        (1, "load_checkpoint", {"weight_decay_mode": "cautious"}, L2, "weight_decay_mode"),
        (0, "restore", {"weight_decay_mode": "independent"}, L2, "weight_decay_mode"),
    ],
)
def test_nothing_changes(
    ranks: Any, tmp_path: Path, stage: int, by: str, then: Any, now: Any, named: str
) -> None:
    arguments: dict[str, Any] = {"folder": str(tmp_path), "stage": stage}
    ranks(2).run(saved, params=then, precision="fp32", **arguments)
    for result in ranks(2).run(loaded, by=by, params=now, **arguments):
        assert named in result["message"] and "hyperparameters=False" in result["message"], result
        assert not result["changes"], result
    if by == "restore":
        for result in ranks(2).run(loaded, by=by, params=now, hyperparameters=False, **arguments):
            assert not result["message"] and result["changes"], result


def test_a_universal_checkpoint_without_state_brings_no_settings(ranks: Any, tmp_path: Path) -> None:
    """Rates and loss scale of the saved run replaced those of this one."""
    arguments: dict[str, Any] = {"stage": 2, "precision": "fp16"}
    ranks(2).run(saved, folder=str(tmp_path / "saved"), params={}, **arguments)
    convert_to_universal(tmp_path / "saved" / "tag", tmp_path / "universal" / "step")
    folder, params = str(tmp_path / "universal"), {"muon_lr": 0.5}
    for options, rate, scale in (({"load_module_only": True}, 0.5, 64.0), ({}, 0.02, 256.0)):
        for result in ranks(2).run(
            loaded, folder=folder, by="universal", params=params, **options, **arguments
        ):
            assert not result["message"] and result["changes"], result
            assert (result["rates"][0], result["scale"]) == (rate, scale), result
