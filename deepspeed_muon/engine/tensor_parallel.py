"""Tensor parallelism: which parameters are cut, along which side, and between whom.

There are two conventions. AutoTP (``tensor_parallel.autotp_size``) replaces linear layers and describes their weights
in an attribute or, in older versions, by the class of the layer. Megatron-style models set ``tensor_model_parallel``
and ``partition_dim`` on parameters and hand DeepSpeed an ``mpu`` object.

Orthogonalisation commutes with permutations of rows and of columns. So nobody needs to know how shards interleave the
rows of a fused matrix (query, key and value of every head group, gate and up): the shards one after the other are the
same matrix with its rows in another order. But every row must be on exactly one rank.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size
from torch import Tensor, nn

from deepspeed_muon.errors import PlanMismatchError, UnsupportedConfigError
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.routing.rules import Route
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.waiting import phase

__all__ = ["CLASSES", "META", "tensor_parallel_group", "with_tensor_parallel"]

META = "ds_autotp_universal_checkpoint_meta"
# Versions without that attribute: the dimension that each class of layer cuts. Subclasses cut in other ways.
CLASSES = {"LinearLayer": 0, "LinearAllreduce": 1, "GateUpPack_LinearLayer": 0}

_Cuts = Mapping[str, tuple[int, int | None]]
"""Name of a shard to the dimension that is cut, and the elements of the whole matrix where that is known."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What one rank says of one matrix: ``dim`` is the cut dimension, ``None`` for a copy."""

    name: str
    shape: tuple[int, int]
    dim: int | None
    logical_numel: int | None
    plan: str
    content: str


def tensor_parallel_group(engine: Any) -> dist.ProcessGroup | None:
    """Return the process group over which the engine's model is cut, or ``None`` if it is not."""
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


def with_tensor_parallel(
    group: dist.ProcessGroup, read: Callable[[], list[StepSet]], model: nn.Module, routes: Mapping[int, Route]
) -> list[StepSet]:
    """Read the step sets of a tensor-parallel rank, with the shards of each matrix on all ranks of the group.

    Must be called by all ranks of ``group``. If one fails, all of them raise.

    Args:
        group: The tensor-parallel process group.
        read: Reads this rank's step sets.
        model: The module, whose parameters carry the marks.
        routes: ``id(model parameter)`` to its route.

    Raises:
        UnsupportedConfigError: On every rank that can tell, naming the parameter, if a shard could not be told from a
            whole matrix, or is of a kind that is not supported.
        PlanMismatchError: If another rank of the group failed, or holds other matrices.
    """
    sets: list[StepSet] = []
    own: list[list[_Matrix]] = []
    listed: list[tuple[int, str]] = []
    error: Exception | None = None
    try:
        sets = read()
        cuts = _cut_dimensions(model, routes)
        own = [_describe(step_set, cuts) for step_set in sets]
        # Ranks exchange flags of gradients by position, also those of AdamW's parameters.
        listed = [
            (number, layout.name) for number, step_set in enumerate(sets) for layout in step_set.layouts
        ]
    except Exception as caught:
        error = caught
    failure = None if error is None else f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with phase("comparison of tensor-parallel shards", group):
        dist.all_gather_object(everyone, (own, listed, failure), group=group)
    if error is not None:
        raise error
    failures = [text for *_, text in everyone if text is not None]
    if failures:
        raise PlanMismatchError(f"another rank of the tensor-parallel group failed: {failures[0]}")
    views: list[list[list[_Matrix]]] = [matrices for matrices, *_ in everyone]
    _compare_names([told for _, told, _ in everyone])
    return [_joined(step_set, [view[i] for view in views], group) for i, step_set in enumerate(sets)]


def _compare_names(told: list[list[tuple[int, str]]]) -> None:
    """Check that the ranks of a group hold the same parameters in the same step sets and order.

    Their elements are not compared: shards of parameters that are not Muon's may be unequal.

    Args:
        told: For each rank of the group, number of the step set and name of every parameter.
    """
    for held in itertools.zip_longest(*told):
        if len(set(held)) > 1:
            shown = ", ".join(
                f"rank {rank}: " + ("no more" if each is None else "{1} (step set {0})".format(*each))
                for rank, each in enumerate(held)
            )
            raise PlanMismatchError(
                f"the ranks of a tensor-parallel group hold different parameters, or the same in another order or in "
                f"other sub-groups. The first that differ, by rank of the group: {shown}. With ZeRO 3 raise "
                f"zero_optimization.sub_group_size so that all parameters are in one"
            )


def _cut_dimensions(model: nn.Module, routes: Mapping[int, Route]) -> _Cuts:
    """Return, for each shard of a matrix of Muon's, the dimension that is cut and the elements of the whole."""
    found = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            route = routes.get(id(param))
            marked = getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False)
            if marked and route is not None and route.algorithm == "muon":
                found[route.name] = _cut_dimension(param, module, route)
    return found


