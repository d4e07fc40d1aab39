"""The topology of an engine: its ranks, which of them train a parameter, and which slice of the full tensor each has.

A rank's parameter is a slice of a full tensor where it belongs to experts or is sharded by tensor parallelism. Slices
that no mark describes are not guessed: such a parameter gets the reason in place of its slice, and checkpoints that
outlive the topology refuse it. Training does not need the slices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_pipeline_parallel_group, bwc_pipeline_parallel_world_size
from torch import Tensor, nn

from deepspeed_muon.engine.offload import CpuAdam
from deepspeed_muon.engine.tensor_parallel import (
    is_replicated,
    read_sharding,
    tensor_parallel_group,
    with_tensor_parallel,
)
from deepspeed_muon.engine.zero.views import ZeroView, view_of
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import PartitionIndex
from deepspeed_muon.plan.placement import TensorSlice, full_slice
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.step.step_set import StepSet, read_step_set
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.ranks import Ranks

# The attribute in which AutoEP describes its stacks of experts, and its key for the experts of a rank's stack.
_STACK, _EXPERTS = "ds_autoep_uc_meta", "local_experts"


def ranks_of(engine: DeepSpeedEngine) -> Ranks:
    """Return the ranks that make up an engine: data-parallel, sequence-, tensor- and pipeline-parallel ones.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups: from its ``_broadcast_model`` on.
    """
    process_groups = [engine.seq_data_parallel_group]
    # Not mpu.get_model_parallel_group: in a pipeline that one spans the stages, too.
    if (tensor_parallel := tensor_parallel_group(engine)) is not None:
        process_groups.append(tensor_parallel)
    if bwc_pipeline_parallel_world_size(engine.mpu) > 1:
        process_groups.append(bwc_pipeline_parallel_group(engine.mpu))
    return Ranks.of(process_groups)


def groups_of(
    param: Tensor, data_parallel: dist.ProcessGroup
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the ranks that train ``param`` together, those that skip steps with them, and those of its stack.

    An expert's parameters carry ``allreduce = False`` and the name of their expert-parallel group. The ranks that hold
    the same expert are its expert-data-parallel group; they partition (or replicate) it among themselves. A stack of
    some experts of a layer (AutoEP) skips steps with the ranks that hold the rest of it.

    Args:
        param: A parameter of the model.
        data_parallel: The data-parallel group of everything that is no expert.

    Returns:
        A process group, and ``wider_group`` and ``stack_group`` of a :class:`deepspeed_muon.step.step_set.StepSet`.
    """
    name = expert_group_name(param)
    if name is None:
        return data_parallel, data_parallel, None
    holders = groups._get_expert_data_parallel_group(name)
    if not hasattr(param, _STACK):
        return holders, data_parallel, None
    stack = groups._get_expert_parallel_group(name)
    return holders, None, stack if dist.get_world_size(stack) > 1 else None


def model_facts(engine: DeepSpeedEngine) -> RankFacts:
    """Return dtype and shape of every parameter, to be equal on the ranks between which DeepSpeed broadcasts it."""
    facts, scope_of = RankFacts(), functools.cache(Scope.of)
    for name, param in engine.module.named_parameters():
        shown = f"{str(param.dtype).removeprefix('torch.')} {list(true_shape(param))}"
        facts.record(
            f"parameter {name}", shown, scope_of(groups_of(param, engine.seq_data_parallel_group)[0])
        )
    return facts


