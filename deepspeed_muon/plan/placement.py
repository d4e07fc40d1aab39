"""Where matrices lie in flat partitions, as rules.

Every ZeRO stage, sub-group, padding rule and offload device divides a parameter between consecutive ranks, one fragment
on each. A :class:`Placement` says how in a few numbers, however many ranks there are, so that plan and transport exist
once. All offsets and sizes are in elements, never in bytes.

Example: a flat buffer has ten elements on each of two ranks. A 4 x 3 matrix that starts at its element 5 is
``flat_placement(5, 12, 10)``: ``Fragment(rank=0, matrix_offset=0, partition_offset=5, numel=5)`` and
``Fragment(rank=1, matrix_offset=5, partition_offset=0, numel=7)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Larger numbers, which only a damaged file has, would overflow in the arithmetic below.
_MOST = 1 << 50


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous run of one matrix inside one rank's partition.

    Attributes:
        rank: Rank inside the data-parallel group.
        matrix_offset: Where the run starts in the row-major matrix.
        partition_offset: Where it starts in that rank's flat partition.
        numel: Its length.
    """

    rank: int
    matrix_offset: int
    partition_offset: int
    numel: int

    def __post_init__(self) -> None:
        if self.rank < 0 or self.matrix_offset < 0 or self.partition_offset < 0 or self.numel < 1:
            raise ValueError(f"not a fragment: {self}")


class Places(Protocol):
    """Where the elements of something lie: at most one fragment on each of some consecutive ranks."""

    @property
    def numel(self) -> int:
        """The number of elements."""

    @property
    def replicated(self) -> bool:
        """Whether each of the ranks holds all of it."""

    @property
    def ranks(self) -> range:
        """The ranks that may hold a fragment."""

    def on(self, rank: int) -> Fragment | None:
        """Return the fragment of a rank, ``None`` if it holds none."""

    def rank_at(self, element: int) -> int:
        """Return the rank that holds an element. Not for what is replicated."""

    def starts(self, ranks: Ints) -> Ints:
        """Return the first element that lies on each of ``ranks`` or on a later one. Not for what is replicated.

        So the fragment of rank ``r`` ends where that of ``r + 1`` starts.
        """


