"""Orthogonalises matrices that tensor parallelism shards or replicates.

Each data-parallel group has one tensor-parallel shard of a matrix and gathers it on one rank, the owner of the shard.
The owners of all shards of a matrix are the ranks of one tensor-parallel group. One of them receives the shards,
orthogonalises the matrix and sends the shards of the update back. The matrices of a chunk are assigned to the ranks by
their cost, so that all ranks work at the same time.

Every rank of the group has a replica of a matrix that tensor parallelism does not shard. One rank orthogonalises it and
sends the update to the remaining ranks, so that the replicas are equal bit for bit even where ranks use different
kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import orthogonalize_flops
from deepspeed_muon.plan.layout import PlanIndex
from deepspeed_muon.plan.owners import assign_owners
from deepspeed_muon.step.orthogonalize import DirectionsOf, LocalOrthogonalizer, Updates
from deepspeed_muon.step.tensors import StepTensors
from deepspeed_muon.transport.all_to_all import exchange_tensors


class TensorParallelOrthogonalizer:
    """Turns the directions of matrices that a tensor-parallel group shards or replicates into updates."""

    def __init__(self, local: LocalOrthogonalizer, group: dist.ProcessGroup) -> None:
        """Keep the arguments, equal on all ranks of the tensor-parallel group; nothing is allocated or sent."""
        self._local, self._group = local, group
        self._matrices, self._context = local.matrices, local.context
        self._rank = dist.get_rank(group)
        self._ranks = range(dist.get_world_size(group))
        # Made at bind by :meth:`inputs`, and once more for each set of active matrices that a step meets.
        self._work_plan = functools.lru_cache(maxsize=1024)(self._make_work_plan)

    def orthogonalized(
        self, owned: Sequence[PlanIndex], directions_of: DirectionsOf, step: StepTensors
    ) -> Updates:
        """Yield indices and updates of this rank's shards and replicas, as :class:`.LocalOrthogonalizer` does.

        Must be called by all ranks of the group with the same ``owned``, and be exhausted: every rank then calls the
        collectives in the order of the plan.
        """
        local, assigned = self._work_plan(tuple(owned))
        yield from self._local.orthogonalized(local, directions_of, step)
        for by_rank in assigned:
            yield from self._gathered(by_rank, directions_of, step)

    def inputs(self, owned: Sequence[PlanIndex]) -> Iterator[Tensor]:
        """Yield empty tensors like the complete matrices that this rank orthogonalises."""
        local, assigned = self._work_plan(tuple(owned))
        yield from self._local.inputs(local)
        for by_rank in assigned:
            yield from self._local.inputs(by_rank[self._rank])

    def _make_work_plan(
        self, owned: tuple[PlanIndex, ...]
    ) -> tuple[list[PlanIndex], list[list[list[PlanIndex]]]]:
        """Say where active owned matrices of a chunk are orthogonalised.

        Returns:
            Matrices without shards or replicas on other ranks, such as attention heads that are complete on this rank;
            and the others, in groups of bounded size: for each group, those that each rank orthogonalises.
        """
        # All ranks of the group own their shards of the same matrices, so they make the same plan.
        local, shards, replicas = list[PlanIndex](), list[PlanIndex](), list[PlanIndex]()
        for index in owned:
            matrix = self._matrices[index]
            (local if matrix.tp_shards is None else shards if matrix.is_tp_shard else replicas).append(index)
        return local, [*self._assigned(replicas), *self._assigned(shards)]

    def _assigned(self, indices: Sequence[PlanIndex]) -> list[list[list[PlanIndex]]]:
        """Assign matrices to ranks in groups of bounded size: the costliest first, to the rank with the least work."""
        # of the complete matrices, which a rank gathers
        numels = {index: math.prod(self._matrices[index].logical_shape) for index in indices}
        # 1. in the order of the plan, as many as may be gathered at once; a larger matrix is alone
        groups: list[list[PlanIndex]] = []
        filled = 0  # elements of the last group
        for index in indices:
            if not groups or filled + numels[index] > self._context.config.exchange_chunk_numel:
                groups.append([])
                filled = 0
            groups[-1].append(index)
            filled += numels[index]
        # 2. within a group to the ranks; all hold about equally much, so that only the work counts
        assigned = []
        for group in groups:
            costs = [orthogonalize_flops(*self._matrices[index].logical_shape) for index in group]
            # None: a matrix may go to any rank at equal cost.
            owners = assign_owners(costs, [None] * len(group), load=np.zeros(len(self._ranks)))
            pairs = [*zip(group, owners, strict=True)]
            assigned.append([[index for index, owner in pairs if owner == rank] for rank in self._ranks])
        return assigned

    def _gathered(
        self, by_rank: Sequence[Sequence[PlanIndex]], directions_of: DirectionsOf, step: StepTensors
    ) -> Updates:
        """Yield updates of this rank's shards or replicas of matrices that are orthogonalised on a single rank each.

        ``by_rank`` are the matrices that each rank orthogonalises: all of them sharded, or all replicated.
        """
        # sharded along rows (0) or columns (1), or replicated (None)
        indices = sorted(index for assigned in by_rank for index in assigned)
        dtype, dims = self._context.wire_dtype, {index: self._shards(index)[0] for index in indices}
        # 1. send directions, and the row state of the variant, to the ranks that orthogonalise
        matrices = self._assembled(
            by_rank, {index: directions_of((index,))[0] for index in indices}, dims, dtype
        )
        # Row state has a number for each output, the rows or columns of a matrix, and is sharded where these are.
        row_dims = {i: 0 if dims[i] == int(self._matrices[i].transposed) else None for i in indices}
        row_state, rows = step.row_state, dict[PlanIndex, Tensor]()
        if row_state is not None:
            stored = {index: row_state.rows[index].clone() for index in indices}
            rows = self._assembled(by_rank, stored, row_dims, torch.float32)
            step = replace(step, row_state=replace(row_state, rows=rows))
        # 2. orthogonalise the matrices assigned to this rank
        results: dict[PlanIndex, Tensor] = {}
        orthogonalized = self._local.orthogonalized(
            by_rank[self._rank], lambda batch: torch.stack([matrices[index] for index in batch]), step
        )
        for batch, updates in orthogonalized:
            for index, update in zip(batch, updates, strict=True):
                results[index] = update.view(self._matrices[index].logical_shape)
        # 3. send shards or replicas of the updates, and of the new row state, back
        numels = {index: self._matrices[index].numel for index in indices}
        local_updates = self._returned(by_rank, results, dims, numels, dtype)
        if row_state is not None:
            lengths = {index: row_state.rows[index].numel() for index in indices}
            for index, new in self._returned(by_rank, rows, row_dims, lengths, torch.float32).items():
                row_state.rows[index].copy_(new)
        for index, update in local_updates.items():
            yield (index,), update.unsqueeze(0)

    def _assembled(
        self,
        by_rank: Sequence[Sequence[PlanIndex]],
        local: Mapping[PlanIndex, Tensor],
        dims: Mapping[PlanIndex, int | None],
        dtype: torch.dtype,
    ) -> dict[PlanIndex, Tensor]:
        """Return the complete tensors of the matrices that this rank orthogonalises.

        ``local`` has this rank's shard or replica of each matrix, ``dims`` the dimension that is sharded, ``None`` for
        replicas, which are not sent.
        """
        # 1. replicas are complete already
        complete = {index: local[index] for index in by_rank[self._rank] if dims[index] is None}
        sent = [[index for index in assigned if dims[index] is not None] for assigned in by_rank]
        if not any(sent):
            return complete
        # 2. one all-to-all: this rank sends its shard of every matrix, and receives all shards of those assigned to it
        sharded = sent[self._rank]
        # [rank][matrix]: the shape of this rank's shard with the length that the other rank has along dim
        shapes: list[list[list[int]]] = []
        for rank in self._ranks:
            shapes.append([])
            for index in sharded:
                shape = list(local[index].shape)
                shape[dims[index] or 0] = self._shards(index)[1][rank]
                shapes[-1].append(shape)
        received = self._exchange(
            [[local[index] for index in indices] for indices in sent],
            [[math.prod(shape) for shape in shapes_of_rank] for shapes_of_rank in shapes],
            dtype,
        )
        # 3. assemble them, in the order of the ranks
        for number, index in enumerate(sharded):
            shards = [
                tensors[number].view(*shapes_of_rank[number])
                for tensors, shapes_of_rank in zip(received, shapes, strict=True)
            ]
            complete[index] = torch.cat(shards, dim=dims[index] or 0)
        return complete

    def _returned(
        self,
        by_rank: Sequence[Sequence[PlanIndex]],
        complete: Mapping[PlanIndex, Tensor],
        dims: Mapping[PlanIndex, int | None],
        lengths: Mapping[PlanIndex, int],
        dtype: torch.dtype,
    ) -> dict[PlanIndex, Tensor]:
        """Return this rank's shards or replicas, flat, of the ranks' results; the reverse of :meth:`_assembled`.

        ``lengths`` are the elements of this rank's shard or replica of each matrix.
        """
        shards = []  # [matrix][rank]
        for index in by_rank[self._rank]:
            dim, sizes = dims[index], self._shards(index)[1]
            replicas = [complete[index]] * len(self._ranks)  # the same tensor for every rank
            shards.append(replicas if dim is None else complete[index].split(sizes, dim=dim))
        received = self._exchange(
            [[shards_of_matrix[rank] for shards_of_matrix in shards] for rank in self._ranks],
            [[lengths[index] for index in assigned] for assigned in by_rank],
            dtype,
        )
        return {
            index: tensor
            for assigned, tensors in zip(by_rank, received, strict=True)
            for index, tensor in zip(assigned, tensors, strict=True)
        }

    def _shards(self, index: PlanIndex) -> tuple[int | None, tuple[int, ...]]:
        """Return the dimension that is sharded, ``None`` for replicas, and the length of each rank's shard in it."""
        shards = self._matrices[index].tp_shards
        assert shards is not None
        return shards.dim, shards.sizes

    def _exchange(
        self, by_rank: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Sequence[Tensor]]:
        """Send tensors to each rank, and return the tensors received from each, flat, of ``lengths`` elements."""
        context, like = self._context, torch.empty(0, dtype=dtype, device=self._context.device)
        sent_numel = sum(
            tensor.numel() for rank, tensors in enumerate(by_rank) if rank != self._rank for tensor in tensors
        )
        purpose = "exchange between tensor-parallel ranks"
        received = exchange_tensors(by_rank, lengths, like=like, group=self._group, purpose=purpose)
        context.counts.count_exchange(sent_numel * dtype.itemsize)
        return received
