"""The tables of a chunk: which fragments this rank packs and applies, and what it copies for the matrices it owns.

They are made once, when the optimizer is bound. A pass takes a table, and equal pieces of the matrices of a batch are
copied at once: the work of a step in Python does not grow with the number of fragments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deepspeed_muon.plan.exchange import Chunk, ExchangePlan, Segment
from deepspeed_muon.transport.exchange import aligned

# The columns of a table of ops/: tensor and offset, other tensor and offset, numel, and the index of the matrix.
COLUMNS = 6
DIRECTIONS, SEND = 0, 1
"""The other tensors of :attr:`ChunkTable.packed`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that are orthogonalised together, ``(matrices, numel)``, and what is copied there.

    Attributes:
        start: Where they lie whole in the directions, one after the other; ``None`` if they do not.
        own: This rank's fragments, in the batch and in the directions.
        travelled: Other ranks' fragments, in the batch and in the receive buffer.
        applied: Table of this rank's fragments and their updates.
    """

    start: int | None
    own: tuple[Segment, ...]
    travelled: tuple[Segment, ...]
    applied: Tensor


class ChunkTable:
    """What this rank does in one chunk.

    Attributes:
        room: Elements of the directions that do not travel: of the owned matrices, in the order in which they run in
            batches, and of others' matrices in a chunk without a gather, whose momentum alone is updated. Each fragment
            starts at a multiple of 32 elements.
        sent_room: Elements of the fragments of others' matrices in the communication dtype.
        packed: Table of the momentum with the directions and with what is sent.
        blocks: The blocks of each fragment of :attr:`packed` where the momentum has 8 bits, else empty.
        arrived: Table of the partitions with what came back; the update arrives where the direction left from.
        held: Table of the partitions with all updates: where the directions of owned matrices were, and what came back.
        coded: Index of the matrix of each fragment of :attr:`arrived`, and where it lies in the communication dtype and
            in the send buffer; empty if fragments lie in the send buffer as they are.
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
        self._partitions = partitions
        found = ((index, plan.matrices[index].placement.on(plan.rank)) for index in chunk.matrices)
        self._held = {index: fragment for index, fragment in found if fragment is not None}
        self._segments: dict[int, list[Segment]] = {}
        for index, segment in chunk.receive_buffer.segments:
            self._segments.setdefault(index, []).append(segment)

        kept = [index for batch in batches for index in batch if index in self._held]
        if not chunk.gathers:
            kept += [i for i in chunk.matrices if plan.owners[i] != plan.rank and i in self._held]
        starts, self.room = self._one_after_the_other(kept)
        self._starts = dict(zip(kept, starts, strict=True))
        segments = chunk.send_buffer.segments
        sent = [index for index, _ in segments]
        if exact:
            places, self.sent_room = [segment.at_buffer for _, segment in segments], chunk.send_buffer.numel
        else:
            places, self.sent_room = self._one_after_the_other(sent)
        pairs = zip(segments, places, strict=True)
        self.coded = () if exact else tuple((i, each._replace(at_matrix=place)) for (i, each), place in pairs)
        self.arrived = self._table(sent, 0, places)
        owned = [index for index in kept if plan.owners[index] == plan.rank]
        at_owned = [self._starts[index] for index in owned]
        self.held = torch.cat((self._table(owned, DIRECTIONS, at_owned), self._table(sent, SEND, places)))
        self.packed = self._table(kept, DIRECTIONS, starts)
        if chunk.gathers:
            self.packed = torch.cat((self.packed, self._table(sent, SEND, places)))
        self.blocks = torch.empty((0, 4), dtype=torch.int64)
        # A chunk has the same active matrices in almost all steps, or some of a few sets.
        self._batch = functools.lru_cache(maxsize=len(batches) + 64)(self._made)
        for batch in batches:
            # Cut matrices of one logical shape need not be alike here.
            if len({plan.matrices[index].numel for index in batch}) == 1:
                self.batch(batch)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return what is copied for owned matrices of one shape. It is known for the batches of a whole chunk."""
        return self._batch(tuple(indices))

    def _made(self, indices: tuple[int, ...]) -> Batch:
        numel = self._matrices[indices[0]].numel
        own: list[Segment] = []
        travelled: list[list[Segment]] = []
        applied: list[int] = []
        at_update: list[int] = []
        for number, index in enumerate(indices):
            start, fragment = number * numel, self._held.get(index)
            if fragment is not None:
                place = start + fragment.matrix_offset
                own.append(Segment.of(place, fragment.numel, self._starts[index], fragment.numel))
                applied.append(index)
                at_update.append(place)
            for position, segment in enumerate(self._segments.get(index, ())):
                if position == len(travelled):
                    travelled.append([])
                travelled[position].append(segment._replace(at_matrix=start + segment.at_matrix))
        whole = len(own) == len(indices) and all(
            each.shape[2] == numel and each.at_buffer == own[0].at_buffer + number * numel
            for number, each in enumerate(own)
        )
        return Batch(
            own[0].at_buffer if whole and not self._gathered(indices) else None,
            tuple(_joined(own, numel)),
            tuple(each for segments in travelled for each in _joined(segments, numel)),
            self._table(applied, 0, at_update),
        )

    def _gathered(self, indices: Sequence[int]) -> bool:
        return any(index in self._segments and not self._matrices[index].replicated for index in indices)

    def _one_after_the_other(self, indices: Sequence[int]) -> tuple[list[int], int]:
        """Return where fragments start that lie one after the other, at multiples of 32 elements, and their room."""
        ends = list(accumulate((aligned(self._held[index].numel) for index in indices), initial=0))
        return ends[:-1], ends[-1]

    def _table(self, indices: Sequence[int], other: int, places: Sequence[int]) -> Tensor:
        """Return the table of this rank's fragments of matrices for the passes of ops/, int64 ``(fragments, 6)``.

        Args:
            indices: The matrices.
            other: Number of the other tensor.
            places: Where each fragment starts in it.
        """
        rows = []
        for index, place in zip(indices, places, strict=True):
            partition, fragment = self._partitions[self._matrices[index].partition], self._held[index]
            rows.append((partition, fragment.partition_offset, other, place, fragment.numel, index))
        return torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)


def _joined(segments: Sequence[Segment], distance: int) -> Iterator[Segment]:
    """Yield segments of one matrix each, with those of consecutive matrices at equal distances as one."""
    last: Segment | None = None
    for each in segments:
        longer = None if last is None else last.before(each, distance)
        if last is not None and longer is None:
            yield last
        last = longer or each._replace(matrix_strides=(distance, *each.matrix_strides[1:]))
    if last is not None:
        yield last
