"""Where matrices are stored in flat partitions, as rules, and which slice of a full tensor a rank's parameter is.

ZeRO stages 1 to 3, with any sub-groups, padding and offload device, divide a parameter between consecutive ranks, one
fragment on each; at stage 0 every rank has all of it. A :class:`Placement` says how in a few numbers, however many
ranks there are, so that plan and transport exist once. All offsets and sizes are in elements, never in bytes.

Example: a flat buffer has ten elements on each of two ranks. A 4 x 3 matrix that starts at its element 5 is
``flat_placement(5, 12, 10)``: ``Fragment(rank=0, matrix_offset=0, partition_offset=5, numel=5)`` and
``Fragment(rank=1, matrix_offset=5, partition_offset=0, numel=7)``.

Where ranks hold different slices of a full tensor or name it differently, a :class:`TensorSlice` says which slice a
rank has. Three kinds of parallelism fit one rule. A rank of ``deepspeed.moe`` has some of the experts, each complete,
under numbers of its own; AutoEP stacks a rank's experts along dimension 0; tensor parallelism shards a dimension.
In each case the rank's tensor is the full tensor, under a name that all ranks share, at some ranges of indices along
one dimension.

Example: two ranks share a fused gate and up projection of 12 x 4, and each has half of both. The first rank's tensor of
6 x 4 is ``TensorSlice("gate_up", (12, 4), 0, ((0, 3), (6, 9)))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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

    Attributes:
        rank: Rank inside the data-parallel group.
        matrix_offset: The first of them in the row-major matrix.
        partition_offset: The first of them in that rank's flat partition.
        numel: How many they are.
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
        positions = (self.first, self.head_offset, self.body_offset, self.copies)
        is_bounded = min(positions) >= 0 and max(self.numel, self.body, *positions) <= _MOST
        has_body = self.body > 0 or self.head == self.numel
        if not is_bounded or not 0 < self.head <= self.numel or not has_body:
            raise ValueError(f"not a placement: {self}")
        if self.copies and (self.first or self.head < self.numel):
            raise ValueError(f"replicas that are not complete: {self}")

    @property
    def replicated(self) -> bool:
        """Whether each of the ranks holds all elements."""
        return self.copies > 0

    @property
    def ranks(self) -> range:
        """The ranks that hold elements."""
        if self.copies:
            return range(self.copies)
        further = self.numel - self.head  # elements after the head, body by body on the following ranks
        return range(self.first, self.first + 1 + (-(-further // self.body) if further else 0))

    @property
    def only_rank(self) -> int | None:
        """The only rank that holds elements, or ``None`` if several do."""
        return self.first if self.head == self.numel and self.copies < 2 else None

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
        if self.copies:
            return Fragment(rank, 0, self.head_offset, self.numel) if rank < self.copies else None
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
        if self.copies:  # every rank has these elements, at the same offset
            offset = self.head_offset + start
            return Placement(numel, 0, numel, offset, self.body, offset, self.copies)
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


def replicated_placement(partition_offset: int, numel: int, world_size: int) -> Placement:
    """Return the placement of a parameter of which every rank holds a replica (stage 0)."""
    return Placement(numel, 0, numel, partition_offset, numel, partition_offset, world_size)


@dataclass(frozen=True, slots=True)
class StridedRange:
    """Equal ranges of elements at equal distances, in a rank's tensor and in the full tensor.

    Attributes:
        local_offset: Where the first range starts in the rank's tensor.
        full_offset: Where it starts in the full tensor.
        numel: Elements of each range.
        count: How many ranges there are.
        local_stride: From the start of one range to that of the next in the rank's tensor.
        full_stride: The same in the full tensor.
    """

    local_offset: int
    full_offset: int
    numel: int
    count: int
    local_stride: int
    full_stride: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's tensor, as ranges along one dimension of the full tensor.

    Attributes:
        name: The name of the full tensor, equal on all ranks.
        shape: The shape of the full tensor.
        dim: The dimension along which it is sliced.
        ranges: First and last index plus one of each range, ascending, in the order of the rank's tensor.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = [0, *(stop for _, stop in self.ranges)]
        are_ascending = all(
            end <= start < stop for end, (start, stop) in zip(ends, self.ranges, strict=False)
        )
        has_dim = 0 <= self.dim < max(1, len(self.shape))
        if not self.ranges or not has_dim or not are_ascending or ends[-1] > self.length:
            raise ValueError(f"not a slice: {self}")

    @property
    def length(self) -> int:
        """The length of the full tensor along :attr:`dim`."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def is_full(self) -> bool:
        """Whether the rank holds the full tensor."""
        return self.ranges == ((0, self.length),)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor."""
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]) if self.shape else ()

    @property
    def _row_numels(self) -> tuple[int, int, int]:
        """Elements of one index along :attr:`dim`, and of all its indices in the rank's and in the full tensor."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return inner, math.prod(self.local_shape[self.dim :]), self.length * inner

    def local_elements_before(self, element: int) -> int:
        """Return how many of the rank's elements come before an element of the full tensor, both in row-major order.

        So the rank's elements among ``[start, stop)`` of the full tensor are
        ``[local_elements_before(start), local_elements_before(stop))``.
        """
        inner, local_row, full_row = self._row_numels
        # A row is what follows one index of the dimensions before dim. Of the last row, which is incomplete, each range
        # counts as far as the element. Example: ranges (0, 3) and (6, 9) along dimension 0 of a 12 x 4 tensor: one row
        # of 48 elements, of which the rank has 24. Before element 26, in index 6, it has 12 and 2 of them.
        outer, rest = divmod(element, full_row)
        return outer * local_row + sum(
            min(max(rest - start * inner, 0), (stop - start) * inner) for start, stop in self.ranges
        )

    def strided_ranges(self, start: int, stop: int) -> Iterator[StridedRange]:
        """Yield where the rank's elements ``[start, stop)`` are in the full tensor: at most three for each range."""
        inner, local_row, full_row = self._row_numels
        for row, count, left, right in row_ranges(start, stop, local_row):
            range_start = 0  # of this range in the rank's row, in elements
            for begin, end in self.ranges:
                range_stop = range_start + (end - begin) * inner
                low, high = max(left, range_start), min(right, range_stop)
                if low < high:
                    offset = row * full_row + begin * inner + low - range_start
                    yield StridedRange(row * local_row + low, offset, high - low, count, local_row, full_row)
                range_start = range_stop

    def scaled(self, local_length: int) -> TensorSlice:
        """Return the slice of a vector that has equally many numbers for each index of :attr:`dim`."""
        factor, rest = divmod(local_length, sum(stop - start for start, stop in self.ranges))
        if rest or not factor:
            raise ValueError(
                f"{self.name}: {local_length} numbers do not belong to the indices of {self.ranges}"
            )
        ranges = tuple((start * factor, stop * factor) for start, stop in self.ranges)
        return TensorSlice(self.name, (self.length * factor,), 0, ranges)


