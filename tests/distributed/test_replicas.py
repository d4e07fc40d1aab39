"""Replicas outside of an engine: the processes of torch's DDP stay bit-identical."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_muon import Muon
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.ops.autotune import Choice, Tuner
from deepspeed_muon.ops.dispatch import Orthogonalizer


def choose(matrix: torch.Tensor) -> tuple[str, str]:
    """Return what this process would run for a matrix by itself, and why."""
    settings = MuonConfig().ns_settings(torch.device("cpu"))
    chosen = Orthogonalizer("auto", Tuner()).prepare(matrix, settings=settings, device=torch.device("cpu"))
    return chosen.candidate.name, chosen.choice.reason


def train(rank: int, world_size: int) -> dict[str, Any]:
    """Train under DDP where rank 1 measures another kernel as fastest; return what ran and whether weights agree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Tuner,
            "_decide",
            lambda _, key, problem, candidates, device: Choice(candidates[rank].name, "measured"),
        )
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 96))
        model = nn.parallel.DistributedDataParallel(layers)
        optimizer = Muon(model, muon_lr=0.02)
        torch.manual_seed(rank)
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(8, 96)) - 1).square().mean().backward()
            optimizer.step()
        alone = choose(torch.empty(1, 256, 96))
    flat = torch.cat([param.detach().view(-1) for param in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(every, flat)
    report = optimizer.kernel_report()
    return {
        "equal": all(torch.equal(one, flat) for one in every),
        "ran": [(entry["problem"], entry["ran"]) for entry in report],
        "reasons": sorted({entry["reason"] for entry in report}),
        "alone": alone,
    }


def test_replicas_run_the_same_kernels(ranks: Any) -> None:
    """Each process timed the kernels and took what was faster there: in bf16 the replicas drifted apart."""
    first, second = ranks(2).run(train)
    assert first["alone"] != second["alone"], "by itself each rank would run another"
    assert first["ran"] == second["ran"] and first["equal"] and second["equal"]
    assert first["reasons"] == ["not timed, so that the replicas of other processes choose the same kernel"]
