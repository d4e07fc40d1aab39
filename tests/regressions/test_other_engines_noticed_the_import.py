"""Engines with other optimizers, in a program that imports this package: as if it were not there.

This module and all that it imports leave ``deepspeed_muon`` alone until a rank function imports it.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import nn

from tests.support.collectives import process_group_calls
from tests.support.models import batch, build
from tests.support.moe_models import build_deepspeed

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
ITS_MUON = {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True, "ns_method": "standard"}}


def config_of(stage: int, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": 1_000_000,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    }
    if optimizer is not None:
        config["optimizer"] = optimizer
    if stage:
        config["zero_optimization"] = {"stage": stage, "reduce_scatter": False}
    return config


def run_engine(rank: int, *, stage: int, kind: str) -> dict[str, Any]:
    """Make an engine that is not ours, train two steps, and report all that can be seen of it."""
    torch.manual_seed(0)
    # Stage 3 numbers the parameters and modules of the process and compares the numbers between the ranks.
    deepspeed.zero.Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    moe = kind.startswith("moe")
    model: nn.Module = build_deepspeed(2, rank) if moe else build("toy", exact=False)
    arguments: dict[str, Any] = {"model_parameters": list(model.parameters())}
    optimizer: dict[str, Any] | None = None
    if kind in ("adamw", "moe"):
        optimizer = ADAMW
    elif kind == "moe groups":
        # Without names, which DeepSpeed asks for where there are experts.
        optimizer = ADAMW
        arguments["model_parameters"] = [{"params": list(model.parameters())}]
    elif kind == "its muon":
        optimizer = ITS_MUON
    elif kind == "client":
        arguments = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    elif kind == "callable":
        arguments["optimizer"] = lambda params: torch.optim.AdamW(params, lr=1e-3)
    with process_group_calls() as calls:
        try:
            engine, *_ = deepspeed.initialize(model=model, config=config_of(stage, optimizer), **arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "calls": described(calls)}
        losses = []
        for step in range(2):
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return {
        "calls": described(calls),
        "losses": losses,
        "rates": engine.get_lr(),
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "groups": [sorted(group) for group in engine.basic_optimizer.param_groups],
        "class": type(engine.basic_optimizer).__name__,
        "weights": [
            getattr(param, "ds_tensor", param).detach().clone() for param in engine.module.parameters()
        ],
        "state": [
            value.detach().clone()
            for state in engine.basic_optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ],
    }


def described(calls: list[Any]) -> list[list[str]]:
    return [[call.name, str(call.ranks), *call.tensors] for call in calls]


def before_and_after(rank: int, world_size: int, *, cases: list[list[Any]]) -> Any:
    """Run each case before this package is imported and after; DeepSpeed's own Muon after ``unregister``."""
    assert not any(name.startswith("deepspeed_muon") for name in sys.modules)
    # Makes the process groups that DeepSpeed keeps.
    run_engine(rank, stage=0, kind="moe")
    before = [run_engine(rank, stage=stage, kind=kind) for stage, kind in cases]
    import deepspeed_muon

    after = []
    for stage, kind in cases:
        if kind == "its muon":
            deepspeed_muon.unregister()
        after.append(run_engine(rank, stage=stage, kind=kind))
        deepspeed_muon.register()
    # A positive control: collectives of an engine of ours are seen.
    config = config_of(1, {"type": "Muon", "params": {"lr": 1e-3}})
    with process_group_calls() as calls:
        deepspeed.initialize(model=build("toy", exact=False), config=config)
    return {"before": before, "after": after, "control": len(calls)}


DEFAULT = [(0, "callable"), (1, "moe groups"), (2, "its muon"), (3, "adamw")]
ALL = [(stage, kind) for stage in range(4) for kind in ("adamw", "client", "callable", "its muon")]
ALL += [(stage, kind) for stage in range(3) for kind in ("moe", "moe groups")]


@pytest.mark.parametrize(
    "cases", [pytest.param(DEFAULT, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.full)]
)
def test_an_engine_of_another_optimizer_does_not_notice_the_import(cases: list[Any]) -> None:
    """Counts, arguments and contents of all collectives, weights, state, rates and errors are the same bit for bit."""
    from tests.support.harness import run_ranks

    # DeepSpeed's Muon compiles its iteration, for minutes.
    env = {"TORCHDYNAMO_DISABLE": "1"}
    for result in run_ranks(before_and_after, 2, {"cases": [list(case) for case in cases]}, env=env):
        assert result["control"] > 0
        for (stage, kind), first, second in zip(cases, result["before"], result["after"], strict=True):
            where = f"stage {stage}, {kind}"
            assert "error" in first or len(first["calls"]) > 5, where
            assert first["calls"] == second["calls"], where
            assert first.keys() == second.keys(), (where, first.get("error"), second.get("error"))
            for key in first:
                if key in ("weights", "state"):
                    assert len(first[key]) == len(second[key]), where
                    assert all(torch.equal(a, b) for a, b in zip(first[key], second[key], strict=True)), where
                else:
                    assert first[key] == second[key], (where, key)
