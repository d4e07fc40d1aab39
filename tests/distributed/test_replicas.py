"""Replicas outside of an engine: the processes of torch's DDP stay bit-identical."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_muon import Muon


def train(rank: int, world_size: int) -> dict[str, Any]:
    """Train under DDP; return what ran and whether the weights are those of all ranks."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 96))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = Muon(model, muon_lr=0.02)
    torch.manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.randn(8, 96)) - 1).square().mean().backward()
        optimizer.step()
    flat = torch.cat([param.detach().view(-1) for param in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(every, flat)
    ran = [(entry["problem"], entry["ran"]) for entry in optimizer.kernel_report()]
    return {"equal": all(torch.equal(one, flat) for one in every), "ran": ran}


def test_replicas_run_the_same_kernels(ranks: Any) -> None:
    """Each process timed the kernels and took what was faster there: in bf16 the replicas drifted apart."""
    first, second = ranks(2).run(train)
    assert first["ran"] == second["ran"] and first["ran"] and first["equal"] and second["equal"]
