"""Where matrices are stored in flat partitions, as rules.

ZeRO stages 1 to 3, with any sub-groups, padding and offload device, divide a parameter between consecutive ranks, one
fragment on each; at stage 0 every rank has all of it. A :class:`Placement` says how in a few numbers, however many
ranks there are, so that plan and transport exist once. Offsets and sizes are in elements.

Example: a flat buffer has ten elements on each of two ranks. A 4 x 3 matrix that starts at its element 5 is
``flat_placement(5, 12, 10)``: ``Fragment(rank=0, matrix_offset=0, partition_offset=5, numel=5)`` and
``Fragment(rank=1, matrix_offset=5, partition_offset=0, numel=7)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Larger numbers, which only a damaged file has, would overflow in the arithmetic below.
_MOST = 1 << 50


@dataclass(frozen=True, slots=True)
class Fragment:
    """The contiguous elements of one matrix that one rank's partition holds.

    ``rank`` is that inside the data-parallel group; the offsets are those of the first element, in the row-major matrix
    and in that rank's flat partition.
    """

    rank: int
    matrix_offset: int
    partition_offset: int
    numel: int

    def __post_init__(self) -> None:
        if self.rank < 0 or self.matrix_offset < 0 or self.partition_offset < 0 or self.numel < 1:
            raise ValueError(f"not a fragment: {self}")


@dataclass(frozen=True, slots=True)
class Placement:
    """The rule by which the elements of one parameter, or of consecutive rows of it, are divided between ranks.

    Attributes:
        numel: Number of elements.
        first: First rank that holds some.
        head: Number of elements on the first rank.
        head_offset: Where they start in its partition.
        body: Number of elements on each further rank; the last one has the rest.
        body_offset: Where they start in the partitions of the further ranks.
        replicas: If not 0, the ranks 0 to ``replicas - 1`` hold all elements each (ZeRO stage 0).
    """

    numel: int
    first: int
    head: int
    head_offset: int
    body: int
    body_offset: int
    replicas: int = 0

    def __post_init__(self) -> None:
        positions = (self.first, self.head_offset, self.body_offset, self.replicas)
        is_bounded = min(positions) >= 0 and max(self.numel, self.body, *positions) <= _MOST
        has_body = self.body > 0 or self.head == self.numel
        if not is_bounded or not 0 < self.head <= self.numel or not has_body:
            raise ValueError(f"not a placement: {self}")
        if self.replicas and (self.first or self.head < self.numel):
            raise ValueError(f"replicas that are not complete: {self}")

    @property
    def replicated(self) -> bool:
        """Whether each of the ranks holds all elements."""
        return self.replicas > 0

    @property
    def ranks(self) -> range:
        """The ranks that hold elements."""
        if self.replicas:
            return range(self.replicas)
        further = self.numel - self.head  # elements after the head, body by body on the following ranks
        return range(self.first, self.first + 1 + (-(-further // self.body) if further else 0))

    @property
    def only_rank(self) -> int | None:
        """The only rank that holds elements, or ``None`` if several do."""
        return self.first if self.head == self.numel and self.replicas < 2 else None

    def rank_of(self, element: int) -> int:
        """Return the rank that holds an element; not for replicated placements."""
        return self.first if element < self.head else self.first + 1 + (element - self.head) // self.body

    def ranks_of(self, elements: Ints) -> Ints:
        """Return :meth:`rank_of` of each element."""
        behind = (elements - self.head) // max(1, self.body)  # negative inside the head
        return self.first + np.maximum(behind + 1, 0)

    def starts(self, ranks: Ints) -> Ints:
        """Return the first element on each of ``ranks`` or on a later one; not for replicated placements.

        Ranks 0, 1 and 2 of which the first two have 5 and 7 elements: 0, 5, 12.
        """
        behind = ranks - self.first
        start = np.where(behind > 0, self.head + (behind - 1) * self.body, 0)
        return np.minimum(start, self.numel)

    def fragment_on(self, rank: int) -> Fragment | None:
        """Return the fragment of a rank, ``None`` if it holds none."""
        if self.replicas:
            return Fragment(rank, 0, self.head_offset, self.numel) if rank < self.replicas else None
        if rank == self.first:
            return Fragment(rank, 0, self.head_offset, self.head)
        # The offset is the same on all further ranks: 0 at ZeRO 1 and 2, that of the shard at ZeRO 3.
        start = self.head + (rank - self.first - 1) * self.body
        if rank < self.first or start >= self.numel:
            return None
        return Fragment(rank, start, self.body_offset, min(self.body, self.numel - start))

    def numel_on(self, rank: int) -> int:
        """Return how many elements a rank holds."""
        fragment = self.fragment_on(rank)
        return 0 if fragment is None else fragment.numel

    def narrow(self, start: int, numel: int) -> Placement:
        """Return the placement of ``numel`` elements from ``start`` on, counted from there."""
        if self.replicas:  # every rank has these elements, at the same offset
            offset = self.head_offset + start
            return Placement(numel, 0, numel, offset, self.body, offset, self.replicas)
        if start < 0 or start + numel > self.numel:
            raise ValueError(f"{numel} elements from {start} on are not among {self.numel}")
        # The fragment in which the range starts; before is how many of its elements precede the range.
        rank, before, fragment_numel, offset = self.first, start, self.head, self.head_offset
        if start >= self.head:
            further, before = divmod(start - self.head, self.body)
            rank, fragment_numel, offset = self.first + 1 + further, self.body, self.body_offset
        # It becomes the head of the new placement; every further fragment still starts at body_offset.
        head = min(fragment_numel - before, numel)
        return Placement(numel, rank, head, offset + before, self.body, self.body_offset)

    def numbers(self) -> list[int]:
        """Return the rule as plain numbers, from which ``Placement(*numbers)`` makes it again."""
        return [getattr(self, name) for name in self.__slots__]


def flat_placement(offset: int, numel: int, partition_numel: int) -> Placement:
    """Return the placement of a parameter in a flat buffer with equal partitions (stages 1, 2, ``BF16_Optimizer``).

    ``offset`` is where it starts in the flat buffer of all ranks.
    """
    first, inside = divmod(offset, partition_numel)
    return Placement(numel, first, min(numel, partition_numel - inside), inside, partition_numel, 0)


def sharded_placement(partition_offset: int, numel: int, shard_numel: int) -> Placement:
    """Return the placement of a parameter of which every rank holds a shard (ZeRO stage 3).

    The shard is at ``partition_offset`` of every rank's partition. ``shard_numel`` are the elements that each rank
    reserves; ``numel`` is without padding, and the last ranks may hold padding only.
    """
    return Placement(numel, 0, min(numel, shard_numel), partition_offset, shard_numel, partition_offset)


def replicated_placement(numel: int, world_size: int) -> Placement:
    """Return the placement of a parameter of which every rank holds a replica, a partition of its own (stage 0)."""
    return Placement(numel, 0, numel, 0, numel, 0, world_size)
