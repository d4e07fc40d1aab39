"""The exchange plan: splits and offsets of the two all-to-alls, computed once from the layouts.

Gather brings every fragment of a matrix to its owner; scatter brings the updates back to the ranks that hold the
fragments. A fragment that already lies on its owner never enters a buffer. Matrices travel in chunks of bounded size,
which bounds the buffers. A chunk in which nothing moves has no all-to-all on any rank.

In a send buffer the segments are ordered by peer, then by matrix, then by matrix offset. Both sides derive that order
from the same layouts, so no header travels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepspeed_muon.plan.layout import Fragment, MatrixLayout

__all__ = ["Chunk", "ExchangePlan", "Segment", "build_exchange_plan", "chunk_limit"]

# Several chunks can overlap, and small ones need little memory. Chunks below this number of elements a rank (512 KiB in
# bf16, some ten microseconds at 50 GB/s) are bound by latency.
_CHUNKS = 8
_LEAST_NUMEL_PER_RANK = 1 << 18


@dataclass(frozen=True, slots=True)
class Segment:
    """One fragment's place in a communication buffer.

    Attributes:
        matrix: Index of the matrix in the plan.
        fragment: The fragment, with its offset in the *holder's* partition.
        buffer_offset: Where it starts in the buffer of this rank.
    """

    matrix: int
    fragment: Fragment
    buffer_offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Matrices that travel together, as one rank sees them.

    Of a replicated matrix only the update travels; otherwise scatter is the reverse of gather.

    Attributes:
        matrices: Indices of the matrices in this chunk, ascending.
        owned: Those that this rank owns.
        outgoing: Fragments that this rank sends in gather.
        incoming: Fragments that this rank receives in gather.
        gather_send_splits: Elements that this rank sends to each rank in gather.
        gather_recv_splits: Elements that it receives from each rank in gather.
        scatter_send_splits: Elements that it sends to each rank in scatter.
        scatter_recv_splits: Elements that it receives from each rank in scatter.
        updates_out: Fragments of updates that this rank sends in scatter.
        updates_in: Fragments of updates that it receives in scatter.
        gathers: Whether any rank sends anything in gather.
        scatters: Whether any rank sends anything in scatter.
    """

    matrices: tuple[int, ...]
    owned: tuple[int, ...]
    outgoing: tuple[Segment, ...]
    incoming: tuple[Segment, ...]
    gather_send_splits: tuple[int, ...]
    gather_recv_splits: tuple[int, ...]
    scatter_send_splits: tuple[int, ...]
    scatter_recv_splits: tuple[int, ...]
    updates_out: tuple[Segment, ...]
    updates_in: tuple[Segment, ...]
    gathers: bool
    scatters: bool

    def active(self, flags: Sequence[bool]) -> list[int]:
        """Return the chunk's matrices whose flag is set; ``flags`` has one for each matrix of the plan."""
        return [index for index in self.matrices if flags[index]]

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to others in both all-to-alls."""
        return sum(self.gather_send_splits) + sum(self.scatter_send_splits)


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Everything that one rank needs to exchange the matrices of a step set.

    Attributes:
        rank: This rank inside the data-parallel group.
        world_size: Ranks of the group.
        matrices: All matrices, equal on every rank.
        owners: The owner of each matrix, equal on every rank.
        chunks: What travels together, in order.
    """

    rank: int
    world_size: int
    matrices: tuple[MatrixLayout, ...]
    owners: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to other ranks per step."""
        return sum(chunk.sent_elements for chunk in self.chunks)

    def digest(self) -> str:
        """Return a hash of :meth:`description`, which must be equal on all ranks."""
        return hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode()).hexdigest()

    def description(self) -> list[list[object]]:
        """Return what all ranks must agree on, owners, chunks and layouts, as plain data: one row per matrix."""
        chunk_of = {index: number for number, chunk in enumerate(self.chunks) for index in chunk.matrices}
        return [
            [
                matrix.name,
                matrix.rows,
                matrix.cols,
                [list(sizes) for sizes in matrix.grid],
                matrix.transposed,
                matrix.first_row,
                self.owners[index],
                list(matrix.sharers),
                chunk_of[index],
                [[f.rank, f.matrix_offset, f.partition_offset, f.numel] for f in matrix.fragments],
            ]
            for index, matrix in enumerate(self.matrices)
        ]


def build_exchange_plan(
    matrices: Sequence[MatrixLayout],
    owners: Sequence[int],
    *,
    rank: int,
    world_size: int,
    chunk_numel: int,
) -> ExchangePlan:
    """Make the plan of one rank.

    Args:
        matrices: All matrices of the data-parallel group, in the order that every rank uses.
        owners: One rank per matrix.
        rank: This rank inside the group.
        world_size: Ranks of the group.
        chunk_numel: Elements that one rank owns in a chunk at most, which bounds what it receives at once. A larger
            matrix travels without others of its owner. Chunks are smaller where this bound would make only a few.
    """
    chunks = [
        _build_chunk(matrices, owners, indices, rank, world_size)
        for indices in _cut(matrices, owners, chunk_numel, world_size)
    ]
    return ExchangePlan(rank, world_size, tuple(matrices), tuple(owners), tuple(chunks))


def _moves(matrix: MatrixLayout, owner: int) -> bool:
    return any(fragment.rank != owner for fragment in matrix.fragments)


def _cut(
    matrices: Sequence[MatrixLayout], owners: Sequence[int], bound: int, world_size: int
) -> list[list[int]]:
    """Cut the matrices into chunks, those that never move first.

    Every owner fills its own part of a chunk up to ``bound`` elements, largest matrices first, so that the parts of a
    chunk cost about the same. A bound on whole chunks would let most ranks wait in a large model: a chunk would hold
    few matrices, and few ranks would own any of them.

    Replicated matrices have chunks of their own, because only their updates travel. Every rank receives each whole
    update, so there the bound holds for all owners together. Shared matrices have chunks of their own too; all rows of
    a matrix are in one chunk, because the sharers orthogonalise them at the same time.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    shared: list[int] = []
    for index, matrix in enumerate(matrices):
        if matrix.sharers:
            shared.append(index)
        else:
            kinds.setdefault((_moves(matrix, owners[index]), matrix.replicated), []).append(index)
    chunks = _cut_shared(matrices, shared, bound)
    for (moving, replicated), members in sorted(kinds.items()):
        together = moving and replicated
        parts: dict[int, list[int]] = {}
        for index in sorted(members, key=lambda i: (-matrices[i].numel, i)):
            parts.setdefault(-1 if together else owners[index], []).append(index)
        largest = max(sum(matrices[i].numel for i in part) for part in parts.values())
        limit = chunk_limit(largest, bound, ranks=world_size if together else 1)
        found: list[list[int]] = []
        for part in parts.values():
            items = [(i, matrices[i].numel, owners[i] if together else -1) for i in part]
            for number, filled in enumerate(_fill(items, limit, copies=world_size - 1 if together else 0)):
                found += [[]] if number == len(found) else []
                found[number] += filled
        chunks += [sorted(chunk) for chunk in found]
    return chunks


