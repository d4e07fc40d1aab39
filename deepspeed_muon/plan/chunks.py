"""Which matrices travel together: the buffers are bounded, and in each chunk all ranks have about the same work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.relay import Machines
from deepspeed_muon.plan.spread import Places

__all__ = ["Link", "chunk_limit", "cut_into_chunks", "moves"]

# Several chunks can overlap, and small ones need little memory. Chunks below this number of elements a rank (512 KiB in
# bf16, some ten microseconds at 50 GB/s) are bound by latency.
_CHUNKS = 8
_LEAST_NUMEL_PER_RANK = 1 << 18


@dataclass(frozen=True, slots=True)
class Link:
    """What the network costs, where that is known.

    Attributes:
        element_seconds: Time in which a rank sends one element of the exchange.
        message_seconds: Time that a message takes besides.
    """

    element_seconds: float
    message_seconds: float

    def chunks(self, numel: int) -> int:
        """Return the number of chunks that costs least time, of the elements that a rank sends in one direction.

        Every chunk costs a message. The first chunk's way to the owners and the last one's way back hide behind
        nothing: the fewer chunks, the longer they are.
        """
        return max(1, round(math.sqrt(numel * self.element_seconds / self.message_seconds)))


def moves(places: Places, owner: int) -> bool:
    """Return whether a matrix is not whole on its owner alone."""
    return places.ranks != range(owner, owner + 1)


def cut_into_chunks(
    matrices: Sequence[MatrixLayout],
    owners: Sequence[int],
    bound: int,
    world_size: int,
    machines: Machines | None = None,
    link: Link | None = None,
) -> list[list[int]]:
    """Cut the matrices into chunks, those that never move first.

    Every owner fills its own part of a chunk up to ``bound`` elements, largest matrices first, so that the parts of a
    chunk cost about the same. A bound on whole chunks would let most ranks wait in a large model: a chunk would hold
    few matrices, and few ranks would own any of them.

    Replicated matrices have chunks of their own, because only their updates travel. Every rank receives each whole
    update, so there the bound holds for all owners together. Shared matrices have chunks of their own too; all rows of
    a matrix are in one chunk, because the sharers orthogonalise them at the same time.

    Args:
        matrices: All matrices of the plan.
        owners: One rank for each.
        bound: Elements that one rank owns in a chunk at most.
        world_size: Ranks of the group.
        machines: Those among which updates of replicated matrices are relayed.
        link: What the network costs, if that is known.
    """
    copies = world_size - 1 if machines is None else machines.count
    kinds: dict[tuple[bool, bool], list[int]] = {}
    shared: list[int] = []
    for index, matrix in enumerate(matrices):
        if matrix.sharers:
            shared.append(index)
        else:
            kinds.setdefault((moves(matrix.spread, owners[index]), matrix.replicated), []).append(index)
    chunks = _cut_shared(matrices, shared, bound)
    for (moving, replicated), members in sorted(kinds.items()):
        together = moving and replicated
        parts: dict[int, list[int]] = {}
        for index in sorted(members, key=lambda i: (-matrices[i].numel, i)):
            parts.setdefault(-1 if together else owners[index], []).append(index)
        largest = max(sum(matrices[i].numel for i in part) for part in parts.values())
        limit = chunk_limit(largest, bound, ranks=world_size if together else 1, link=link)
        found: list[list[int]] = []
        for part in parts.values():
            items = [(i, matrices[i].numel, owners[i] if together else -1) for i in part]
            for number, filled in enumerate(_fill(items, limit, copies=copies if together else 0)):
                found += [[]] if number == len(found) else []
                found[number] += filled
        chunks += [sorted(chunk) for chunk in found]
    return chunks


def _cut_shared(matrices: Sequence[MatrixLayout], shared: Sequence[int], bound: int) -> list[list[int]]:
    """Cut shared matrices into chunks in which each rank has at most ``bound`` elements, or one matrix.

    Args:
        matrices: All matrices.
        shared: Indices of the rows that sharers get; those of one matrix follow each other.
        bound: As for :func:`cut_into_chunks`.
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


def chunk_limit(largest: int, bound: int, *, ranks: int = 1, link: Link | None = None) -> int:
    """Return how many elements an owner's part of a chunk has at most, unless it is a single matrix.

    Args:
        largest: Elements of the owner that owns most.
        bound: What the configuration allows.
        ranks: Ranks that share the bound.
        link: What the network costs, if that is known.
    """
    if link is not None:
        return min(bound, max(1, -(-largest // link.chunks(largest))))
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
