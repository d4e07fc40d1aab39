"""The directions of one chunk as matrices, and what the chunks of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_muon.plan.exchange import Chunk, ExchangePlan, Segment
from deepspeed_muon.step.momentum import LocalDirections
from deepspeed_muon.step.update_rule import UpdateTable
from deepspeed_muon.transport.buffers import aligned
from deepspeed_muon.transport.context import StepContext
from deepspeed_muon.transport.exchange import cut, part_of
from deepspeed_muon.transport.row_state import RowsAtOwner


class ChunkDirections:
    """The directions of one chunk's owned matrices: this rank's fragments, and what the gather brought."""

    def __init__(
        self,
        plan: ExchangePlan,
        context: StepContext,
        step: Step,
        chunk: Chunk,
        received: Tensor | None,
        idle: Tensor | None = None,
    ) -> None:
        """Sort the fragments that the gather brought by matrix.

        Args:
            plan: This rank's view of the exchange.
            context: Of the step set.
            step: Shared by the chunks.
            chunk: What travels.
            received: What the gather brought; ``None`` if nothing moves.
            idle: Flat memory in which the matrices are put together, as far as it goes.
        """
        self.rules = step.table.rules
        self.finish = step.finish
        self._matrices = plan.matrices
        self._context = context
        self._local = step.directions
        self._received = received
        self._idle = idle
        self._incoming: dict[int, list[Segment]] = {}
        for segment in chunk.owned_buffer.segments if chunk.gathers else ():
            self._incoming.setdefault(segment.matrix, []).append(segment)

    def stacked(self, indices: Sequence[int]) -> Tensor:
        """Return ``(matrices, rows, cols)``. Matrices that lie whole on this rank are used in place."""
        first = self._matrices[indices[0]]
        shape = (len(indices), first.rows, first.cols)
        own = [self._local.get(index) for index in indices]
        if all(index not in self._incoming for index in indices):
            whole = together([direction for _, direction in filter(None, own)])
            if whole is not None:
                return whole.to(self._context.device).view(shape)
        full = self._empty(len(indices) * first.numel)
        for index, local, matrix in zip(indices, own, full.split(first.numel), strict=True):
            if local is not None:
                fragment, direction = local
                matrix.narrow(0, fragment.matrix_offset, fragment.numel).copy_(direction)
            for segment in self._incoming.get(index, ()):
                assert self._received is not None
                read = self._context.wire.read(cut(self._received, segment), segment.numel)
                part_of(matrix, segment).copy_(read)
        return full.view(shape)

    def _empty(self, numel: int) -> Tensor:
        """Return flat memory in the wire dtype that nobody else uses before the chunk is done."""
        if self._idle is None or self._idle.numel() < aligned(numel):
            return torch.empty(numel, dtype=self._context.wire_dtype, device=self._context.device)
        place, self._idle = self._idle.tensor_split([aligned(numel)])
        return place.narrow(0, 0, numel)


@dataclass(frozen=True, slots=True)
class Step:
    """What the chunks of one step of one set share.

    Attributes:
        active: Whether any rank has a gradient, one flag for each matrix of the exchange plan.
        directions: The directions of this rank's fragments; it holds the gradients.
        table: How updates reach the weights.
        finish: The variant's ``finish`` with the row state of owned matrices; ``None`` if it has none.
    """

    active: Sequence[bool]
    directions: LocalDirections
    table: UpdateTable
    finish: RowsAtOwner | None


def together(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one view of tensors of equal length that follow each other in memory, ``None`` if they do not."""
    first, step = parts[0], parts[0].numel() * parts[0].element_size()
    if any(part.data_ptr() != first.data_ptr() + number * step for number, part in enumerate(parts)):
        return None
    if any(part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for part in parts):
        return None
    return first.as_strided((len(parts) * first.numel(),), (1,))