def _cut_shared(matrices: Sequence[MatrixLayout], shared: Sequence[int], bound: int) -> list[list[int]]:
    """Cut shared matrices into chunks in which each rank has at most ``bound`` elements, or one matrix.

    Args:
        matrices: All matrices.
        shared: Indices of the rows that sharers get; those of one matrix follow each other.
        bound: As for :func:`_cut`.
    """
    chunks: list[list[int]] = []
    place: dict[int, int] = {}
    filled: dict[int, int] = {}
    start = 0
    while start < len(shared):
        first = matrices[shared[start]]
        together = shared[start : start + len(first.sharers)]
        parts = dict(zip(first.sharers, (matrices[index].numel for index in together), strict=True))
        if first.replicated:
            # Every rank receives the whole update.
            parts = {-1: sum(parts.values())}
        at = max(
            place.get(rank, 0) + _is_full(filled.get(rank, 0), numel, bound) for rank, numel in parts.items()
        )
        chunks += [[]] if at == len(chunks) else []
        chunks[at] += together
        for rank, numel in parts.items():
            filled[rank] = numel + (filled[rank] if place.get(rank) == at else 0)
            place[rank] = at
        start += len(together)
    return chunks


def _is_full(filled: int, numel: int, bound: int) -> bool:
    return filled > 0 and filled + numel > bound


