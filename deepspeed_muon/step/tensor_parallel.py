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
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.math.newton_schulz import orthogonalize_flops
from deepspeed_muon.monitoring.check import Result, Together
from deepspeed_muon.plan.owners import assign_owners
from deepspeed_muon.step.passes import Step
from deepspeed_muon.step.strategies import Directions, Updates, WholeAtOwner, batches
from deepspeed_muon.transport.exchange import exchange_bytes
from deepspeed_muon.transport.ranks import phase
from deepspeed_muon.transport.row_state import RowsAtOwner, before_iteration
from deepspeed_muon.transport.sharded import orthogonalize_sharded


class OverTensorGroup:
    """Turns the directions of matrices that a tensor-parallel group cuts or copies into updates."""

    def __init__(self, whole: WholeAtOwner, config: MuonConfig, group: dist.ProcessGroup) -> None:
        """Keep the arguments; nothing is allocated or sent.

        Args:
            whole: Orthogonalises matrices that are whole on this rank. Its matrices are in the same order on all ranks.
            config: Whether cut matrices are gathered or orthogonalised where they lie (``tensor_parallel_mode``), and
                how many elements are gathered at once, unless a matrix has more (``exchange_chunk_numel``).
            group: The tensor-parallel process group.
        """
        self._whole, self._group = whole, group
        self._matrices, self._context, self._check = whole.matrices, whole.context, whole.check
        self._rank = dist.get_rank(group)
        self._ranks = range(dist.get_world_size(group))
        self._distributed = config.tensor_parallel_mode == "distributed"
        self._chunk_numel = config.exchange_chunk_numel

    def updates(self, owned: Sequence[int], directions: Directions, step: Step) -> Updates:
        """Yield indices and updates of this rank's shards and copies, as :meth:`.WholeAtOwner.updates` does.

        Must be called by all ranks of the group with the same ``owned``, and be exhausted: all ranks follow the order
        of the plan, so that two ranks never wait for each other in different matrices.
        """
        # What is whole on this rank alone: attention heads, and other blocks that the cut leaves whole.
        yield from self._whole.updates(
            [i for i in owned if self._matrices[i].shards is None], directions, step
        )
        shared = [index for index in owned if self._matrices[index].shards is not None]
        shards = [index for index in shared if self._matrices[index].is_cut]
        for part in self._parts([index for index in shared if not self._matrices[index].is_cut]):
            yield from self._at_one_rank(part, directions, step)
        if self._distributed:
            yield from self._over_all_ranks(shards, directions, step)
            return
        for part in self._parts(shards):
            yield from self._at_one_rank(part, directions, step)

    def inputs(self, owned: Sequence[int]) -> Iterator[Tensor]:
        """Yield empty tensors like the whole matrices that this rank orthogonalises."""
        yield from self._whole.inputs([i for i in owned if self._matrices[i].shards is None])
        shared = [index for index in owned if self._matrices[index].shards is not None]
        for cut in (False,) if self._distributed else (False, True):
            for part in self._parts([index for index in shared if self._matrices[index].is_cut == cut]):
                yield from self._whole.inputs(self._dealt(part)[self._rank])

    def _parts(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Cut a list of matrices into parts of bounded size, in the same way on all ranks of the group."""
        part: list[int] = []
        filled = 0
        for index in indices:
            rows, cols = self._matrices[index].logical_shape
            if part and filled + rows * cols > self._chunk_numel:
                yield part
                part, filled = [], 0
            part.append(index)
            filled += rows * cols
        if part:
            yield part

    def _dealt(self, part: Sequence[int]) -> list[list[int]]:
        """Divide matrices among the ranks of the group: the costliest first, each to the rank with the least work."""
        costs = [orthogonalize_flops(*self._matrices[index].logical_shape) for index in part]
        owners = assign_owners(costs, [None] * len(part), load=np.zeros(len(self._ranks)))
        return [
            [index for index, owner in zip(part, owners, strict=True) if owner == rank]
            for rank in self._ranks
        ]

    def _at_one_rank(self, part: Sequence[int], directions: Directions, step: Step) -> Updates:
        """Yield updates of matrices that are all cut or all copied: each one goes through the iteration on one rank."""
        of_rank = self._dealt(part)
        mine, kept = of_rank[self._rank], step.finish
        if self._matrices[part[0]].is_cut:
            directions = self._gathered(of_rank, directions)
            if kept is not None:
                step = replace(step, finish=self._gather_rows(kept, of_rank))
        found = (
            pair for each in self._whole.updates(mine, directions, step) for pair in zip(*each, strict=True)
        )
        parts = {index: self._parts_of(index, update) for index, update in found}
        returned = self._exchange(
            [[parts[index][rank] for index in mine] for rank in self._ranks],
            [[self._part_numel(index, self._rank) for index in each] for each in of_rank],
        )
        if kept is not None and step.finish is not None:
            self._return_rows(kept, step.finish, of_rank)
        for indices, updates in zip(of_rank, returned, strict=True):
            for index, update in zip(indices, updates, strict=True):
                yield [index], update.unsqueeze(0)

    def _gathered(self, of_rank: Sequence[Sequence[int]], directions: Directions) -> Directions:
        """Bring shards to the ranks that orthogonalise them; return the directions of this rank's whole matrices."""
        mine = of_rank[self._rank]
        arrived = self._exchange(
            [[directions([index]).reshape(-1) for index in each] for each in of_rank],
            [[self._part_numel(index, rank) for index in mine] for rank in self._ranks],
        )
        whole = {}
        for index, parts in zip(mine, zip(*arrived, strict=True), strict=True):
            dim, sizes = self._shards(index)
            rows, cols = self._matrices[index].logical_shape
            shapes = [(size, cols) if dim == 0 else (rows, size) for size in sizes]
            views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            whole[index] = torch.cat(views, dim=dim)
        return lambda indices: torch.stack([whole[index] for index in indices])

    def _over_all_ranks(self, shards: Sequence[int], directions: Directions, step: Step) -> Updates:
        """Yield updates of this rank's shards, which all ranks of the group iterate on together."""
        for batch in batches(self._matrices, self._context, shards, by_shards=True):
            result = self._iterated(batch, directions(batch), step)
            self._check.settle(result)
            yield batch, result.updates.to(self._context.comm_dtype).reshape(len(batch), -1)

    def _iterated(self, batch: Sequence[int], inputs: Tensor, step: Step) -> Result:
        """Orthogonalise matrices of one shape, cut alike, of which this rank has ``(matrices, rows, cols)``."""
        dim, sizes = self._shards(batch[0])
        iterate = functools.partial(
            orthogonalize_sharded, group=self._group, shard_dim=dim - 2, shard_sizes=sizes
        )
        inputs = before_iteration(step.variant, inputs, self._matrices[batch[0]], self._group)
        names = ", ".join(self._matrices[index].name for index in batch[:3])
        with self._check.recorder.span("newton_schulz"), phase(f"iteration of {names}", self._group):
            blocks = iterate(inputs, settings=self._context.ns_settings)
        counts = self._rank == 0
        first_blocks = sum(self._matrices[index].first_row == 0 for index in batch)
        self._context.stats.matrices_orthogonalized += first_blocks if counts else 0
        together = Together(self._group, dim, sizes, iterate, counts)
        return Result(
            [(index, 0) for index in batch], inputs, blocks, step.rates.scales, step.finish, together
        )

    def _gather_rows(self, kept: RowsAtOwner, of_rank: Sequence[Sequence[int]]) -> RowsAtOwner:
        """Return the row state of the matrices that this rank orthogonalises.

        Every rank has that of its rows. Where the inputs are cut, all ranks have that of all rows.
        """
        apart = [[index for index in each if self._matrices[index].cuts_outputs] for each in of_rank]
        whole = {}
        for key, rows in kept.rows.items():
            arrived = self._exchange(
                [[rows[index] for index in each] for each in apart],
                [[rows[index].numel() for index in apart[self._rank]] for _ in self._ranks],
                torch.float32,
            )
            whole[key] = {index: rows[index].clone() for index in of_rank[self._rank]}
            for number, index in enumerate(apart[self._rank]):
                whole[key][index] = torch.cat([parts[number] for parts in arrived])
        return kept.with_whole(whole)

    def _return_rows(self, kept: RowsAtOwner, done: RowsAtOwner, of_rank: Sequence[Sequence[int]]) -> None:
        """Bring the row state that each rank has advanced to the ranks that have these rows."""
        for key, rows in kept.rows.items():
            sizes = [[rows[index].numel() for index in each] for each in of_rank]
            parts = [
                done.rows[key][index].split(size)
                if self._matrices[index].cuts_outputs
                else [done.rows[key][index]] * len(self._ranks)
                for index, size in zip(of_rank[self._rank], sizes[self._rank], strict=True)
            ]
            returned = self._exchange(
                [[each[rank] for each in parts] for rank in self._ranks], sizes, torch.float32
            )
            for indices, values in zip(of_rank, returned, strict=True):
                for index, own in zip(indices, values, strict=True):
                    rows[index].copy_(own)

    def _shards(self, index: int) -> tuple[int, tuple[int, ...]]:
        """Return the dimension that is cut, and the length of every rank's shard."""
        shards = self._matrices[index].shards
        assert shards is not None and shards.dim is not None
        return shards.dim, shards.sizes

    def _parts_of(self, index: int, update: Tensor) -> Sequence[Tensor]:
        """Return what each rank gets of a flat update: its shard, or a copy."""
        matrix = self._matrices[index]
        if not matrix.is_cut:
            return [update] * len(self._ranks)
        dim, sizes = self._shards(index)
        return [each.reshape(-1) for each in update.view(matrix.logical_shape).split(sizes, dim=dim)]

    def _part_numel(self, index: int, rank: int) -> int:
        """Return how many elements of a matrix a rank has."""
        matrix = self._matrices[index]
        if not matrix.is_cut:
            return matrix.numel
        dim, sizes = self._shards(index)
        return sizes[rank] * matrix.logical_shape[1 - dim]

    def _exchange(
        self,
        parts: Sequence[Sequence[Tensor]],
        wanted: Sequence[Sequence[int]],
        dtype: torch.dtype | None = None,
    ) -> list[Sequence[Tensor]]:
        """Send flat tensors (in the communication dtype by default) to every rank; return what each sent, cut."""
        context, dtype = self._context, dtype or self._context.comm_dtype
        flat = [part.to(context.device) for of_rank in parts for part in of_rank]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=context.device)
        out = [sum(part.numel() for part in of_rank) for of_rank in parts]
        into = [sum(lengths) for lengths in wanted]
        received = torch.empty(sum(into), dtype=dtype, device=context.device)
        with phase("exchange between tensor-parallel ranks", self._group):
            exchange_bytes(received, send, into, out, group=self._group).wait()
        context.stats.count_exchange((sum(out) - out[self._rank]) * received.element_size())
        return [
            part.split(list(lengths)) if lengths else ()
            for part, lengths in zip(received.split(into), wanted, strict=True)
        ]
