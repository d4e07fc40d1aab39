"""Programs written for DeepSpeed's Muon ended in ``KeyError: 'use_muon'``, or before their first step.

They read the key in the param groups, and they may train nothing but a head, which was refused because nothing is left
for Muon.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from torch import nn

import deepspeed_muon
from deepspeed_muon import Muon, RoutingError
from tests.support import training
from tests.support.contract import backward
from tests.support.models import batch, build
from tests.support.reference import Oracle, relative
from tests.support.thinning import full


def kinds(optimizer: Any) -> list[tuple[bool, str]]:
    return [(group["use_muon"], group["algorithm"]) for group in optimizer.param_groups]


def test_groups_say_whose_they_are() -> None:
    model = build("toy")
    optimizer = Muon(model, lr=0.02)
    expected = [(True, "muon"), (False, "adamw")]
    assert kinds(optimizer) == expected
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:  # saved before the key was there, or by a program that dropped it
        del group["use_muon"], group["algorithm"], group["lr_ratio"]
    optimizer.load_state_dict(saved)
    assert kinds(optimizer) == kinds(copy.deepcopy(optimizer)) == expected
    rates = {bool(group["use_muon"]): 0.1 if group["use_muon"] else 0.01 for group in optimizer.param_groups}
    assert rates == {True: 0.1, False: 0.01}


def test_groups_stay_what_they_are() -> None:
    """A parameter cannot change sides: its state and its place in the exchange are of one algorithm."""
    model = nn.Linear(4, 4)
    optimizer = Muon(model, lr=0.02)
    optimizer.param_groups[0]["use_muon"] = True
    with pytest.raises(RoutingError, match="use_muon is True and cannot become False"):
        optimizer.param_groups[0]["use_muon"] = False
    saved = optimizer.state_dict()
    saved["param_groups"].reverse()
    with pytest.raises(
        RoutingError, match="param group 0 of the state dict is of adamw and this optimizer's of muon"
    ):
        optimizer.load_state_dict(saved)


def head_only(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name in ("lm_head.weight", "blocks.0.gain"))


def test_a_head_alone_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build("toy")
    head_only(model)
    with caplog.at_level(logging.WARNING):
        optimizer = Muon(model, lr=0.01)
        model(*batch(0, 0)).backward()
        optimizer.step()
    said = [record.message for record in caplog.records if "no parameter goes to Muon" in record.message]
    assert len(said) == 1 and "this is a plain AdamW run" in said[0]


def train_head(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Train the head of a frozen model."""
    import deepspeed

    model = build("toy")
    head_only(model)
    config = training.ds_config(stage, clipping=0.5)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    for step in range(3):
        training.run_step(engine, step, rank, world_size, 1)
    report = {
        "params": training.full_masters(engine),
        "kinds": [list(kind) for kind in kinds(deepspeed_muon.muon_optimizer(engine))],
    }
    engine.destroy()
    return report


@pytest.mark.parametrize("stage", [0, full(2), 3])
def test_a_head_alone_is_trained_by_adamw(ranks: Any, stage: int) -> None:
    model = build("toy").double()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    head_only(model)
    oracle = Oracle(set(), clipping=0.5)
    for step in range(3):
        backward(model, step, 2)
        oracle.update(model)
    for report in ranks(2).run(train_head, stage=stage):
        assert report["kinds"] == [[False, "adamw"]]
        assert report["params"].keys() == {"lm_head.weight", "blocks.0.gain"}
        for name, value in report["params"].items():
            # ADAM_TOLERANCE of test_equivalence.py, for the same reason.
            assert relative(value, model.get_parameter(name).detach(), start[name]) <= 2.5e-5, name
