"""``copy.deepcopy`` and ``pickle`` of a ``Muon`` ended in an ``AttributeError``: no attribute ``config``."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon import Muon
from tests.support import training
from tests.support.models import batch, build

SETTINGS: dict[str, Any] = {"lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "fp32"}


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(*batch(step, 0)).backward()
    optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_goes_on_like_the_original(copied: Any, steps: int) -> None:
    """Before the first step and after some, the copy of model and optimizer takes the same next step."""
    model = build("toy")
    optimizer = Muon(model, variant="normuon", **SETTINGS)
    for step in range(steps):
        run(model, optimizer, step)
    optimizer.param_groups[0]["lr"] = 0.05
    other, twin = copied((model, optimizer))
    assert isinstance(twin, Muon) and twin.config == optimizer.config and twin.routes == optimizer.routes
    assert not {id(p) for p in model.parameters()} & {id(p) for g in twin.param_groups for p in g["params"]}
    for step in range(steps, steps + 2):
        run(model, optimizer, step)
        run(other, twin, step)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_an_optimizer_alone_is_copied_with_its_parameters() -> None:
    model = build("toy")
    optimizer = Muon(model, **SETTINGS)
    run(model, optimizer, 0)
    before = [p.detach().clone() for p in model.parameters()]
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    twin.step()
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    assert all(state["step"] == 2 for state in twin.state.values())
    assert all(state["step"] == 1 for state in optimizer.state.values())
    shallow = copy.copy(optimizer)
    assert shallow.param_groups[0]["params"][0] is optimizer.param_groups[0]["params"][0]
    run(model, shallow, 1)
    run(model, optimizer, 2)


def test_frozen_parameters_and_names_survive() -> None:
    model = build("toy")
    model.blocks[0].up.weight.requires_grad_(False)
    twin = copy.deepcopy(Muon(list(model.parameters()), model=model, **SETTINGS))
    assert {route.name: route.algorithm for route in twin.routes}["blocks.0.up.weight"] == "frozen"
    again = by_pickle(twin)
    assert again.routes == twin.routes


def test_with_qk_clip_the_copy_watches_the_copied_model() -> None:
    from tests.support.attention_models import MODELS

    torch.manual_seed(0)
    model = MODELS["grouped"]()
    optimizer = Muon(model, qk_clip={"threshold": 2.0}, **SETTINGS)
    run(model, optimizer, 0)
    other, twin = copy.deepcopy((model, optimizer))
    run(model, optimizer, 1)
    run(other, twin, 1)
    assert twin.qk_clip is not optimizer.qk_clip and twin.qk_clip.report == optimizer.qk_clip.report
    assert twin.qk_clip.report.clipped > 0
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def managed(rank: int, world_size: int) -> str:
    """Copy the optimizer of an engine."""
    engine = training.make_engine(training.ds_config(2), "single")
    try:
        copy.deepcopy(deepspeed_muon.muon_optimizer(engine))
    except deepspeed_muon.BindingError as error:
        return str(error)
    finally:
        engine.destroy()
    return "copied"


def test_a_managed_one_says_why_not(ranks: Any) -> None:
    assert all("engine.save_checkpoint" in said for said in ranks(2).run(managed))
