"""A record of who holds what, inside every optimizer state that DeepSpeed saves.

DeepSpeed's own files do not say which parameter lies where when gradients are dealt round-robin or groups are split,
nor the names at stage 0. The record is made of numbers, strings and lists only, so that it loads with
``weights_only``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_muon.checkpoint.live import LiveState, collect
from deepspeed_muon.errors import CheckpointError

__all__ = ["RECORD_KEY", "add_record_to_state_dict"]

RECORD_KEY = "deepspeed_muon_layout"
RECORD_VERSION = 1


def add_record_to_state_dict(engine: Any) -> None:
    """Let the optimizer of ``engine`` add the record whenever its state is saved.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
    """
    reference = weakref.ref(engine)

    def add(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        owner = reference()
        if owner is None:
            return
        try:
            state_dict[RECORD_KEY] = _record(collect(owner))
        except CheckpointError:
            # Several data-parallel groups, or equal names: DeepSpeed's own resume works without the record.
            return

    engine.basic_optimizer.register_state_dict_post_hook(add)


def _record(state: LiveState) -> Mapping[str, Any]:
    order = {route.name: number for number, route in enumerate(state.optimizer.routes)}
    parameters = sorted(state.parameters, key=lambda parameter: order[parameter.route.name])
    return {
        "version": RECORD_VERSION,
        "world_size": state.world_size,
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "parameters": [
            {
                "name": parameter.route.name,
                "shape": list(parameter.route.shape),
                "algorithm": parameter.route.algorithm,
                "heads": parameter.route.heads,
                "grid": None if (grid := parameter.route.grid) is None else [list(sizes) for sizes in grid],
                "transposed": parameter.route.transposed,
                "partition": parameter.partition.index,
                "group": parameter.group,
                "replicated": parameter.replicated,
                "fragments": [
                    [f.rank, f.matrix_offset, f.partition_offset, f.numel] for f in parameter.fragments
                ],
                "rows": [[f.rank, f.matrix_offset, f.partition_offset, f.numel] for f in parameter.rows],
            }
            for parameter in parameters
        ],
    }