def runs_within(places: Places, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, start and stop of each run of the elements ``[start, stop)`` that one rank holds, in their order."""
    while start < stop:
        rank = places.rank_at(start)
        end = min(stop, int(places.starts(np.array([rank + 1]))[0]))
        yield rank, start, end
        start = end


@dataclass(frozen=True, slots=True)
class Placement:
    """The rule by which the elements of one parameter, or of a run of its rows, are divided between ranks.

    Attributes:
        numel: Elements.
        first: First rank that holds some.
        head: Elements on the first rank.
        head_offset: Where they start in its partition.
        body: Elements on each further rank; the last one has what is left.
        body_offset: Where they start in the partitions of the further ranks.
        copies: If not 0, the ranks 0 to ``copies - 1`` hold all elements each (ZeRO stage 0).
    """

    numel: int
    first: int
    head: int
    head_offset: int
    body: int
    body_offset: int
    copies: int = 0

    def __post_init__(self) -> None:
        if max(self.numel, self.first, self.head_offset, self.body, self.body_offset, self.copies) > _MOST:
            raise ValueError(f"not a placement: {self}")
        if self.numel < 1 or not 0 < self.head <= self.numel or (self.head < self.numel and self.body < 1):
            raise ValueError(f"not a placement: {self}")
        if min(self.first, self.head_offset, self.body_offset, self.copies) < 0:
            raise ValueError(f"not a placement: {self}")
        if self.copies and (self.first or self.head < self.numel):
            raise ValueError(f"copies are not whole: {self}")

    @property
    def replicated(self) -> bool:
        """Whether each of the ranks holds all elements."""
        return self.copies > 0

    @property
    def ranks(self) -> range:
        """The ranks that hold elements."""
        if self.copies:
            return range(self.copies)
        further = self.numel - self.head
        return range(self.first, self.first + 1 + (-(-further // self.body) if further else 0))

    @property
    def whole_on(self) -> int | None:
        """The only rank that holds elements, or ``None`` if several do."""
        return self.first if self.head == self.numel and self.copies < 2 else None

    def rank_at(self, element: int) -> int:
        """Return the rank that holds an element; not for replicated placements."""
        return self.first if element < self.head else self.first + 1 + (element - self.head) // self.body

    def ranks_at(self, elements: Ints) -> Ints:
        """Return :meth:`rank_at` of each element."""
        behind = (elements - self.head) // max(1, self.body)
        return self.first + np.maximum(behind + 1, 0)

    def starts(self, ranks: Ints) -> Ints:
        """Return the first element that lies on each of ``ranks`` or on a later one; not for replicated placements."""
        behind = ranks - self.first
        start = np.where(behind > 0, self.head + (behind - 1) * self.body, 0)
        return np.minimum(start, self.numel)

    def on(self, rank: int) -> Fragment | None:
        """Return the fragment of a rank, ``None`` if it holds none."""
        if self.copies:
            return Fragment(rank, 0, self.head_offset, self.numel) if rank < self.copies else None
        if rank == self.first:
            return Fragment(rank, 0, self.head_offset, self.head)
        start = self.head + (rank - self.first - 1) * self.body
        if rank < self.first or start >= self.numel:
            return None
        return Fragment(rank, start, self.body_offset, min(self.body, self.numel - start))

    def held_by(self, rank: int) -> int:
        """Return how many elements a rank holds."""
        fragment = self.on(rank)
        return 0 if fragment is None else fragment.numel

    def part(self, start: int, numel: int) -> Placement:
        """Return the placement of ``numel`` elements from ``start`` on, counted from there."""
        if self.copies:
            offset = self.head_offset + start
            return Placement(numel, 0, numel, offset, self.body, offset, self.copies)
        if start < 0 or start + numel > self.numel:
            raise ValueError(f"{numel} elements from {start} on are not among {self.numel}")
        rank, inside, room, offset = self.first, start, self.head, self.head_offset
        if start >= self.head:
            further, inside = divmod(start - self.head, self.body)
            rank, room, offset = self.first + 1 + further, self.body, self.body_offset
        head = min(room - inside, numel)
        return Placement(numel, rank, head, offset + inside, self.body, self.body_offset)

    def numbers(self) -> list[int]:
        """Return the rule as plain numbers, from which ``Placement(*numbers)`` makes it again."""
        return [
            self.numel,
            self.first,
            self.head,
            self.head_offset,
            self.body,
            self.body_offset,
            self.copies,
        ]


def flat_placement(offset: int, numel: int, partition_numel: int) -> Placement:
    """Return the placement of a parameter in a flat buffer with equal partitions (stages 1, 2, ``BF16_Optimizer``).

    Args:
        offset: Where the parameter starts in the flat buffer of all ranks.
        numel: Elements of the parameter.
        partition_numel: Elements of a partition.
    """
    first, inside = divmod(offset, partition_numel)
    return Placement(numel, first, min(numel, partition_numel - inside), inside, partition_numel, 0)


def sharded_placement(partition_offset: int, numel: int, shard_numel: int) -> Placement:
    """Return the placement of a parameter of which every rank holds a shard (ZeRO stage 3).

    Args:
        partition_offset: Where the shard lies in every rank's flat partition.
        numel: Elements of the parameter, without padding.
        shard_numel: Elements that each rank reserves for it; the last ranks may hold padding only.
    """
    return Placement(numel, 0, min(numel, shard_numel), partition_offset, shard_numel, partition_offset)


def replicated_placement(partition_offset: int, numel: int, world_size: int) -> Placement:
    """Return the placement of a parameter that every rank holds whole (stage 0)."""
    return Placement(numel, 0, numel, partition_offset, numel, partition_offset, world_size)
