"""Which parts of which parameters a rank keeps in ZeRO's partitions: chosen where it can be, and read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_muon.engine.offload import CpuAdam
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group, with_tensor_parallel
from deepspeed_muon.engine.topology import holders, skips_with
from deepspeed_muon.engine.zero import View, view_of
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.route import Route
from deepspeed_muon.step.step_set import LayoutReader, StepSet


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


def read_step_sets(engine: Any, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read the layout of whichever wrapper DeepSpeed put around ``optimizer``.

    Args:
        engine: The ``DeepSpeedEngine`` whose ``optimizer`` attribute is the wrapper.
        optimizer: Our optimizer, inside the wrapper.
        routes: ``id(model parameter)`` to its route.

    Returns:
        The step sets in an order that all ranks share.

    Raises:
        UnsupportedConfigError: If the wrapper is of an unknown class, or a matrix that tensor parallelism cuts is of a
            kind that cannot be orthogonalised.
        BindingError: If the layout does not fit the routes.
        PlanMismatchError: If the ranks of a tensor-parallel group hold different matrices.
    """
    read = functools.partial(_read, engine, optimizer, routes)
    group = tensor_parallel_group(engine)
    return read() if group is None else with_tensor_parallel(group, read, engine.module, routes)


def _read(engine: Any, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    view, everyone = view_of(engine.optimizer), engine.seq_data_parallel_group
    assert view.optimizer is optimizer
    # Partitions that one call of the inner step updates, and that the same ranks hold, both in the order of the view.
    sets: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
    for index, params in enumerate(view.params):
        group = view.group(index)
        if group is None:
            group = holders(params[0], everyone)
        call = 0 if view.is_one_call else index
        sets.setdefault((call, id(group)), (group, []))[1].append(index)
    return [_step_set(view, routes, group, indices, everyone) for group, indices in sets.values()]


def _step_set(
    view: View, routes: Mapping[int, Route], group: dist.ProcessGroup, indices: list[int], everyone: Any
) -> StepSet:
    reader = LayoutReader(
        routes,
        group,
        others=skips_with(view.params[indices[0]][0], everyone),
        native_adam=CpuAdam if view.offloads else None,
    )
    for index in indices:
        reader.add_partition(index, view.masters[index], view.params[index])
        for param, placement in view.placements(index, reader.world_size):
            reader.add_parameter(param, placement)
    if view.is_one_call or view.weights(indices[0]) is None:
        return reader.step_set()
    # A reference that is not weak would make a cycle, and keep the device's memory.
    return reader.step_set(functools.partial(_refresh, weakref.ref(view.wrapper), indices[0]))


def _refresh(reference: weakref.ref[Any], index: int, offset: int, numel: int) -> None:
    """Round a run of a partition into the weights of the forward pass, as DeepSpeed does with all of it."""
    view = view_of(reference())
    weights = view.weights(index)
    assert weights is not None
    weights.data.narrow(0, offset, numel).copy_(view.masters[index].data.narrow(0, offset, numel))
