"""The exchange plan: splits and offsets of the two all-to-alls, computed once from the layouts.

:class:`Chunk` says what is sent; an owner also sends its own fragments to itself. A rank plans only for the fragments
that it holds and the matrices that it owns. In a buffer the fragments are ordered by peer, then by matrix, which both
sides derive from the same layouts. Peers that send equal fragments make one :class:`Segment`: a plan has about as many
segments as matrices, however many ranks there are.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from deepspeed_muon.plan.layout import MatrixLayout, PlanIndex
from deepspeed_muon.plan.placement import Ints, Placement

if TYPE_CHECKING:
    from torch import Tensor

# Several chunks can overlap, and small ones need little memory. Chunks below this number of elements a rank (512 KiB in
# bf16, some ten microseconds at 50 GB/s) are bound by latency.
_CHUNKS = 8
_LEAST_NUMEL_PER_RANK = 1 << 18

# NCCL copies 16 bytes at a time only from and to multiples of 16. So what a peer sends or receives is padded to eight
# elements where it is long enough for that to matter, and to cost nothing: ZeRO 3 on 24 or 96 ranks cuts odd lengths.
# A short one is not padded and may shift those after it; sender and receiver must decide alike, by its length alone.
_ALIGNED_FROM, _ALIGNMENT = 1 << 10, 8

ChunkKind = Literal["all_to_all", "broadcast", "local"]


class Segment(NamedTuple):
    """Equal fragments of a matrix, or of several equal ones, on consecutive ranks: in the matrices and in a buffer.

    A fragment is contiguous in both. Those of a matrix follow each other in the matrix, and are at equal distances in
    the buffer, which is ordered by rank and then by matrix. Element ``k`` of fragment ``j`` of matrix ``i`` is at::

        matrix_offset + i * matrix_distance + j * numel             + k   in the matrices
        buffer_offset + i * buffer_distance + j * fragment_distance + k   in the buffer of this rank

    Example: rank 0 owns the 2 x 3 matrices ``A`` and ``B``, and ranks 0 and 1 have one row of each. Its owner buffer::

        offset    0       3       6       9
        content   A[0:3]  B[0:3]  A[3:6]  B[3:6]        from rank 0, from rank 0, from rank 1, from rank 1

    ``A`` is ``Segment(matrix_offset=0, numel=3, buffer_offset=0, fragments=2, fragment_distance=6)``, ``B`` has
    ``buffer_offset`` 3. In a batch of both, ``(2, 2, 3)``, ``B`` starts at element 6, and they are one segment with
    ``matrices=2, matrix_distance=6, buffer_distance=3``: a single copy of shape ``(2, 2, 3)`` between the strides
    ``(6, 3, 1)`` in the matrices and ``(3, 6, 1)`` in the buffer. ``A[4]`` has ``i, j, k = 0, 1, 1``: 4 and 7.
    """

    matrix_offset: int
    numel: int
    buffer_offset: int
    fragments: int = 1
    fragment_distance: int = 0
    matrices: int = 1
    matrix_distance: int = 0
    buffer_distance: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, fragments of each of them, elements of a fragment."""
        return self.matrices, self.fragments, self.numel

    def in_matrices(self, flat: Tensor) -> Tensor:
        """Return the fragments in ``flat``, the contiguous matrices, as a view of :attr:`shape`."""
        strides = self.matrix_distance, self.numel, 1
        return flat.as_strided(self.shape, strides, flat.storage_offset() + self.matrix_offset)

    def in_buffer(self, buffer: Tensor) -> Tensor:
        """Return the fragments in the buffer, as a view of :attr:`shape`."""
        strides = self.buffer_distance, self.fragment_distance, 1
        return buffer.as_strided(self.shape, strides, buffer.storage_offset() + self.buffer_offset)

    def joined(self, following: Segment, matrix_distance: int) -> Segment | None:
        """Return this segment and that of the next matrix as one; ``None`` if they are not at equal distances.

        ``matrix_distance`` is the number of elements from the start of a matrix to that of the next one.
        """
        gap = following.buffer_offset - self.buffer_offset
        # Two matrices set the distance of all that follow: with buffer offsets 0 and 12, the third one must be at 24.
        distance = gap if self.matrices == 1 else self.buffer_distance
        expected = self._replace(
            matrix_offset=self.matrix_offset + self.matrices * matrix_distance,
            buffer_offset=self.buffer_offset + self.matrices * distance,
            matrices=1,
            matrix_distance=0,
            buffer_distance=0,
        )
        if gap <= 0 or following != expected:
            return None
        return self._replace(
            matrices=self.matrices + 1, matrix_distance=matrix_distance, buffer_distance=distance
        )


