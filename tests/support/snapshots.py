"""Bitwise snapshots of everything that an engine holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deepspeed_muon
from deepspeed_muon.errors import CheckpointError
from tests.support.training import refusal


def tensors_of(engine: Any) -> dict[str, Tensor]:
    """Copy the module's weights, the fp32 masters and all optimizer state that this rank holds."""
    optimizer = deepspeed_muon.muon_optimizer(engine)
    tensors: dict[str, Any] = {}
    for name, param in engine.module.named_parameters():
        tensors[f"weight {name}"] = param.data
        tensors[f"partition of weight {name}"] = getattr(param, "ds_tensor", param).data
    for runner in optimizer.runners:
        for partition in runner.step_set.partitions:
            tensors[f"master {partition.index}"] = partition.tensor.data
            for key, value in optimizer.state.get(partition.tensor, {}).items():
                tensors[f"{key} {partition.index}"] = torch.as_tensor(value)
    return {name: value.clone() for name, value in tensors.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Name the tensors that are not bit-identical, or came or went."""
    names = [f"{name} came or went" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        same = before[name].shape == after[name].shape and torch.equal(
            before[name].reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)
        )
        names += [] if same else [name]
    return names


def snapshot(engine: Any) -> dict[str, Any]:
    """Return a copy of all that a restore can change on this rank: the tensors, and counters and settings."""
    optimizer = engine.basic_optimizer
    facts: dict[str, Any] = {
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "settings": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "loss scale": float(getattr(engine.optimizer, "loss_scale", 1.0)),
    }
    return {"facts": copy.deepcopy(facts), "tensors": tensors_of(engine)}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what is not bit-identical in two snapshots of one engine."""
    names = [
        f"{key}: {before['facts'].get(key)} -> {after['facts'].get(key)}"
        for key in before["facts"].keys() | after["facts"].keys()
        if before["facts"].get(key) != after["facts"].get(key)
    ]
    return names + changed(before["tensors"], after["tensors"])


def attempted(engine: Any, load: Callable[[], object]) -> tuple[str, list[str]]:
    """Load a checkpoint; return why it was refused, or ``""``, and what is not bit-identical afterwards."""
    before, message = snapshot(engine), refusal(load, CheckpointError)
    return message, differences(before, snapshot(engine))
