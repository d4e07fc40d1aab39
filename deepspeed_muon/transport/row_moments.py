"""Brings NorMuon's row moments from the ranks that keep them to the owners of the matrices, and back.

They travel in fp32, one number for every row of a matrix, in two small all-to-alls a step; only if some matrix has rows
that begin on another rank than its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.normuon import normalize_rows
from deepspeed_muon.plan.exchange import Chunk, ExchangePlan, Segment, build_exchange_plan
from deepspeed_muon.plan.rows import row_layouts
from deepspeed_muon.transport.context import StepContext
from deepspeed_muon.transport.exchange import cut
from deepspeed_muon.transport.waiting import phase

__all__ = ["RowMoments"]


class RowMoments:
    """The row moments of the matrices of one exchange plan.

    A step calls :meth:`gather`, then :meth:`normalize` for each batch of owned matrices (as their
    :class:`~deepspeed_muon.monitoring.results.Finish`), then :meth:`scatter`.
    """

    def __init__(self, plan: ExchangePlan, context: StepContext) -> None:
        self._matrices = plan.matrices
        layouts = row_layouts(plan.matrices)
        self.plan = build_exchange_plan(
            layouts,
            plan.owners,
            rank=plan.rank,
            world_size=plan.world_size,
            chunk_numel=sum(layout.numel for layout in layouts) + 1,
        )
        self._context = context
        self._whole: dict[int, Tensor] = {}
        self._before: dict[tuple[int, int], Tensor] = {}
        self._beta2: Sequence[float] = ()

    def numel(self, partition: int) -> int:
        """Return how many row moments of a partition this rank keeps."""
        layouts = (layout for layout in self.plan.matrices if layout.partition == partition)
        return sum(layout.held_by(self.plan.rank) for layout in layouts)

    def gather(self, kept: Mapping[int, Tensor], *, beta2: Sequence[float]) -> None:
        """Bring the moments of every matrix to its owner.

        Must be called by all ranks of the group.

        Args:
            kept: Partition index to the moments that this rank keeps, one-dimensional fp32.
            beta2: Decay of the moments in this step, for each matrix of the plan.
        """
        self._whole, self._before, self._beta2 = {}, {}, beta2
        for chunk in self.plan.chunks:
            received = None
            if chunk.gathers:
                send = self._buffer(sum(chunk.gather_send_splits))
                for segment in chunk.outgoing:
                    cut(send, segment).copy_(self._kept(kept, segment))
                received = self._buffer(sum(chunk.gather_recv_splits))
                self._all_to_all(received, send, chunk.gather_recv_splits, chunk.gather_send_splits)
            for index in chunk.owned:
                self._whole[index] = self._buffer(self.plan.matrices[index].rows)
            for segment in self._own(chunk):
                self._rows(segment).copy_(self._kept(kept, segment))
            for segment in chunk.incoming:
                assert received is not None
                self._rows(segment).copy_(cut(received, segment))

    def normalize(self, blocks: Sequence[tuple[int, int]], updates: Tensor) -> Tensor:
        """Normalise the rows of owned matrices and advance their moments.

        Args:
            blocks: The block of each update: index of the matrix and number of the block.
            updates: ``(blocks, rows, cols)``: the orthogonalised blocks.

        Returns:
            A new fp32 tensor of the same shape.
        """
        kept = [self._of_block(index, block) for index, block in blocks]
        moments = torch.stack(kept)
        for block, before in zip(blocks, moments.clone(), strict=True):
            self._before.setdefault(block, before)
        transposed = self._matrices[blocks[0][0]].transposed
        decay = torch.tensor(
            [self._beta2[index] for index, _ in blocks], device=self._context.device
        ).unsqueeze(-1)
        result = normalize_rows(updates.mT if transposed else updates, moments, beta2=decay)
        for view, new in zip(kept, moments, strict=True):
            view.copy_(new)
        return result.mT if transposed else result

    def take_back(self, block: tuple[int, int]) -> None:
        """Restore the moments that a block had before this step."""
        self._of_block(*block).copy_(self._before[block])

    def start_anew(self, block: tuple[int, int]) -> None:
        """Set the moments of a block to zero, as they are before the first step."""
        self._of_block(*block).zero_()

    def _of_block(self, index: int, number: int) -> Tensor:
        """Return a view of the moments of one block of an owned matrix."""
        matrix = self._matrices[index]
        row, col = divmod(number, len(matrix.grid[1]))
        block = matrix.blocks()[number]
        if matrix.transposed:
            return self._whole[index].view(-1, matrix.cols)[row].narrow(0, block.col, block.cols)
        return self._whole[index].view(matrix.rows, -1)[:, col].narrow(0, block.row, block.rows)

    def scatter(self, kept: Mapping[int, Tensor]) -> None:
        """Bring the moments back to the ranks that keep them; those of inactive matrices are unchanged.

        Must be called by all ranks of the group.

        Args:
            kept: As for :meth:`gather`. The tensors are mutated.
        """
        for chunk in self.plan.chunks:
            for segment in self._own(chunk):
                self._kept(kept, segment).copy_(self._rows(segment))
            if not chunk.scatters:
                continue
            send = self._buffer(sum(chunk.scatter_send_splits))
            for segment in chunk.updates_out:
                cut(send, segment).copy_(self._rows(segment))
            received = self._buffer(sum(chunk.scatter_recv_splits))
            self._all_to_all(received, send, chunk.scatter_recv_splits, chunk.scatter_send_splits)
            for segment in chunk.updates_in:
                self._kept(kept, segment).copy_(cut(received, segment))
        self._whole, self._before = {}, {}

    def _own(self, chunk: Chunk) -> list[Segment]:
        """Return the fragments that this rank keeps of its own matrices."""
        return [
            Segment(index, fragment, 0)
            for index in chunk.owned
            for fragment in self.plan.matrices[index].fragments
            if fragment.rank == self.plan.rank
        ]

    def _kept(self, kept: Mapping[int, Tensor], segment: Segment) -> Tensor:
        partition = kept[self.plan.matrices[segment.matrix].partition]
        return partition.narrow(0, segment.fragment.partition_offset, segment.fragment.numel)

    def _rows(self, segment: Segment) -> Tensor:
        return self._whole[segment.matrix].narrow(0, segment.fragment.matrix_offset, segment.fragment.numel)

    def _buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.float32, device=self._context.device)

    def _all_to_all(
        self, out: Tensor, send: Tensor, out_splits: Sequence[int], send_splits: Sequence[int]
    ) -> None:
        group = self._context.group
        with phase("exchange of row moments", group):
            dist.all_to_all_single(out, send, list(out_splits), list(send_splits), group=group)
        self._context.stats.count_exchange(sum(send_splits) * send.element_size())
