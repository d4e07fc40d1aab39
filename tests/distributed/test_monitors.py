"""The monitors that DeepSpeed can write a run's health to, beside the CSV one of ``test_health.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deepspeed_muon
from tests.support import training
from tests.support.harness import run_ranks
from tests.support.training import EVENTS

STEPS = 4
EVERY = 2


def train_with(rank: int, world_size: int, *, section: str, settings: dict[str, Any]) -> Any:
    """Train under a monitor; return the last report, and what wandb holds of the run on this rank."""
    config = training.ds_config(2, params={"health": EVERY}, extra={section: {"enabled": True, **settings}})
    engine = training.make_engine(config)
    training.train_steps(engine, STEPS, rank, world_size)
    batch_size = engine.global_samples // STEPS
    # wandb closes a row when the next one begins: DeepSpeed's own events of this step do that.
    training.run_step(engine, STEPS, rank, world_size, 1)
    report = deepspeed_muon.health(engine)
    logged: dict[str, float] = {}
    if section == "wandb":
        import wandb

        if wandb.run is not None:
            logged = {name: float(wandb.run.summary[f"Train/Muon/{name}"]) for name in EVENTS}
            wandb.finish()
    return {"report": report, "batch_size": batch_size, "logged": logged}


def test_tensorboard_shows_every_sample(tmp_path: Path) -> None:
    """Its own reader finds every number, at DeepSpeed's positions, with the values of the report."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"output_path": str(tmp_path), "job_name": "run"}
    result = run_ranks(train_with, 2, {"section": "tensorboard", "settings": settings})[0]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {tag.removeprefix("Train/Muon/") for tag in tags if "/Muon/" in tag} == EVENTS
    rates = training.ds_config(2)["optimizer"]["params"]
    for key in ("muon_lr", "adam_lr"):
        # DeepSpeed writes the first group's alone.
        rows = events.Scalars(f"Train/Samples/{key}")
        assert [row.step for row in rows] == [row.step for row in events.Scalars("Train/Samples/lr")]
        assert [row.value for row in rows] == pytest.approx([rates[key]] * (STEPS + 1), rel=1e-6), key
    for name in EVENTS:
        rows = events.Scalars(f"Train/Muon/{name}")
        assert [row.step for row in rows] == [n * result["batch_size"] for n in (EVERY, STEPS)], name
        # TensorBoard keeps fp32.
        assert rows[-1].value == pytest.approx(result["report"][name], rel=1e-6), name


@pytest.mark.full
def test_wandb_offline_holds_the_last_sample(tmp_path: Path) -> None:
    """Rank 0 alone logs; the run's summary has the numbers of the report, and the run lies in a folder of its own."""
    pytest.importorskip("wandb")
    arguments = {"section": "wandb", "settings": {"project": "muon-test"}}
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    results = run_ranks(train_with, 2, arguments, env=variables)
    assert set(results[0]["logged"]) == EVENTS and results[1]["logged"] == {}
    for name, value in results[0]["logged"].items():
        assert value == pytest.approx(results[0]["report"][name]), name
    assert [path.stat().st_size > 0 for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")] == [True]
