"""Consolidating weights of other strides (``channels_last``, stage 0) ended in a RuntimeError of ``view``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.checkpoint.sources import ConsolidatedSource
from tests.support import training
from tests.support.snapshots import differences, snapshot
from tests.support.thinning import full


class Filters(nn.Module):
    """Two convolutions, one of them AdamW's, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped(self.conv(x).relu()).pow(2).mean()


def engine_of(seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = Filters()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.named_parameters()), config=training.ds_config(0)
    )
    model.to(memory_format=torch.channels_last)  # DeepSpeed does not broadcast weights of such strides
    assert not model.conv.weight.is_contiguous()
    return engine


def train(engine: Any, step: int) -> None:
    torch.manual_seed(100 + step)
    engine.backward(engine(torch.randn(2, 4, 6, 6)))
    engine.step()


def save_and_continue(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Save after two steps and continue in a new engine; return what differs there, then and one step later."""
    first, second = engine_of(0), engine_of(1)
    for step in range(2):
        train(first, step)
    consolidate(first, folder)
    for name, param in first.module.named_parameters():
        source = ConsolidatedSource(folder)
        saved = source.read(name, "fp32", 0, param.numel())
        source.close()
        assert torch.equal(saved, param.detach().reshape(-1)), name
    train(second, 0)  # so that the restored state takes the place of another one
    strides = [param.stride() for param in second.module.parameters()]
    restore(second, folder)
    found = differences(snapshot(first), snapshot(second))
    for engine in (first, second):
        train(engine, 2)
    found += differences(snapshot(first), snapshot(second))
    assert [param.stride() for param in second.module.parameters()] == strides
    for engine in (first, second):
        engine.destroy()
    return found


@pytest.mark.parametrize("count", [full(1), 2])
def test_saved_and_restored_in_row_major_order(ranks: Any, tmp_path: Path, count: int) -> None:
    assert ranks(count).run(save_and_continue, folder=str(tmp_path / "set")) == [[]] * count
