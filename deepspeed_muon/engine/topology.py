"""The topology of an engine: its ranks, which of them train a parameter, where they keep it, and which part it is.

Parts are those of experts, and of what tensor parallelism cuts. What nobody says is not guessed: such a parameter gets
a sentence in place of its part, and checkpoints that outlive the topology refuse it. Training does not need the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_pipeline_parallel_group, bwc_pipeline_parallel_world_size
from torch import Tensor, nn

from deepspeed_muon.engine.offload import CpuAdam
from deepspeed_muon.engine.tensor_parallel import (
    is_copy,
    read_cut,
    tensor_parallel_group,
    with_tensor_parallel,
)
from deepspeed_muon.engine.zero.stages import view_of
from deepspeed_muon.engine.zero.views import PlainView, View
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.placement import TensorSlice, full_slice
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.step.step_set import StepSet, read_step_set
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.ranks import Ranks

# What AutoEP says of its stacks of experts, and which experts a rank's stack has.
_STACK, _EXPERTS = "ds_autoep_uc_meta", "local_experts"


def ranks_of(engine: Any) -> Ranks:
    """Return the ranks that make up an engine: data-parallel, sequence-, tensor- and pipeline-parallel ones.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups: from its ``_broadcast_model`` on.
    """
    found = [engine.seq_data_parallel_group]
    # Not mpu.get_model_parallel_group: in a pipeline that spans the stages too.
    if (tensor_parallel := tensor_parallel_group(engine)) is not None:
        found.append(tensor_parallel)
    if bwc_pipeline_parallel_world_size(engine.mpu) > 1:
        found.append(bwc_pipeline_parallel_group(engine.mpu))
    return Ranks.of(found)


def groups_of(
    param: Tensor, everyone: dist.ProcessGroup
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the ranks that train ``param`` together, those that skip steps with them, and those of its stack.

    An expert's parameters carry ``allreduce = False`` and the name of their expert-parallel group. The ranks that hold
    the same expert are its expert-data-parallel group; they partition (or replicate) it among themselves. A stack of
    some experts of a layer (AutoEP) skips steps with the ranks that hold the rest of it.

    Args:
        param: A parameter of the model.
        everyone: The data-parallel group of everything that is no expert.

    Returns:
        A process group, and ``wider_group`` and ``stack_group`` of a :class:`deepspeed_muon.step.step_set.StepSet`.
    """
    name = expert_group_name(param)
    if name is None:
        return everyone, everyone, None
    holders = groups._get_expert_data_parallel_group(name)
    if not hasattr(param, _STACK):
        return holders, everyone, None
    stack = groups._get_expert_parallel_group(name)
    return holders, None, stack if dist.get_world_size(stack) > 1 else None


def model_facts(engine: Any) -> RankFacts:
    """Return dtype and shape of every parameter, to be equal on the ranks between which DeepSpeed broadcasts it."""
    facts, scope_of = RankFacts(), functools.cache(Scope.of)
    for name, param in engine.module.named_parameters():
        shown = f"{str(param.dtype).removeprefix('torch.')} {list(true_shape(param))}"
        facts.record(
            f"parameter {name}", shown, scope_of(groups_of(param, engine.seq_data_parallel_group)[0])
        )
    return facts


