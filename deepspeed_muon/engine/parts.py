"""Which part of a whole tensor each parameter of a rank is: experts, and what tensor parallelism cuts.

What nobody says is not guessed: such a parameter gets a sentence in place of its part, and checkpoints that outlive the
topology refuse it. Training does not need the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.engine.tensor_cuts import is_copy, read_cut
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.errors import UnsupportedConfigError
from deepspeed_muon.plan.slices import TensorSlice, whole_slice
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.route import Route
from deepspeed_muon.transport.waiting import phase

__all__ = ["no_checkpoint", "parts_of"]

# What AutoEP says of its stacks of experts, and which experts a rank's stack has.
_STACK, _EXPERTS = "ds_autoep_uc_meta", "local_experts"


class _UnknownPartError(Exception):
    """Why nobody knows which part of a whole tensor a parameter is."""


def parts_of(engine: Any, routes: Mapping[int, Route]) -> dict[str, TensorSlice | str]:
    """Return the parameters of this rank that are no whole tensors, or have another name among all ranks.

    Must be called by all ranks of the engine.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups.
        routes: ``id(model parameter)`` to its route.

    Returns:
        Name of each such parameter to its part, or to a sentence that says why nobody knows it.
    """
    numbers = _numbers_of_experts(engine.module)
    group = tensor_parallel_group(engine)
    shapes = [{route.name: route.shape for route in routes.values()}]
    rank = 0
    if group is not None:
        rank, shapes = dist.get_rank(group), shapes * dist.get_world_size(group)
        with phase("comparison of tensor-parallel shapes", group):
            dist.all_gather_object(shapes, shapes[0], group=group)
    found: dict[str, TensorSlice | str] = {}
    for module in engine.module.modules():
        for param in module.parameters(recurse=False):
            route = routes.get(id(param))
            if route is None or route.algorithm == "frozen":
                continue
            try:
                part = _part_of_expert(param, route, numbers)
                if group is not None:
                    part = _part_of_shard(
                        param, module, part, rank, [each.get(route.name, ()) for each in shapes]
                    )
                if part != whole_slice(route.name, route.shape):
                    found[route.name] = part
            except (_UnknownPartError, ValueError) as error:
                found[route.name] = str(error)
    return found


def no_checkpoint(
    config: MuonConfig, parts: Mapping[str, TensorSlice | str]
) -> UnsupportedConfigError | None:
    """Return the error where the configuration asks for consolidated checkpoints and a part is not known."""
    wanted = next((key for key in ("consolidate_on_save", "restore_from") if getattr(config, key)), None)
    unknown = next((name for name, part in parts.items() if isinstance(part, str)), None)
    if wanted is None or unknown is None:
        return None
    return UnsupportedConfigError(
        f"optimizer.params.{wanted} does not work here: parameter {unknown}: {parts[unknown]}. Unset it; "
        f"engine.save_checkpoint and load_checkpoint resume at the same ranks"
    )


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
        return whole_slice(route.name, route.shape)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if id(param) in numbers:
        own, count = numbers[id(param)]
        before, mark, behind = route.name.rpartition(f"deepspeed_experts.{own}.")
        if not mark:
            raise _UnknownPartError("it belongs to an expert whose number its name does not have")
        return whole_slice(f"{before}deepspeed_experts.{rank * count + own}.{behind}", route.shape)
    stack = getattr(param, _STACK, None)
    if stack is None:
        raise _UnknownPartError("it belongs to experts of which nothing says which of all experts they are")
    ranges = tuple((number, number + 1) for number in stack[_EXPERTS])
    if ranges == tuple((number, number + 1) for number in range(ranges[0][0], ranges[-1][1])):
        ranges = ((ranges[0][0], ranges[-1][1]),)
    return TensorSlice(route.name, (route.shape[0] * size, *route.shape[1:]), 0, ranges)


def _part_of_shard(
    param: Tensor, module: nn.Module, part: TensorSlice, rank: int, shapes: Sequence[tuple[int, ...]]
) -> TensorSlice:
    """Return the part that tensor parallelism leaves of ``part``; ``shapes`` are those of the group's ranks."""
    if is_copy(param):
        if len(set(shapes)) > 1:
            raise _UnknownPartError(
                f"its shape differs between tensor-parallel ranks, {[list(shape) for shape in shapes]}, but it is not "
                f"marked as a shard (tensor_model_parallel, partition_dim)"
            )
        return part
    if not part.is_whole:
        raise _UnknownPartError("a stack of experts is cut by tensor parallelism too")
    told = read_cut(param)
    if isinstance(told, str):
        raise _UnknownPartError(told)
    dimensions = len(shapes[rank])
    if not -dimensions <= told.dim < dimensions:
        raise _UnknownPartError(
            f"it is marked as cut along dimension {told.dim} of {dimensions} (partition_dim)"
        )
    dim = told.dim % dimensions
    sizes = [shape[dim] for shape in shapes]
    starts = [list(accumulate(each, initial=0)) for each in told.shares(sizes)]
    first = accumulate((each[-1] for each in starts), initial=0)
    ranges = tuple(
        (base + each[rank], base + each[rank + 1]) for base, each in zip(first, starts, strict=False)
    )
    length = told.shape[dim] if told.shape else sum(sizes)
    cut = TensorSlice(part.name, (*part.shape[:dim], length, *part.shape[dim + 1 :]), dim, ranges)
    if cut.own_shape != part.shape:
        raise _UnknownPartError(
            f"its shape {list(part.shape)} is not that of its part {list(ranges)} along dimension {dim}"
        )
    return cut
