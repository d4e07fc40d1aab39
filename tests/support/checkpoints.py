"""What tests of damaged checkpoints share: everything that an engine holds, and edits of sealed documents."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.checkpoint.sealed import sealed_json

INDEX = "muon_index.json"


def snapshot(engine: Any) -> dict[str, Any]:
    """Return a copy of all that a restore can change on this rank."""
    optimizer = engine.basic_optimizer
    tensors = {f"weight {name}": param.detach() for name, param in engine.module.named_parameters()}
    facts: dict[str, Any] = {
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "settings": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "loss scale": float(getattr(engine.optimizer, "loss_scale", 1.0)),
    }
    for runner in optimizer.runners:
        for partition in runner.step_set.partitions:
            tensors[f"master {partition.index}"] = partition.tensor.detach()
            for key, value in optimizer.state.get(partition.tensor, {}).items():
                name = f"{key} {partition.index}"
                if isinstance(value, torch.Tensor):
                    tensors[name] = value
                else:
                    facts[name] = value
    return {
        "facts": copy.deepcopy(facts),
        "tensors": {name: value.clone() for name, value in tensors.items()},
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what is not bit-identical in two snapshots of one engine."""
    found = [
        f"{key}: {before['facts'].get(key)} -> {after['facts'].get(key)}"
        for key in before["facts"].keys() | after["facts"].keys()
        if before["facts"].get(key) != after["facts"].get(key)
    ]
    first, second = before["tensors"], after["tensors"]
    found += [f"{name} came or went" for name in first.keys() ^ second.keys()]
    for name in first.keys() & second.keys():
        same = first[name].shape == second[name].shape and torch.equal(
            first[name].reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8)
        )
        found += [] if same else [name]
    return found


def edit(path: Path, change: Callable[[dict[str, Any]], Any], *, seal: bool = True) -> None:
    """Change a sealed document as somebody would who knows how it is sealed."""
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(sealed_json(content) if seal else json.dumps(content).encode())