def read_step_sets(engine: DeepSpeedEngine, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read the layout of whichever wrapper DeepSpeed put around ``optimizer``.

    Args:
        engine: The ``DeepSpeedEngine`` whose ``optimizer`` attribute is the wrapper.
        optimizer: Our optimizer, inside the wrapper.
        routes: ``id(model parameter)`` to its route.

    Returns:
        The step sets in an order that all ranks share.

    Raises:
        ConfigError: If the wrapper is of an unknown class, or a matrix cannot be orthogonalised: its tensor-parallel
            shards are of an unsupported kind, or differ between the ranks without being marked as shards.
        BindingError: If the layout does not fit the routes.
        RankDisagreementError: If another rank of the tensor-parallel group failed.
    """
    read = functools.partial(_read, engine, optimizer, routes)
    group = tensor_parallel_group(engine)
    return read() if group is None else with_tensor_parallel(group, read, engine, routes)


def _read(engine: DeepSpeedEngine, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    view, data_parallel = view_of(engine.optimizer), engine.seq_data_parallel_group
    assert view.optimizer is optimizer
    # 1. Partitions that one call of the inner step updates, and that the same ranks hold, both in the order of the
    # view.
    sets: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
    for index, params in enumerate(view.params):
        if not view.is_trained(index):
            continue
        group = view.group(index)
        if group is None:
            group, *_ = groups_of(params[0], data_parallel)
        # The inner step of ZeRO 1 to 3 is called for each partition.
        call = 0 if view.is_one_call else index
        sets.setdefault((call, id(group)), (group, []))[1].append(index)
    # Without ZeRO's wrappers DeepSpeed does not exchange the status of gradients and updates between pipeline stages.
    has_stages = not isinstance(view, ZeroView) and is_divided(engine.module)
    stage_group = engine.mpu.get_model_parallel_group() if has_stages else None
    # 2. A step set for each of them, with the ranks that skip the same steps.
    step_sets = []
    for group, indices in sets.values():
        ranks = dist.get_world_size(group)
        _, wider_group, stack_group = groups_of(view.params[indices[0]][0], data_parallel)
        # A wider group that is no wider (one expert-parallel rank) would only repeat the exchange of flags.
        if wider_group is None or dist.get_world_size(wider_group) <= ranks:
            wider_group = None
        partitions = [
            (PartitionIndex(index), view.masters[index], view.params[index], view.placements(index, ranks))
            for index in indices
        ]
        step_sets.append(
            read_step_set(
                partitions,
                routes,
                group,
                wider_group=wider_group,
                stage_group=stage_group,
                stack_group=stack_group,
                native_adam=CpuAdam if view.offloads else None,
            )
        )
    return step_sets


def tensor_slices(engine: DeepSpeedEngine, routes: Mapping[int, Route]) -> dict[str, TensorSlice | str]:
    """Return which slice of a full tensor each trained parameter of this rank is.

    Must be called by all ranks of the engine.

    Args:
        engine: An engine that knows its process groups.
        routes: ``id(model parameter)`` to its route.

    Returns:
        Name of each parameter to its slice, or to the reason why it is unknown.
    """
    # 1. the shapes on all tensor-parallel ranks: shards may be unequal
    expert_numbers = _expert_numbers(engine.module)
    group = tensor_parallel_group(engine)
    shapes_by_rank = [{route.name: route.shape for route in routes.values()}]
    rank = 0
    if group is not None:
        rank = dist.get_rank(group)
        gathered = Ranks((group,)).all_gather(
            shapes_by_rank[0], purpose="comparison of tensor-parallel shapes"
        )
        shapes_by_rank = list(gathered.values())
    # 2. each parameter: first its experts, then its shard
    slices: dict[str, TensorSlice | str] = {}
    for param in engine.module.parameters():
        route = routes.get(id(param))
        if route is None or route.algorithm == "frozen":
            continue
        # A slice that no mark describes gets the reason: only checkpoints for other topologies need it.
        try:
            tensor_slice = _slice_of_expert(param, route, expert_numbers)
            if group is not None:
                shapes = [shapes.get(route.name, ()) for shapes in shapes_by_rank]
                tensor_slice = _slice_of_shard(param, tensor_slice, rank, shapes)
            slices[route.name] = tensor_slice
        except ValueError as error:
            slices[route.name] = str(error)
    return slices


def _expert_numbers(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Return, for each parameter of ``deepspeed.moe`` experts, the expert's number on this rank and their count."""
    numbers = {}
    for module in model.modules():
        experts = getattr(module, "deepspeed_experts", None)
        if isinstance(experts, nn.ModuleList):
            for number, expert in enumerate(experts):
                numbers.update({id(param): (number, len(experts)) for param in expert.parameters()})
    return numbers


def _slice_of_expert(param: Tensor, route: Route, numbers: Mapping[int, tuple[int, int]]) -> TensorSlice:
    """Return the slice of a parameter: the rank's experts of a stack, else the full tensor.

    An expert's tensor is full, under the number of the expert among those of all ranks.
    """
    name = expert_group_name(param)
    group = None if name is None else groups._get_expert_parallel_group(name)
    if group is None or dist.get_world_size(group) == 1:
        return full_slice(route.name, route.shape)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if id(param) in numbers:
        local_number, count = numbers[id(param)]
        prefix, mark, suffix = route.name.rpartition(f"deepspeed_experts.{local_number}.")
        if not mark:
            raise ValueError("it belongs to an expert whose number its name does not have")
        # Every rank counts from 0: with 4 experts on each, expert 2 of rank 1 is number 6 of all.
        return full_slice(f"{prefix}deepspeed_experts.{rank * count + local_number}.{suffix}", route.shape)
    stack = getattr(param, _STACK, None)
    if stack is None:
        raise ValueError("it belongs to experts, and nothing says to which of all ranks' experts")
    # AutoEP lists the numbers of the rank's experts among all: (4, 5, 6, 7) is the range (4, 8) along dimension 0.
    ranges = tuple((number, number + 1) for number in stack[_EXPERTS])
    # Consecutive experts are one range, which describes the same slice in one way only.
    if ranges == tuple((number, number + 1) for number in range(ranges[0][0], ranges[-1][1])):
        ranges = ((ranges[0][0], ranges[-1][1]),)
    return TensorSlice(route.name, (route.shape[0] * size, *route.shape[1:]), 0, ranges)


def _slice_of_shard(
    param: Tensor, full: TensorSlice, rank: int, shapes: Sequence[tuple[int, ...]]
) -> TensorSlice:
    """Return this rank's tensor-parallel shard of a full tensor; ``shapes`` are those of the group's ranks."""
    if is_replicated(param):
        if len(set(shapes)) > 1:
            raise ValueError(
                f"its shape differs between tensor-parallel ranks, {[list(shape) for shape in shapes]}, but it is not "
                f"marked as a shard (tensor_model_parallel, partition_dim)"
            )
        return full
    if not full.is_full:
        raise ValueError("a stack of experts is cut by tensor parallelism too")
    sharding = read_sharding(param)
    dimensions = len(shapes[rank])
    if not -dimensions <= sharding.dim < dimensions:
        raise ValueError(
            f"it is marked as cut along dimension {sharding.dim} of {dimensions} (partition_dim)"
        )
    dim = sharding.dim % dimensions
    lengths = [shape[dim] for shape in shapes]
    # Within each sub-parameter, the first index of every rank's shard; then the first index of each sub-parameter.
    starts = [list(accumulate(of_ranks, initial=0)) for of_ranks in sharding.shard_lengths(lengths)]
    bases = accumulate((of_ranks[-1] for of_ranks in starts), initial=0)
    ranges = tuple(
        (base + of_ranks[rank], base + of_ranks[rank + 1])
        for base, of_ranks in zip(bases, starts, strict=False)
    )
    # Example: query, key and value of 8, 4 and 4 rows on two ranks; the second one has (4, 8), (10, 12) and (14, 16).
    length = sharding.shape[dim] if sharding.shape else sum(lengths)
    shard = TensorSlice(full.name, (*full.shape[:dim], length, *full.shape[dim + 1 :]), dim, ranges)
    if shard.local_shape != full.shape:
        raise ValueError(
            f"its shape {list(full.shape)} is not that of its ranges {list(ranges)} along dimension {dim}"
        )
    return shard
