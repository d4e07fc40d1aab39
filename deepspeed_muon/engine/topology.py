"""The topology of an engine: its ranks, which of them train a parameter, and which slice of the full tensor each has.

A rank's parameter is a slice of a full tensor if it belongs to experts or is sharded by tensor parallelism. Slices that
no mark describes are not guessed: such a parameter gets the reason in place of its slice, and checkpoints that do not
depend on the topology refuse it. Training does not need the slices.

**Tensor parallelism.** Orthogonalisation commutes with permutations of rows and of columns. So the order in which
shards interleave the rows of a fused matrix (query, key and value of every head group, gate and up) does not matter if
it is orthogonalised as one: the concatenated shards are the same matrix with its rows in another order. But every row
must be on exactly one rank. If the sub-parameters of a fused matrix are blocks that are orthogonalised separately, the
layer must say whether each of them is sharded: see :attr:`Sharding.sub_params`.

Layers describe that by one of two conventions. AutoTP (``tensor_parallel.autotp_size``) replaces linear layers and
describes the shards in an attribute of their weights. Megatron-style models set ``tensor_model_parallel`` and
``partition_dim`` on parameters and pass DeepSpeed an ``mpu`` object.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_group,
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from torch import Tensor, nn

from deepspeed_muon.checkpoint.parameters import TensorSlice, full_slice
from deepspeed_muon.engine.offload import CpuAdam
from deepspeed_muon.engine.views import ZeroView, view_of
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import PartitionIndex, TensorShards
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.step.step_set import StepSet, read_step_set
from deepspeed_muon.transport.agreement import RankFacts, Scope, raise_on_all_ranks
from deepspeed_muon.transport.ranks import Ranks

# The attributes in which AutoEP describes its stacks of experts, and AutoTP its shards.
_AUTOEP_META = "ds_autoep_uc_meta"
_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"


def ranks_of(engine: DeepSpeedEngine) -> Ranks:
    """Return the ranks that make up an engine: data-parallel, sequence-, tensor- and pipeline-parallel ones.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups: from its ``_broadcast_model`` on.
    """
    process_groups = [engine.seq_data_parallel_group]
    # Not mpu.get_model_parallel_group, which spans the stages of a pipeline as well.
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
    some experts of a layer (AutoEP) skips steps with the ranks that hold the layer's other experts.

    Args:
        param: A parameter of the model.
        data_parallel: The data-parallel group of everything that is not an expert.

    Returns:
        A process group, and ``wider_group`` and ``stack_group`` of a :class:`deepspeed_muon.step.step_set.StepSet`.
    """
    name = expert_group_name(param)
    if name is None:
        return data_parallel, data_parallel, None
    holders = groups._get_expert_data_parallel_group(name)
    if not hasattr(param, _AUTOEP_META):
        return holders, data_parallel, None
    stack = groups._get_expert_parallel_group(name)
    return holders, None, stack if dist.get_world_size(stack) > 1 else None


def model_facts(engine: DeepSpeedEngine) -> RankFacts:
    """Return dtype and shape of every parameter, which must be equal on the ranks that DeepSpeed broadcasts it to."""
    facts, scope_of = RankFacts(), functools.cache(Scope.of)
    for name, param in engine.module.named_parameters():
        shown = f"{str(param.dtype).removeprefix('torch.')} {list(true_shape(param))}"
        holders, *_ = groups_of(param, engine.seq_data_parallel_group)
        facts.record(f"parameter {name}", shown, scope_of(holders))
    return facts


