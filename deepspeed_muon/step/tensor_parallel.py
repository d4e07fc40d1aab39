"""The strategy for matrices that tensor parallelism cuts or copies.

Each data-parallel group holds one tensor-parallel shard of a matrix and gathers it on one rank, the shard's owner. The
owners of all shards of a matrix are the ranks of one tensor-parallel group. They have two ways to orthogonalise it:

* ``gather``: one rank receives the whole matrix, orthogonalises it and sends the shards of the update back. The
  matrices of a chunk are divided by their cost, so that all ranks work at the same time.
* ``distributed``: the matrix stays cut, and all ranks iterate together
  (:func:`deepspeed_muon.transport.sharded.orthogonalize_sharded`).

Every rank of the group holds a whole copy of a matrix that tensor parallelism does not cut. In both modes one rank
orthogonalises it and sends the update to the others, so that the copies stay equal bit for bit, whatever kernels run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.math.newton_schulz import orthogonalize_flops
from deepspeed_muon.plan.owners import assign_owners
from deepspeed_muon.step.check import DistributedIteration, Result
from deepspeed_muon.step.orthogonalize import Directions, Updates, WholeAtOwner, batches
from deepspeed_muon.step.tables import Step
from deepspeed_muon.transport.all_to_all import exchange_tensors
from deepspeed_muon.transport.ranks import phase
from deepspeed_muon.transport.row_state import before_iteration
from deepspeed_muon.transport.sharded import orthogonalize_sharded


class _Division(NamedTuple):
    """How the ranks of a tensor-parallel group divide the owned matrices of a chunk; the same on all of them.

    Attributes:
        alone: Matrices of which no other rank has a shard or a copy: heads and other blocks that the cut leaves whole.
        dealt: Shards or copies, in groups of bounded size: the matrices that each rank orthogonalises.
        distributed: Batches of shards on which all ranks iterate together.
    """

    alone: list[int]
    dealt: list[list[list[int]]]
    distributed: list[list[int]]


class OverTensorGroup:
    """Turns the directions of matrices that a tensor-parallel group cuts or copies into updates."""

    def __init__(self, whole: WholeAtOwner, config: MuonConfig, group: dist.ProcessGroup) -> None:
        """Keep the arguments; nothing is allocated or sent.

        Args:
            whole: Orthogonalises matrices that are whole on this rank. Its matrices are in the same order on all ranks.
            config: Whether cut matrices are gathered or orthogonalised where they are (``tensor_parallel_mode``), and
                how many elements are gathered at once, unless a matrix has more (``exchange_chunk_numel``).
            group: The tensor-parallel process group.
        """
        self._whole, self._group = whole, group
        self._matrices, self._context, self._check = whole.matrices, whole.context, whole.check
        self._rank = dist.get_rank(group)
        self._ranks = range(dist.get_world_size(group))
        self._distributed = config.tensor_parallel_mode == "distributed"
        self._chunk_numel = config.exchange_chunk_numel
        # Planned at bind by :meth:`inputs`, and once more for each other set of active matrices.
        self._division = functools.lru_cache(maxsize=64)(self._divided)

    def updates(self, owned: Sequence[int], directions: Directions, step: Step) -> Updates:
        """Yield indices and updates of this rank's shards and copies, as :meth:`.WholeAtOwner.updates` does.

        Must be called by all ranks of the group with the same ``owned``, and be exhausted: all ranks follow the order
        of the plan, so that two ranks never wait for each other in different matrices.
        """
        division = self._division(tuple(owned))
        yield from self._whole.updates(division.alone, directions, step)
        for of_rank in division.dealt:
            yield from self._at_one_rank(of_rank, directions, step)
        for batch in division.distributed:
            result = self._iterated(batch, directions(batch), step)
            self._check.settle(result)
            yield batch, result.updates.to(self._context.comm_dtype).reshape(len(batch), -1)

    def inputs(self, owned: Sequence[int]) -> Iterator[Tensor]:
        """Yield empty tensors like the whole matrices that this rank orthogonalises."""
        division = self._division(tuple(owned))
        yield from self._whole.inputs(division.alone)
        for of_rank in division.dealt:
            yield from self._whole.inputs(of_rank[self._rank])

    def _divided(self, owned: tuple[int, ...]) -> _Division:
        """Divide active owned matrices of a chunk between the ranks of the group."""
        alone = [index for index in owned if self._matrices[index].shards is None]
        shards = [index for index in owned if self._matrices[index].is_sharded]
        copies = [index for index in owned if index not in {*alone, *shards}]
        if self._distributed:
            together = batches(self._matrices, self._context, shards, by_shards=True)
            return _Division(alone, self._dealt(copies), together)
        return _Division(alone, [*self._dealt(copies), *self._dealt(shards)], [])

    def _dealt(self, indices: Sequence[int]) -> list[list[list[int]]]:
        """Deal matrices to the ranks in groups of bounded size, the costliest first to the rank with the least work."""
        numels = {index: math.prod(self._matrices[index].logical_shape) for index in indices}
        groups: list[list[int]] = []
        for index in indices:
            filled = sum(numels[member] for member in groups[-1]) if groups else 0
            if not groups or filled + numels[index] > self._chunk_numel:
                groups.append([])
            groups[-1].append(index)
        dealt = []
        for group in groups:
            costs = [orthogonalize_flops(*self._matrices[index].logical_shape) for index in group]
            owners = assign_owners(costs, [None] * len(group), load=np.zeros(len(self._ranks)))
            pairs = [*zip(group, owners, strict=True)]
            dealt.append([[index for index, owner in pairs if owner == rank] for rank in self._ranks])
        return dealt

    def _at_one_rank(self, of_rank: Sequence[Sequence[int]], directions: Directions, step: Step) -> Updates:
        """Yield updates of shards or copies, each of which one rank orthogonalises.

        Args:
            of_rank: The matrices of each rank: all of them shards, or all copies.
            directions: Their directions.
            step: The step.
        """
        indices = sorted(index for of_one in of_rank for index in of_one)
        dtype, dims = self._context.comm_dtype, {index: self._shards(index)[0] for index in indices}
        # 1. directions, and the row state of the variant, to the ranks that orthogonalise
        matrices = self._assembled(of_rank, {index: directions([index])[0] for index in indices}, dims, dtype)
        local_rows = {} if step.finish is None else step.finish.rows
        row_dims = {index: 0 if self._matrices[index].shards_outputs else None for index in indices}
        rows = {
            key: self._assembled(
                of_rank, {index: stored[index].clone() for index in indices}, row_dims, torch.float32
            )
            for key, stored in local_rows.items()
        }
        if step.finish is not None:
            step = replace(step, finish=step.finish.with_assembled(rows))
        # 2. this rank's matrices
        results = {
            index: update.view(self._matrices[index].logical_shape)
            for batch, updates in self._whole.updates(
                of_rank[self._rank], lambda batch: torch.stack([matrices[index] for index in batch]), step
            )
            for index, update in zip(batch, updates, strict=True)
        }
        # 3. shards or copies of the updates, and of the new row state, back
        numels = {index: self._matrices[index].numel for index in indices}
        local_updates = self._returned(of_rank, results, dims, numels, dtype)
        for key, stored in local_rows.items():
            lengths = {index: stored[index].numel() for index in indices}
            for index, new in self._returned(of_rank, rows[key], row_dims, lengths, torch.float32).items():
                stored[index].copy_(new)
        for index, update in local_updates.items():
            yield [index], update.unsqueeze(0)

    def _assembled(
        self,
        of_rank: Sequence[Sequence[int]],
        own: Mapping[int, Tensor],
        dims: Mapping[int, int | None],
        dtype: torch.dtype,
    ) -> dict[int, Tensor]:
        """Return whole tensors of the matrices that this rank orthogonalises.

        Args:
            of_rank: The matrices of every rank.
            own: This rank's shard of each, or its copy.
            dims: The dimension that is cut, ``None`` for copies, which are not sent.
            dtype: Of the tensors.
        """
        found = {index: own[index] for index in of_rank[self._rank] if dims[index] is None}
        sent = [[index for index in each if dims[index] is not None] for each in of_rank]
        if not any(sent):
            return found
        mine = sent[self._rank]
        shapes = [
            [_resized(own[index].shape, dims[index], self._shards(index)[1][rank]) for index in mine]
            for rank in self._ranks
        ]
        arrived = self._exchange(
            [[own[index] for index in each] for each in sent],
            [[math.prod(shape) for shape in each] for each in shapes],
            dtype,
        )
        for number, index in enumerate(mine):
            parts = [each[number].view(*shape[number]) for each, shape in zip(arrived, shapes, strict=True)]
            found[index] = torch.cat(parts, dim=dims[index] or 0)
        return found

    def _returned(
        self,
        of_rank: Sequence[Sequence[int]],
        whole: Mapping[int, Tensor],
        dims: Mapping[int, int | None],
        lengths: Mapping[int, int],
        dtype: torch.dtype,
    ) -> dict[int, Tensor]:
        """Return this rank's shards or copies, flat, of what the ranks have computed; see :meth:`_assembled`.

        Args:
            of_rank: The matrices of every rank.
            whole: Those of this rank.
            dims: The dimension that is cut, ``None`` for copies.
            lengths: Elements of this rank's shards or copies.
            dtype: Of the tensors.
        """
        parts = []
        for index in of_rank[self._rank]:
            dim, sizes = dims[index], self._shards(index)[1]
            copies = [whole[index]] * len(self._ranks)
            parts.append(copies if dim is None else whole[index].split(sizes, dim=dim))
        returned = self._exchange(
            [[each[rank] for each in parts] for rank in self._ranks],
            [[lengths[index] for index in each] for each in of_rank],
            dtype,
        )
        pairs = (zip(*each, strict=True) for each in zip(of_rank, returned, strict=True))
        return {index: part for each in pairs for index, part in each}

    def _iterated(self, batch: Sequence[int], inputs: Tensor, step: Step) -> Result:
        """Orthogonalise matrices of one shape, cut alike, of which this rank has ``(matrices, rows, cols)``."""
        dim, sizes = self._shards(batch[0])
        assert dim is not None
        iterate = functools.partial(
            orthogonalize_sharded, group=self._group, shard_dim=dim - 2, shard_sizes=sizes
        )
        variant, first = self._context.variant, self._matrices[batch[0]]
        inputs = before_iteration(variant, inputs, first, self._group)
        names = ", ".join(self._matrices[index].name for index in batch[:3])
        with self._check.recorder.span("newton_schulz"), phase(f"iteration of {names}", self._group):
            blocks = iterate(inputs, settings=self._context.ns_settings)
        counts = self._rank == 0
        first_blocks = sum(self._matrices[index].first_row == 0 for index in batch)
        self._context.stats.matrices_orthogonalized += first_blocks if counts else 0
        distributed = DistributedIteration(self._group, dim, sizes, iterate, counts)
        return Result(
            [(index, 0) for index in batch], inputs, blocks, step.rates.scales, step.finish, distributed
        )

    def _shards(self, index: int) -> tuple[int | None, tuple[int, ...]]:
        """Return the dimension that is cut, ``None`` for copies, and the length of every rank's shard."""
        shards = self._matrices[index].shards
        assert shards is not None
        return shards.dim, shards.sizes

    def _exchange(
        self, parts: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Sequence[Tensor]]:
        """Send tensors to every rank; return what each sent, flat and cut into ``lengths``."""
        context, like = self._context, torch.empty(0, dtype=dtype, device=self._context.device)
        sent = sum(part.numel() for rank, each in enumerate(parts) for part in each if rank != self._rank)
        purpose = "exchange between tensor-parallel ranks"
        received = exchange_tensors(parts, lengths, like=like, group=self._group, purpose=purpose)
        context.stats.count_exchange(sent * dtype.itemsize)
        return received


def _resized(shape: Sequence[int], dim: int | None, length: int) -> list[int]:
    """Return a shape with another length of one dimension."""
    return [length if number == dim else each for number, each in enumerate(shape)]
