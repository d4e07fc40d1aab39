"""Checkpoints use the names of the engine's model, whatever model or names the optimizer was made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.tools.convert import consolidate_files
from tests.support import training
from tests.support.checkpoints import tensors_of
from tests.support.models import batch, build
from tests.support.snapshots import differences, snapshot


class WithLoss(nn.Module):
    """A model around another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)


class Tied(WithLoss):
    """The weights of the output head are those of the embedding."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        model.lm_head.weight = model.embed.weight


class Two(WithLoss):
    """Two models whose parameters have the same names; the second one is called like a parameter of the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.blocks = build("toy", seed=3)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets) + self.blocks(tokens, targets)


class ShortKeys(WithLoss):
    """Its ``state_dict`` leaves out the name of the inner model, so that a key is the name of another parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.embed = nn.Embedding(29, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets) + self.embed(tokens).square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**self.model.state_dict(), "second.weight": self.embed.weight.detach()}


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "a loss": (WithLoss, lambda outer: outer.model),
    "tied weights": (Tied, lambda outer: outer.model),
    "torch.compile": (compiled, lambda outer: outer._orig_mod),
    "two models": (
        Two,
        lambda outer: [*outer.model.named_parameters(), *outer.blocks.named_parameters()],
    ),
    "a state_dict of its own": (
        ShortKeys,
        lambda outer: [*outer.model.named_parameters(), ("embed", outer.embed.weight)],
    ),
}


def make(kind: str, stage: int, seed: int, *, configured: bool) -> Any:
    wrap, inner = WRAPPERS[kind]
    outer = wrap(build("toy", seed=seed))
    config = training.ds_config(stage)
    if configured:
        return training.initialize(outer, config)
    optimizer = deepspeed_muon.Muon(inner(outer), **config.pop("optimizer")["params"])
    return training.initialize(outer, config, optimizer=optimizer)


def save(rank: int, world_size: int, *, folder: str, kind: str, stage: int) -> Any:
    """Save both ways with an optimizer of the inner model; return weights by name, and what a restored engine lacks."""
    engine = make(kind, stage, 0, configured=False)
    engine.backward(engine(*batch(0, rank)))
    engine.step()
    engine.save_checkpoint(folder, tag="tag")
    consolidate(engine, f"{folder}/live")
    names = [name for name, _ in engine.module.named_parameters()]
    masters = training.full_masters(engine)
    restored = make(kind, stage, 1, configured=True)
    restore(restored, f"{folder}/live")
    return {"names": names, "masters": masters, "lost": differences(snapshot(engine), snapshot(restored))}


@pytest.mark.parametrize(("kind", "stage"), [(kind, 3 if kind == "a loss" else 0) for kind in WRAPPERS])
def test_an_optimizer_of_an_inner_model_saves_the_names_of_the_engines(
    ranks: Any, tmp_path: Path, kind: str, stage: int
) -> None:
    """Without an engine, the weights of stage 0 were looked for by the inner model's names and not found."""
    saved = ranks(2).run(save, folder=str(tmp_path), kind=kind, stage=stage)[0]
    assert saved["lost"] == []
    index = consolidate_files(tmp_path, tmp_path / "offline")
    assert sorted(index.parameters) == sorted(saved["names"])
    offline, live = tensors_of(tmp_path / "offline"), tensors_of(tmp_path / "live")
    assert offline.keys() == live.keys()
    assert all(torch.equal(offline[key], live[key]) for key in live)
    for name, master in saved["masters"].items():
        assert torch.equal(offline[f"fp32/{name}"].double(), master), name
