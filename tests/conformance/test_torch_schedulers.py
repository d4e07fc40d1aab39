"""Every scheduler of torch: each group follows the rates that plain SGD would follow, and a saved run goes on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.swa_utils import SWALR

import deepspeed_muon
from deepspeed_muon import Muon
from deepspeed_muon.checkpoint.restore import group_settings
from tests.support import training

RATES = (0.02, 0.003)
S = torch_schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda n: 0.95),
    "StepLR": lambda o: S.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: S.LinearLR(o, 0.25, total_iters=6),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 8, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=3), S.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: S.CyclicLR(o, [0.001, 0.0001], [0.1, 0.01], 2),
    "CyclicLR, halving": lambda o: S.CyclicLR(o, [0.001, 0.0001], [0.1, 0.01], 2, mode="triangular2"),
    "CyclicLR, shrinking": lambda o: S.CyclicLR(o, 0.001, 0.1, 2, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: S.OneCycleLR(o, [0.1, 0.01], 12),
    "OneCycleLR, in three phases": lambda o: S.OneCycleLR(
        o, 0.1, 12, three_phase=True, anneal_strategy="linear"
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=[0.005, 0.0005], anneal_epochs=5),
}


def groups() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4)
    return [
        {"params": [("weight", layer.weight)], "lr": RATES[0]},
        {"params": [("bias", layer.bias)], "lr": RATES[1]},
    ]


def advance(optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> list[float]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, 0.1 * (step + 1))
    optimizer.step()
    scheduler.step(*[1.0] if isinstance(scheduler, S.ReduceLROnPlateau) else [])
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_and_a_saved_run(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = Muon(groups())
        theirs = torch.optim.SGD(
            [{k: v if k != "params" else [v[0][1]] for k, v in g.items()} for g in groups()], momentum=0.9
        )
        schedule, expected = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
        for step in range(4):
            assert advance(ours, schedule, step) == pytest.approx(advance(theirs, expected, step)), step
        again = Muon(groups())
        resumed = SCHEDULERS[name](again)
        for group, reference in zip(again.param_groups, ours.param_groups, strict=True):
            for to, source in zip(group["params"], reference["params"], strict=True):
                to.data.copy_(source.data)
        again.load_state_dict(copy.deepcopy(ours.state_dict()))
        resumed.load_state_dict(copy.deepcopy(schedule.state_dict()))
        for step in range(4, 8):
            rates = advance(again, resumed, step)
            assert rates == advance(ours, schedule, step) == pytest.approx(advance(theirs, expected, step)), (
                step
            )
    for group, reference in zip(again.param_groups, ours.param_groups, strict=True):
        assert group["momentum"] == reference["momentum"] and group["betas"] == reference["betas"]
        assert all(torch.equal(a, b) for a, b in zip(group["params"], reference["params"], strict=True))


def test_the_list_is_torchs() -> None:
    public = {n for n in S.__all__ if n not in ("LRScheduler", "_LRScheduler")}
    assert public <= {name.split(",")[0] for name in SCHEDULERS}


def test_a_rate_in_a_tensor_is_followed() -> None:
    """Schedulers write into the tensor; so may the program."""
    rate = torch.tensor(0.02, dtype=torch.float64)
    layer = nn.Linear(3, 4)
    optimizer = Muon(layer, lr=rate, adam_lr=0.5)
    assert optimizer.param_groups[0]["lr"] is rate and optimizer.param_groups[1]["lr"] == 0.5
    scheduler = S.ExponentialLR(optimizer, 0.5)
    advance(optimizer, scheduler, 0)
    assert float(rate) == pytest.approx(0.01)
    before = layer.weight.detach().clone()
    rate.zero_()
    advance(optimizer, scheduler, 1)
    assert torch.equal(layer.weight, before)


# Schedulers with ``cycle_momentum`` cycled AdamW's ``betas`` only: Muon's ``momentum`` stayed where it was.


def optimizer_and_groups(**settings: Any) -> tuple[Muon, dict[str, Any], dict[str, Any]]:
    optimizer = Muon(nn.Linear(4, 4), lr=0.02, **settings)
    muon, adamw = optimizer.param_groups
    return optimizer, muon, adamw


@pytest.mark.parametrize(
    "make",
    [
        lambda o: S.OneCycleLR(o, max_lr=0.1, total_steps=12, max_momentum=0.9),
        lambda o: S.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=4),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_torchs_schedulers_cycle_both_halves(make: Any) -> None:
    """Step for step the momentum that they give to SGD, which has no other."""
    optimizer, muon, adamw = optimizer_and_groups(momentum=0.95)
    sgd = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.02, momentum=0.95)
    ours, theirs = make(optimizer), make(sgd)
    seen = set()
    for _ in range(11):
        assert muon["momentum"] == adamw["betas"][0] == sgd.param_groups[0]["momentum"]
        assert adamw["betas"][1] == 0.95
        seen.add(muon["momentum"])
        for stepped in (optimizer, sgd, ours, theirs):
            stepped.step()
    assert len(seen) > 3


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
    rates = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3}
    params = {**rates, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    config = training.ds_config(stage, extra={"scheduler": {"type": "OneCycle", "params": params}})
    engine = training.make_engine(config, "single")
    groups = deepspeed_muon.muon_optimizer(engine).param_groups
    settings = []
    for step in range(3):
        training.run_step(engine, step, rank, world_size, 1)
        settings.append([group["momentum"] if group["use_muon"] else group["betas"][0] for group in groups])
    return settings


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_one_cycle_cycles_both_halves(ranks: Any, stage: int) -> None:
    for result in ranks(2).run(under_deepspeed, stage=stage):
        assert all(muon == adamw for muon, adamw in result) and len({muon for muon, _ in result}) == 3