@dataclass(frozen=True, slots=True, eq=False)
class BufferPlan:
    """The layout of one of a rank's two buffers of a chunk.

    Attributes:
        segments: The index of a matrix in the plan, and its fragments.
        peers: The ranks with which this rank exchanges elements of the buffer, ascending; itself for what it copies.
        counts: Elements of the buffer for each of ``peers``.
        numel: Elements of the buffer.
        remote_numel: Elements of the buffer that other ranks send or receive, without padding; what is broadcast counts
            once for each receiver.
    """

    segments: tuple[tuple[PlanIndex, Segment], ...]
    peers: Ints
    counts: Ints
    numel: int
    remote_numel: int

    def splits(self, world_size: int) -> list[int]:
        """Return the elements of the buffer for every rank, as an all-to-all needs them."""
        splits = np.zeros(world_size, dtype=np.int64)
        splits[self.peers] = self.counts
        return [int(count) for count in splits]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Matrices that are exchanged together, as one rank sees them.

    ==============  =======================  ===================================  ===================================
    kind            its matrices are         gather: fragment to owner buffers    scatter: owner to fragment buffers
    ==============  =======================  ===================================  ===================================
    ``all_to_all``  on several ranks         directions                           updates
    ``broadcast``   replicated (stage 0)     nothing                              updates, each to all other ranks
    ``local``       on their owner alone     nothing                              nothing; both buffers are empty
    ==============  =======================  ===================================  ===================================

    Attributes:
        kind: What is sent.
        matrices: Indices of the matrices in this chunk, ascending.
        owned: The matrices of the chunk that this rank owns.
        fragment_buffer: Fragments that this rank holds. If updates are broadcast, those of matrices of other owners.
        owner_buffer: All fragments of the matrices that this rank owns.
    """

    kind: ChunkKind
    matrices: tuple[PlanIndex, ...]
    owned: tuple[PlanIndex, ...]
    fragment_buffer: BufferPlan
    owner_buffer: BufferPlan


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Everything that one rank needs to exchange the matrices of a step set.

    Attributes:
        rank, world_size: Of the data-parallel group.
        matrices: All matrices, equal on every rank.
        owners: The owner of each matrix, equal on every rank.
        chunks: What is exchanged together, in order.
    """

    rank: int
    world_size: int
    matrices: tuple[MatrixLayout, ...]
    owners: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def digest(self) -> str:
        """Return a hash of what must be equal on all ranks: owners, chunks and layouts."""
        digest = hashlib.sha256()
        chunk_of = {index: number for number, chunk in enumerate(self.chunks) for index in chunk.matrices}
        for index, matrix in enumerate(self.matrices):
            shape = matrix.rows, matrix.cols, matrix.grid, matrix.transposed, matrix.first_row
            exchange = self.owners[index], chunk_of[PlanIndex(index)], matrix.placement.numbers()
            digest.update(repr((matrix.name, *shape, *exchange)).encode())
        return digest.hexdigest()


def build_exchange_plan(
    matrices: Sequence[MatrixLayout],
    owners: Sequence[int],
    *,
    rank: int,
    world_size: int,
    chunk_numel: int,
) -> ExchangePlan:
    """Make the plan of one rank; matrices and owners are those of all ranks of the group, in one order.

    ``chunk_numel`` is how many elements one rank owns in a chunk at most, which bounds the buffers. A larger matrix is
    sent without others of its owner. Chunks that are sent are smaller where this bound would make only a few.
    """
    placements = [matrix.placement for matrix in matrices]
    chunks = [
        build_chunk(placements, owners, indices, rank)
        for indices in divide_into_chunks(matrices, owners, chunk_numel, world_size)
    ]
    return ExchangePlan(rank, world_size, tuple(matrices), tuple(owners), tuple(chunks))


