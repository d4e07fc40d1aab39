"""The order of the matrices in ZeRO's flat buffers: chosen before the buffers exist, and recorded in checkpoints.

DeepSpeed's files hold flat partitions without names. An engine with another order would load them into the wrong
matrices, so the orders are compared before anything of the optimizer is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.spread import fragments_of

__all__ = ["ORDER_KEY", "has_flat_groups", "load_state_dict", "order_parameters", "record_order"]

ORDER_KEY = "deepspeed_muon_order"
# Where the wrappers keep the state of the optimizer inside them.
_INNER_KEYS = ("base_optimizer_state", "optimizer_state_dict")


def order_parameters(engine: Any, optimizer: Muon, *, device: torch.device) -> None:
    """Choose the order of the matrices of every Muon group that ZeRO 1 or 2 will flatten.

    These keep their order: other stages, which do not cut a flat buffer; ``round_robin_gradients``, an order of its
    own; and groups of experts, whose ranks are not known here.

    Args:
        engine: A ``DeepSpeedEngine`` before its ZeRO wrapper is made.
        optimizer: Its optimizer. The lists in its param groups are replaced.
        device: Where the iteration will run.
    """
    if optimizer.config.order == "given" or engine.zero_optimization_stage() not in (1, 2):
        return
    if getattr(engine._config.zero_config, "round_robin_gradients", False):
        return
    group = getattr(engine, "seq_data_parallel_group", None)
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    sizes = [None if entry.get("moe") else ranks for entry in optimizer.param_groups]
    optimizer.order_parameters(sizes, device=device)


def has_flat_groups(engine: Any) -> bool:
    """Return whether the wrapper keeps param groups as flat buffers, in which the order of the matrices matters."""
    return isinstance(engine.optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer))


def record_order(engine: Any, optimizer: Muon) -> None:
    """Let every saved state of a bound optimizer hold its order and a digest of its layout, where the order matters."""
    if not has_flat_groups(engine):
        return
    rule, order = _digest(_rules(optimizer)), optimizer.config.order

    def add(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[ORDER_KEY] = {"order": order, "rule": rule}

    optimizer.register_state_dict_post_hook(add)


def load_state_dict(
    original: Callable[..., Any], wrapper: Any, state_dict_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load a saved state, unless it has another layout."""
    rule = _digest(_rules(wrapper.optimizer))
    # Universal checkpoints come without such a list. Their state is found by name.
    for saved in state_dict_list if isinstance(state_dict_list, (list, tuple)) else ():
        _compare(saved, wrapper.optimizer, rule)
    return original(state_dict_list, *args, **kwargs)


def _rules(optimizer: Muon) -> list[Any]:
    """Return name, partition and rule of every Muon matrix, sorted by name: equal rows are equal layouts."""
    return sorted([m.name, m.partition, m.spread.numbers()] for m in _matrices(optimizer))


def _with_fragments(optimizer: Muon) -> list[Any]:
    """Return the same with all fragments, as releases before 0.3 compared them."""
    return sorted(
        [m.name, m.partition, [[f.rank, f.partition_offset, f.numel] for f in fragments_of(m.spread)]]
        for m in _matrices(optimizer)
    )


def _matrices(optimizer: Muon) -> Iterator[MatrixLayout]:
    return (matrix for runner in optimizer.runners for matrix in runner.step_set.matrices)


def _digest(rows: list[Any]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _compare(saved: Any, optimizer: Muon, rule: str) -> None:
    """Raise if a rank's saved state has another layout. States of other optimizers have none on record."""
    if not isinstance(saved, dict):
        return
    inner: dict[str, Any] = next((saved[key] for key in _INNER_KEYS if isinstance(saved.get(key), dict)), {})
    if _is_same(inner, optimizer, rule):
        return
    stored = (
        inner[ORDER_KEY]["order"]
        if ORDER_KEY in inner
        else inner[RECORD_KEY]["optimizer"].get("order", "given")
    )
    raise CheckpointError(
        f"the checkpoint's flat partitions hold the matrices in another order (optimizer.params.order was "
        f"{str(stored)!r}) than this engine's ({optimizer.config.order!r}). Set optimizer.params.order to "
        f"{str(stored)!r} to resume it, or convert it with 'python -m deepspeed_muon checkpoint consolidate' and start "
        f"with restore_from"
    )


def _is_same(inner: dict[str, Any], optimizer: Muon, rule: str) -> bool:
    """Return whether a saved state has the layout of this optimizer, or does not say."""
    order = inner.get(ORDER_KEY, {})
    if "rule" in order:
        return bool(order["rule"] == rule)
    if "digest" in order:
        return bool(order["digest"] == _digest(_with_fragments(optimizer)))
    record = inner.get(RECORD_KEY)
    if record is None or record.get("version") != 1:
        return True
    rows = sorted(
        [entry["name"], entry["partition"], [[f[0], f[2], f[3]] for f in entry["fragments"]]]
        for entry in record["parameters"]
        if entry["algorithm"] == "muon"
    )
    return rows == _with_fragments(optimizer)
