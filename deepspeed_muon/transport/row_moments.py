"""Brings NorMuon's row moments from the ranks that keep them to the owners of the matrices, and back.

They travel in fp32, one number for every row of a matrix, in two small all-to-alls a step (of replicated matrices, in
broadcasts by the owners); only if some matrix has rows
that begin on another rank than its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.normuon import normalize_rows
from deepspeed_muon.plan.exchange import BufferPlan, ExchangePlan, build_chunk
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.rows import row_places
from deepspeed_muon.transport.context import StepContext
from deepspeed_muon.transport.exchange import broadcast_bytes, cut, part_of
from deepspeed_muon.transport.waiting import phase


class RowsAtOwner:
    """Row moments of matrices at the rank that orthogonalises them, or of this rank's shards of cut matrices."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        moments: dict[int, Tensor],
        beta2: Sequence[float],
        *,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Keep the arguments; nothing is sent.

        Args:
            matrices: Of the exchange plan.
            moments: Index of each matrix here to its moments, one-dimensional fp32. Mutated.
            beta2: Decay of the moments in this step, for each matrix of the plan.
            group: The tensor-parallel group that has the other shards of cut matrices; ``None`` if they are whole here.
        """
        self._matrices = matrices
        self._whole = moments
        self._beta2 = beta2
        self._group = group
        self._before: dict[tuple[int, int], Tensor] = {}

    def of(self, index: int) -> Tensor:
        """Return the moments of a matrix, one-dimensional fp32; a later :meth:`normalize` changes them."""
        return self._whole[index]

    def at_one_rank(self, moments: dict[int, Tensor]) -> RowsAtOwner:
        """Return the moments of matrices whose shards were gathered."""
        return RowsAtOwner(self._matrices, moments, self._beta2, group=None)

    def _sums_over_group(self, matrix: MatrixLayout) -> dict[str, Any]:
        """Return how :func:`normalize_rows` adds up over the shards of a cut matrix; nothing for one that is whole."""
        group = self._group
        if group is None or not matrix.is_cut:
            return {}
        assert matrix.shards is not None

        def add_up(part: Tensor) -> Tensor:
            with phase("sums of rows", group):
                dist.all_reduce(part, group=group)
            return part

        if matrix.cuts_outputs:
            return {"sum_over_rows": add_up}
        return {"sum_of_row": add_up, "cols": sum(matrix.shards.sizes)}

    def normalize(self, blocks: Sequence[tuple[int, int]], updates: Tensor) -> Tensor:
        """Normalise the rows of owned matrices and advance their moments.

        For shards of cut matrices it must be called by all ranks of the tensor-parallel group.

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
        first = self._matrices[blocks[0][0]]
        transposed = first.transposed
        decay = torch.tensor([self._beta2[index] for index, _ in blocks], device=moments.device).unsqueeze(-1)
        sums = self._sums_over_group(first)
        result = normalize_rows(updates.mT if transposed else updates, moments, beta2=decay, **sums)
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
        if matrix.is_cut:
            return self._whole[index]
        row, col = divmod(number, len(matrix.grid[1]))
        block = matrix.blocks()[number]
        if matrix.transposed:
            return self._whole[index].view(-1, matrix.cols)[row].narrow(0, block.col, block.cols)
        return self._whole[index].view(matrix.rows, -1)[:, col].narrow(0, block.row, block.rows)