def divide_into_chunks(
    matrices: Sequence[MatrixLayout], owners: Sequence[int], chunk_numel: int, world_size: int
) -> list[list[PlanIndex]]:
    """Divide the matrices into chunks of one :data:`ChunkKind`, those that are never sent first.

    Every owner fills its share of a chunk up to ``chunk_numel`` elements, largest matrices first, so that the owners'
    shares cost about the same. If the bound held for all owners together, most ranks of a large model would wait: a
    chunk would hold few matrices, and few ranks would own any of them.
    """
    # 1. by what is sent
    kinds: dict[ChunkKind, list[PlanIndex]] = {"local": [], "all_to_all": [], "broadcast": []}
    for index, matrix in enumerate(matrices):
        kinds[_kind_of(matrix.placement, owners[index])].append(PlanIndex(index))
    chunks: list[list[PlanIndex]] = []
    for kind, members in kinds.items():
        is_broadcast = kind == "broadcast"
        # The rank towards whose bound a matrix counts: its owner. What is broadcast arrives on every rank, so all of it
        # counts towards a single bound, that of rank 0.
        rank_of = {index: 0 if is_broadcast else owners[index] for index in members}
        # 2. the size of a chunk: an eighth of what the busiest rank owns, within the bounds. What is not sent has
        # nothing to overlap with, and large batches fill a GPU: as much as the bound allows
        totals = np.zeros(world_size, dtype=np.int64)  # elements that each rank owns
        for index in members:
            totals[rank_of[index]] += matrices[index].numel
        least = _LEAST_NUMEL_PER_RANK * (world_size if is_broadcast else 1)
        eighth = -(-int(totals.max()) // _CHUNKS)
        limit = chunk_numel if kind == "local" else min(chunk_numel, max(eighth, least))
        # 3. every rank fills chunk after chunk: the chunk that it fills now, and the elements that it has in it
        new_chunks: list[list[PlanIndex]] = []
        number, filled = [0] * world_size, np.zeros(world_size, dtype=np.int64)
        for index in sorted(
            members, key=lambda index: (matrices[index].numel, matrices[index].rows), reverse=True
        ):
            rank, numel = rank_of[index], matrices[index].numel
            if filled[rank] and filled[rank] + numel > limit:
                number[rank] += 1
                filled[rank] = 0
            if number[rank] == len(new_chunks):
                new_chunks.append([])
            new_chunks[number[rank]].append(index)
            filled[rank] += numel
        chunks += [sorted(chunk) for chunk in new_chunks]
    return chunks


def build_chunk(
    placements: Sequence[Placement], owners: Sequence[int], indices: Sequence[PlanIndex], rank: int
) -> Chunk:
    """Plan one chunk for one rank; the matrices ``indices`` of the plan are of one kind."""
    kind = _kind_of(placements[indices[0]], owners[indices[0]])
    owned = tuple(index for index in indices if owners[index] == rank)
    fragment_buffer = owner_buffer = BufferPlan((), _ints(()), _ints(()), 0, 0)
    if kind == "all_to_all":
        fragment_buffer = _by_owner(placements, owners, indices, rank)
        owner_buffer = _by_holder(placements, owned, rank)
    elif kind == "broadcast":
        # The owner has the full gradient already: updates go from its owner buffer to the ranks' fragment buffers.
        fragment_buffer = _by_owner(placements, owners, [i for i in indices if owners[i] != rank], rank)
        # One copy of this rank's updates for all ranks; no peer has a slice of its own.
        updates, receivers = _by_owner(placements, owners, owned, rank), len(placements[indices[0]].ranks) - 1
        remote_numel = sum(placements[index].numel for index in owned) * receivers
        owner_buffer = replace(updates, peers=_ints(()), counts=_ints(()), remote_numel=remote_numel)
    return Chunk(kind, tuple(indices), owned, fragment_buffer, owner_buffer)


def _kind_of(placement: Placement, owner: int) -> ChunkKind:
    if placement.only_rank == owner:
        return "local"
    return "broadcast" if placement.replicated else "all_to_all"


def _by_owner(
    placements: Sequence[Placement], owners: Sequence[int], indices: Sequence[PlanIndex], rank: int
) -> BufferPlan:
    """Lay out the fragments that a rank holds of some matrices, by owner."""
    segments: list[tuple[PlanIndex, Segment]] = []
    counts: dict[int, int] = {}
    offset = remote_numel = 0
    by_owner = sorted(indices, key=lambda index: owners[index])  # stable: by owner, then by matrix
    for owner, owned in itertools.groupby(by_owner, key=lambda index: owners[index]):
        start = offset
        for index in owned:
            if (fragment := placements[index].fragment_on(rank)) is not None:
                segments.append((index, Segment(fragment.matrix_offset, fragment.numel, offset)))
                offset += fragment.numel
        if offset > start:
            remote_numel += (offset - start) * (owner != rank)
            counts[owner] = int(_padded(offset - start))
            offset = start + counts[owner]
    return BufferPlan(tuple(segments), _ints(counts), _ints(counts.values()), offset, remote_numel)


def _by_holder(placements: Sequence[Placement], indices: Sequence[PlanIndex], rank: int) -> BufferPlan:
    """Lay out the fragments of a rank's own matrices, by the rank that holds them."""
    if not indices:
        return BufferPlan((), _ints(()), _ints(()), 0, 0)
    first = min(placements[index].ranks.start for index in indices)
    # The last of ``ranks`` only ends them.
    ranks = np.arange(first, max(placements[index].ranks.stop for index in indices) + 1)
    # Where the fragment of each rank starts; the difference to the next start is its length.
    numels = np.array([np.diff(placements[index].starts(ranks)) for index in indices])  # (matrices, ranks)
    # The buffer is ordered by rank, and by matrix within a rank. Example: matrices of 8 and 6 elements, half of each on
    # ranks 0 and 1: numels ((4, 4), (3, 3)), totals (7, 7), rank_offsets (0, 7), offsets_in_rank ((0, 0), (4, 4)). Rank
    # 1's half of the second matrix is at 7 + 4.
    totals = _padded(numels.sum(axis=0))  # (ranks,)
    rank_offsets = np.cumsum(totals) - totals
    offsets_in_rank = np.cumsum(numels, axis=0) - numels  # (matrices, ranks)
    segments: list[tuple[PlanIndex, Segment]] = []
    for index, lengths, before in zip(indices, numels, offsets_in_rank, strict=True):
        starts = placements[index].starts(ranks[:-1])
        # Peers make one segment where their fragments are equal and at equal offsets in what they send.
        facts = np.stack((lengths, totals, before))
        # A new segment begins at each rank at which one of the facts differs from that of the rank before it.
        begins = np.flatnonzero(np.append(True, (facts[:, 1:] != facts[:, :-1]).any(axis=0)))
        ends = np.append(begins[1:], len(lengths))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if numel := int(lengths[begin]):  # ranks without elements make no segment
                offset = int(rank_offsets[begin] + before[begin])
                segments.append(
                    (index, Segment(int(starts[begin]), numel, offset, end - begin, int(totals[begin])))
                )
    peers = np.flatnonzero(totals)
    remote_numel = int(numels.sum(where=ranks[:-1] != rank))
    return BufferPlan(tuple(segments), ranks[peers], totals[peers], int(totals.sum()), remote_numel)


def _padded(numels: Any) -> Any:
    """Return numbers of elements with their padding (:data:`_ALIGNMENT`)."""
    return numels + np.where(numels < _ALIGNED_FROM, 0, -numels % _ALIGNMENT)


def _ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)
