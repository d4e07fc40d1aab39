"""The strategy for matrices that tensor parallelism cuts or copies.

Each data-parallel group holds one tensor-parallel shard of a matrix and gathers it on one rank, the shard's owner. The
owners of all shards of a matrix are the ranks of one tensor-parallel group. They have two ways to orthogonalise it:

* ``gather``: one rank receives the whole matrix, orthogonalises it and sends the shards of the update back. The
  matrices of a chunk are divided by their cost, so that all ranks work at the same time.
* ``distributed``: the matrix stays cut, see :class:`deepspeed_muon.step.strategies.CutOverGroup`.

Every rank of the group holds a whole copy of a matrix that tensor parallelism does not cut. In both modes one rank
orthogonalises it and sends the update to the others, so that the copies stay equal bit for bit, whatever kernels run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import orthogonalize_flops
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.plan.owners import assign_owners
from deepspeed_muon.step.passes import Rates
from deepspeed_muon.step.strategies import CutOverGroup, Directions, Updates, WholeAtOwner
from deepspeed_muon.transport.exchange import StepContext, exchange_bytes
from deepspeed_muon.transport.ranks import phase
from deepspeed_muon.transport.row_state import RowsAtOwner


class OverTensorGroup:
    """Turns the directions of matrices that a tensor-parallel group cuts or copies into updates."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        context: StepContext,
        *,
        group: dist.ProcessGroup,
        whole: WholeAtOwner,
        cut: CutOverGroup | None,
        chunk_numel: int,
    ) -> None:
        """Keep the arguments; nothing is allocated or sent.

        Args:
            matrices: All matrices of the exchange plan, in the same order on all ranks of ``group``.
            context: Of the step set.
            group: The tensor-parallel process group.
            whole: Orthogonalises matrices that are whole on this rank.
            cut: Orthogonalises cut matrices where they lie; ``None`` to gather them.
            chunk_numel: Elements that are gathered at once, unless a single matrix has more.
        """
        self._matrices = matrices
        self._context = context
        self._group = group
        self._rank = dist.get_rank(group)
        self._ranks = range(dist.get_world_size(group))
        self._whole = whole
        self._cut = cut
        self._chunk_numel = chunk_numel

    def updates(self, owned: Sequence[int], directions: Directions) -> Updates:
        """Yield indices and updates of this rank's shards of all matrices in ``owned``.

        Must be called by all ranks of the group with the same ``owned``, and be exhausted.

        Args:
            owned: Active matrices of which this rank has a whole shard or a copy.
            directions: Its ``stacked`` returns these shards and copies.
        """
        # What is whole on this rank alone: attention heads, and other blocks that the cut leaves whole.
        yield from self._whole.updates([i for i in owned if self._matrices[i].shards is None], directions)
        copies = [index for index in owned if self._held_by_all(index)]
        shards = [index for index in owned if self._matrices[index].is_cut]
        for part in self._parts(copies):
            yield from self._copied(part, directions)
        if self._cut is not None:
            yield from self._cut.updates(shards, directions)
            return
        for part in self._parts(shards):
            yield from self._gathered(part, directions)

    def _held_by_all(self, index: int) -> bool:
        return self._matrices[index].shards is not None and not self._matrices[index].is_cut

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
        owners = assign_owners(costs, [None] * len(part), load=[0.0] * len(self._ranks))
        return [
            [index for index, owner in zip(part, owners, strict=True) if owner == rank]
            for rank in self._ranks
        ]

    def _copied(self, part: Sequence[int], directions: Directions) -> Updates:
        """Yield updates of matrices that every rank holds whole: one rank orthogonalises, all apply its result."""
        of_rank = self._dealt(part)
        updates = dict(_one_by_one(self._whole.updates(of_rank[self._rank], directions)))
        mine = [updates[index] for index in of_rank[self._rank]]
        received = self._exchange(
            [[] if rank == self._rank else mine for rank in self._ranks],
            [
                [] if rank == self._rank else [self._matrices[index].numel for index in of_rank[rank]]
                for rank in self._ranks
            ],
        )
        for rank in self._ranks:
            if rank != self._rank:
                updates.update(zip(of_rank[rank], received[rank], strict=True))
        if directions.finish is not None:
            self._return_rows(directions.finish, directions.finish, of_rank)
        yield from (([index], update.unsqueeze(0)) for index, update in updates.items())

    def _gathered(self, part: Sequence[int], directions: Directions) -> Updates:
        """Yield updates of matrices that are cut: each one goes whole to one rank and comes back in shards."""
        of_rank = self._dealt(part)
        mine = of_rank[self._rank]
        arrived = self._exchange(
            [[directions.stacked([index]).reshape(-1) for index in of_rank[rank]] for rank in self._ranks],
            [[self._shard_numel(index, rank) for index in mine] for rank in self._ranks],
        )
        shards = {
            index: [arrived[rank][number].view(self._shard_shape(index, rank)) for rank in self._ranks]
            for number, index in enumerate(mine)
        }
        kept = directions.finish
        rows = None if kept is None else self._gather_rows(kept, of_rank)
        gathered = _Gathered(
            {index: torch.cat(parts, dim=self._shards(index)[0]) for index, parts in shards.items()},
            directions.rates,
            rows,
        )
        back: dict[int, Sequence[Tensor]] = {}
        for index, update in _one_by_one(self._whole.updates(mine, gathered)):
            dim, sizes = self._shards(index)
            back[index] = update.view(self._matrices[index].logical_shape).split(sizes, dim=dim)
        returned = self._exchange(
            [[back[index][rank].reshape(-1) for index in mine] for rank in self._ranks],
            [[self._shard_numel(index, self._rank) for index in of_rank[rank]] for rank in self._ranks],
        )
        if kept is not None and rows is not None:
            self._return_rows(kept, rows, of_rank)
        for rank in self._ranks:
            for index, update in zip(of_rank[rank], returned[rank], strict=True):
                yield [index], update.unsqueeze(0)

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
        shards: TensorShards | None = self._matrices[index].shards
        assert shards is not None and shards.dim is not None
        return shards.dim, shards.sizes

    def _shard_shape(self, index: int, rank: int) -> tuple[int, int]:
        dim, sizes = self._shards(index)
        rows, cols = self._matrices[index].logical_shape
        return (sizes[rank], cols) if dim == 0 else (rows, sizes[rank])

    def _shard_numel(self, index: int, rank: int) -> int:
        rows, cols = self._shard_shape(index, rank)
        return rows * cols

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


def _one_by_one(updates: Updates) -> Iterator[tuple[int, Tensor]]:
    """Yield index and flat update of every matrix."""
    for indices, found in updates:
        yield from zip(indices, found, strict=True)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Whole directions of matrices that this rank of the tensor-parallel group orthogonalises."""

    matrices: Mapping[int, Tensor]
    rates: Rates
    finish: RowsAtOwner | None

    def stacked(self, indices: Sequence[int]) -> Tensor:
        """Return ``(matrices, rows, cols)``."""
        return torch.stack([self.matrices[index] for index in indices])