def read_step_sets(engine: DeepSpeedEngine, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read the layout of whichever wrapper DeepSpeed put around ``optimizer``, and the shards of each matrix.

    Must be called by all ranks of a tensor-parallel group. The caller compares the plans.

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
    group = tensor_parallel_group(engine)
    if group is None:
        return _read(engine, optimizer, routes)
    ranks = Ranks((group,))
    sets: list[StepSet] = []
    shapes_and_digests: dict[str, tuple[tuple[int, int], str]] = {}
    with raise_on_all_ranks(ranks=ranks, purpose="comparison of plans"):
        # 1. what the layers say of each matrix; one without a mark is a copy
        shards_of = {
            routes[key].name: shards for key, shards in tensor_shards(engine, routes).items() if key in routes
        }
        replicated = TensorShards(None, ())
        for step_set in _read(engine, optimizer, routes):
            # In a stack every rank of the group has other experts, none of them sharded.
            if step_set.stack_group is None:
                matrices = tuple(
                    replace(matrix, tp_shards=matrix.tp_shards or shards_of.get(matrix.name, replicated))
                    for matrix in step_set.matrices
                )
                step_set = replace(step_set, matrices=matrices, tensor_group=group)
                shapes_and_digests |= _shapes_and_digests(step_set)
            sets.append(step_set)
    # 2. compare it: shards must have equal shapes, copies equal values. A shard without a mark would pass for a matrix,
    # and train to a wrong result without an error.
    gathered = ranks.all_gather(shapes_and_digests, purpose="comparison of tensor-parallel shards").values()
    for name, of_this_rank in shapes_and_digests.items():
        of_ranks = [by_name[name] for by_name in gathered if name in by_name]
        if set(of_ranks) != {of_this_rank}:
            why = f"its shards are unequal, {[list(shape) for shape, _ in of_ranks]}"
            if of_this_rank[1]:
                why = (
                    "its shape or its values differ between tensor-parallel ranks, but it is not marked as a shard "
                    "(tensor_model_parallel, partition_dim); if it is meant to be a copy, start it equal on all ranks"
                )
            _refuse(name, why)
    return sets


def _read(engine: DeepSpeedEngine, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    view, data_parallel = view_of(engine.optimizer), engine.seq_data_parallel_group
    assert view.optimizer is optimizer
    # 1. Partitions that one call of the inner step updates and that the same ranks hold, in the order of the view.
    sets: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
    for index, params in enumerate(view.params):
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
        # With one expert-parallel rank the wider group is the same one, and would only repeat the exchange of flags.
        if wider_group is None or dist.get_world_size(wider_group) <= ranks:
            wider_group = None
        partitions = [
            (PartitionIndex(index), view.masters[index], view.params[index], view.placements(index, ranks))
            for index in indices
        ]
        step_sets.append(
            replace(
                read_step_set(partitions, routes, group),
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
    shapes_by_rank: list[dict[str, tuple[int, ...]]] = []
    if group is not None:
        shapes = {route.name: route.shape for route in routes.values()}
        gathered = Ranks((group,)).all_gather(shapes, purpose="comparison of tensor-parallel shapes")
        shapes_by_rank = list(gathered.values())
    # 2. each parameter: first its experts, then its shard
    slices: dict[str, TensorSlice | str] = {}
    for param in engine.module.parameters():
        route = routes.get(id(param))
        if route is None or route.algorithm == "frozen":
            continue
        # An unknown slice is not an error here: only checkpoints for other topologies need it.
        try:
            tensor_slice = _slice_of_expert(param, route, expert_numbers)
            if group is not None:
                of_ranks = [shapes.get(route.name, ()) for shapes in shapes_by_rank]
                tensor_slice = _slice_of_shard(param, tensor_slice, dist.get_rank(group), of_ranks)
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
    stack = getattr(param, _AUTOEP_META, None)
    if stack is None:
        raise ValueError("it belongs to experts, and nothing says to which of all ranks' experts")
    # AutoEP lists the numbers of the rank's experts among all: (4, 5, 6, 7) is the range (4, 8) along dimension 0.
    ranges = tuple((number, number + 1) for number in stack["local_experts"])
    # Consecutive experts are one range, so that there is one description of the same slice.
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


# Tensor parallelism


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a parameter is sharded over the tensor-parallel ranks.

    Attributes:
        dim: The sharded dimension, as the layer gives it.
        sub_params: Length along ``dim`` of each fused sub-parameter (query, key, value), each of which is sharded over
            all ranks, or their number if they are equal; ``None`` if the layer does not say.
        shape: The shape of the full tensor, from AutoTP's record; empty without one.
        widths: For each sub-parameter the lengths of all ranks' shards, if the record has them.
        is_legible: Whether the record says which elements a rank has.
    """

    dim: int
    sub_params: int | tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()
    widths: tuple[tuple[int, ...], ...] = ()
    is_legible: bool = True

    def shard_lengths(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return, for each sub-parameter, the lengths of its shards on all ranks.

        Args:
            lengths: The lengths of the ranks' shards of the full tensor along :attr:`dim`.

        Raises:
            ValueError: If the layer does not say that, or the sub-parameters do not divide evenly.
        """
        if not self.is_legible:
            raise ValueError("AutoTP's record of its shards is of an unknown kind")
        if self.widths:  # recorded, so they may be unequal
            return [list(widths) for widths in self.widths]
        sub_params = self.sub_params or 1
        if sub_params == 1:
            return [list(lengths)]
        if isinstance(sub_params, int):
            sub_params = (sum(lengths) // sub_params,) * sub_params
        ranks = len(lengths)
        divides = not any(length % ranks for length in sub_params)
        if len(set(lengths)) > 1 or sum(sub_params) != sum(lengths) or not divides:
            raise ValueError(
                f"its fused sub-parameters {list(sub_params)} are not divided equally over shards of {list(lengths)}"
            )
        return [[length // ranks] * ranks for length in sub_params]

    def of_matrix(self, shape: Sequence[int], ranks: int) -> TensorShards:
        """Return the shards of the parameter as a matrix, taking those of all ranks to have this rank's ``shape``.

        Raises:
            ValueError: If it is no matrix, or has no such dimension, or the full matrix has another number of elements.
        """
        if len(shape) != 2:
            raise ValueError(f"a tensor-parallel shard of shape {list(shape)} is not a matrix")
        total = shape[0] * shape[1] * ranks
        if self.shape and torch.Size(self.shape).numel() != total:
            raise ValueError(
                f"{ranks} shards like this rank's have {total} elements together and the matrix "
                f"{torch.Size(self.shape).numel()}: its shards are unequal, or some of its rows are on several ranks"
            )
        if not self.shape:
            if self.dim not in (0, 1):
                raise ValueError(
                    f"it is marked as a shard of dimension {self.dim} (partition_dim), which a matrix does not have"
                )
            lengths = (shape[self.dim],) * ranks
            sub_params: tuple[int, ...] = ()
            with suppress(ValueError):  # the layer does not say which rows a rank has
                sub_params = tuple(map(sum, self.shard_lengths(lengths))) if self.sub_params else ()
            return TensorShards(1 if self.dim else 0, lengths, sub_params)
        # The shape that AutoTP has recorded may have more than two dimensions. In the matrix, the indices before dim
        # repeat the sub-parameters, and those between dim and the last dimension make them longer.
        dim = self.dim % len(self.shape)
        widths = self.widths or ((self.shape[dim],),)
        sub_params = ()
        if all(len(set(of_ranks)) == 1 for of_ranks in widths):
            # Example: (4, 6, 8, 10) cut along dim 1 in widths (3, 3) is a 192 x 10 matrix. Each of the 4 indices before
            # dim has a sub-parameter of 6 * 8 = 48 rows, so that sub_params are (48, 48, 48, 48).
            inner = torch.Size(self.shape[dim + 1 : -1]).numel()
            sub_params = tuple(sum(of_ranks) * inner for of_ranks in widths)
            if dim < len(self.shape) - 1:
                sub_params *= torch.Size(self.shape[:dim]).numel()
        is_last = dim == len(self.shape) - 1
        return TensorShards(1 if is_last else 0, (shape[int(is_last)],) * ranks, sub_params)


def is_replicated(param: Tensor) -> bool:
    """Return whether every rank has the full parameter, by its marks."""
    meta = getattr(param, _AUTOTP_META, None) or {}
    return bool(meta.get("replicated")) or not (meta or is_model_parallel_parameter(param))


def read_sharding(param: Tensor) -> Sharding:
    """Return how a parameter is sharded, from its marks.

    Raises:
        ValueError: Saying what the marks lack.
    """
    meta = getattr(param, _AUTOTP_META, None)
    if not meta:  # Megatron's marks
        dim = getattr(param, "partition_dim", None)
        if dim is None:
            raise ValueError("it is marked as a shard without the dimension that is cut (partition_dim)")
        sub_params = getattr(param, "partition_sizes", getattr(param, "partition_stride", None))
        return Sharding(dim, tuple(sub_params) if isinstance(sub_params, (tuple, list)) else sub_params)
    # AutoTP's record; its dimensions are those of a shape that may have more than two.
    conversion = meta.get("conversion") or {}
    shape, dim = meta.get("logical_shape"), meta.get("partition_dim")
    if conversion.get("unsupported_reason") or not shape or dim is None:
        raise ValueError(conversion.get("unsupported_reason") or "AutoTP does not say how it was cut")
    widths = tuple(tuple(map(int, of_ranks)) for of_ranks in meta.get("sub_param_shard_widths") or ())
    is_legible = bool(widths) or "affine_map" not in conversion or bool(meta.get("partition_sizes"))
    return Sharding(dim, None, tuple(map(int, shape)), widths, is_legible)


def tensor_parallel_group(engine: DeepSpeedEngine) -> dist.ProcessGroup | None:
    """Return the process group over which the engine's model is sharded, or ``None`` if it is not."""
    mpu, kinds = engine.mpu, ("tensor_model", "slice", "model")
    if not any(hasattr(mpu, f"get_{kind}_parallel_world_size") for kind in kinds):
        return None
    if bwc_tensor_model_parallel_world_size(mpu) == 1:
        return None
    # DeepSpeed's Ulysses calls the ranks that share a sequence model-parallel.
    sequence = getattr(mpu, "get_sequence_parallel_group", None)
    if sequence is not None and mpu.get_model_parallel_group() is sequence():
        return None
    group: dist.ProcessGroup = bwc_tensor_model_parallel_group(mpu)
    return group


def tensor_shards(
    engine: DeepSpeedEngine, routes: Mapping[int, Route] | None = None
) -> dict[int, TensorShards]:
    """Return how the engine's matrices are sharded, by ``id(parameter)``, if their layers say so.

    Every rank takes the other ranks' shards to be as long as its own; :func:`read_step_sets` compares them.

    Args:
        engine: An engine, which need not have its optimizer yet.
        routes: ``id(parameter)`` to its route, once there are routes.

    Raises:
        ConfigError: If a layer does not say how a matrix is sharded that goes to Muon.
    """
    group = tensor_parallel_group(engine)
    shards: dict[int, TensorShards] = {}
    if group is None:
        return shards
    for param in filter(is_model_parallel_parameter, engine.module.parameters()):
        try:
            shards[id(param)] = read_sharding(param).of_matrix(true_shape(param), dist.get_world_size(group))
        except ValueError as error:
            route = (routes or {}).get(id(param))
            if route is not None and route.algorithm == "muon":
                _refuse(route.name, str(error))
    return shards


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(
        f"tensor parallelism: {name} cannot be orthogonalised: {why}. Send it to AdamW with "
        f"optimizer.params.exclude, or train without tensor parallelism"
    )


def _shapes_and_digests(step_set: StepSet) -> dict[str, tuple[tuple[int, int], str]]:
    """Return the shape of each matrix, and a hash of this rank's fragment of a replicated one; empty for shards."""
    flat = {partition.index: partition.tensor.detach().reshape(-1) for partition in step_set.partitions}
    shapes_and_digests = {}
    for matrix in step_set.matrices:
        digest, fragment = "", matrix.placement.fragment_on(step_set.rank)
        if not matrix.is_tp_shard:
            digest = "copy"  # of a rank that has no elements of it
            if fragment is not None:
                values = flat[matrix.partition].narrow(0, fragment.partition_offset, fragment.numel)
                digest = hashlib.sha256(
                    values.contiguous().view(torch.uint8).cpu().numpy().tobytes()
                ).hexdigest()
        shapes_and_digests[matrix.name] = (matrix.rows, matrix.cols), digest
    return shapes_and_digests
