"""The step that ``docs/architecture.md`` follows is the step that two ranks take."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon.reference import ReferenceMuon
from tests.support import training
from tests.support.native_ops import REPOSITORY

SHAPES = {"q": (4, 4), "k": (3, 3), "v": (5, 4)}
LR, MOMENTUM = 0.02, 0.95


def gradients() -> dict[str, Tensor]:
    """Return random gradients, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(rank: int, world_size: int) -> dict[str, Any]:
    """Train one step from zero; return the elements of each message, and the weights after the step."""
    settings = {"ns_dtype": "fp32", "exchange_chunk_numel": 20}
    params = {"muon_lr": LR, "momentum": MOMENTUM, "include": ["*"], **settings}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Muon", "params": params},
    }
    model = nn.ModuleDict({name: nn.Linear(cols, rows, bias=False) for name, (rows, cols) in SHAPES.items()})
    for param in model.parameters():
        nn.init.zeros_(param)
    engine = deepspeed.initialize(model=model, config=config)[0]
    messages = []
    all_to_all_single = dist.all_to_all_single

    def recorded(out: Tensor, send: Tensor, received: Any, sent: list[int], **options: Any) -> Any:
        messages.append([nbytes // 4 for nbytes in sent])
        return all_to_all_single(out, send, received, sent, **options)

    losses = [
        (engine.module[name](torch.eye(gradient.shape[1])) * gradient.T).sum()
        for name, gradient in gradients().items()
    ]
    engine.backward(torch.stack(losses).sum())
    with mock.patch.object(dist, "all_to_all_single", recorded):
        engine.step()
    weights = {name: engine.module[name].weight for name in SHAPES}
    optimizer = deepspeed_muon.muon_optimizer(engine)
    with deepspeed.zero.GatheredParameters(list(weights.values())):
        after = {name: weight.detach().clone() for name, weight in weights.items()}
    plan = optimizer.runners[0].plan
    owners = {matrix.name[0]: owner for matrix, owner in zip(plan.matrices, plan.owners, strict=True)}
    sent = training.planned_bytes(optimizer)
    return {"messages": messages, "weights": after, "owners": owners, "bytes": sent}


def test_the_page_shows_the_step_of_two_ranks(ranks: Any) -> None:
    """The sizes of all messages, in the order of the figure; the weights are those of one process."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    figure = page.partition("```text\n")[2].partition("```")[0]
    rows = [
        [line[18:52], line[52:]] for line in figure.splitlines() if "to rank" in line
    ]  # a cell for each sender
    numels = [
        [sum(int(b) - int(a) for a, b in re.findall(r"\[(\d+):(\d+)\]", cell)) for cell in row]
        for row in rows
    ]
    reference = ReferenceMuon(
        {name: lambda weight: [weight] for name in SHAPES}, muon_lr=LR, momentum=MOMENTUM
    )
    weights = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    reference.step(weights, gradients())
    for rank, result in enumerate(ranks(2).run(train)):
        assert [message for messages in result["messages"] for message in messages] == [
            row[rank] for row in numels
        ]
        assert result["owners"] == {"q": 1, "k": 0, "v": 0}
        assert result["bytes"] == 88 == 4 * sum(row[rank] for row in numels[1 - rank :: 2])
        for name, weight in weights.items():
            torch.testing.assert_close(result["weights"][name].double(), weight, rtol=0, atol=1e-6)