def _cut_dimension(param: Tensor, module: nn.Module, route: Route) -> tuple[int, int | None]:
    if len(route.shape) != 2:
        _refuse(route.name, f"a tensor-parallel shard of shape {list(route.shape)} is not a matrix")
    meta = getattr(param, META, None)
    if meta:
        reason = (meta.get("conversion") or {}).get("unsupported_reason")
        shape, dim = meta.get("logical_shape"), meta.get("partition_dim")
        if reason or not shape or dim is None:
            _refuse(route.name, reason or "AutoTP does not say how it was cut")
        return int(dim == len(shape) - 1), torch.Size(shape).numel()
    dim = getattr(param, "partition_dim", None)
    if dim in (0, 1):
        return int(dim), None
    if type(module).__module__.startswith("deepspeed.module_inject") and type(module).__name__ in CLASSES:
        return CLASSES[type(module).__name__], None
    _refuse(
        route.name,
        f"{type(module).__name__} marks it tensor_model_parallel without a partition_dim of 0 or 1",
    )


def _refuse(name: str, why: str) -> NoReturn:
    raise UnsupportedConfigError(
        f"tensor parallelism: {name} cannot be orthogonalised: {why}. Send it to AdamW with "
        f"optimizer.params.exclude, or train without tensor parallelism"
    )


def _describe(step_set: StepSet, cuts: _Cuts) -> list[_Matrix]:
    tensors = {partition.index: partition.tensor for partition in step_set.partitions}
    described = []
    for matrix in step_set.matrices:
        dim, logical_numel = cuts.get(matrix.name, (None, None))
        if dim is not None and matrix.block_shape != (matrix.rows, matrix.cols):
            # Head counts and sizes of parts describe the whole layer, and would cut a shard in the wrong places.
            _refuse(
                matrix.name,
                "parts of it (heads, a split, experts) are asked for, and only a shard of it is here",
            )
        plan = f"{matrix.rows} x {matrix.cols}, {matrix.spread.numbers()}"
        content = _content(matrix, tensors[matrix.partition], step_set.rank) if dim is None else ""
        described.append(_Matrix(matrix.name, (matrix.rows, matrix.cols), dim, logical_numel, plan, content))
    return described


def _content(matrix: MatrixLayout, tensor: Tensor, rank: int) -> str:
    """Return a hash of what this rank holds of a matrix; empty where it is not in memory (NVMe)."""
    digest = hashlib.sha256()
    flat = tensor.detach().reshape(-1)
    fragment = matrix.spread.on(rank)
    if fragment is not None and fragment.partition_offset + fragment.numel <= flat.numel():
        values = flat.narrow(0, fragment.partition_offset, fragment.numel).contiguous().view(torch.uint8)
        digest.update(values.cpu().numpy().tobytes())
    return digest.hexdigest()


def _joined(step_set: StepSet, views: list[list[_Matrix]], group: dist.ProcessGroup) -> StepSet:
    """Return the step set with the shards of its matrices, from what the ranks of the group say of each."""
    matrices = []
    for number, matrix in enumerate(step_set.matrices):
        matrices.append(replace(matrix, shards=_shards([view[number] for view in views])))
    return replace(step_set, matrices=tuple(matrices), tensor_group=group)


def _shards(told: list[_Matrix]) -> TensorShards | None:
    first = told[0]
    if any(each.dim != first.dim for each in told):
        raise PlanMismatchError(
            f"{first.name}: the tensor-parallel ranks do not agree on the dimension that is cut"
        )
    if any(each.shape != first.shape for each in told) and first.dim is not None:
        _refuse(first.name, f"its shards are unequal, {[list(each.shape) for each in told]}")
    if first.dim is None and any((each.shape, each.content) != (first.shape, first.content) for each in told):
        _refuse(
            first.name,
            "its shape or its values differ between tensor-parallel ranks, but it is not marked as a shard "
            "(tensor_model_parallel, partition_dim); if it is meant to be a copy, start it equal on all ranks",
        )
    if any(each.plan != first.plan for each in told):
        raise PlanMismatchError(
            f"{first.name} is partitioned by ZeRO otherwise on other tensor-parallel ranks"
        )
    if first.dim is None:
        return TensorShards(None, ())
    total = sum(each.shape[0] * each.shape[1] for each in told)
    if first.logical_numel is not None and first.logical_numel != total:
        _refuse(
            first.name,
            f"its shards have {total} elements together and the matrix {first.logical_numel}: some of its rows are on "
            f"several ranks",
        )
    assert first.dim in (0, 1)
    return TensorShards(1 if first.dim else 0, tuple(each.shape[first.dim] for each in told))
