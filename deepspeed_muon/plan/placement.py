"""Where matrices lie in flat partitions, as rules, and which part of a whole tensor a rank's parameter is.

Every ZeRO stage, sub-group, padding rule and offload device divides a parameter between consecutive ranks, one fragment
on each. A :class:`Placement` says how in a few numbers, however many ranks there are, so that plan and transport exist
once. All offsets and sizes are in elements, never in bytes.

Example: a flat buffer has ten elements on each of two ranks. A 4 x 3 matrix that starts at its element 5 is
``flat_placement(5, 12, 10)``: ``Fragment(rank=0, matrix_offset=0, partition_offset=5, numel=5)`` and
``Fragment(rank=1, matrix_offset=5, partition_offset=0, numel=7)``.

Where ranks hold different parts of a whole tensor or give it other names, a :class:`TensorSlice` says which part it is.
Three kinds of parallelism fit one rule. A rank of ``deepspeed.moe`` has some of the experts, each whole, under the
numbers of the rank; AutoEP stacks a rank's experts along dimension 0; tensor parallelism cuts a dimension. In each case
the rank's tensor is the whole tensor, under a name that all ranks share, at some ranges of indices along one dimension.

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
        return [getattr(self, name) for name in self.__slots__]


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


@dataclass(frozen=True, slots=True)
class Runs:
    """Equal runs of elements of a rank's tensor, and of the whole tensor.

    Attributes:
        own: Where the first run starts in the rank's tensor.
        whole: Where it starts in the whole tensor.
        numel: Elements of each run.
        count: How many runs there are.
        own_step: From the start of one run to that of the next in the rank's tensor.
        step: The same in the whole tensor.
    """

    own: int
    whole: int
    numel: int
    count: int
    own_step: int
    step: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's tensor, as ranges along one dimension of the whole tensor.

    Attributes:
        name: Of the whole tensor, equal on all ranks.
        shape: Of the whole tensor.
        dim: The dimension that is cut.
        ranges: First index and the one behind the last of each range, ascending, as the rank's tensor has them.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = [0, *(stop for _, stop in self.ranges)]
        apart = all(end <= start < stop for end, (start, stop) in zip(ends, self.ranges, strict=False))
        if (
            not self.ranges
            or not 0 <= self.dim < max(1, len(self.shape))
            or not apart
            or ends[-1] > self.length
        ):
            raise ValueError(f"not a slice: {self}")

    @property
    def length(self) -> int:
        """The length of the whole tensor along the dimension that is cut."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the whole tensor."""
        return self.ranges == ((0, self.length),)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor."""
        own = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], own, *self.shape[self.dim + 1 :]) if self.shape else ()

    @property
    def _steps(self) -> tuple[int, int, int]:
        """Elements of one index, of a row of the rank's tensor along :attr:`dim`, and of one of the whole tensor."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return inner, math.prod(self.own_shape[self.dim :]), self.length * inner

    def before(self, element: int) -> int:
        """Return how many of the rank's elements come before an element of the whole tensor, both in row-major order.

        So the rank's elements among ``[start, stop)`` of the whole tensor are ``[before(start), before(stop))``.
        """
        inner, row, whole_row = self._steps
        outer, rest = divmod(element, whole_row)
        return outer * row + sum(
            min(max(rest - start * inner, 0), (stop - start) * inner) for start, stop in self.ranges
        )

    def runs(self, start: int, stop: int) -> Iterator[Runs]:
        """Yield where the rank's elements ``[start, stop)`` lie in the whole tensor."""
        _, row, _ = self._steps
        begin = min(stop, -(-start // row) * row)
        end = max(begin, stop // row * row)
        for first, last, rows in ((start, begin, 1), (begin, end, (end - begin) // row), (end, stop, 1)):
            if first < last:
                yield from self._runs(first, last if rows == 1 else first + row, rows)

    def _runs(self, start: int, stop: int, rows: int) -> Iterator[Runs]:
        """Yield the runs of elements of one row, in this row and the next ones."""
        inner, row, whole_row = self._steps
        outer = start // row
        own = outer * row
        for begin, end in self.ranges:
            numel = (end - begin) * inner
            first, last = max(start, own), min(stop, own + numel)
            if first < last:
                place = outer * whole_row + begin * inner + first - own
                yield Runs(first, place, last - first, rows, row, whole_row)
            own += numel

    def scaled(self, own: int) -> TensorSlice:
        """Return the slice of a vector that has equally many numbers for each index of :attr:`dim`.

        Args:
            own: The length of the rank's part of the vector.

        Raises:
            ValueError: If it is no multiple of the indices.
        """
        each, rest = divmod(own, sum(stop - start for start, stop in self.ranges))
        if rest or not each:
            raise ValueError(f"{self.name}: {own} numbers do not belong to the indices of {self.ranges}")
        ranges = tuple((start * each, stop * each) for start, stop in self.ranges)
        return TensorSlice(self.name, (self.length * each,), 0, ranges)


def whole_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a rank that has the whole tensor."""
    return TensorSlice(name, tuple(shape), 0, ((0, shape[0] if shape else 1),))


def add_up(slices: Iterable[TensorSlice]) -> bool:
    """Return whether slices of one tensor, copies counted once, have each index of it once."""
    distinct = set(slices)
    if len({(each.name, each.shape, each.dim) for each in distinct}) > 1:
        return False
    ordered = sorted(each for piece in distinct for each in piece.ranges)
    ends = [0, *(stop for _, stop in ordered)]
    together = all(end == start for end, (start, _) in zip(ends, ordered, strict=False))
    return together and ends[-1] == next(iter(distinct)).length
