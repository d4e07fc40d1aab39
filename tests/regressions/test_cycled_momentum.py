"""Schedulers with ``cycle_momentum`` cycled AdamW's ``betas`` only: Muon's ``momentum`` stayed where it was."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon import Muon
from deepspeed_muon.checkpoint.settings import group_settings
from tests.support import training


def optimizer_and_groups(**settings: Any) -> tuple[Muon, dict[str, Any], dict[str, Any]]:
    optimizer = Muon(nn.Linear(4, 4), lr=0.02, **settings)
    muon, adamw = optimizer.param_groups
    return optimizer, muon, adamw


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12, max_momentum=0.9)


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=4)


@pytest.mark.parametrize("make", [one_cycle, cyclic])
def test_torchs_schedulers_cycle_both_halves(make: Any) -> None:
    """Step for step the momentum that they give to SGD, which has no other."""
    optimizer, muon, adamw = optimizer_and_groups(momentum=0.95)
    sgd = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.02, momentum=0.95)
    ours, theirs = make(optimizer), make(sgd)
    seen = []
    for _ in range(11):
        assert muon["momentum"] == adamw["betas"][0] == sgd.param_groups[0]["momentum"]
        assert adamw["betas"][1] == 0.95
        seen.append(muon["momentum"])
        optimizer.step()
        sgd.step()
        ours.step()
        theirs.step()
    assert len(set(seen)) > 3


def test_a_saved_cycle_goes_on() -> None:
    """Between the scheduler's step and the optimizer's, where programs save."""
    optimizer, muon, _ = optimizer_and_groups()
    scheduler = one_cycle(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    fresh, _, _ = optimizer_and_groups()
    again = one_cycle(fresh)
    fresh.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for _ in range(3):
        assert fresh.param_groups[0]["momentum"] == muon["momentum"] != 0.95
        for each in (optimizer, fresh, scheduler, again):
            each.step()
    assert copy.deepcopy(optimizer).param_groups[0]["momentum"] == muon["momentum"]


def test_states_saved_before_keep_their_momentum() -> None:
    """Their Muon groups carry AdamW's betas beside another momentum, which is what ran."""
    optimizer, _, _ = optimizer_and_groups(momentum=0.95, betas=(0.9, 0.95))
    optimizer.load_state_dict(optimizer.state_dict())
    group = copy.deepcopy(optimizer).param_groups[0]
    assert (group["momentum"], group["betas"]) == (0.95, (0.9, 0.95))


def test_restoring_adamws_betas_leaves_momentum_alone() -> None:
    """Of a matrix that AdamW trained before: its betas are no momentum of Muon's."""
    optimizer, muon, _ = optimizer_and_groups(momentum=0.95)
    record = SimpleNamespace(group=0, name="weight")
    state: Any = SimpleNamespace(
        parameters={"weight": SimpleNamespace(record=record, name="weight")}, optimizer=optimizer
    )
    index: Any = SimpleNamespace(groups=[{"betas": [0.8, 0.99], "lr": 0.5}], parameters={"weight": record})
    settings = group_settings(state, index, "a set")[0]
    muon.update(settings)
    assert (muon["momentum"], muon["lr"]) == (0.95, 0.5) and "betas" not in settings


def test_a_program_may_write_momentum_itself() -> None:
    optimizer, muon, adamw = optimizer_and_groups()
    for group in optimizer.param_groups:
        group["momentum"] = 0.85
    assert muon["momentum"] == 0.85 and adamw["betas"] == (0.9, 0.95)


def under_deepspeed(rank: int, world_size: int, *, stage: int) -> list[list[float]]:
    """Train under DeepSpeed's OneCycle and report momentum and beta after each step."""
    config = training.ds_config(
        stage,
        extra={
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 0.001,
                    "cycle_max_lr": 0.01,
                    "cycle_first_step_size": 3,
                    "cycle_min_mom": 0.8,
                    "cycle_max_mom": 0.9,
                },
            }
        },
    )
    engine = training.make_engine(config, "single")
    groups = deepspeed_muon.muon_optimizer(engine).param_groups
    found = []
    for step in range(3):
        training.run_step(engine, step, rank, world_size, 1)
        found.append([group["momentum"] if group["use_muon"] else group["betas"][0] for group in groups])
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_one_cycle_cycles_both_halves(ranks: Any, stage: int) -> None:
    for found in ranks(2).run(under_deepspeed, stage=stage):
        assert all(muon == adamw for muon, adamw in found) and len({muon for muon, _ in found}) == 3