def chunk_limit(largest: int, bound: int, *, ranks: int = 1) -> int:
    """Return how many elements an owner's part of a chunk has at most, unless it is a single matrix.

    Args:
        largest: Elements of the owner that owns most.
        bound: What the configuration allows.
        ranks: Ranks that share the bound.
    """
    return min(bound, max(-(-largest // _CHUNKS), _LEAST_NUMEL_PER_RANK * ranks))


def _fill(items: Sequence[tuple[int, int, int]], limit: int, *, copies: int) -> list[list[int]]:
    """Divide items, in order, into chunks of at most ``limit`` elements or one item.

    Args:
        items: Index, elements and owner of each.
        limit: Elements of a chunk, and of what one owner sends of it.
        copies: How many copies of its items an owner sends.
    """
    chunks: list[list[int]] = []
    filled = 0
    of_owner: dict[int, int] = {}
    for index, numel, owner in items:
        own = of_owner.get(owner, 0)
        if not chunks or filled + numel > limit or (own and copies * (own + numel) > limit):
            chunks.append([])
            filled, of_owner, own = 0, {}, 0
        chunks[-1].append(index)
        filled += numel
        of_owner[owner] = own + numel
    return chunks


def _build_chunk(
    matrices: Sequence[MatrixLayout],
    owners: Sequence[int],
    indices: Sequence[int],
    rank: int,
    world_size: int,
) -> Chunk:
    moving = [i for i in indices if _moves(matrices[i], owners[i])]
    # The owner of a replicated matrix has the whole gradient already.
    gathered = [i for i in moving if not matrices[i].replicated]

    def owner_elsewhere(index: int, fragment: Fragment) -> int | None:
        return owners[index] if fragment.rank == rank != owners[index] else None

    def holder_elsewhere(index: int, fragment: Fragment) -> int | None:
        return fragment.rank if owners[index] == rank != fragment.rank else None

    held = _segments(matrices, gathered, owner_elsewhere, world_size)
    needed = _segments(matrices, gathered, holder_elsewhere, world_size)
    updates_in = _segments(matrices, moving, owner_elsewhere, world_size)
    updates_out = _segments(matrices, moving, holder_elsewhere, world_size)
    return Chunk(
        matrices=tuple(indices),
        owned=tuple(i for i in indices if owners[i] == rank),
        outgoing=held[0],
        incoming=needed[0],
        gather_send_splits=held[1],
        gather_recv_splits=needed[1],
        scatter_send_splits=updates_out[1],
        scatter_recv_splits=updates_in[1],
        updates_out=updates_out[0],
        updates_in=updates_in[0],
        gathers=bool(gathered),
        scatters=bool(moving),
    )


def _segments(
    matrices: Sequence[MatrixLayout],
    indices: Sequence[int],
    peer_of: Callable[[int, Fragment], int | None],
    world_size: int,
) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
    """Lay out a buffer by peer, matrix and offset, and count the elements of each peer.

    ``peer_of`` maps a fragment to its peer, or to ``None`` if it does not belong into the buffer.
    """
    by_peer: list[list[tuple[int, Fragment]]] = [[] for _ in range(world_size)]
    for index in indices:
        for fragment in sorted(matrices[index].fragments, key=lambda f: (f.matrix_offset, f.rank)):
            peer = peer_of(index, fragment)
            if peer is not None:
                by_peer[peer].append((index, fragment))
    segments: list[Segment] = []
    splits: list[int] = []
    offset = 0
    for entries in by_peer:
        start = offset
        for index, fragment in entries:
            segments.append(Segment(index, fragment, offset))
            offset += fragment.numel
        splits.append(offset - start)
    return tuple(segments), tuple(splits)
