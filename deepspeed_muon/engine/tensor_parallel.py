"""Tensor parallelism: which parameters are cut, along which side, and between whom.

Orthogonalisation commutes with permutations of rows and of columns. So nobody needs to know how shards interleave the
rows of a fused matrix (query, key and value of every head group, gate and up) that is orthogonalised as one: the shards
one after the other are the same matrix with its rows in another order. But every row must be on exactly one rank. Where
parts of the matrix are blocks of their own, the layer must say whether each part is cut: see :attr:`Cut.parts`.

There are two conventions of saying it. AutoTP (``tensor_parallel.autotp_size``) replaces linear layers and describes
their weights in an attribute. Megatron-style models set ``tensor_model_parallel`` and ``partition_dim`` on parameters
and hand DeepSpeed an ``mpu`` object.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size
from torch import Tensor, nn

from deepspeed_muon.errors import PlanMismatchError, UnsupportedConfigError
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.ranks import Ranks

_META = "ds_autotp_universal_checkpoint_meta"

_Cuts = dict[str, tuple[TensorShards, int | None]]
"""Name of each matrix that is cut to its shards, and to the elements of the whole if that is known."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut over the tensor-parallel ranks.

    Attributes:
        dim: The dimension that is cut, as the layer says it.
        parts: Length along ``dim`` of each part that is cut over all ranks, or their number if they are equal; ``None``
            if the layer does not say.
        shape: Of the whole tensor, from AutoTP's record; empty without one.
        widths: For each fused part the shares of all ranks, if the record has them.
        is_legible: Whether the record tells which elements a rank has.
    """

    dim: int
    parts: int | tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()
    widths: tuple[tuple[int, ...], ...] = ()
    is_legible: bool = True

    def shares(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return, for each fused part, the lengths of the shares that the ranks have of it.

        Args:
            sizes: The lengths of the ranks' shards along :attr:`dim`.

        Raises:
            ValueError: If nobody says it, or the parts do not divide.
        """
        if not self.is_legible:
            raise ValueError("AutoTP cuts it in a way that is not read here")
        if self.widths:
            return [list(each) for each in self.widths]
        parts = self.parts or 1
        if parts == 1:
            return [list(sizes)]
        if isinstance(parts, int):
            parts = (sum(sizes) // parts,) * parts
        ranks = len(sizes)
        if len(set(sizes)) > 1 or sum(parts) != sum(sizes) or any(part % ranks for part in parts):
            raise ValueError(
                f"its fused parts {list(parts)} are not divided equally over shards of {list(sizes)}"
            )
        return [[part // ranks] * ranks for part in parts]

    def of_matrix(self, shape: Sequence[int], ranks: int) -> TensorShards:
        """Return the shards of the parameter as a matrix, of which this rank has ``shape``, and the others as much.

        Raises:
            ValueError: If a matrix has no such dimension.
        """
        if not self.shape:
            if self.dim not in (0, 1):
                raise ValueError(
                    f"it is marked as a shard of dimension {self.dim} (partition_dim), which a matrix does not have"
                )
            whole, parts = shape[self.dim] * ranks, self.parts or ()
            if isinstance(parts, int):
                parts = (whole // parts,) * parts if whole % parts == 0 else ()
            return TensorShards(1 if self.dim else 0, (shape[self.dim],) * ranks, parts)
        # The shape that AutoTP has recorded may have more than two dimensions. As a matrix, the indices before dim
        # repeat the parts, and those behind it (but the last) make them longer.
        dim = self.dim % len(self.shape)
        widths = self.widths or ((self.shape[dim],),)
        parts = ()
        if all(len(set(each)) == 1 for each in widths):
            inner = torch.Size(self.shape[dim + 1 : -1]).numel()
            parts = tuple(sum(each) * inner for each in widths)
            if dim < len(self.shape) - 1:
                parts *= torch.Size(self.shape[:dim]).numel()
        is_last = dim == len(self.shape) - 1
        return TensorShards(1 if is_last else 0, (shape[int(is_last)],) * ranks, parts)


def is_copy(param: Tensor) -> bool:
    """Return whether every rank has the whole parameter, as far as it is marked."""
    meta = getattr(param, _META, None) or {}
    return bool(meta.get("replicated")) or not (meta or is_model_parallel_parameter(param))


def read_cut(param: Tensor) -> Cut:
    """Return what is said of how a shard was cut.

    Raises:
        ValueError: Saying why that is too little.
    """
    meta = getattr(param, _META, None)
    if meta:
        return _recorded(meta)
    dim = getattr(param, "partition_dim", None)
    if dim is None:
        raise ValueError("it is marked as a shard without the dimension that is cut (partition_dim)")
    own = getattr(param, "partition_sizes", getattr(param, "partition_stride", None))
    return Cut(dim, tuple(own) if isinstance(own, (tuple, list)) else own)


def _recorded(meta: Mapping[str, Any]) -> Cut:
    """Return what AutoTP has recorded; its dimensions are those of a shape that may have more than two."""
    conversion = meta.get("conversion") or {}
    shape, dim = meta.get("logical_shape"), meta.get("partition_dim")
    if conversion.get("unsupported_reason") or not shape or dim is None:
        raise ValueError(conversion.get("unsupported_reason") or "AutoTP does not say how it was cut")
    widths = tuple(tuple(map(int, each)) for each in meta.get("sub_param_shard_widths") or ())
    legible = bool(widths) or "affine_map" not in conversion or bool(meta.get("partition_sizes"))
    return Cut(dim, None, tuple(map(int, shape)), widths, legible)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What one rank says of one matrix: ``shards`` is ``None`` for a copy."""

    name: str
    shape: tuple[int, int]
    shards: TensorShards | None
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


def tensor_shards(engine: Any) -> dict[int, TensorShards]:
    """Return how tensor parallelism cuts the engine's matrices, by ``id(parameter)``, as far as their layers say.

    Every rank takes the shards of the others to be as long as its own; :func:`with_tensor_parallel` compares them.

    Args:
        engine: A ``DeepSpeedEngine``, which need not have its optimizer yet.
    """
    group = tensor_parallel_group(engine)
    if group is None:
        return {}
    found = {}
    for param in engine.module.parameters():
        shape = true_shape(param)
        if is_model_parallel_parameter(param) and len(shape) == 2:
            with suppress(ValueError):  # with_tensor_parallel refuses it, if it is Muon's
                found[id(param)] = read_cut(param).of_matrix(shape, dist.get_world_size(group))
    return found


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
    matrices: dict[str, _Matrix] = {}
    listed: list[tuple[int, str]] = []
    error: Exception | None = None
    try:
        sets = read()
        cuts = _cuts(model, routes, dist.get_world_size(group))
        for number, step_set in enumerate(sets):
            # Ranks exchange flags of gradients by position, also those of AdamW's parameters.
            listed += [(number, layout.name) for layout in step_set.layouts]
            matrices |= _described(step_set, cuts)
    except Exception as caught:
        error = caught
    failure = None if error is None else f"{type(error).__name__}: {error}"
    told = (
        Ranks((group,))
        .gather((matrices, listed, failure), what="comparison of tensor-parallel shards")
        .values()
    )
    if error is not None:
        raise error
    failures = [text for *_, text in told if text is not None]
    if failures:
        raise PlanMismatchError(f"another rank of the tensor-parallel group failed: {failures[0]}")
    _compare_names([names for _, names, _ in told])
    return [_joined(step_set, [of_rank for of_rank, *_ in told], group) for step_set in sets]


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


def _cuts(model: nn.Module, routes: Mapping[int, Route], ranks: int) -> _Cuts:
    """Return what the layers say of each shard of a matrix of Muon's."""
    found = {}
    for param in model.parameters():
        route = routes.get(id(param))
        if route is None or route.algorithm != "muon" or not is_model_parallel_parameter(param):
            continue
        if len(route.shape) != 2:
            _refuse(route.name, f"a tensor-parallel shard of shape {list(route.shape)} is not a matrix")
        try:
            cut = read_cut(param)
            numel = torch.Size(cut.shape).numel() if cut.shape else None
            found[route.name] = cut.of_matrix(route.shape, ranks), numel
        except ValueError as error:
            _refuse(route.name, str(error))
    return found


def _refuse(name: str, why: str) -> NoReturn:
    raise UnsupportedConfigError(
        f"tensor parallelism: {name} cannot be orthogonalised: {why}. Send it to AdamW with "
        f"optimizer.params.exclude, or train without tensor parallelism"
    )


def _described(step_set: StepSet, cuts: _Cuts) -> dict[str, _Matrix]:
    if step_set.stack_group is not None:
        return {}  # every rank of the group has other experts, all of them whole
    tensors = {partition.index: partition.tensor for partition in step_set.partitions}
    described = {}
    for matrix in step_set.matrices:
        cut, numel = cuts.get(matrix.name, (None, None))
        plan = f"{matrix.rows} x {matrix.cols}, {matrix.grid}, {matrix.placement.numbers()}"
        content = _content(matrix, tensors[matrix.partition], step_set.rank) if cut is None else ""
        shape, shards = (matrix.rows, matrix.cols), matrix.shards or cut
        described[matrix.name] = _Matrix(matrix.name, shape, shards, numel, plan, content)
    return described


def _content(matrix: MatrixLayout, tensor: Tensor, rank: int) -> str:
    """Return a hash of what this rank holds of a matrix; empty if it holds nothing."""
    fragment = matrix.placement.on(rank)
    if fragment is None:
        return ""
    held = tensor.detach().reshape(-1).narrow(0, fragment.partition_offset, fragment.numel)
    return hashlib.sha256(held.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def _joined(step_set: StepSet, told: list[dict[str, _Matrix]], group: dist.ProcessGroup) -> StepSet:
    """Return the step set with the shards of its matrices, from what the ranks of the group say of each."""
    if step_set.stack_group is not None:
        return step_set
    matrices = (
        replace(matrix, shards=_shards([each[matrix.name] for each in told])) for matrix in step_set.matrices
    )
    return replace(step_set, matrices=tuple(matrices), tensor_group=group)


def _shards(told: list[_Matrix]) -> TensorShards:
    """Return the shards that all ranks of the group tell of, or that of copies."""
    first = told[0]
    dims = {None if each.shards is None else each.shards.dim for each in told}
    if len(dims) > 1:
        raise PlanMismatchError(
            f"{first.name}: the tensor-parallel ranks do not agree on the dimension that is cut"
        )
    if any(each.shape != first.shape for each in told) and first.shards is not None:
        _refuse(first.name, f"its shards are unequal, {[list(each.shape) for each in told]}")
    if first.shards is None and any(
        (each.shape, each.content) != (first.shape, first.content) for each in told
    ):
        _refuse(
            first.name,
            "its shape or its values differ between tensor-parallel ranks, but it is not marked as a shard "
            "(tensor_model_parallel, partition_dim); if it is meant to be a copy, start it equal on all ranks",
        )
    if any((each.plan, each.shards) != (first.plan, first.shards) for each in told):
        raise PlanMismatchError(
            f"{first.name} is partitioned by ZeRO otherwise on other tensor-parallel ranks, or has other blocks there"
        )
    if first.shards is None:
        return TensorShards(None, ())
    total = sum(each.shape[0] * each.shape[1] for each in told)
    if first.logical_numel is not None and first.logical_numel != total:
        _refuse(
            first.name,
            f"its shards have {total} elements together and the matrix {first.logical_numel}: some of its rows are on "
            f"several ranks",
        )
    return first.shards
