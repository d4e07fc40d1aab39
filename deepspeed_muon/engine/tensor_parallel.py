"""Tensor parallelism: which parameters are sharded, along which dimension, and over which ranks.

Orthogonalisation commutes with permutations of rows and of columns. So the order in which shards interleave the rows of
a fused matrix (query, key and value of every head group, gate and up) does not matter if it is orthogonalised as one:
the concatenated shards are the same matrix with its rows in another order. But every row must be on exactly one rank.
Where the sub-parameters of a fused matrix are blocks that are orthogonalised by themselves, the layer must say whether
each of them is sharded: see :attr:`Sharding.sub_params`.

Layers describe that by one of two conventions. AutoTP (``tensor_parallel.autotp_size``) replaces linear layers and
describes the shards in an attribute of their weights. Megatron-style models set ``tensor_model_parallel`` and
``partition_dim`` on parameters and pass DeepSpeed an ``mpu`` object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
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
        # The shape that AutoTP has recorded may have more than two dimensions. As a matrix, the indices before dim
        # repeat the sub-parameters, and those after it (but the last) make them longer.
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
    """Return whether every rank has the full parameter, as far as it is marked."""
    meta = getattr(param, _META, None) or {}
    return bool(meta.get("replicated")) or not (meta or is_model_parallel_parameter(param))


def read_sharding(param: Tensor) -> Sharding:
    """Return how a parameter is sharded, from its marks.

    Raises:
        ValueError: Saying what the marks lack.
    """
    meta = getattr(param, _META, None)
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
    """Return how the engine's matrices are sharded, by ``id(parameter)``, as far as their layers say.

    Every rank takes the shards of the other ranks to be as long as its own; :func:`with_tensor_parallel` compares
    them.

    Args:
        engine: An engine, which need not have its optimizer yet.
        routes: ``id(parameter)`` to its route, once there are routes.

    Raises:
        ConfigError: If a layer does not say how a matrix is sharded that goes to Muon.
    """
    group = tensor_parallel_group(engine)
    shards: dict[int, TensorShards] = {}
    for param in engine.module.parameters() if group is not None else ():
        if not is_model_parallel_parameter(param):
            continue
        try:
            shards[id(param)] = read_sharding(param).of_matrix(true_shape(param), dist.get_world_size(group))
        except ValueError as error:
            route = (routes or {}).get(id(param))
            if route is not None and route.algorithm == "muon":
                _refuse(route.name, str(error))
    return shards


def with_tensor_parallel(
    group: dist.ProcessGroup,
    read: Callable[[], list[StepSet]],
    engine: DeepSpeedEngine,
    routes: Mapping[int, Route],
) -> list[StepSet]:
    """Read the step sets of a tensor-parallel rank, with the shards of each matrix on all ranks of the group.

    Must be called by all ranks of ``group``. If one fails, all of them raise. The caller compares the plans.

    Args:
        group: The tensor-parallel process group.
        read: Reads this rank's step sets.
        engine: The engine, whose parameters carry the marks.
        routes: ``id(model parameter)`` to its route.

    Raises:
        ConfigError: Naming the parameter, on every rank that can know it, if a shard could be taken for a full matrix,
            or is of a kind that is not supported.
        RankDisagreementError: If another rank of the group failed.
    """
    ranks = Ranks((group,))
    sets: list[StepSet] = []
    fingerprints: dict[str, tuple[tuple[int, int], str]] = {}
    with raise_on_all_ranks(ranks=ranks, purpose="comparison of plans"):
        # 1. what the layers say of each matrix; one without a mark is a copy
        shards_of = {
            routes[key].name: shards for key, shards in tensor_shards(engine, routes).items() if key in routes
        }
        replicated = TensorShards(None, ())
        for step_set in read():
            # Where there is a stack, every rank of the group has other experts, none of them sharded.
            if step_set.stack_group is None:
                matrices = tuple(
                    replace(matrix, shards=matrix.shards or shards_of.get(matrix.name, replicated))
                    for matrix in step_set.matrices
                )
                step_set = replace(step_set, matrices=matrices, tensor_group=group)
                fingerprints |= _fingerprints(step_set)
            sets.append(step_set)
    # 2. compare it: shards must have equal shapes, copies equal values. A shard without a mark would pass as a matrix,
    # and train to a wrong result without an error.
    gathered = ranks.all_gather(fingerprints, purpose="comparison of tensor-parallel shards").values()
    for name, fingerprint in fingerprints.items():
        of_ranks = [by_name[name] for by_name in gathered if name in by_name]
        if set(of_ranks) == {fingerprint}:
            continue
        if not fingerprint[1]:
            _refuse(name, f"its shards are unequal, {[list(shape) for shape, _ in of_ranks]}")
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


def _fingerprints(step_set: StepSet) -> dict[str, tuple[tuple[int, int], str]]:
    """Return the shape of each matrix, and a hash of this rank's fragment of a replicated one; empty for shards."""
    flat = {partition.index: partition.tensor.detach().reshape(-1) for partition in step_set.partitions}
    fingerprints = {}
    for matrix in step_set.matrices:
        digest, fragment = "", matrix.placement.fragment_on(step_set.rank)
        if not matrix.is_sharded:
            digest = "copy"  # of a rank that has no elements of it
            if fragment is not None:
                values = flat[matrix.partition].narrow(0, fragment.partition_offset, fragment.numel)
                digest = hashlib.sha256(
                    values.contiguous().view(torch.uint8).cpu().numpy().tobytes()
                ).hexdigest()
        fingerprints[matrix.name] = (matrix.rows, matrix.cols), digest
    return fingerprints