class RowMoments(RowsAtOwner):
    """The row moments of the matrices of one exchange plan.

    A step calls :meth:`gather`, then :meth:`normalize` for each batch of owned matrices (as their
    :class:`~deepspeed_muon.monitoring.results.Finish`), then :meth:`scatter`.
    """

    def __init__(
        self, plan: ExchangePlan, context: StepContext, tensor_group: dist.ProcessGroup | None
    ) -> None:
        """Find out which moments this rank keeps; ``tensor_group`` has the other shards of cut matrices."""
        super().__init__(plan.matrices, {}, (), group=tensor_group)
        places = row_places(plan.matrices)
        self._held = [each.on(plan.rank) for each in places]
        self._chunk = build_chunk(places, plan.owners, range(len(places)), plan.rank)
        self._counts = [each.numel for each in places]
        self._context = context

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to other ranks per step."""
        return self._chunk.sent_elements

    def numel(self, partition: int) -> int:
        """Return how many row moments of a partition this rank keeps."""
        held = zip(self._matrices, self._held, strict=True)
        return sum(own.numel for matrix, own in held if own is not None and matrix.partition == partition)

    def gather(self, kept: Mapping[int, Tensor], *, beta2: Sequence[float]) -> None:
        """Bring the moments of every matrix to its owner.

        Must be called by all ranks of the group.

        Args:
            kept: Partition index to the moments that this rank keeps, one-dimensional fp32.
            beta2: Decay of the moments in this step, for each matrix of the plan.
        """
        chunk, self._before, self._beta2 = self._chunk, {}, beta2
        self._whole = {index: self._buffer(self._counts[index]) for index in chunk.owned}
        for mine, own in self._own(kept):
            mine.copy_(own)
        if chunk.gathers:
            send = self._buffer(chunk.held_buffer.numel)
            for segment in chunk.held_buffer.segments:
                cut(send, segment).copy_(self._kept(kept, segment.matrix))
            received = self._buffer(chunk.owned_buffer.numel)
            self._all_to_all(received, send, chunk.owned_buffer, chunk.held_buffer)
            for segment in chunk.owned_buffer.segments:
                part_of(self._whole[segment.matrix], segment).copy_(cut(received, segment))

    def scatter(self, kept: Mapping[int, Tensor]) -> None:
        """Bring the moments back to the ranks that keep them; those of inactive matrices are unchanged.

        Must be called by all ranks of the group.

        Args:
            kept: As for :meth:`gather`. The tensors are mutated.
        """
        chunk = self._chunk
        for mine, own in self._own(kept):
            own.copy_(mine)
        if chunk.scatters:
            send = self._buffer(chunk.owned_buffer.numel)
            for segment in chunk.owned_buffer.segments:
                cut(send, segment).copy_(part_of(self._whole[segment.matrix], segment))
            received = self._buffer(chunk.held_buffer.numel)
            if chunk.copies:
                self._broadcast(received, send)
            else:
                self._all_to_all(received, send, chunk.held_buffer, chunk.owned_buffer)
            for segment in chunk.held_buffer.segments:
                self._kept(kept, segment.matrix).copy_(cut(received, segment).view(-1))
        self._whole, self._before = {}, {}

    def _own(self, kept: Mapping[int, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows that this rank keeps of each owned matrix: in the whole, and where it keeps them."""
        for index in self._chunk.owned:
            own = self._held[index]
            if own is not None:
                yield self._whole[index].narrow(0, own.matrix_offset, own.numel), self._kept(kept, index)

    def _kept(self, kept: Mapping[int, Tensor], index: int) -> Tensor:
        own = self._held[index]
        assert own is not None
        return kept[self._matrices[index].partition].narrow(0, own.partition_offset, own.numel)

    def _buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.float32, device=self._context.device)

    def _broadcast(self, out: Tensor, send: Tensor) -> None:
        group = self._context.group
        with phase("exchange of row moments", group):
            for work in broadcast_bytes(self._chunk, self._context.rank, out, send, group=group):
                work.wait()
        self._context.stats.count_exchange(self._chunk.copies * send.numel() * send.element_size())

    def _all_to_all(self, out: Tensor, send: Tensor, received: BufferPlan, sent: BufferPlan) -> None:
        group, ranks = self._context.group, self._context.world_size
        with phase("exchange of row moments", group):
            dist.all_to_all_single(out, send, received.splits(ranks), sent.splits(ranks), group=group)
        self._context.stats.count_exchange(sent.numel * send.element_size())
