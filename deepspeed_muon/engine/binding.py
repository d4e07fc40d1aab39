"""Reads the layout of whichever wrapper DeepSpeed put around the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_muon.engine import stage0, stage3, stage12
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group, with_tensor_parallel
from deepspeed_muon.errors import UnsupportedConfigError
from deepspeed_muon.routing.rules import Route
from deepspeed_muon.step.step_set import StepSet

__all__ = ["read_step_sets"]


def read_step_sets(
    engine: Any, optimizer: torch.optim.Optimizer, routes: Mapping[int, Route]
) -> list[StepSet]:
    """Read the layout of whichever wrapper DeepSpeed put around ``optimizer``.

    Args:
        engine: The ``DeepSpeedEngine`` whose ``optimizer`` attribute is the wrapper.
        optimizer: Our optimizer, inside the wrapper.
        routes: ``id(model parameter)`` to its route.

    Returns:
        The step sets in an order that all ranks share.

    Raises:
        UnsupportedConfigError: If the wrapper is one that no adapter knows, or a matrix that tensor parallelism cuts
            is of a kind that cannot be orthogonalised.
        BindingError: If the layout does not fit the routes.
        PlanMismatchError: If the ranks of a tensor-parallel group hold different matrices.
    """
    group = tensor_parallel_group(engine)
    if group is None:
        return _read(engine, optimizer, routes)
    return with_tensor_parallel(group, lambda: _read(engine, optimizer, routes), engine.module, routes)


def _read(engine: Any, optimizer: torch.optim.Optimizer, routes: Mapping[int, Route]) -> list[StepSet]:
    wrapper = engine.optimizer
    for adapter in (stage3, stage12, stage0):
        if adapter.knows(wrapper, optimizer):
            sets: list[StepSet] = adapter.read(engine, wrapper, routes)
            return sets
    raise UnsupportedConfigError(
        f"DeepSpeed wrapped the optimizer in {type(wrapper).__name__}, whose layout is not known here; "
        f"known: ZeRO stages 0 to 3, BF16_Optimizer and FP16_UnfusedOptimizer"
    )
