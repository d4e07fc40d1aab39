"""The tables of a chunk: which fragments this rank packs and applies, and what it copies for the matrices it owns.

They are made once, when the optimizer is bound. A pass takes a table, and equal pieces of the matrices of a batch are
copied at once: the work of a step in Python does not grow with the number of fragments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_muon.plan.exchange import Chunk, ExchangePlan, Segment
from deepspeed_muon.transport.exchange import aligned

# The columns of a table of ops/: tensor and offset, other tensor and offset, numel, and the index of the matrix.
COLUMNS = 6
DIRECTIONS, SEND = 0, 1
"""The other tensors of :attr:`ChunkTable.packed`."""


class Row(NamedTuple):
    """This rank's fragment of one matrix.

    Attributes:
        matrix: Index of the matrix in the plan.
        partition: Position of the flat partition among those of Muon in the step set.
        offset: Where the fragment starts in the partition.
        matrix_offset: Where it starts in the matrix.
        numel: Its length.
        segment: Its place in the send buffer; ``None`` if it does not travel.
    """

    matrix: int
    partition: int
    offset: int
    matrix_offset: int
    numel: int
    segment: Segment | None = None


class Copy(NamedTuple):
    """Equal pieces of the matrices of a batch, and of a buffer, that are copied at once.

    Attributes:
        shape: Matrices, pieces of each of them, elements of a piece.
        at_matrix: Where the first piece starts in the batch.
        matrix_strides: Strides there.
        at_buffer: Where it starts in the buffer.
        buffer_strides: Strides there.
        units: Room of a piece in the buffer.
    """

    shape: tuple[int, int, int]
    at_matrix: int
    matrix_strides: tuple[int, int, int]
    at_buffer: int
    buffer_strides: tuple[int, int, int]
    units: int

    def in_batch(self, batch: Tensor) -> Tensor:
        """Return the pieces in the matrices of a batch, contiguous, as a view of :attr:`shape`."""
        return batch.as_strided(self.shape, self.matrix_strides, batch.storage_offset() + self.at_matrix)

    def in_buffer(self, buffer: Tensor) -> Tensor:
        """Return the pieces in the buffer: ``(matrices, pieces, units)``, a view."""
        start = buffer.storage_offset() + self.at_buffer
        return buffer.as_strided((*self.shape[:2], self.units), self.buffer_strides, start)

    def before(self, other: Copy, distance: int) -> Copy | None:
        """Return this copy and ``other``, of the next matrix, as one; ``None`` if that cannot be.

        Args:
            other: A copy for one matrix.
            distance: Elements from the start of a matrix to that of the next one.
        """
        matrices, gap = self.shape[0], other.at_buffer - self.at_buffer
        step = gap if matrices == 1 else self.buffer_strides[0] * matrices
        alike = self.shape[1:] == other.shape[1:] and self.buffer_strides[1:] == other.buffer_strides[1:]
        if not alike or gap <= 0 or gap != step or other.at_matrix != self.at_matrix + matrices * distance:
            return None
        return self._replace(
            shape=(matrices + 1, *self.shape[1:]),
            buffer_strides=(gap // matrices, *self.buffer_strides[1:]),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that are orthogonalised together, ``(matrices, numel)``, and what is copied there.

    Attributes:
        start: Where they lie whole in the directions, one after the other; ``None`` if they do not.
        own: Copies of this rank's fragments from the directions.
        travelled: Copies of other ranks' fragments from the receive buffer, and of their updates back.
        applied: Table of this rank's fragments and their updates.
    """

    start: int | None
    own: tuple[Copy, ...]
    travelled: tuple[Copy, ...]
    applied: Tensor


