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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size
from torch import Tensor

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.agreement import raise_on_all_ranks
from deepspeed_muon.transport.ranks import Ranks

_META = "ds_autotp_universal_checkpoint_meta"


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
            ValueError: If it is no matrix, or has no such dimension, or the whole has another number of elements.
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
            sizes = (shape[self.dim],) * ranks
            parts: tuple[int, ...] = ()
            with suppress(ValueError):  # nobody says which rows a rank has
                parts = tuple(map(sum, self.shares(sizes))) if self.parts else ()
            return TensorShards(1 if self.dim else 0, sizes, parts)
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
    if not meta:
        dim = getattr(param, "partition_dim", None)
        if dim is None:
            raise ValueError("it is marked as a shard without the dimension that is cut (partition_dim)")
        own = getattr(param, "partition_sizes", getattr(param, "partition_stride", None))
        return Cut(dim, tuple(own) if isinstance(own, (tuple, list)) else own)
    # AutoTP's record; its dimensions are those of a shape that may have more than two.
    conversion = meta.get("conversion") or {}
    shape, dim = meta.get("logical_shape"), meta.get("partition_dim")
    if conversion.get("unsupported_reason") or not shape or dim is None:
        raise ValueError(conversion.get("unsupported_reason") or "AutoTP does not say how it was cut")
    widths = tuple(tuple(map(int, each)) for each in meta.get("sub_param_shard_widths") or ())
    legible = bool(widths) or "affine_map" not in conversion or bool(meta.get("partition_sizes"))
    return Cut(dim, None, tuple(map(int, shape)), widths, legible)


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


def tensor_shards(engine: Any, routes: Mapping[int, Route] | None = None) -> dict[int, TensorShards]:
    """Return how tensor parallelism cuts the engine's matrices, by ``id(parameter)``, as far as their layers say.

    Every rank takes the shards of the others to be as long as its own; :func:`with_tensor_parallel` compares them.

    Args:
        engine: A ``DeepSpeedEngine``, which need not have its optimizer yet.
        routes: ``id(parameter)`` to its route, once there are routes.

    Raises:
        ConfigError: If a layer does not say how a matrix is cut that goes to Muon.
    """
    group, found = tensor_parallel_group(engine), {}
    for param in engine.module.parameters() if group is not None else ():
        if not is_model_parallel_parameter(param):
            continue
        try:
            found[id(param)] = read_cut(param).of_matrix(true_shape(param), dist.get_world_size(group))
        except ValueError as error:
            route = (routes or {}).get(id(param))
            if route is not None and route.algorithm == "muon":
                _refuse(route.name, str(error))
    return found


def with_tensor_parallel(
    group: dist.ProcessGroup, read: Callable[[], list[StepSet]], engine: Any, routes: Mapping[int, Route]
) -> list[StepSet]:
    """Read the step sets of a tensor-parallel rank, with the shards of each matrix on all ranks of the group.

    Must be called by all ranks of ``group``. If one fails, all of them raise. Whoever calls it compares the plans.

    Args:
        group: The tensor-parallel process group.
        read: Reads this rank's step sets.
        engine: The engine, whose parameters carry the marks.
        routes: ``id(model parameter)`` to its route.

    Raises:
        ConfigError: On every rank that can tell, naming the parameter, if a shard could not be told from a
            whole matrix, or is of a kind that is not supported.
        RankDisagreementError: If another rank of the group failed.
    """
    ranks = Ranks((group,))
    sets: list[StepSet] = []
    held: dict[str, tuple[tuple[int, int], str]] = {}
    with raise_on_all_ranks(ranks=ranks, purpose="comparison of plans"):
        shards = {
            routes[key].name: each for key, each in tensor_shards(engine, routes).items() if key in routes
        }
        copy = TensorShards(None, ())
        for step_set in read():
            # Where there is a stack, every rank of the group has other experts, all of them whole.
            if step_set.stack_group is None:
                matrices = tuple(
                    replace(each, shards=each.shards or shards.get(each.name, copy))
                    for each in step_set.matrices
                )
                step_set = replace(step_set, matrices=matrices, tensor_group=group)
                held |= _held(step_set)
            sets.append(step_set)
    told = ranks.gather(held, purpose="comparison of tensor-parallel shards").values()
    for name, own in held.items():
        others = [each[name] for each in told if name in each]
        if set(others) == {own}:
            continue
        if not own[1]:
            _refuse(name, f"its shards are unequal, {[list(shape) for shape, _ in others]}")
        _refuse(
            name,
            "its shape or its values differ between tensor-parallel ranks, but it is not marked as a shard "
            "(tensor_model_parallel, partition_dim); if it is meant to be a copy, start it equal on all ranks",
        )
    return sets


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(
        f"tensor parallelism: {name} cannot be orthogonalised: {why}. Send it to AdamW with "
        f"optimizer.params.exclude, or train without tensor parallelism"
    )


def _held(step_set: StepSet) -> dict[str, tuple[tuple[int, int], str]]:
    """Return the shape of each matrix, and a hash of what this rank holds of a copy; empty for shards."""
    flat = {partition.index: partition.tensor.detach().reshape(-1) for partition in step_set.partitions}
    found = {}
    for matrix in step_set.matrices:
        content, fragment = "", matrix.placement.fragment_on(step_set.rank)
        if not matrix.is_sharded:
            content = "copy"
            if fragment is not None:
                part = flat[matrix.partition].narrow(0, fragment.partition_offset, fragment.numel)
                own = part.contiguous().view(torch.uint8).cpu().numpy().tobytes()
                content = hashlib.sha256(own).hexdigest()
        found[matrix.name] = (matrix.rows, matrix.cols), content
    return found
