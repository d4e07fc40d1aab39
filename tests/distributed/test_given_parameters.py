"""Which parameters an engine gets, and in which form: some of the model's, scalars, other strides, no elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon.tools.convert import consolidate_files
from tests.support import training
from tests.support.comparisons import relative, within
from tests.support.models import batch, build
from tests.support.thinning import full

CLIPPING = 0.05


def train_blocks(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Train the blocks alone; embedding and head get gradients, and no optimizer has them."""
    model = build("toy")
    config = training.ds_config(stage, clipping=CLIPPING)
    engine = training.initialize(model, config, model_parameters=list(model.blocks.parameters()))
    norms = training.train_steps(engine, 2, rank, world_size)
    return {"norms": norms, "params": training.full_masters(engine)}


@pytest.mark.parametrize("stage", [0, full(1), full(2), 3])
def test_the_norm_is_that_of_the_optimizers_parameters(ranks: Any, stage: int) -> None:
    """ZeRO 0 counted all parameters of the model and clipped by another factor than the other stages."""
    model = build("toy").double()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = deepspeed_muon.Muon(list(model.blocks.parameters()), model=model, **training.MUON_PARAMS)
    norms = []
    for step in range(2):
        model.zero_grad()
        for rank in range(2):
            (model(*batch(step, rank)) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.blocks.parameters(), CLIPPING)))
        optimizer.step()
    trained = ranks(2).run(train_blocks, stage=stage)[0]
    assert trained["norms"] == pytest.approx(norms, rel=1e-5)
    for name, param in model.named_parameters():
        if name in trained["params"]:
            # fp32 gradients and updates against float64's, as in test_equivalence.py; another factor changes AdamW's
            # gains little, and the momentum of a matrix only together with its later gradients.
            error = relative(trained["params"][name], param.detach(), start[name])
            within(error, 1e-4, f"path of {name}")


class Filters(nn.Module):
    """A convolution, a linear layer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.conv(x).mean((2, 3))).logsumexp(1) * self.scale).square().mean()


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, 6, 6, generator=generator)


def filters(seed: int) -> Filters:
    torch.manual_seed(seed)
    model = Filters().to(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    return model


def train_filters(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Every rank begins with other weights: those of the first must be broadcast."""
    model = filters(seed=rank)
    engine = training.initialize(model, training.ds_config(stage))
    strides = model.conv.weight.stride()
    for step in range(2):
        engine.backward(engine(inputs(step, rank)))
        engine.step()
    return {"params": training.full_masters(engine), "strides": list(strides)}


@pytest.mark.parametrize("stage", [0, 1, full(2), 3])
def test_scalars_and_strides(ranks: Any, stage: int) -> None:
    """DeepSpeed's broadcast raised a RuntimeError for both."""
    model = filters(seed=0).double()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = deepspeed_muon.Muon(model, **training.MUON_PARAMS)
    for step in range(2):
        model.zero_grad()
        for rank in range(2):
            (model(inputs(step, rank).double()) / 2).backward()
        optimizer.step()
    for trained in ranks(2).run(train_filters, stage=stage):
        assert stage or trained["strides"] == list(model.conv.weight.stride())
        for name, param in model.named_parameters():
            # Forward and backward passes in fp32, whose roundings Adam divides by the size of the gradient.
            error = relative(trained["params"][name], param.detach(), start[name])
            within(error, 1e-3, f"path of {name}")


def train_with_an_empty_parameter(
    rank: int, world_size: int, *, stage: int, folder: str, precision: str = "fp32", has_empty: bool = True
) -> dict[str, Any]:
    """Train two steps; save after the first, and take the second again after each way to resume."""
    config = training.ds_config(stage, precision=precision)

    def engine_of(seed: int) -> Any:
        model = build("toy", seed=seed)
        if has_empty:
            model.unused = nn.ParameterList([torch.empty(0), torch.empty(4, 0)])
        return training.initialize(model, config)

    engine = engine_of(0)
    training.run_step(engine, 0, rank, world_size, 1)
    engine.save_checkpoint(folder, tag="tag")
    deepspeed_muon.consolidate(engine, folder + "/set")
    training.run_step(engine, 1, rank, world_size, 1)
    results = {"trained": training.full_masters(engine)}
    for kind in ("loaded", "restored"):
        engine = engine_of(1)
        if kind == "loaded":
            engine.load_checkpoint(folder)
        else:
            deepspeed_muon.restore(engine, folder + "/set")
        training.run_step(engine, 1, rank, world_size, 1)
        results[kind] = training.full_masters(engine)
    return results


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "fp32"), full(0, "bf16"), full(1, "bf16"), full(2, "fp32")]
)
def test_a_parameter_without_elements(ranks: Any, tmp_path: Path, stage: int, precision: str) -> None:
    """`deepspeed.initialize` ended with a validation error; training, saves and resumes do without it."""
    arguments = {"stage": stage, "precision": precision}
    (tmp_path / "without").mkdir()
    ours, _ = ranks(2).run(train_with_an_empty_parameter, folder=str(tmp_path), **arguments)
    without, _ = ranks(2).run(
        train_with_an_empty_parameter, folder=str(tmp_path / "without"), has_empty=False, **arguments
    )
    for masters in ours.values():
        assert masters.keys() == without["trained"].keys()
        for name, master in masters.items():
            assert torch.equal(master, without["trained"][name]), name
    offline = consolidate_files(tmp_path, tmp_path / "offline")
    assert offline.parameters.keys() == without["trained"].keys()