class ChunkTable:
    """What this rank does in one chunk.

    Attributes:
        own: Fragments of the matrices that this rank owns, by matrix, in the order in which they run in batches.
        sent: Fragments of others' matrices: the update arrives where the direction left from.
        segments: For each owned matrix, where other ranks' fragments lie in the receive buffer.
        room: Elements of the directions that do not travel: of :attr:`own`, and of others' matrices in a chunk without
            a gather, whose momentum alone is updated. Each starts at a multiple of 32 elements.
        sent_room: Elements of :attr:`sent` in the communication dtype.
        packed: Table of the momentum with the directions and with what is sent.
        arrived: Table of the partitions with what came back.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        chunk: Chunk,
        batches: Sequence[Sequence[int]],
        partitions: Mapping[int, int],
        *,
        exact: bool,
    ) -> None:
        """Make the tables.

        Args:
            plan: The exchange plan.
            chunk: One of its chunks.
            batches: The chunk's owned matrices as they are orthogonalised.
            partitions: Index of a partition to its position.
            exact: Whether fragments lie in the send buffer as they are.
        """
        self._matrices = plan.matrices

        def rows(indices: Iterable[int], segment: Segment | None = None) -> list[Row]:
            held = [(index, plan.matrices[index].placement.on(plan.rank)) for index in indices]
            return [
                Row(
                    index,
                    partitions[plan.matrices[index].partition],
                    each.partition_offset,
                    each.matrix_offset,
                    each.numel,
                    segment,
                )
                for index, each in held
                if each is not None
            ]

        own = rows(index for batch in batches for index in batch)
        self.own = {row.matrix: row for row in own}
        self.segments: dict[int, list[Segment]] = {}
        for segment in chunk.receive_buffer.segments:
            self.segments.setdefault(segment.matrix, []).append(segment)
        others = () if chunk.gathers else [i for i in chunk.matrices if plan.owners[i] != plan.rank]
        kept = [*own, *rows(others)]
        self.sent = tuple(row for each in chunk.send_buffer.segments for row in rows([each.matrix], each))
        starts, self.room = _one_after_the_other(kept)
        at_send, self.sent_room = _one_after_the_other(self.sent)
        if exact:
            at_send = [row.segment.buffer_offset for row in self.sent if row.segment is not None]
            self.sent_room = chunk.send_buffer.numel
        self._starts = {row.matrix: start for row, start in zip(kept, starts, strict=True)}
        self.arrived = table_of(self.sent, 0, at_send)
        sent = table_of(self.sent, SEND, at_send) if chunk.gathers else table_of((), SEND, ())
        self.packed = torch.cat((table_of(kept, DIRECTIONS, starts), sent))
        # Cut matrices of one logical shape need not be alike here.
        alike = [batch for batch in batches if len({plan.matrices[index].numel for index in batch}) == 1]
        self._batches = {tuple(batch): self._batch(batch) for batch in alike}

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return what is copied for owned matrices of one shape. It is known for the batches of a whole chunk."""
        return self._batches.get(tuple(indices)) or self._batch(indices)

    def _batch(self, indices: Sequence[int]) -> Batch:
        numel = self._matrices[indices[0]].numel
        own: list[Copy] = []
        travelled: list[list[Copy]] = []
        applied: list[Row] = []
        at_update: list[int] = []
        for number, index in enumerate(indices):
            start, row = number * numel, self.own.get(index)
            if row is not None:
                place = start + row.matrix_offset
                own.append(_copy(1, row.numel, place, self._starts[index], 0, row.numel))
                applied.append(row)
                at_update.append(place)
            for position, each in enumerate(self.segments.get(index, ())):
                if position == len(travelled):
                    travelled.append([])
                place = start + each.matrix_offset
                travelled[position].append(
                    _copy(each.count, each.numel, place, each.buffer_offset, each.stride, each.units)
                )
        whole = len(own) == len(indices) and all(
            each.shape[2] == numel and each.at_buffer == own[0].at_buffer + number * numel
            for number, each in enumerate(own)
        )
        return Batch(
            own[0].at_buffer if whole and not self._gathered(indices) else None,
            tuple(_joined(own, numel)),
            tuple(each for copies in travelled for each in _joined(copies, numel)),
            table_of(applied, 0, at_update),
        )

    def _gathered(self, indices: Sequence[int]) -> bool:
        return any(index in self.segments and not self._matrices[index].replicated for index in indices)


def _one_after_the_other(rows: Sequence[Row]) -> tuple[list[int], int]:
    """Return where fragments start that lie one after the other, each at a multiple of 32 elements, and their room."""
    starts, end = [], 0
    for row in rows:
        starts.append(end)
        end += aligned(row.numel)
    return starts, end


def table_of(rows: Sequence[Row], other: int, places: Sequence[int]) -> Tensor:
    """Return the table of fragments for the passes of ops/, int64 ``(fragments, 6)``.

    Args:
        rows: The fragments.
        other: Number of the other tensor.
        places: Where each fragment starts in it.
    """
    numbers = [
        (row.partition, row.offset, other, place, row.numel, row.matrix)
        for row, place in zip(rows, places, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.int64).view(-1, COLUMNS)


def _copy(count: int, numel: int, at_matrix: int, at_buffer: int, stride: int, units: int) -> Copy:
    """Return the copy of consecutive pieces of one matrix."""
    return Copy((1, count, numel), at_matrix, (0, numel, 1), at_buffer, (0, stride, 1), units)


def _joined(copies: Sequence[Copy], distance: int) -> Iterator[Copy]:
    """Yield copies for one matrix each, with those of consecutive matrices at equal distances as one."""
    last: Copy | None = None
    for each in copies:
        longer = None if last is None else last.before(each, distance)
        if last is not None and longer is None:
            yield last
        last = longer or each._replace(matrix_strides=(distance, *each.matrix_strides[1:]))
    if last is not None:
        yield last