def row_ranges(start: int, stop: int, width: int) -> list[tuple[int, int, int, int]]:
    """Return the end of a row, full rows and the start of a row that elements ``[start, stop)`` consist of.

    Each is given by its first row, the number of rows, its first column, and the column after its last one.
    """
    # [5, 14) in rows of 4: element 5 to the end of row 1, row 2, elements 12 and 13 of row 3
    first, end = -(-start // width), stop // width  # full rows are [first, end)
    if first > end:  # all inside one row
        return [(end, 1, start % width, stop % width)]
    ranges = [(first - 1, 1, start % width, width)] if start < first * width else []
    if end > first:
        ranges.append((first, end - first, 0, width))
    return [*ranges, (end, 1, 0, stop % width)] if stop > end * width else ranges


def full_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a rank that has the full tensor."""
    return TensorSlice(name, tuple(shape), 0, ((0, shape[0] if shape else 1),))


def cover_tensor(slices: Iterable[TensorSlice]) -> bool:
    """Return whether slices of one tensor, replicas counted once, have each index of it once."""
    distinct = set(slices)
    if len({(one.name, one.shape, one.dim) for one in distinct}) > 1:
        return False
    ranges = sorted(pair for one in distinct for pair in one.ranges)
    ends = [0, *(stop for _, stop in ranges)]
    are_adjacent = all(end == start for end, (start, _) in zip(ends, ranges, strict=False))
    return are_adjacent and ends[-1] == next(iter(distinct)).length
