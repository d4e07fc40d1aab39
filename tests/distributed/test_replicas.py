"""Replicas outside of an engine: the processes of torch's DDP stay bit-identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_muon import Muon
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.ops import dispatch
from deepspeed_muon.ops.candidates import candidates_for, problem_of
from deepspeed_muon.ops.dispatch import Orthogonalizer
from deepspeed_muon.ops.machine import write_json

SHAPES = ((256, 96), (96, 256))


def choose(shape: tuple[int, int]) -> tuple[str, str]:
    """Return what this process would run for a matrix by itself, and why."""
    settings = MuonConfig().ns_settings(torch.device("cpu"))
    chosen = Orthogonalizer("auto").prepare(
        torch.empty(1, *shape), settings=settings, device=torch.device("cpu")
    )
    return chosen.candidate.name, chosen.choice.reason


def remember(rank: int) -> None:
    """Write choices into this process's folder, as if measured: on rank 0 the expected kernels, on rank 1 others."""
    settings = MuonConfig().ns_settings(torch.device("cpu"))
    choices = {}
    for shape in SHAPES:
        problem = problem_of(torch.empty(1, *shape), settings)
        names = [candidate.name for candidate in candidates_for(problem, dispatch._operators("auto"))]
        choice = {"name": names[rank], "reason": "measured", "milliseconds": {}, "rejected": {}}
        choices[problem.key()] = {**choice, "candidates": names}
    tuner = dispatch.process_tuner()
    tuner._file.parent.mkdir(parents=True)
    write_json(tuner._file, {"identity": tuner._identity, "choices": choices})


def train(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Train under DDP, and return the weights of all ranks, what ran and why."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_MUON_CACHE_DIR", f"{folder}/{rank}")
        dispatch.process_tuner.cache_clear()
        remember(rank)
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 96))
        model = nn.parallel.DistributedDataParallel(layers)
        optimizer = Muon(model, muon_lr=0.02)
        torch.manual_seed(rank)
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(8, 96)) - 1).square().mean().backward()
            optimizer.step()
        alone = [choose(shape) for shape in SHAPES]
    dispatch.process_tuner.cache_clear()
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


def test_replicas_run_the_same_kernels(ranks: Any, tmp_path: Path) -> None:
    """Each process timed the kernels and took what was faster there, or what its folder remembered."""
    first, second = ranks(2).run(train, folder=str(tmp_path))
    assert {why for _, why in (*first["alone"], *second["alone"])} == {"remembered"}
    assert not set(first["alone"]) & set(second["alone"]), "by itself each rank would run another"
    assert first["ran"] == second["ran"] and first["equal"] and second["equal"]
    assert first["reasons"] == ["expected; the replicas of other processes round alike"]
