"""The order of the matrices in ZeRO's flat buffers: chosen before the buffers exist, and recorded in checkpoints.

DeepSpeed's files hold flat partitions without names. An engine with another order would load them into the wrong
matrices, so the orders are compared before anything of the optimizer is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_muon.optimizer import Muon

ORDER_KEY = "deepspeed_muon_order"


def order_parameters(engine: Any, optimizer: Muon, *, device: torch.device) -> None:
    """Choose the order of the matrices of every Muon group that ZeRO 1 or 2 will flatten.

    These keep their order: other stages, which do not cut a flat buffer; ``round_robin_gradients``, an order of its
    own; and groups of experts, whose ranks are not known here.

    Args:
        engine: A ``DeepSpeedEngine`` before its ZeRO wrapper is made.
        optimizer: Its optimizer. The lists in its param groups are replaced.
        device: Where the iteration will run.
    """
    if engine.zero_optimization_stage() not in (1, 2):
        return
    if getattr(engine._config.zero_config, "round_robin_gradients", False):
        return
    group = getattr(engine, "seq_data_parallel_group", None)
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    sizes = [None if entry.get("moe") else ranks for entry in optimizer.param_groups]
    optimizer._order_parameters(sizes, device=device)


def has_flat_groups(engine: Any) -> bool:
    """Return whether the wrapper keeps param groups as flat buffers, in which the order of the matrices matters."""
    return isinstance(engine.optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer))


def record_order(engine: Any, optimizer: Muon) -> None:
    """Let every saved state of a bound optimizer hold a digest of its layout, where the order matters."""
    if not has_flat_groups(engine):
        return
    rule = _digest(_rules(optimizer))

    def add(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[ORDER_KEY] = {"rule": rule}

    optimizer.register_state_dict_post_hook(add)


def _rules(optimizer: Muon) -> list[Any]:
    """Return name, partition and rule of every Muon matrix, sorted by name: equal rows are equal layouts."""
    matrices = (matrix for runner in optimizer._runners for matrix in runner.step_set.matrices)
    return sorted([m.name, m.partition, m.spread.numbers()] for m in matrices)


def _digest(rows: list[Any]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def same_order(inner: Mapping[str, Any], optimizer: Muon) -> bool:
    """Return whether a rank's saved state has the layout of this optimizer, or does not say."""
    recorded = inner.get(ORDER_KEY)
    return recorded is None or bool(recorded["rule"] == _digest(_rules(optimizer)))