def read_step_sets(engine: Any, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read the layout of whichever wrapper DeepSpeed put around ``optimizer``.

    Args:
        engine: The ``DeepSpeedEngine`` whose ``optimizer`` attribute is the wrapper.
        optimizer: Our optimizer, inside the wrapper.
        routes: ``id(model parameter)`` to its route.

    Returns:
        The step sets in an order that all ranks share.

    Raises:
        ConfigError: If the wrapper is of an unknown class, or a matrix that tensor parallelism cuts is of a
            kind that cannot be orthogonalised.
        BindingError: If the layout does not fit the routes.
        RankDisagreementError: If the ranks of a tensor-parallel group hold different matrices.
    """
    read = functools.partial(_read, engine, optimizer, routes)
    group = tensor_parallel_group(engine)
    return read() if group is None else with_tensor_parallel(group, read, engine, routes)


def _read(engine: Any, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    view, everyone = view_of(engine.optimizer), engine.seq_data_parallel_group
    assert view.optimizer is optimizer
    # Partitions that one call of the inner step updates, and that the same ranks hold, both in the order of the view.
    sets: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
    for index, params in enumerate(view.params):
        if not view.is_trained(index):
            continue
        group = view.group(index)
        if group is None:
            group, *_ = groups_of(params[0], everyone)
        call = 0 if view.is_one_call else index
        sets.setdefault((call, id(group)), (group, []))[1].append(index)
    # At stage 0 nobody else tells the stages of a pipeline of each other's gradients.
    stages = (
        engine.mpu.get_model_parallel_group()
        if isinstance(view, PlainView) and is_divided(engine.module)
        else None
    )
    return [_step_set(view, routes, group, indices, everyone, stages) for group, indices in sets.values()]


def _step_set(
    view: View,
    routes: Mapping[int, Route],
    group: dist.ProcessGroup,
    indices: list[int],
    everyone: Any,
    stages: dist.ProcessGroup | None,
) -> StepSet:
    _, wider_group, stack_group = groups_of(view.params[indices[0]][0], everyone)
    ranks = dist.get_world_size(group)
    if wider_group is None or dist.get_world_size(wider_group) <= ranks:
        wider_group = stages
    return read_step_set(
        [(each, view.masters[each], view.params[each], view.placements(each, ranks)) for each in indices],
        routes,
        group,
        wider_group=wider_group,
        stack_group=stack_group,
        native_adam=CpuAdam if view.offloads else None,
    )


def parts_of(engine: Any, routes: Mapping[int, Route]) -> dict[str, TensorSlice | str]:
    """Return which part of a whole tensor each trained parameter of this rank is, and of which.

    Must be called by all ranks of the engine.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups.
        routes: ``id(model parameter)`` to its route.

    Returns:
        Name of each parameter to its part, or to a sentence that says why nobody knows it.
    """
    numbers = _numbers_of_experts(engine.module)
    group = tensor_parallel_group(engine)
    shapes = [{route.name: route.shape for route in routes.values()}]
    rank = 0
    if group is not None:
        rank = dist.get_rank(group)
        shapes = list(
            Ranks((group,)).gather(shapes[0], purpose="comparison of tensor-parallel shapes").values()
        )
    found: dict[str, TensorSlice | str] = {}
    for param in engine.module.parameters():
        route = routes.get(id(param))
        if route is None or route.algorithm == "frozen":
            continue
        try:
            part = _part_of_expert(param, route, numbers)
            if group is not None:
                part = _part_of_shard(param, part, rank, [each.get(route.name, ()) for each in shapes])
            found[route.name] = part
        except ValueError as error:
            found[route.name] = str(error)
    return found


def _numbers_of_experts(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Return, for each parameter of the experts of ``deepspeed.moe``, the expert's number here and their count here."""
    found = {}
    for module in model.modules():
        experts = getattr(module, "deepspeed_experts", None)
        if isinstance(experts, nn.ModuleList):
            for number, expert in enumerate(experts):
                found.update({id(param): (number, len(experts)) for param in expert.parameters()})
    return found


def _part_of_expert(param: Tensor, route: Route, numbers: Mapping[int, tuple[int, int]]) -> TensorSlice:
    """Return the whole tensor of an expert under its number among all, the rank's experts of a stack, or the tensor."""
    name = expert_group_name(param)
    group = None if name is None else groups._get_expert_parallel_group(name)
    if group is None or dist.get_world_size(group) == 1:
        return full_slice(route.name, route.shape)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if id(param) in numbers:
        own, count = numbers[id(param)]
        before, mark, behind = route.name.rpartition(f"deepspeed_experts.{own}.")
        if not mark:
            raise ValueError("it belongs to an expert whose number its name does not have")
        return full_slice(f"{before}deepspeed_experts.{rank * count + own}.{behind}", route.shape)
    stack = getattr(param, _STACK, None)
    if stack is None:
        raise ValueError("it belongs to experts of which nothing says which of all experts they are")
    ranges = tuple((number, number + 1) for number in stack[_EXPERTS])
    if ranges == tuple((number, number + 1) for number in range(ranges[0][0], ranges[-1][1])):
        ranges = ((ranges[0][0], ranges[-1][1]),)
    return TensorSlice(route.name, (route.shape[0] * size, *route.shape[1:]), 0, ranges)


def _part_of_shard(
    param: Tensor, part: TensorSlice, rank: int, shapes: Sequence[tuple[int, ...]]
) -> TensorSlice:
    """Return the part that tensor parallelism leaves of ``part``; ``shapes`` are those of the group's ranks."""
    if is_copy(param):
        if len(set(shapes)) > 1:
            raise ValueError(
                f"its shape differs between tensor-parallel ranks, {[list(shape) for shape in shapes]}, but it is not "
                f"marked as a shard (tensor_model_parallel, partition_dim)"
            )
        return part
    if not part.is_full:
        raise ValueError("a stack of experts is cut by tensor parallelism too")
    told = read_cut(param)
    dimensions = len(shapes[rank])
    if not -dimensions <= told.dim < dimensions:
        raise ValueError(f"it is marked as cut along dimension {told.dim} of {dimensions} (partition_dim)")
    dim = told.dim % dimensions
    sizes = [shape[dim] for shape in shapes]
    starts = [list(accumulate(each, initial=0)) for each in told.shares(sizes)]
    first = accumulate((each[-1] for each in starts), initial=0)
    ranges = tuple(
        (base + each[rank], base + each[rank + 1]) for base, each in zip(first, starts, strict=False)
    )
    length = told.shape[dim] if told.shape else sum(sizes)
    cut = TensorSlice(part.name, (*part.shape[:dim], length, *part.shape[dim + 1 :]), dim, ranges)
    if cut.local_shape != part.shape:
        raise ValueError(
            f"its shape {list(part.shape)} is not that of its part {list(ranges)} along dimension {dim}"
        )
    return cut
