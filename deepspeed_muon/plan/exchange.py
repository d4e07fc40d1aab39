"""The exchange plan: splits and offsets of the two all-to-alls, computed once from the layouts.

Gather brings every fragment of a matrix to its owner, the owner's own too; scatter brings the updates back. Of
replicated matrices only the updates are sent: every owner broadcasts its own, each with the row state of the matrix.
Chunks have a bounded size, which bounds the buffers. A chunk in which nothing moves has no all-to-all on any rank.

A rank plans only for the fragments that it holds and the matrices that it owns. In a buffer the fragments are ordered
by peer, then by matrix. Both sides derive that order from the same layouts, so no header is sent. Peers that send equal
fragments make one :class:`Segment`: a plan has about as many segments as matrices, however many ranks there are.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Ints, Placement

if TYPE_CHECKING:
    from torch import Tensor

_Numel = TypeVar("_Numel", int, Ints)
_SCALE_BYTES = 4
# Several chunks can overlap, and small ones need little memory. Chunks below this number of elements a rank (512 KiB in
# bf16, some ten microseconds at 50 GB/s) are bound by latency.
_CHUNKS = 8
_LEAST_NUMEL_PER_RANK = 1 << 18


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The room of a fragment in a buffer: its elements as they are, or one byte each and a scale for every block.

    Attributes:
        block: Elements of a fragment that share an fp32 scale; 0 for elements as they are.
    """

    block: int = 0

    def units(self, numel: _Numel) -> _Numel:
        """Return the room for a fragment of ``numel`` elements: elements of the buffer, which are bytes if coded.

        Scales follow the elements, at a multiple of four bytes.
        """
        if not self.block:
            return numel
        return -(-numel // _SCALE_BYTES) * _SCALE_BYTES + -(-numel // self.block) * _SCALE_BYTES

    def bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes that an element takes in a long fragment; ``itemsize`` is that of elements as they are."""
        return 1 + _SCALE_BYTES / self.block if self.block else itemsize


PLAIN = WireFormat()
"""Elements as they are."""

CODED = WireFormat(256)
"""One byte an element, and a scale for each 256."""


class Segment(NamedTuple):
    """Equal fragments of a matrix, or of several alike, on consecutive ranks: there and in a communication buffer.

    Attributes:
        shape: Matrices, fragments of each of them, elements of a fragment.
        at_matrix: Where the first fragment starts in the matrices.
        matrix_strides: Strides there.
        at_buffer: Where it starts in the buffer of this rank.
        buffer_strides: Strides there.
        units: Room of a fragment in the buffer; see :class:`WireFormat`.
    """

    shape: tuple[int, int, int]
    at_matrix: int
    matrix_strides: tuple[int, int, int]
    at_buffer: int
    buffer_strides: tuple[int, int, int]
    units: int

    @classmethod
    def of(
        cls, at_matrix: int, numel: int, at_buffer: int, units: int, *, count: int = 1, stride: int = 0
    ) -> Segment:
        """Return ``count`` fragments of one matrix that follow each other there, and every ``stride`` in the buffer."""
        shape, in_matrix, in_buffer = _shape_and_strides(count, numel, stride)
        return cls(shape, at_matrix, in_matrix, at_buffer, in_buffer, units)

    def in_matrices(self, flat: Tensor) -> Tensor:
        """Return the fragments in the matrices, flat and contiguous, as a view of :attr:`shape`."""
        return flat.as_strided(self.shape, self.matrix_strides, flat.storage_offset() + self.at_matrix)

    def in_buffer(self, buffer: Tensor) -> Tensor:
        """Return the fragments in the buffer: ``(matrices, fragments, units)``, a view."""
        start = buffer.storage_offset() + self.at_buffer
        return buffer.as_strided((*self.shape[:2], self.units), self.buffer_strides, start)

    def before(self, other: Segment, distance: int) -> Segment | None:
        """Return this segment and ``other``, of the next matrix, as one; ``None`` if that cannot be.

        Args:
            other: A segment of one matrix.
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


@functools.lru_cache(maxsize=1024)
def _shape_and_strides(count: int, numel: int, stride: int) -> tuple[tuple[int, int, int], ...]:
    """Return tuples that equal fragments share: of 44,000 matrices those would be 8 MB otherwise."""
    return (1, count, numel), (0, numel, 1), (0, stride, 1)


@dataclass(frozen=True, slots=True, eq=False)
class BufferPlan:
    """What lies where in one of a rank's two buffers of a chunk.

    Attributes:
        segments: The index of a matrix in the plan, and its fragments.
        peers: The ranks with which this rank exchanges elements of the buffer, ascending; itself among them.
        counts: Units for each of ``peers``.
        numel: Units of the buffer.
        others: Those of them that other ranks send or receive.
    """

    segments: tuple[tuple[int, Segment], ...]
    peers: Ints
    counts: Ints
    numel: int
    others: int

    def splits(self, world_size: int) -> list[int]:
        """Return the units for every rank, as an all-to-all wants them."""
        every = np.zeros(world_size, dtype=np.int64)
        every[self.peers] = self.counts
        return [int(units) for units in every]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Matrices that are exchanged together, as one rank sees them.

    Attributes:
        matrices: Indices of the matrices in this chunk, ascending.
        owned: Those that this rank owns.
        send_buffer: Fragments that this rank holds. Gather sends them to the receive buffers, scatter is the reverse.
        receive_buffer: Fragments of this rank's matrices, a single matrix whole.
        gathers: Whether any rank sends anything in gather.
        scatters: Whether any rank sends anything in scatter.
        copies: Ranks that get every update, if the owners broadcast them (replicated matrices); 0 for an all-to-all.
    """

    matrices: tuple[int, ...]
    owned: tuple[int, ...]
    send_buffer: BufferPlan
    receive_buffer: BufferPlan
    gathers: bool
    scatters: bool
    copies: int = 0

    @property
    def sent_elements(self) -> int:
        """Units that this rank sends to others in gather and scatter; a broadcast counts once for each receiver."""
        receivers = self.copies or self.scatters
        return self.send_buffer.others * self.gathers + self.receive_buffer.others * receivers


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Everything that one rank needs to exchange the matrices of a step set.

    Attributes:
        rank: This rank inside the data-parallel group.
        world_size: Ranks of the group.
        matrices: All matrices, equal on every rank.
        owners: The owner of each matrix, equal on every rank.
        chunks: What is exchanged together, in order.
    """

    rank: int
    world_size: int
    matrices: tuple[MatrixLayout, ...]
    owners: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def sent_elements(self) -> int:
        """Units that this rank sends to other ranks per step: elements, or bytes on a coded wire."""
        return sum(chunk.sent_elements for chunk in self.chunks)

    def digest(self) -> str:
        """Return a hash of :meth:`description`, which must be equal on all ranks."""
        found = hashlib.sha256()
        for row in self.description():
            found.update(repr(row).encode())
        return found.hexdigest()

    def description(self) -> Iterator[tuple[object, ...]]:
        """Yield what all ranks must agree on, owners, chunks and layouts, as plain data: one row per matrix."""
        chunk_of = {index: number for number, chunk in enumerate(self.chunks) for index in chunk.matrices}
        for index, matrix in enumerate(self.matrices):
            yield (
                matrix.name,
                matrix.rows,
                matrix.cols,
                matrix.grid,
                matrix.transposed,
                matrix.first_row,
                self.owners[index],
                chunk_of[index],
                matrix.placement.numbers(),
            )


def build_exchange_plan(
    matrices: Sequence[MatrixLayout],
    owners: Sequence[int],
    *,
    rank: int,
    world_size: int,
    chunk_numel: int,
    wire: WireFormat = PLAIN,
    row_units: int = 0,
) -> ExchangePlan:
    """Make the plan of one rank.

    Args:
        matrices: All matrices of the data-parallel group, in the order that every rank uses.
        owners: One rank per matrix.
        rank: This rank inside the group.
        world_size: Ranks of the group.
        chunk_numel: Elements that one rank owns in a chunk at most, which bounds what it receives at once. A larger
            matrix is sent without others of its owner. Chunks are smaller where this bound would make only a few.
        wire: The room that a fragment takes in a buffer.
        row_units: The room of one row's state, which follows the update of a replicated matrix.
    """
    placements = [matrix.placement for matrix in matrices]
    tails = [row_units * matrix.output_count if matrix.replicated else 0 for matrix in matrices]
    chunks = [
        build_chunk(placements, owners, indices, rank, wire, tails)
        for indices in cut_into_chunks(matrices, owners, chunk_numel, world_size)
    ]
    return ExchangePlan(rank, world_size, tuple(matrices), tuple(owners), tuple(chunks))


def moves(places: Placement, owner: int) -> bool:
    """Return whether a matrix is not whole on its owner alone."""
    return places.ranks != range(owner, owner + 1)


def cut_into_chunks(
    matrices: Sequence[MatrixLayout], owners: Sequence[int], bound: int, world_size: int
) -> list[list[int]]:
    """Cut the matrices into chunks, those that never move first.

    Every owner fills its own part of a chunk up to ``bound`` elements, largest matrices first, so that the parts of a
    chunk cost about the same. A bound on whole chunks would let most ranks wait in a large model: a chunk would hold
    few matrices, and few ranks would own any of them.

    Replicated matrices have chunks of their own, because only their updates are sent. Every rank receives each whole
    update, so there the bound holds for all owners together.

    Args:
        matrices: All matrices of the plan.
        owners: One rank for each.
        bound: Elements that one rank owns in a chunk at most.
        world_size: Ranks of the group.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, matrix in enumerate(matrices):
        kinds.setdefault((moves(matrix.placement, owners[index]), matrix.replicated), []).append(index)
    chunks: list[list[int]] = []
    for (moving, replicated), members in sorted(kinds.items()):
        together = moving and replicated
        room = np.zeros(world_size, dtype=np.int64)
        for index in members:
            room[0 if together else owners[index]] += matrices[index].numel
        least = _LEAST_NUMEL_PER_RANK * (world_size if together else 1)
        limit = min(bound, max(-(-int(room.max()) // _CHUNKS), least))
        found: list[list[int]] = []
        number, filled = [0] * world_size, np.zeros(world_size, dtype=np.int64)
        for index in sorted(members, key=lambda index: matrices[index].placement.numel, reverse=True):
            part, numel = 0 if together else owners[index], matrices[index].numel
            if filled[part] and filled[part] + numel > limit:
                number[part] += 1
                filled[part] = 0
            if number[part] == len(found):
                found.append([])
            found[number[part]].append(index)
            filled[part] += numel
        chunks += [sorted(chunk) for chunk in found]
    return chunks


def build_chunk(
    places: Sequence[Placement],
    owners: Sequence[int],
    indices: Sequence[int],
    rank: int,
    wire: WireFormat = PLAIN,
    tails: Sequence[int] = (),
) -> Chunk:
    """Plan one chunk for one rank.

    Args:
        places: Where each matrix of the plan lies.
        owners: The owner of each matrix.
        indices: The matrices of the chunk, ascending; all replicated, or none.
        rank: The rank.
        wire: The room that a fragment takes in a buffer.
        tails: Room behind the update of each replicated matrix of the plan, for its row state; none by default.
    """
    moving = [index for index in indices if moves(places[index], owners[index])]
    owned = tuple(index for index in indices if owners[index] == rank)
    if moving and places[moving[0]].replicated:
        # The owner has the whole gradient already.
        others = [index for index in moving if owners[index] != rank]
        tails = tails or [0] * len(places)
        held = _send_buffer(places, owners, others, rank, wire, tails)
        own = _own_updates(places, owned, wire, tails)
        copies = len(places[moving[0]].ranks) - 1
        return Chunk(tuple(indices), owned, held, own, gathers=False, scatters=True, copies=copies)
    return Chunk(
        tuple(indices),
        owned,
        _send_buffer(places, owners, moving, rank, wire),
        _receive_buffer(places, [index for index in moving if owners[index] == rank], rank, wire),
        gathers=bool(moving),
        scatters=bool(moving),
    )


def _own_updates(
    places: Sequence[Placement], owned: Sequence[int], wire: WireFormat, tails: Sequence[int]
) -> BufferPlan:
    """Lay out a rank's own updates of replicated matrices, one copy for all ranks."""
    units = [wire.units(places[index].numel) for index in owned]
    ends = list(accumulate(map(sum, zip(units, (tails[index] for index in owned), strict=True)), initial=0))
    segments = tuple(
        (index, Segment.of(0, places[index].numel, start, length))
        for index, start, length in zip(owned, ends, units, strict=False)
    )
    return BufferPlan(segments, _ints(()), _ints(()), ends[-1], ends[-1])


def _send_buffer(
    places: Sequence[Placement],
    owners: Sequence[int],
    indices: Sequence[int],
    rank: int,
    wire: WireFormat,
    tails: Sequence[int] = (),
) -> BufferPlan:
    """Lay out the fragments that a rank holds of some matrices, by owner."""
    segments: list[tuple[int, Segment]] = []
    counts: dict[int, int] = {}
    offset = 0
    for index in sorted(indices, key=lambda index: owners[index]):
        if (fragment := places[index].on(rank)) is not None:
            units = wire.units(fragment.numel)
            segments.append((index, Segment.of(fragment.matrix_offset, fragment.numel, offset, units)))
            length = units + (tails[index] if tails else 0)
            counts[owners[index]] = counts.get(owners[index], 0) + length
            offset += length
    others = offset - counts.get(rank, 0)
    return BufferPlan(tuple(segments), _ints(counts), _ints(counts.values()), offset, others)


def _receive_buffer(
    places: Sequence[Placement], indices: Sequence[int], rank: int, wire: WireFormat
) -> BufferPlan:
    """Lay out the fragments of a rank's own matrices, by holder."""
    if not indices:
        return BufferPlan((), _ints(()), _ints(()), 0, 0)
    first = min(places[index].ranks.start for index in indices)
    ranks = np.arange(first, max(places[index].ranks.stop for index in indices) + 1)
    # The last of ``ranks`` only ends them.
    held = np.array([np.diff(places[index].starts(ranks)) for index in indices])
    room = wire.units(held)
    total = room.sum(axis=0)
    offsets = np.cumsum(total) - total
    inside = np.cumsum(room, axis=0) - room
    segments: list[tuple[int, Segment]] = []
    for index, lengths, before in zip(indices, held, inside, strict=True):
        starts = places[index].starts(ranks[:-1])
        # Peers make one segment where their fragments are equal and lie equally in what they send.
        alike = np.stack((lengths, total, before))
        begins = np.flatnonzero(np.append(True, (alike[:, 1:] != alike[:, :-1]).any(axis=0)))
        ends = np.append(begins[1:], len(lengths))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if lengths[begin]:
                numel, at = int(lengths[begin]), int(offsets[begin] + before[begin])
                where = int(starts[begin]), numel, at, wire.units(numel)
                segments.append((index, Segment.of(*where, count=end - begin, stride=int(total[begin]))))
    peers = np.flatnonzero(total)
    numel, others = int(total.sum()), int(total.sum(where=ranks[:-1] != rank))
    return BufferPlan(tuple(segments), ranks[peers], total[peers], numel, others)


def _ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)
